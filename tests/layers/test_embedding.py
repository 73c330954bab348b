"""The lookup on meshes that split the table by rows, by columns, by both, and by neither."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from MaxText.layers import embedding
from tests.helpers import MESHES, VOCAB, toy

RNG = np.random.default_rng(0)
TABLE, IDS = RNG.standard_normal((VOCAB, 32), np.float32), RNG.integers(0, VOCAB, (8, 4)).astype(np.int32)
IDS[0] = [0, VOCAB - 1, VOCAB // 2 - 1, VOCAB // 2]  # both sides of every cut


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("whole_batch", [False, True], ids=["", "whole-batch"])
def test_lookup_and_its_gradient(mesh, whole_batch):
    made = toy(MESHES[mesh])
    layout = made.layout.unsplit("activation_batch") if whole_batch else made.layout
    put = lambda x, *dims: jax.device_put(x, NamedSharding(made.mesh, layout.spec(dims)))  # noqa: E731
    cotangent = RNG.standard_normal((8, 4, 32), np.float32)

    def run(table, ids, dy):
        y, pull = jax.vjp(lambda t: embedding.lookup(layout, t, ids, "float32"), table)
        return y, *pull(dy)

    arguments = put(TABLE, "vocab", "embed"), put(IDS, *embedding.IDS), put(cotangent, *embedding.STREAM)
    found, grad = made.run(run, *arguments)
    np.testing.assert_array_equal(found, TABLE[IDS])
    wanted = np.zeros_like(TABLE)
    np.add.at(wanted, IDS, cotangent)
    np.testing.assert_allclose(grad, wanted, atol=1e-5)
