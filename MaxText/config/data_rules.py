"""Rules between data and tokenizer keys. Registered with those of `rules`."""

from __future__ import annotations

import math
import re

from MaxText.config.rules import rule

_STAGE = re.compile(r"\s*([0-9]+)\s*:\s*([0-9.eE+/\s-]+)")
_SUM_ERROR = 1e-6  # of weights that sum to 1


@rule("config.train-files")
def text_needs_train_files(dataset_type: str, train_files: tuple[str, ...]) -> str | None:
    """dataset_type=text needs train_files."""
    if dataset_type == "text" and not train_files:
        return "text to learn from is missing; set train_files=[a.txt,b.txt], or dataset_type=synthetic"
    return None


@rule("config.data-source", notable=bool)
def each_type_says_where(
    dataset_type: str,
    dataset_path: str,
    dataset_name: str,
    hf_path: str,
    grain_train_files: str,
    grain_train_mixture_config_path: str,
) -> str | None:
    """dataset_type=tfds needs dataset_name, hf needs hf_path, prepared needs dataset_path, and grain exactly one of
    grain_train_files and grain_train_mixture_config_path."""
    if dataset_type == "tfds" and not dataset_name:
        return "set dataset_name=NAME, and dataset_path=FOLDER if it does not lie in ~/tensorflow_datasets"
    if dataset_type == "hf" and not hf_path:
        return "set hf_path=NAME of a data set, or hf_path=json hf_train_files=[FILE] and the like for files"
    if dataset_type == "prepared" and not dataset_path:
        return "set dataset_path to the folder that `python -m MaxText data prepare` made"
    if dataset_type == "grain" and bool(grain_train_files) == bool(grain_train_mixture_config_path):
        return "set one of grain_train_files=PATTERN and grain_train_mixture_config_path=FILE"
    return None


@rule("config.data-type", notable=bool)
def keys_belong_to_the_type(
    dataset_type: str,
    dataset_path: str,
    dataset_name: str,
    grain_train_files: str,
    grain_eval_files: str,
    grain_train_mixture_config_path: str,
    hf_path: str,
    hf_name: str,
    hf_data_dir: str,
    hf_train_files: tuple[str, ...],
    hf_eval_split: str,
    hf_eval_files: tuple[str, ...],
    hf_streaming: bool,
) -> str | None:
    """Where the data are is said by keys of the dataset_type only: dataset_* of tfds, grain_* of grain, hf_* of hf."""
    given = {name: value for name, value in locals().items() if name != "dataset_type" and value}
    owners = {name: name.partition("_")[0].replace("dataset", "tfds") for name in given}
    owners["dataset_path"] = "prepared" if dataset_type == "prepared" else "tfds"
    stray = [f"{name} (of {owners[name]})" for name in given if owners[name] != dataset_type]
    return f"leave out {', '.join(stray)}, or choose that dataset_type" if stray else None


@rule("config.empty-file-name", notable=bool)
def file_lists_hold_paths(
    train_files: tuple[str, ...],
    eval_files: tuple[str, ...],
    hf_train_files: tuple[str, ...],
    hf_eval_files: tuple[str, ...],
    quarantine: tuple[str, ...],
) -> str | None:
    """No entry of a list of files is empty."""
    if any(not file.strip() for file in (*train_files, *eval_files, *hf_train_files, *hf_eval_files, *quarantine)):
        return "an entry is empty; remove it"
    return None


@rule("config.eval-files", notable=bool)
def evaluation_needs_data(
    eval_interval: int,
    dataset_type: str,
    eval_files: tuple[str, ...],
    eval_split: str,
    grain_eval_files: str,
    hf_eval_split: str,
    hf_eval_files: tuple[str, ...],
    held_out_every: int,
) -> str | None:
    """A positive eval_interval needs data to evaluate on."""
    there = {"text": eval_files, "tfds": eval_split, "grain": grain_eval_files, "hf": hf_eval_split or hf_eval_files}
    if eval_interval > 0 and not held_out_every and not there.get(dataset_type, True):
        key = {"text": "eval_files=[c.txt]", "tfds": "eval_split=validation", "hf": "hf_eval_split=validation"}
        how = key.get(dataset_type, "grain_eval_files=PATTERN")
        return f"there is nothing to evaluate on; set {how}, held_out_every=100, or eval_interval=-1"
    return None


