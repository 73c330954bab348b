"""Rows split over devices: every strategy and feature has the loss and the gradients of one device."""

from __future__ import annotations

import pytest

from tests.helpers import assert_close, toy, toy_batch


def same_as_one(mesh, batch=None, tolerance=1e-5, **model):
    batch = toy_batch() if batch is None else batch
    strategy = {k: model.pop(k) for k in list(model) if k.startswith("context_")}
    wanted, one = toy(**model).gradients(batch)
    found, split = toy(mesh, **model, **strategy).gradients(batch)
    assert_close(found, wanted, tolerance)
    for name, value in one.items():
        assert split[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("balanced", [True, False])
def test_basic(strategy, balanced):
    same_as_one({"context": 2}, context_parallel_strategy=strategy, context_parallel_load_balance=balanced)
