"""Rules between data and tokenizer keys. Registered with those of `rules`."""

from __future__ import annotations

from MaxText.config.rules import rule


@rule("config.train-files")
def text_needs_train_files(dataset_type: str, train_files: tuple[str, ...]) -> str | None:
    """dataset_type=text needs train_files."""
    if dataset_type == "text" and not train_files:
        return "text to learn from is missing; set train_files=[a.txt,b.txt], or dataset_type=synthetic"
    return None


@rule("config.empty-file-name")
def file_lists_hold_paths(train_files: tuple[str, ...], eval_files: tuple[str, ...]) -> str | None:
    """No entry of train_files or eval_files is empty."""
    if any(not file.strip() for file in (*train_files, *eval_files)):
        return "an entry is empty; remove it"
    return None


@rule("config.eval-files")
def evaluation_needs_files(eval_interval: int, dataset_type: str, eval_files: tuple[str, ...]) -> str | None:
    """A positive eval_interval with dataset_type=text needs eval_files."""
    if eval_interval > 0 and dataset_type == "text" and not eval_files:
        return "there is nothing to evaluate on; set eval_files=[c.txt], or eval_interval=-1"
    return None


@rule("config.tokenizer-path")
def byte_tokenizer_has_no_file(tokenizer_type: str, tokenizer_path: str) -> str | None:
    """tokenizer_type=byte has no tokenizer_path."""
    return (
        "the byte tokenizer has no file; remove tokenizer_path" if tokenizer_type == "byte" and tokenizer_path else None
    )
