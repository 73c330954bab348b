"""Where the tokens of a row lie when rows are split over devices, and how they reach their neighbours.

A row is cut into equal *chunks*, numbered in reading order. In plain order shard i of c holds chunk i. In zigzag order
there are 2c chunks and shard i holds chunks i and 2c-1-i, its two *pieces*: under a causal mask the early chunk has
little to see and the late one much, so that all shards have the same work (Striped and zigzag orders: Brandon et al.,
2023, arXiv:2311.09431). The order is a fixed permutation of the row: the host applies it when a batch is put on the
devices, and inside the program it follows from the place of the device, so no array carries it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from MaxText.layout import Layout

LENGTH = "activation_length"


class Order(NamedTuple):
    """The mesh axes that split a row, the number of shards, and how many chunks each of them holds: 2 in zigzag."""

    axes: tuple[str, ...]
    shards: int
    pieces: int

    @property
    def chunks(self) -> int:
        return self.shards * self.pieces

    def number(self, shard: Any, piece: int) -> Any:
        """The chunk that is the given piece of a shard."""
        return self.chunks - 1 - shard if piece else shard


def order(cfg: Any, layout: Layout) -> Order:
    """Zigzag where rows are split and context_parallel_load_balance asks for it; not for ulysses, where every device
    sees whole rows."""
    shards = layout.ways(LENGTH)
    zigzag = shards > 1 and cfg.context_parallel_load_balance and cfg.context_parallel_strategy != "ulysses"
    return Order(layout.axes(LENGTH), shards, 2 if zigzag else 1)


def permutation(order: Order, length: int) -> np.ndarray:
    """The place in the row of the token in each slot, int32 [length]; slots are numbered over the shards in turn."""
    chunks = np.arange(length, dtype=np.int32).reshape(order.chunks, -1)
    numbers = [order.number(shard, piece) for shard in range(order.shards) for piece in range(order.pieces)]
    return chunks[numbers].reshape(-1)


def arrange(order: Order, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows [..., S] on the host, from reading order to the order of the slots."""
    if order.pieces == 1:
        return dict(batch)
    return {name: x[..., permutation(order, x.shape[-1])] for name, x in batch.items()}


def read(order: Order, x: Array, axis: int = 1) -> Array:
    """Whole rows along `axis`, from the order of the slots to reading order."""
    if order.pieces == 1:
        return x
    chunks = jnp.split(x, order.chunks, axis=axis)
    numbers = [order.number(shard, piece) for shard in range(order.shards) for piece in range(order.pieces)]
    return jnp.concatenate([chunks[i] for i in np.argsort(numbers)], axis=axis)


def index(cfg: Any, layout: Layout, like_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The place in its row of every token, laid out as `like`."""
    row = jnp.asarray(permutation(order(cfg, layout), like_BS.shape[1]))
    return jnp.broadcast_to(row, like_BS.shape, out_sharding=jax.typeof(like_BS).sharding.spec)


# --- inside a wall: x is the shard's own part, its chunks one after the other along `axis`


def pieces(order: Order, x: Array, axis: int = 1) -> list[Array]:
    """The chunks of this shard."""
    return jnp.split(x, order.pieces, axis=axis) if order.pieces > 1 else [x]


def before(order: Order, x: Array, size: int, axis: int = 1) -> list[Array]:
    """For each piece the last `size` of the chunk before it, zeros before the first chunk. Only these travel."""
    own = pieces(order, x, axis)
    tails = [jax.lax.slice_in_dim(piece, piece.shape[axis] - size, None, axis=axis) for piece in own]
    came = [_from_neighbour(order, tails[0], 1)]
    if order.pieces == 2:  # the last shard's late chunk follows its own early one
        came.append(_where_last(order, tails[0], _from_neighbour(order, tails[1], -1)))
    return came


def after(order: Order, x: Array, size: int, axis: int = 1) -> list[Array]:
    """For each piece the first `size` of the chunk after it, zeros after the last chunk."""
    own = pieces(order, x, axis)
    heads = [jax.lax.slice_in_dim(piece, 0, size, axis=axis) for piece in own]
    came = [_from_neighbour(order, heads[0], -1)]
    if order.pieces == 2:
        came = [_where_last(order, heads[1], came[0]), _from_neighbour(order, heads[1], 1)]
    return came


def cumsum(order: Order, x: Array, axis: int = 1) -> Array:
    """The sum over the row up to each of its tokens, this one included. One number a chunk travels."""
    if order.shards == 1:
        return jnp.cumsum(x, axis=axis)
    own = pieces(order, x, axis)
    totals = jax.lax.all_gather(jnp.stack([piece.sum(axis=axis) for piece in own]), order.axes)  # [shards, pieces, ...]
    totals = totals.reshape(-1, *totals.shape[2:])
    numbers = np.array([order.number(i, piece) for i in range(order.shards) for piece in range(order.pieces)])
    totals = totals[np.argsort(numbers)]
    earlier = jnp.cumsum(totals, axis=0) - totals
    numbers_here = [order.number(jax.lax.axis_index(order.axes), piece) for piece in range(order.pieces)]
    sums = [
        jnp.cumsum(piece, axis=axis) + jnp.expand_dims(jax.lax.dynamic_index_in_dim(earlier, n, keepdims=False), axis)
        for piece, n in zip(own, numbers_here, strict=True)
    ]
    return jnp.concatenate(sums, axis=axis)


def _from_neighbour(order: Order, x: Array, distance: int) -> Array:
    """x of shard i - distance at shard i; zeros where there is none."""
    pairs = [(i, i + distance) for i in range(order.shards) if 0 <= i + distance < order.shards]
    return jax.lax.ppermute(x, order.axes, pairs)


def _where_last(order: Order, last: Array, others: Array) -> Array:
    return jnp.where(jax.lax.axis_index(order.axes) == order.shards - 1, last, others)


# ---


def shift(cfg: Any, layout: Layout, x: Int[Array, "*batch S"], by: int) -> Int[Array, "*batch S"]:
    """What stands `by` places further on in the row; zeros at its end."""
    how = order(cfg, layout)
    if how.shards == 1:
        return jnp.pad(x[..., by:], [(0, 0)] * (x.ndim - 1) + [(0, by)])

    def local(x: Array) -> Array:
        axis = x.ndim - 1
        pairs = zip(pieces(how, x, axis), after(how, x, by, axis), strict=True)
        return jnp.concatenate([part for own, following in pairs for part in (own[..., by:], following)], axis=axis)

    spec = jax.typeof(x).sharding.spec
    return layout.shard_map(local, in_specs=(spec,), out_specs=spec)(x)
