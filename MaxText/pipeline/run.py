"""A segment run as a pipeline: one program for all stages, a loop over the iterations of the `Schedule`.

Inside, every array has a leading dim of stages that lies on the pipeline axis, and the layers run under `jax.vmap`
over it, in the layout of one stage. What crosses stages is written out, under `shard_map`:

1. The stream enters by one all-gather over the stages (outside the pipeline the batch is split over them too) and
   leaves by one reduce-scatter; the backward pass turns the two around.
2. In each iteration every stage hands its microbatch to the next: one collective-permute around the ring. Stage 0
   keeps what waits for its turn, be it input, between two rounds, or done: one buffer of M microbatches.
3. Weights that no stage owns are exchanged once at the door (an all-to-all). Within a stage they stay in pieces and
   are gathered for the moment of use, as everywhere.

Token ids of all microbatches are on every stage, so masks and rotations are made where they are used, and nothing but
the stream travels. An idle stage works on real rows out of turn, and nothing reads what it makes: the buffer takes
finished items only, and statistics are cut out of the iterations in which the stage was at work.

More letters: P stages, R rounds, M microbatches, K repeats of the pattern on a stage in a round, L = P R K.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from MaxText.blueprint import Blueprint, Param
from MaxText.layout import Axes, Layout
from MaxText.pipeline.schedule import AXIS, Schedule

STREAM: Axes = ("activation_batch", "activation_length", "activation_embed")
IDS: Axes = ("activation_batch", "activation_length")
OWN: Axes = (None, "activation_batch", "activation_length", None)

Stage = Callable[[Layout, Any, Array, Any, Any, Any], tuple[Array, Any]]
Rows = Mapping[str, Int[Array, "B S"]]


def run(
    layout: Layout,
    schedule: Schedule,
    tree: Blueprint,
    stage: Stage,
    params: Any,
    x_BSD: Float[Array, "B S D"],
    rows: Rows,
    own_LBSP: Array | None,
    checkpoint: Callable[[Any], Any],
) -> tuple[Float[Array, "B S D"], Any]:
    """(the stream after the pipelined layers, what they leave beside, stacked over L).

    `stage(layout, params [K, ...], x, rows, own [K, n, B, S, P], numbers)` is one turn of one stage on one microbatch;
    `numbers` [K] are those of its repeats, from `schedule.pipelined` on empty ones; `tree` is the blueprint of the
    segment's parameters, `params`; `own` are vectors of each layer's own, in the order of layers.
    `checkpoint` wraps an iteration and decides on what it keeps for the backward pass."""
    inner = layout.inside(AXIS)
    weights = _to_stages(layout, inner, schedule, tree, params)
    items = {name: _enter(layout, inner, schedule, ids, IDS) for name, ids in rows.items()}
    own = None if own_LBSP is None else _own_to_stages(layout, inner, schedule, own_LBSP)
    waiting = _enter(layout, inner, schedule, x_BSD, STREAM)
    turn = jax.vmap(functools.partial(stage, dataclasses.replace(inner, staged=AXIS)), spmd_axis_name=AXIS)

    def iteration(carry: tuple[Array, Array], t: Array):
        waiting, x = carry
        x, sides = turn(*_taken(schedule, weights, x, items, own, t))
        return _hand_over(schedule, waiting, x, t), sides

    start = (waiting, waiting[:, 0])
    (waiting, _), sides = jax.lax.scan(checkpoint(iteration), start, jnp.arange(schedule.iterations))
    return _leave(layout, inner, schedule, waiting), _of_layers(schedule, sides)


def _spec(x: Array) -> PartitionSpec:
    return jax.typeof(x).sharding.spec


def _specs(tree: Any) -> Any:
    return jax.tree.map(_spec, tree)


def _at(x: Array, index: Array, dim: int) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False)


# --- through the door


def _to_stages(layout: Layout, inner: Layout, schedule: Schedule, tree: Blueprint, params: Any) -> Any:
    """The segment's stored parameters [layers, ...] as [R, P, K, ...], each stage holding its own."""

    def one(param: Param, piece: Array) -> Array:
        if schedule.owned:
            return piece[None, None]
        piece = _filled(schedule, piece[: schedule.pipelined])
        piece = piece.reshape(schedule.repeats, schedule.stages, schedule.depth, *piece.shape[1:])
        split = [dim for dim, axes in enumerate(layout.split(param.axes), start=2) if AXIS in axes]
        if split:
            return jax.lax.all_to_all(piece, AXIS, split_axis=1, concat_axis=split[0], tiled=True)
        return jax.lax.dynamic_slice_in_dim(piece, jax.lax.axis_index(AXIS), 1, axis=1)

    def local(pieces: Any) -> Any:
        return jax.tree.map(one, tree, pieces)

    stored = jax.tree.map(lambda param: layout.spec(param.axes), tree)
    staged = jax.tree.map(lambda param: PartitionSpec(None, AXIS, None, *inner.spec(param.axes[1:])), tree)
    weights = jax.shard_map(local, in_specs=(stored,), out_specs=staged)(params)
    return weights if schedule.repeats > 1 else jax.tree.map(lambda w: w[0], weights)


