"""How rows lie on the devices: a permutation that halves the triangle evenly, and sums and neighbours across chunks."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import toy
from jax.sharding import NamedSharding

from MaxText import sequence
from tests.helpers import toy_config

ROW = 24
ORDERS = [(2, True), (2, False), (4, True), (4, False)]


def split(shards, balanced):
    cfg = toy_config(context_parallel_load_balance=balanced)
    world, layout = toy.mesh(context=shards)
    return cfg, world, layout, sequence.order(cfg, layout)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_zigzag_gives_every_shard_the_same_part_of_the_triangle(shards):
    order = sequence.Order(("context",), shards, 2)
    places = sequence.permutation(order, ROW)
    assert sorted(places) == list(range(ROW))
    assert len({int((part + 1).sum()) for part in places.reshape(shards, -1)}) == 1


def test_rows_can_be_read_again():
    order = sequence.Order(("context",), 3, 2)
    row = np.arange(2 * ROW).reshape(2, ROW)
    np.testing.assert_array_equal(sequence.read(order, sequence.arrange(order, {"x": row})["x"]), row)


def test_plain_order_is_the_reading_order():
    assert list(sequence.permutation(sequence.Order(("context",), 4, 1), ROW)) == list(range(ROW))


@pytest.mark.parametrize(("shards", "balanced"), ORDERS)
def test_shift_and_sums_are_those_of_the_row(shards, balanced):
    cfg, world, layout, order = split(shards, balanced)
    row = np.random.default_rng(0).integers(0, 9, (2, 3, ROW)).astype(np.int32)
    sharding = NamedSharding(world, layout.spec((None, "activation_batch", "activation_length")))
    placed = jax.device_put(sequence.arrange(order, {"x": row})["x"], sharding)

    def run(x):
        spec = jax.typeof(x).sharding.spec
        sums = jax.shard_map(lambda x: sequence.cumsum(order, x, axis=2), in_specs=spec, out_specs=spec)(x)
        return [sequence.shift(cfg, layout, x, by) for by in (1, 3)], sums, sequence.index(cfg, layout, x[0])

    with jax.set_mesh(world):
        shifted, sums, index = jax.jit(run)(placed)
    places = sequence.permutation(order, ROW)
    for by, found in zip((1, 3), shifted, strict=True):
        wanted = np.concatenate([row[..., by:], np.zeros((2, 3, by), int)], axis=-1)
        np.testing.assert_array_equal(found, wanted[..., places])
    np.testing.assert_array_equal(sums, np.cumsum(row, axis=-1)[..., places])
    np.testing.assert_array_equal(index, np.broadcast_to(places, (3, ROW)))
