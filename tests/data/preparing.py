"""What the tests of prepared rows share."""

from pathlib import Path

from MaxText import data, tokenizer
from MaxText.data import prepare

from .helpers import make_config


def keys_of(files, **more):
    return {"train_files": files, "held_out_every": 7, "num_epoch": -1} | more


def make(keys, out="rows", workers=1):
    cfg = make_config(**keys)
    return prepare.prepare(cfg, tokenizer.make(cfg), Path(out), workers)


def pair(keys, split="train", **now):
    """The same split from its sources and from the prepared rows."""
    there = make_config(**keys)
    here = make_config(
        **{k: v for k, v in keys.items() if k != "train_files"}
        | {"dataset_type": "prepared", "dataset_path": "rows"}
        | now
    )
    words = tokenizer.make(there)
    return (data.open_split(cfg, words, split, 4) for cfg in (there, here))