def _filled(schedule: Schedule, piece: Array) -> Array:
    """Layers in dim 0, and as many more as are empty: they have what the last one has, and are as finite as that."""
    more = schedule.padding * (piece.shape[0] // schedule.pipelined)
    return jnp.concatenate([piece, jnp.repeat(piece[-1:], more, axis=0)]) if more else piece


def _cut(schedule: Schedule, piece: Array, dim: int = 0) -> Array:
    """The local rows of a stage's share, in dim `dim`, as [M/P, rows of a microbatch]. Microbatch j holds every
    (M/P)-th row from the j-th on, so that no row moves to another device of the stage."""
    shape = piece.shape
    return jnp.moveaxis(piece.reshape(*shape[:dim], -1, schedule.share, *shape[dim + 1 :]), dim + 1, dim)


def _enter(layout: Layout, inner: Layout, schedule: Schedule, x: Array, dims: Axes) -> Array:
    """Rows [B, ...] as microbatches on every stage, [P, M, B/M, ...]."""

    def local(piece: Array) -> Array:
        return jax.lax.all_gather(_cut(schedule, piece), AXIS, axis=0, tiled=True)[None]

    out = PartitionSpec(AXIS, None, *inner.spec(dims))
    return jax.shard_map(local, in_specs=(layout.spec(dims),), out_specs=out)(x)


def _own_to_stages(layout: Layout, inner: Layout, schedule: Schedule, own_LBSP: Array) -> Array:
    """The layers' own vectors [L n, B, S, P] on the stages of their layers, [P, R, K n, M, B/M, S, P]."""

    def local(piece: Array) -> Array:
        pieces = _filled(schedule, _cut(schedule, piece, dim=1))
        pieces = pieces.reshape(schedule.repeats, schedule.stages, -1, *pieces.shape[1:])
        pieces = jax.lax.all_to_all(pieces, AXIS, split_axis=1, concat_axis=3, tiled=True)
        return jnp.moveaxis(pieces, 1, 0)

    out = PartitionSpec(AXIS, None, None, None, *inner.spec(OWN[1:]))
    return jax.shard_map(local, in_specs=(layout.spec(OWN),), out_specs=out)(own_LBSP)


def _leave(layout: Layout, inner: Layout, schedule: Schedule, waiting: Array) -> Array:
    """The finished microbatches, which stage 0 holds, as rows [B, S, D]; each stage gets its share."""

    def local(piece: Array) -> Array:
        done = jnp.where(jax.lax.axis_index(AXIS) == 0, piece[0], jnp.zeros_like(piece[0]))
        share = jax.lax.psum_scatter(done, AXIS, scatter_dimension=0, tiled=True)
        share = jnp.moveaxis(share, 0, 1)
        return share.reshape(-1, *share.shape[2:])

    return jax.shard_map(local, in_specs=(_spec(waiting),), out_specs=layout.spec(STREAM))(waiting)


# --- in each iteration


def _item(schedule: Schedule, t: Array) -> tuple[Array, Array]:
    """(round, microbatch) that this stage works on in iteration t; an idle stage takes the nearest item."""
    last = schedule.microbatches * schedule.repeats - 1
    item = jnp.clip(t - jax.lax.axis_index(AXIS), 0, last)
    return item // schedule.microbatches, item % schedule.microbatches


def _taken(schedule: Schedule, weights: Any, x: Array, items: Any, own: Array | None, t: Array) -> tuple[Any, ...]:
    """What the stages need in iteration t: weights of the round [P, K, ...], the stream, ids [P, B, S] and own vectors
    [P, K n, B, S, P] of the microbatch, and the numbers of the repeats [P, K]."""

    def local(weights: Any, items: Any, own: Array | None, t: Array) -> Any:
        number, microbatch = _item(schedule, t)
        if schedule.repeats > 1:
            weights = jax.tree.map(lambda w: _at(w, number, 0), weights)
        items = jax.tree.map(lambda ids: _at(ids, microbatch, 1), items)
        own = None if own is None else _at(_at(own, number, 1), microbatch, 2)
        return weights, items, own, _numbers(schedule, number)

    def without(tree: Any, *dims: int) -> Any:
        return jax.tree.map(lambda x: PartitionSpec(*(e for i, e in enumerate(_spec(x)) if i not in dims)), tree)

    out_specs = (
        without(weights, 0) if schedule.repeats > 1 else _specs(weights),
        without(items, 1),
        without(own, 1, 3),
        PartitionSpec(AXIS),
    )
    in_specs = (_specs(weights), _specs(items), _specs(own), PartitionSpec())
    weights, items, own, numbers = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs)(weights, items, own, t)
    return weights, x, items, own, numbers


