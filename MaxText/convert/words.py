"""The tokenizer's files, which go with the weights: copied as they are, or written from what a GGUF file carries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from MaxText.convert.gguf_words import SPLITS, BytePairs
from MaxText.errors import DataError

if TYPE_CHECKING:
    from MaxText.convert.source import Source

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model",
    "tekken.json", "vocab.json", "merges.txt",
)  # fmt: skip


def folder(source: Source) -> Path | None:
    """Where the files of a source lie: a Hugging Face folder, or what `import` wrote beside the checkpoints."""
    if source.kind == "GGUF":
        return None
    return source.path if source.kind == "Hugging Face" else source.path.absolute().parent.parent


def carry(source: Source, out: Path) -> list[str]:
    """Write the files of the source's tokenizer to the folder `out`; return their names."""
    where = folder(source)
    if where is not None:
        found = [name for name in FILES if (where / name).is_file()]
        for name in found:
            shutil.copyfile(where / name, out / name)
        return found
    if not isinstance(source.words, BytePairs):
        return []
    written = {"tokenizer.json": as_json(source.words), "tokenizer_config.json": _ends(source.words)}
    for name, content in written.items():
        (out / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    return list(written)


def read(source: Source) -> BytePairs | None:
    """The tokenizer that came with the weights, where it is byte-level BPE as GPT-2's; needs no library."""
    where = folder(source)
    if where is None:
        return source.words
    file = where / FILES[0]
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{file} is no JSON: {error}. Copy it again. [convert.tokenizer]", id="convert.tokenizer"
        ) from error
    try:
        return _of_json(content, _said(where))
    except (KeyError, TypeError, ValueError):
        return None  # of another kind


def _said(where: Path) -> dict[str, Any]:
    file = where / FILES[1]
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _of_json(content: dict[str, Any], said: dict[str, Any]) -> BytePairs | None:
    """None where anything but the table, the merges and the special tokens differs from what `as_json` writes."""
    model, vocabulary = content["model"], dict(content["model"]["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        return None
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    control = {token["id"] for token in content["added_tokens"] if token["special"]}
    steps = content["pre_tokenizer"].get("pretokenizers", [content["pre_tokenizer"]])
    kinds = [step["type"] for step in steps]
    plain = steps[-1].get("use_regex", True) and not steps[-1]["add_prefix_space"] and content["normalizer"] is None
    if kinds not in (["ByteLevel"], ["Digits", "ByteLevel"]) or not plain or model["type"] != "BPE":
        return None
    bos, eos = (vocabulary.get(_content(said.get(f"{end}_token")), 0) for end in ("bos", "eos"))
    return BytePairs(tokens, merges, control, bos, eos, SPLITS["smollm" if len(kinds) > 1 else "gpt-2"])


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token


def as_json(words: BytePairs) -> dict[str, Any]:
    """The tokenizer in the form of Hugging Face's `tokenizers`."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = [{"type": "Digits", "individual_digits": True}] if words.digits_apart else []
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": words.tokens[i], **special} for i in sorted(words.control)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(words.tokens)},
            "merges": words.merges,
        },
    }


def _ends(words: BytePairs) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words.tokens[words.bos_id],
        "eos_token": words.tokens[words.eos_id],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
