"""A configuration for the data tests: the keys that `tokenizer` and `data` read, with the schema's defaults."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from MaxText import data, tokenizer

DEFAULTS: dict[str, Any] = {
    "dataset_type": "text",
    "train_files": [],
    "eval_files": [],
    "packing": True,
    "packing_type": "concat_then_split",
    "num_epoch": 1,
    "enable_data_shuffling": True,
    "data_shuffle_seed": 0,
    "tokenizer_type": "byte",
    "tokenizer_path": "",
    "add_bos": True,
    "add_eos": True,
    "max_target_length": 16,
    "vocab_size": 288,
    "eval_steps": -1,
}


def make_config(**overrides: Any) -> Any:
    assert overrides.keys() <= DEFAULTS.keys()
    return SimpleNamespace(**DEFAULTS | overrides)


def open_texts(
    folder: Path, texts: list[bytes], *, split: data.Split = "train", batch: int = 4, **overrides: Any
) -> data.Dataset:
    """A split whose documents are `texts`, written as files of `folder`."""
    paths = [folder / f"{i:03}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    cfg = make_config(**{f"{split}_files": [str(p) for p in paths]} | overrides)
    return data.open_split(cfg, tokenizer.make(cfg), split, batch)
