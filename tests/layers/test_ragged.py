"""Products of groups of rows, and rows that travel, against loops in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec

from MaxText.layers import dispatch, ragged

GROUPS = {
    "empty ones among them": [7, 0, 13, 2, 0],
    "one has all": [0, 40, 0, 0, 0],
    "none at all": [0, 0, 0, 0, 0],
    "larger than a tile": [300, 5, 17, 1, 0],
}


@pytest.mark.parametrize("rows", GROUPS.values(), ids=GROUPS)
def test_products_equal_a_loop(rows):
    rng, total = np.random.default_rng(0), sum(rows)
    beyond = 9
    x, w = rng.normal(size=(total + beyond, 6)), rng.normal(size=(len(rows), 6, 4))
    y = rng.normal(size=(total + beyond, 4))
    group = np.repeat(np.arange(len(rows)), rows)
    forward, back, sums = np.zeros(y.shape), np.zeros(x.shape), np.zeros(w.shape)
    for row, e in enumerate(group):
        forward[row], back[row] = x[row] @ w[e], w[e] @ y[row]
        sums[e] += np.outer(x[row], y[row])
    x, y, w, sizes = (jnp.asarray(a, jnp.float32) for a in (x, y, w, rows))
    sizes = sizes.astype(jnp.int32)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(jax.jit(ragged.matmul)(x, w, sizes), forward, **tolerance)
    np.testing.assert_allclose(jax.jit(ragged.matmul_transposed)(y, w, sizes), back, **tolerance)
    np.testing.assert_allclose(jax.jit(ragged.outer)(x, y, sizes), sums, **tolerance)


@pytest.mark.parametrize("buffer", [40, 11], ids=["all fits", "some does not"])
def test_rows_reach_their_expert_and_come_back(buffer):
    """Four devices with ten choices each of eight experts, two on a shard. A row says whose it is and for whom."""
    shards, experts, choices = 4, 8, 10
    world, _ = toy.mesh(expert=shards)
    chosen = np.random.default_rng(0).integers(0, experts + 1, (shards, choices))  # experts: none
    row = np.stack([np.arange(shards * choices).reshape(chosen.shape), chosen], axis=-1).astype(np.float32) + 1

    def local(chosen, row):
        found = dispatch.by_expert(chosen[0], experts)
        got = dispatch.between_shards(found.rows_E, shards, buffer, ("expert",))
        size = ragged.Size(choices, buffer, min(choices, buffer))
        there = ragged.exchange(row[0][found.order.to_M], got.routes, size, ("expert",))
        there = dispatch.permuted(there, got.order)
        back = dispatch.permuted(there, dispatch.Order(got.order.back_M, got.order.to_M))
        home = ragged.Routes(got.routes.back, got.routes.there)
        back = ragged.exchange(back, home, ragged.Size(buffer, choices, size.pair), ("expert",))
        return there[None], back[found.order.back_M][None], got.rows_e[None], got.dropped[None]

    split = PartitionSpec("expert")
    with jax.set_mesh(world):
        run = jax.jit(jax.shard_map(local, in_specs=(split, split), out_specs=split))
        there, back, rows, dropped = map(
            np.asarray, run(*(jax.device_put(a, jax.NamedSharding(world, split)) for a in (chosen, row)))
        )
    for shard in range(shards):
        used = int(rows[shard].sum())
        own = np.arange(2 * shard, 2 * shard + 2)
        np.testing.assert_array_equal(there[shard, :used, 1] - 1, np.repeat(own, rows[shard]))
        assert not there[shard, used:].any()
    wanted = np.bincount(chosen[chosen < experts], minlength=experts).reshape(shards, -1).sum(axis=1)
    np.testing.assert_array_equal(rows.sum(axis=1), np.minimum(wanted, buffer))
    assert dropped.sum() == (wanted - np.minimum(wanted, buffer)).sum()
    returned = back.any(axis=-1)
    np.testing.assert_array_equal(back[returned], row[returned])
    assert returned.sum() == rows.sum() and not returned[chosen == experts].any()
