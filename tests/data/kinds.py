"""A small data set of every kind, the same forty documents in each, able to be opened anew as after a restart."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from MaxText import data, tokenizer
from MaxText.data import prepare
from MaxText.data.stream import Reader, StreamDataset

from .files import write, write_tfds
from .helpers import make_config
from .test_stream import UNIT, WORDS, Listed

TEXTS = [bytes(np.random.default_rng(i).integers(97, 123, 3 + 37 * i % 211).tolist()).decode() for i in range(40)]
FORMS = ("txt", "jsonl", "jsonl.gz", "parquet", "array_record", "tfrecord", "npy")
BY_INDEX = (
    *FORMS, "first_fit", "best_fit", "unpacked", "held_out", "quarantine", "mixture", "grain", "grain_mixture", "hf",
    "saved", "prepared", "prepared_fit", "prepared_mixture", "synthetic",
)  # fmt: skip
STREAMS = ("stream", "stream_shuffled", "hf_stream")
LENGTH = 16


class Kinds:
    """Data sets by kind in a folder; what a kind needs is made when it is first opened."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.keys = cache(self._keys)

    def open(self, kind: str, batch: int, **more: Any) -> data.Train:
        """The training split as a new process sees it."""
        if kind in ("stream", "stream_shuffled"):
            reader = Reader(Listed([{"text": t} for t in TEXTS]), UNIT, WORDS, LENGTH, None)
            return StreamDataset("test", LENGTH, batch, {}, reader, seed=1, shuffle=kind != "stream")
        cfg = make_config(**{"num_epoch": -1, "max_target_length": LENGTH} | self.keys(kind) | more)
        return data.open_train(cfg, tokenizer.make(cfg), batch)

    def files(self, form: str) -> list[str]:
        """Two files of the form with half of the documents each."""
        made = {self.folder / f"{name}.{form}": texts for name, texts in (("a", TEXTS[:20]), ("b", TEXTS[20:]))}
        return [str(path) if path.exists() else write(path, texts) for path, texts in made.items()]

    def _keys(self, kind: str) -> dict[str, Any]:
        if kind in FORMS:
            return {"train_files": self.files(kind)}
        text = {"train_files": self.files("jsonl")}
        mixture = text | {"mixture_weights": [0.25, 0.75], "mixture_schedule": ["7:1/0", "30:0.5/0.5"]}
        grain = {"dataset_type": "grain", "train_files": []}
        if kind in ("hf", "saved", "hf_stream"):
            pytest.importorskip("datasets")
        hf = {"dataset_type": "hf", "hf_path": "json", "hf_train_files": self.files("jsonl")}
        made = {
            "first_fit": lambda: text | {"packing_type": "first_fit"},
            "best_fit": lambda: text | {"packing_type": "best_fit"},
            "unpacked": lambda: text | {"packing": False},
            "held_out": lambda: text | {"held_out_every": 3},
            "quarantine": lambda: text | {"quarantine": ["a.jsonl:5", "b.jsonl:19"]},
            "mixture": lambda: mixture,
            "grain": lambda: (
                grain | {"grain_train_files": ",".join(self.files("parquet")), "grain_file_type": "parquet"}
            ),
            "grain_mixture": lambda: grain | {"grain_train_files": "{},0.3;{},0.7".format(*self.files("array_record"))},
            "hf": lambda: hf,
            "saved": self._saved,
            "tfds": lambda: write_tfds(self.folder / "tfds", TEXTS) | {"train_files": []},
            "prepared": lambda: self._prepared(text),
            "prepared_fit": lambda: self._prepared(text | {"packing_type": "best_fit"}),
            "prepared_mixture": lambda: self._prepared(mixture),
            "synthetic": lambda: {"dataset_type": "synthetic"},
            "hf_stream": lambda: hf | {"hf_streaming": True},
        }
        return made[kind]()

    def _saved(self) -> dict[str, Any]:
        """A folder that `save_to_disk` made."""
        import datasets

        how = {"data_files": self.files("jsonl"), "split": "train"}
        datasets.load_dataset("json", **how).save_to_disk(self.folder / "saved")
        return {"dataset_type": "hf", "hf_path": str(self.folder / "saved")}

    def _prepared(self, keys: dict[str, Any]) -> dict[str, Any]:
        rows = self.folder / f"rows{len(list(self.folder.glob('rows*')))}"
        cfg = make_config(num_epoch=-1, max_target_length=LENGTH, **keys)
        prepare.prepare(cfg, tokenizer.make(cfg), rows, 1)
        how = {key: value for key, value in keys.items() if key != "train_files"}
        return how | {"dataset_type": "prepared", "dataset_path": str(rows)}
