"""What the data tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from MaxText import config, data, tokenizer


def make_config(**overrides: Any) -> config.Config:
    """The schema's defaults, but for short rows and one file."""
    return config.make(
        **{"train_files": ["builtin:austen/emma.txt"], "eval_files": [], "max_target_length": 16} | overrides
    )


def open_texts(
    folder: Path, texts: list[bytes], *, split: data.Split = "train", batch: int = 4, **overrides: Any
) -> data.Dataset:
    """A split whose documents are `texts`, written as files of `folder`."""
    paths = [folder / f"{i:03}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    cfg = make_config(**{f"{split}_files": [str(p) for p in paths], "num_epoch": 1} | overrides)
    return data.open_split(cfg, tokenizer.make(cfg), split, batch)
