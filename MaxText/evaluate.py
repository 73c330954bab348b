"""Held-out loss: one token-weighted mean over a fixed set, per token and per byte of text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from MaxText import faults

IN_FLIGHT = 2  # evaluation steps dispatched and not yet read: bounded, so that no device queue can grow


class Batches(Protocol):
    """A `Dataset`, or a process's `Share` of one."""

    def batch(self, step: int) -> dict[str, np.ndarray]: ...


def evaluate(
    compiled: Callable[..., dict[str, jax.Array]],
    params: Any,
    dataset: Batches,
    put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]],
    token_bytes: np.ndarray,
    batches: int,
    stop: Callable[[], bool] = lambda: False,
    counted: np.ndarray | slice = slice(None),
    total: Callable[[float], float] = lambda own: own,
) -> dict[str, float]:
    """eval_loss [nats/token], eval_loss_per_byte [nats/byte], eval_total_weights, eval_seconds over the first `batches`
    batches.

    Sums are kept in float64 on the host. `stop()` true ends early with an empty result: half a set is no comparable
    figure. In several processes each sees its rows: `counted` are those whose bytes it counts, `total` adds over all.
    """
    started = time.perf_counter()
    nll = weight = text_bytes = 0.0
    waiting: deque[dict[str, jax.Array]] = deque()
    for batch in _batches(dataset, batches):
        if stop():
            return {}
        text_bytes += float((token_bytes[batch["targets"]] * batch["loss_mask"])[counted].sum())
        waiting.append(compiled(params, put(batch)))
        faults.point("eval.batch")
        while len(waiting) > IN_FLIGHT:
            nll, weight = _add(waiting.popleft(), nll, weight)
    while waiting:
        nll, weight = _add(waiting.popleft(), nll, weight)
    text_bytes = total(text_bytes)
    result = {
        "eval_loss": nll / max(weight, 1.0),
        "eval_total_weights": weight,
        "eval_seconds": time.perf_counter() - started,
    }
    return result | ({"eval_loss_per_byte": nll / text_bytes} if text_bytes else {})


def _batches(dataset: Batches, count: int) -> Iterator[dict[str, np.ndarray]]:
    return (dataset.batch(i) for i in range(count))


def _add(sums: dict[str, jax.Array], nll: float, weight: float) -> tuple[float, float]:
    return nll + float(sums["nll"]), weight + float(sums["weight"])