@rule("config.data-columns")
def one_column(train_data_columns: tuple[str, ...], eval_data_columns: tuple[str, ...]) -> str | None:
    """Pre-training reads one column."""
    if len(train_data_columns) != 1 or len(eval_data_columns) != 1:
        return "pre-training reads one column of each; name it, such as train_data_columns=[text]"
    return None


@rule("config.mixture", notable=bool)
def mixture_is_whole(
    dataset_type: str,
    grain_train_files: str,
    train_files: tuple[str, ...],
    mixture_weights: tuple[float, ...],
    mixture_schedule: tuple[str, ...],
) -> str | None:
    """mixture_weights are one for each entry of train_files and sum to 1, and so are those of mixture_schedule."""
    if not mixture_weights:
        return "a schedule changes shares; set mixture_weights too" if mixture_schedule else None
    if dataset_type not in ("text", "prepared"):
        return "only dataset_type=text and prepared take it; grain has weights in grain_train_files"
    wanted = len(train_files) if dataset_type == "text" else len(mixture_weights)
    stages = [(0, mixture_weights), *map(stage, mixture_schedule)]
    for text, (_, weights) in zip(("mixture_weights", *mixture_schedule), stages, strict=True):
        fault = "is not of the form STEP:W/W/..." if not weights else weights_fault(weights, wanted)
        if fault:
            return f"{text}: {fault}"
    steps = [step for step, _ in stages]
    if any(later <= earlier for earlier, later in zip(steps, steps[1:], strict=False)):
        return f"its steps must rise from above 0, and are {', '.join(map(str, steps[1:]))}"
    return None


def stage(text: str) -> tuple[int, tuple[float, ...]]:
    """(step, weights) of `STEP:W/W/...`; no weights where it is not of this form."""
    match = _STAGE.fullmatch(text)
    try:
        return (int(match[1]), tuple(float(weight) for weight in match[2].split("/"))) if match else (0, ())
    except ValueError:
        return 0, ()


def weights_fault(weights: tuple[float, ...], wanted: int) -> str | None:
    """What is wrong with the weights of `wanted` parts; None if nothing is."""
    total = sum(weights)
    if len(weights) != wanted:
        return f"{len(weights)} weights for {wanted} entries; write one for each"
    if any(weight < 0 or not math.isfinite(weight) for weight in weights):
        return "a weight is negative"
    if abs(total - 1) > _SUM_ERROR:
        right = "/".join(f"{weight / total:.4g}" for weight in weights) if total else "1"
        return f"the weights sum to {total:g}, not to 1; in these proportions: {right}"
    return None


@rule("config.streaming", notable=bool)
def streams_have_no_index(
    dataset_type: str,
    hf_path: str,
    hf_streaming: bool,
    packing: bool,
    packing_type: str,
    held_out_every: int,
    quarantine: tuple[str, ...],
) -> str | None:
    """hf_streaming reads front to back: no plan over all documents, no document by its number."""
    if not hf_streaming:
        return None
    if packing and packing_type != "concat_then_split":
        return f"{packing_type} plans over all documents; set packing_type=concat_then_split, or hf_streaming=false"
    if held_out_every or quarantine:
        return "a stream knows no document by its number; leave these out, or set hf_streaming=false"
    return None


@rule("config.tokenizer-path")
def tokenizer_and_its_file(tokenizer_type: str, tokenizer_path: str) -> str | None:
    """tokenizer_type=byte has no tokenizer_path; every other has one."""
    if tokenizer_type == "byte":
        return (
            "the byte tokenizer has no file; remove tokenizer_path, or set tokenizer_type" if tokenizer_path else None
        )
    return None if tokenizer_path else f"the {tokenizer_type} tokenizer is a file; set tokenizer_path=FILE"