def _numbers(schedule: Schedule, number: Array) -> Array:
    """[1, K]: the repeats of this stage in round `number`, counted over all stages and rounds."""
    first = (number * schedule.stages + jax.lax.axis_index(AXIS)) * schedule.depth
    return (first + jnp.arange(schedule.depth))[None]


def _hand_over(schedule: Schedule, waiting: Array, x: Array, t: Array) -> tuple[Array, Array]:
    """(what waits, what each stage works on next) after iteration t, which made x [P, B/M, S, D]."""
    pieces = schedule.microbatches
    ring = [(stage, (stage + 1) % schedule.stages) for stage in range(schedule.stages)]

    def local(waiting: Array, x: Array, t: Array) -> tuple[Array, Array]:
        x = jax.lax.ppermute(x, AXIS, ring)
        back = t - (schedule.stages - 1)  # the item that is back at stage 0; before the first none
        waiting, following = _put_and_get(waiting, x, back >= 0, back % pieces, (t + 1) % pieces)
        return waiting, jnp.where(jax.lax.axis_index(AXIS) == 0, following, x)

    specs = (_spec(waiting), _spec(x))
    return jax.shard_map(local, in_specs=(*specs, PartitionSpec()), out_specs=specs)(waiting, x, t)


@jax.custom_vjp
def _put_and_get(waiting: Array, x: Array, real: Array, put: Array, get: Array) -> tuple[Array, Array]:
    """(the buffer with x in slot `put` if it is real, then its slot `get`). The backward pass touches the two slots
    alone, where plain differentiation would add buffers of zeros."""
    waiting = _set(waiting, jnp.where(real, x, _at(waiting, put, 1)), put)
    return waiting, _at(waiting, get, 1)


def _put_and_get_forward(waiting: Array, x: Array, real: Array, put: Array, get: Array) -> Any:
    return _put_and_get(waiting, x, real, put, get), (real, put, get)


def _put_and_get_backward(saved: Any, cotangents: tuple[Array, Array]) -> Any:
    real, put, get = saved
    d_waiting, d_got = cotangents
    d_waiting = _set(d_waiting, _at(d_waiting, get, 1) + d_got, get)
    d_slot = _at(d_waiting, put, 1)
    none = jnp.zeros_like(d_slot)
    return _set(d_waiting, jnp.where(real, none, d_slot), put), jnp.where(real, d_slot, none), None, None, None


_put_and_get.defvjp(_put_and_get_forward, _put_and_get_backward)


def _set(waiting: Array, x: Array, slot: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(waiting, x, slot, 1)


# --- beside the stream


def _of_layers(schedule: Schedule, sides: Any) -> Any:
    """What each turn left beside, [iterations, P, K, ...], summed over microbatches, in the order of layers: [L, ...].
    Iterations in which a stage idled are not read."""

    def local(side: Array) -> Array:
        work = schedule.microbatches * schedule.repeats
        at_work = jax.lax.dynamic_slice_in_dim(side, jax.lax.axis_index(AXIS), work, axis=0)
        return at_work.reshape(schedule.repeats, schedule.microbatches, *side.shape[1:]).sum(axis=1)

    def one(side: Array) -> Array:
        spec = _spec(side)
        rounds = jax.shard_map(local, in_specs=(spec,), out_specs=spec)(side)
        whole = jax.reshard(rounds, PartitionSpec(None, None, *spec[2:]))
        return whole.reshape(-1, *side.shape[3:])[: schedule.pipelined]

    return jax.tree.map(one, sides)


# --- without a pipeline


def from_owner(layout: Layout, tree: Blueprint, params: Any, layer: Int[Array, ""]) -> Any:
    """The parameters of one repeat, from the stage that owns it to all: for passes too small for a pipeline."""
    inner = layout.inside(AXIS)

    def one(piece: Array, layer: Array) -> Array:
        mine = layer // piece.shape[0] == jax.lax.axis_index(AXIS)
        found = _at(piece, layer % piece.shape[0], 0)
        return jax.lax.psum(jnp.where(mine, found, jnp.zeros_like(found)), AXIS)

    def local(pieces: Any, layer: Array) -> Any:
        return jax.tree.map(lambda piece: one(piece, layer), pieces)

    stored = jax.tree.map(lambda param: layout.spec(param.axes), tree)
    used = jax.tree.map(lambda param: inner.spec(param.axes[1:]), tree)
    return jax.shard_map(local, in_specs=(stored, PartitionSpec()), out_specs=used)(params, layer)
