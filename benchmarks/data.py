"""The data pipeline alone, in tokens/s: `python -m benchmarks.data [key=value ...]` prints one JSON line for each case.

open_seconds        read, check, tokenize and plan the training text, up to and with the first batch
tokens_per_second   batch(step), shuffled and packed, one after the other
feeder_...          the same through the background thread
floor_...           numpy cutting the same int32 arrays from tokens in memory, unshuffled, without documents
ratio               time of a batch / time of a floor batch
times_default_model feeder_tokens_per_second over what the first run's model consumes on two cores with AMX

The last line is of a first run of STEPS_RUN steps: how long its loop waited for batches, and that over its step times.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import config, data, metrics, tokenizer
from MaxText.data import prepare, sources

STEPS, REPEATS = 300, 5
STEPS_RUN = 100
ROOT = Path(__file__).parents[1]
CONSUMED = 2048 / 0.096  # tokens/s: 16 rows of 128 in 96 ms (docs/log.md)


def seconds(run: Callable[[], Any]) -> float:
    """Median time of one step over a few runs of STEPS steps."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) / STEPS)
    return statistics.median(times)


def floor(tokens: np.ndarray, rows: int, length: int) -> Callable[[], None]:
    """The least that makes five int32 [rows, length] arrays out of tokens in memory: slices and constants."""
    size = rows * length
    last = len(tokens) - size - 1

    def run() -> None:
        for step in range(STEPS):
            first = step * size % last
            tokens[first : first + size].reshape(rows, length).astype(np.int32)
            tokens[first + 1 : first + size + 1].reshape(rows, length).astype(np.int32)
            for _ in ("positions", "segments", "loss_mask"):
                np.ones((rows, length), np.int32)

    return run


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings by name: the first run, then each way in which rows come about."""
    lines = [json.dumps({"text": page}) for name in sources.TEXTS.glob("austen/*.txt") for page in pages(name)]
    (folder / "pages.jsonl").write_text("\n".join(lines) + "\n")
    files = {"train_files": [str(folder / "pages.jsonl")], "data_cache_dir": "", "eval_files": []}
    rows = folder / "rows"
    cfg = config.make(**files)
    prepare.prepare(cfg, tokenizer.make(cfg), rows, 1)
    return {
        "text": {},
        "jsonl": files,
        "first_fit": files | {"packing_type": "first_fit"},
        "best_fit": files | {"packing_type": "best_fit"},
        "mixture": {"mixture_weights": [0.4, 0.3, 0.2, 0.1]},
        "prepared": {"dataset_type": "prepared", "dataset_path": str(rows)},
    }


def pages(path: Path, size: int = 1500) -> list[str]:
    """A book as documents of about a page."""
    text = path.read_text(encoding="utf-8")
    return [text[i : i + size] for i in range(0, len(text), size)]


def measure(cfg: config.Config) -> dict[str, Any]:
    """One case: opening and drawing."""
    rows = cfg.global_batch_size or int(cfg.per_device_batch_size)
    begin = time.perf_counter()
    dataset = data.open_split(cfg, tokenizer.make(cfg), "train", rows)
    dataset.batch(0)
    opened = time.perf_counter() - begin

    def feed() -> None:
        with data.Feeder(dataset, 0, STEPS, lambda batch: batch) as feeder:
            for _ in feeder:
                pass

    def draw() -> None:
        for step in range(STEPS):
            dataset.batch(step)

    tokens = np.random.default_rng(0).integers(0, 256, max(dataset.tokens, 2 * rows * dataset.length), np.uint16)
    per_batch, per_feed, per_floor = seconds(draw), seconds(feed), seconds(floor(tokens, rows, dataset.length))
    size = rows * dataset.length
    return {
        "batch": [rows, dataset.length],
        "open_seconds": round(opened, 4),
        "batch_microseconds": round(per_batch * 1e6, 1),
        "tokens_per_second": round(size / per_batch),
        "feeder_tokens_per_second": round(size / per_feed),
        "floor_tokens_per_second": round(size / per_floor),
        "ratio": round(per_batch / per_floor, 2),
        "times_default_model": round(size / per_feed / CONSUMED),
    }


def first_run(folder: Path) -> dict[str, Any]:
    """The loop's waiting in a run of the defaults, without evaluation and sample."""
    keys = {"base_output_directory": folder, "steps": STEPS_RUN, "eval_interval": -1, "sample_length": 0,
            "run_name": "wait", "eval_files": "[]", "enable_checkpointing": "false"}  # fmt: skip
    command = [sys.executable, "train.py", "configs/base.yml", *(f"{key}={value}" for key, value in keys.items())]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = [line for line in metrics.read(folder / "wait" / "metrics.jsonl") if "seconds" in line]
    waits, steps = ([line[key] for line in lines] for key in ("data_wait_seconds", "seconds"))
    return {
        "steps": len(lines),
        "median_step_seconds": round(statistics.median(steps), 4),
        "median_wait_microseconds": round(statistics.median(waits) * 1e6, 1),
        "first_wait_seconds": round(waits[0], 4),
        "wait_percent_of_step_time": round(100 * sum(waits) / sum(steps), 3),
    }


def main(overrides: list[str]) -> None:
    given = {"num_epoch": "-1"} | dict(text.split("=", 1) for text in overrides)
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in cases(Path(folder)).items():
            result = {"benchmark": "data", "case": name, **measure(config.make(**keys | given))}
            print(json.dumps(result), flush=True)
        print(json.dumps({"benchmark": "data", "case": "first run", **first_run(Path(folder))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
