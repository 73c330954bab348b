"""Held-out loss: weighted by token, per byte of text, and blind to padding."""

from __future__ import annotations

import numpy as np
import pytest

from MaxText import step
from MaxText.evaluate import evaluate
from tests.helpers import MESHES, ROWS, VOCAB, toy, toy_batch

BATCHES = [toy_batch(seed) for seed in range(5)]
BYTES = np.where(np.arange(VOCAB) < 90, np.arange(VOCAB) % 3, 0).astype(np.int32)


class Fixed:
    """A data set of these batches."""

    def __init__(self, batches):
        self.batch = lambda index: batches[index]


def measure(batches, mesh="one", **how):
    made = toy(MESHES[mesh])
    program = lambda p, b: made.run(step.make_eval_step(made.cfg, made.layout), p, b)  # noqa: E731
    return evaluate(program, made.params, Fixed(batches), made.put_rows, BYTES, len(batches), **how)


def sums(batch):
    made = toy()
    found = made.run(step.make_eval_step(made.cfg, made.layout), made.params, made.put_rows(batch))
    return np.array([float(found["nll"]), float(found["weight"])])


def test_the_mean_is_over_tokens_not_over_batches():
    few = BATCHES[0] | {"loss_mask": BATCHES[0]["loss_mask"] * (np.arange(ROWS) == 1)[:, None]}
    found = measure([few, BATCHES[1]])
    (nll, weight), means = sums(few) + sums(BATCHES[1]), [s[0] / s[1] for s in (sums(few), sums(BATCHES[1]))]
    assert found["eval_loss"] == pytest.approx(nll / weight, rel=1e-6)
    assert found["eval_loss"] != pytest.approx(np.mean(means), rel=1e-4)
    assert found["eval_total_weights"] == weight


def test_per_byte():
    found = measure(BATCHES)
    text = sum((BYTES[batch["targets"]] * batch["loss_mask"]).sum() for batch in BATCHES)
    total = found["eval_loss"] * found["eval_total_weights"]
    assert found["eval_loss_per_byte"] == pytest.approx(total / text, rel=1e-9)


def test_rows_of_padding_count_nothing():
    padding = {key: np.concatenate([value[:5], 0 * value[5:]]) for key, value in BATCHES[0].items()}
    noise = padding | {key: np.concatenate([padding[key][:5], BATCHES[1][key][5:]]) for key in ("inputs", "targets")}
    one, other = measure([padding]), measure([noise])
    assert one["eval_loss"] == other["eval_loss"] and one["eval_loss_per_byte"] == other["eval_loss_per_byte"]
    assert one["eval_total_weights"] == BATCHES[0]["loss_mask"][:5].sum()


def test_every_mesh_measures_the_same():
    one, many = measure(BATCHES), measure(BATCHES, "data2-fsdp2-tensor2")
    assert many["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)
    assert many["eval_total_weights"] == one["eval_total_weights"]


def test_half_a_set_is_no_result():
    calls = iter([False, False, True])
    assert measure(BATCHES, stop=lambda: next(calls)) == {}
