"""The data pipeline alone, in tokens/s: `python -m benchmarks.data [key=value ...]` prints one JSON line.

open_seconds        read, check and tokenize the training text, up to and with the first batch
tokens_per_second   batch(step), shuffled and packed, one after the other
feeder_...          the same through the background thread
floor_...           numpy cutting the same int32 arrays from tokens in memory, unshuffled, without documents
ratio               time of a batch / time of a floor batch
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from MaxText import config, data, tokenizer

STEPS, REPEATS = 500, 5


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


def main(overrides: list[str]) -> None:
    cfg = config.make(**{"num_epoch": "-1"} | dict(text.split("=", 1) for text in overrides))
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
    result = {
        "benchmark": "data",
        "source": dataset.source,
        "batch": [rows, dataset.length],
        "open_seconds": round(opened, 4),
        "batch_microseconds": round(per_batch * 1e6, 1),
        "tokens_per_second": round(size / per_batch),
        "feeder_tokens_per_second": round(size / per_feed),
        "floor_tokens_per_second": round(size / per_floor),
        "ratio": round(per_batch / per_floor, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
