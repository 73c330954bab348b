"""Which choice of which token goes where: all arithmetic on integers, and the moves of rows that follow from it.

A *choice* is one of a token's k experts. The choices of the local tokens are sorted by expert, so what a shard of
experts gets from a device is one run of rows. Where experts are split over P devices, each tells the others how many
rows it has for each expert (one all-gather of E integers), and the runs are exchanged. A shard lays the runs that it
got by expert again, and sends the results back the way that they came.

The receiving buffer has a fixed size. By default it is the largest that can be needed, so that nothing is ever dropped:
every token of all P devices may choose min(k, E/P) experts of one shard. `ragged_buffer_factor` makes it smaller: what
does not fit is dropped and counted.

Local arrays only. M = T k choices of the T local tokens, R rows of the buffer, e = E/P experts of a shard."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from MaxText import sequence
from MaxText.layers.ragged import Route, Routes


class Order(NamedTuple):
    """A permutation of rows: y[i] = x[to[i]], and its inverse."""

    to_M: Int[Array, " M"]
    back_M: Int[Array, " M"]


class Sorted(NamedTuple):
    """Choices by expert; those of no expert come last."""

    order: Order
    rows_E: Int[Array, " E"]


class Received(NamedTuple):
    """How the rows for a shard of experts travel, their order by expert, their numbers, and what was left behind."""

    routes: Routes
    order: Order
    rows_e: Int[Array, " e"]
    dropped: Int[Array, ""]


def by_expert(expert_M: Int[Array, " M"], experts: int) -> Sorted:
    """Choices sorted by expert, in their order for each; `experts` stands for no expert."""
    to_M = jnp.argsort(expert_M, stable=True)
    rows_E = (expert_M[:, None] == jnp.arange(experts)[None]).sum(axis=0, dtype=jnp.int32)
    return Sorted(Order(to_M, jnp.argsort(to_M)), rows_E)


def _before(x: Array, axis: int = 0) -> Array:
    """The sum of what comes before, along an axis."""
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


def between_shards(rows_E: Int[Array, " E"], shards: int, buffer: int, axes: tuple[str, ...]) -> Received:
    """The exchange of sorted choices between the shards along `axes`, of which each has room for `buffer` rows."""
    me = lax.axis_index(axes)
    table_SDe = lax.all_gather(rows_E, axes).reshape(shards, shards, -1)  # from, to, expert
    wanted_DSe = table_SDe.swapaxes(0, 1)
    begin_DSe = _before(wanted_DSe.reshape(shards, -1), axis=1).reshape(wanted_DSe.shape)
    taken_DSe = jnp.clip(buffer - begin_DSe, 0, wanted_DSe)
    size_SD = taken_DSe.sum(axis=2, dtype=jnp.int32).T
    start_SD, landing_SD = _before(table_SDe.sum(axis=2, dtype=jnp.int32), axis=1), _before(size_SD)
    routes = Routes(
        Route(start_SD[me], size_SD[me], landing_SD[me]),
        Route(landing_SD[:, me], size_SD[:, me], start_SD[:, me]),
    )
    mine_Se = taken_DSe[me]
    return Received(routes, _regrouped(mine_Se, buffer), mine_Se.sum(axis=0), rows_E.sum() - size_SD[me].sum())


def _regrouped(rows_Se: Array, buffer: int) -> Order:
    """From runs by device, each sorted by expert, to runs by expert."""
    by_device = _before(rows_Se.reshape(-1)).reshape(rows_Se.shape)
    by_expert = _before(rows_Se.T.reshape(-1)).reshape(rows_Se.T.shape).T
    at_R = jnp.arange(buffer, dtype=jnp.int32)
    used_R = at_R < rows_Se.sum()

    def moved(shift: Array, rows: Array) -> Array:
        repeated = jnp.repeat(shift.reshape(-1), rows.reshape(-1), total_repeat_length=buffer)
        return jnp.where(used_R, at_R + repeated, at_R)

    return Order(moved((by_device - by_expert).T, rows_Se.T), moved(by_expert - by_device, rows_Se))


def groups(rows_E: Int[Array, " E"], rows: int) -> Int[Array, " M"]:
    """The group of each of `rows` rows; E beyond all groups."""
    return (jnp.arange(rows)[:, None] >= jnp.cumsum(rows_E)[None]).sum(axis=1)


@jax.custom_vjp
def permuted(x_MD: Float[Array, "M D"], order: Order) -> Float[Array, "M D"]:
    """The rows in another order; the gradient is a gather too, not a scatter."""
    return _rows(x_MD, order.to_M)


permuted.defvjp(lambda x_MD, order: (_rows(x_MD, order.to_M), order), lambda order, dy: (_rows(dy, order.back_M), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x_TD: Float[Array, "T D"], order: Order, k: int) -> Float[Array, "M D"]:
    """The token of each choice, in the order of choices."""
    return _rows(x_TD, order.to_M // k)


def _spread_backward(k, order, dy):
    dy_TkD = _rows(dy, order.back_M).reshape(-1, k, dy.shape[-1])
    return dy_TkD.astype(jnp.float32).sum(axis=1).astype(dy.dtype), None


spread.defvjp(lambda x_TD, order, k: (_rows(x_TD, order.to_M // k), order), _spread_backward)


def _rows(x_MD: Array, index_M: Array) -> Array:
    return x_MD.at[index_M].get(mode="promise_in_bounds", unique_indices=False)


def places(expert_BSk: Int[Array, "B S k"], experts: int, order: sequence.Order) -> Int[Array, "B S k"]:
    """How many choices of the same expert came before, in the row's own order; a token's choices count in theirs.
    Where rows are split, one number for each chunk and expert travels. `experts` stands for no expert; its places mean
    nothing."""
    expert_BCM = expert_BSk.reshape(expert_BSk.shape[0], order.pieces, -1)
    place_BCM, rows_BCE = jax.vmap(jax.vmap(functools.partial(_places_of_chunk, experts=experts)))(expert_BCM)
    before_BCE = sequence.cumsum(order, rows_BCE) - rows_BCE
    return (place_BCM + jnp.take_along_axis(before_BCE, expert_BCM, axis=-1)).reshape(expert_BSk.shape)


def _places_of_chunk(expert_M: Array, experts: int) -> tuple[Array, Array]:
    """(places, choices of each expert). In the order by expert the place is the distance from the expert's first."""
    to_M = jnp.argsort(expert_M, stable=True)
    rows_E = (expert_M[:, None] == jnp.arange(experts + 1)[None]).sum(axis=0, dtype=jnp.int32)
    place_M = jnp.arange(expert_M.size, dtype=jnp.int32) - _before(rows_E)[expert_M[to_M]]
    return place_M[jnp.argsort(to_M)], rows_E
