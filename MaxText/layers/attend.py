"""One door to attention, whatever the layout: rows whole on each device, or split over several.

Where rows are split, `context_parallel_strategy` says how queries meet the keys of the other shards:

- *ring*: blocks of keys and values travel from shard to shard (`blockwise`);
- *all_gather*: every shard gathers all of them;
- *ulysses* (Jacobs et al., 2023, arXiv:2309.14509): shards exchange a part of the row of all heads for the whole row of
  a part of the heads, and back.

A layer that sees no further back than one chunk needs its neighbour's last tokens only, and under the first two gets
nothing else."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from MaxText import sequence
from MaxText.architecture import Reach
from MaxText.layers import blockwise, dot_product
from MaxText.layers.blockwise import Expand, How
from MaxText.layers.masks import Places, visible
from MaxText.layout import Axes, Layout
from MaxText.sequence import Order

TOKENS: Axes = ("activation_batch", "activation_length")
WHOLE_ROWS: Axes = ("activation_batch", None)
Q_HEADS: Axes = ("activation_batch", "activation_length", "activation_heads", None)
SINK: Axes = ("heads",)


class Keys(NamedTuple):
    """What keys and values are made of: `parts`, a tuple of arrays [B, T, ...] with `dims`; they are (keys, values), or
    `expand(kernel, parts)` makes these, the kernel [C, N, X] in its layout of use."""

    parts: tuple[Array, ...]
    dims: Axes
    expand: Expand = lambda kernel, parts: parts
    kernel: Array | None = None
    kernel_dims: Axes = ()


def is_split(layout: Layout) -> bool:
    """Whether rows are split over devices."""
    return layout.ways(sequence.LENGTH) > 1


def split(
    cfg: Any,
    layout: Layout,
    reach: Reach,
    q_BSNH: Float[Array, "B S N H"],
    keys: Keys,
    sink_N: Float[Array, " N"] | None,
    q_places: Places,
    all_places: Places,
) -> Float[Array, "B S N V"]:
    """softmax(q k^T) v where rows are split; q is already scaled. `all_places` [B, T] are whole on every device, in the
    order of the slots."""
    ring = cfg.context_parallel_strategy == "ring"
    how = How(sequence.order(cfg, layout), ring, reach, cfg.attn_logits_soft_cap, keys.expand)

    def local(q: Array, parts: Any, kernel: Any, sink: Any, q_places: Places, all_places: Places) -> Array:
        if cfg.context_parallel_strategy == "ulysses":
            return _exchanged(how, q, parts, kernel, sink, all_places)
        if 0 < reach.size <= q.shape[1] // how.order.pieces + 1:
            return _with_neighbours(how, q, parts, kernel, sink, q_places)
        return blockwise.attention(how, q, parts, kernel, sink, q_places, all_places)

    def specs(tree: Any, dims: Axes) -> Any:
        return jax.tree.map(lambda x: layout.spec(dims[: x.ndim]), tree)

    heads: Any = layout.spec(Q_HEADS)
    in_specs = (
        heads,
        specs(keys.parts, keys.dims),
        layout.compute_spec(keys.kernel_dims) if keys.kernel is not None else None,
        specs(sink_N, SINK),
        specs(q_places, TOKENS),
        specs(all_places, WHOLE_ROWS),
    )
    return layout.shard_map(local, in_specs=in_specs, out_specs=heads)(
        q_BSNH, keys.parts, keys.kernel, sink_N, q_places, all_places
    )


def _with_neighbours(how: How, q: Array, parts: Any, kernel: Any, sink: Any, at: Places) -> Array:
    """Each chunk attends to itself and to the end of the chunk before it."""
    order = how.order
    before = functools.partial(sequence.before, order, size=max(how.reach.size - 1, 1))
    tails = [before(x) for x in parts]
    # Before the first chunk there are zeros; no token is of document -1.
    tail_places = before(at.index_BS), before(at.position_BS), [x - 1 for x in before(at.document_BS + 1)]
    out = []
    for i, q_piece in enumerate(sequence.pieces(order, q)):
        own = Places(*(sequence.pieces(order, x)[i] for x in at))
        k_places = Places(*(_after_tail(x[i], y) for x, y in zip(tail_places, own, strict=True)))
        near = [_after_tail(tail[i], sequence.pieces(order, x)[i]) for tail, x in zip(tails, parts, strict=True)]
        k, v = how.expand(kernel, tuple(near))
        out.append(dot_product.attention(q_piece, k, v, visible(how.reach, own, k_places), how.soft_cap, sink))
    return jnp.concatenate(out, axis=1)


def _after_tail(tail: Array, chunk: Array) -> Array:
    return jnp.concatenate([tail, chunk], axis=1)


def _exchanged(how: How, q: Array, parts: Any, kernel: Any, sink: Any, at: Places) -> Array:
    """Whole rows of this shard's part of the heads. Where there are fewer key/value heads than shards, each goes to all
    shards that need it; latents go to all, and each shard makes the keys of its own heads."""
    shards, axes = how.order.shards, how.order.axes
    to_rows = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=2, concat_axis=1, tiled=True)
    if kernel is None:
        k, v = (to_rows(_spread(x, shards)) for x in how.expand(None, parts))
    else:
        whole = tuple(jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in parts)
        k, v = how.expand(_own_heads(how.order, kernel, 1), whole)
    sink = None if sink is None else _own_heads(how.order, sink, 0)
    y = dot_product.attention(to_rows(q), k, v, visible(how.reach, at, at), how.soft_cap, sink)
    return jax.lax.all_to_all(y, axes, split_axis=1, concat_axis=2, tiled=True)


def _spread(x_BTKH: Array, shards: int) -> Array:
    """Heads repeated until each shard can get one."""
    return jnp.repeat(x_BTKH, max(shards // x_BTKH.shape[2], 1), axis=2)


def _own_heads(order: Order, x: Array, axis: int) -> Array:
    size = x.shape[axis] // order.shards
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(order.axes) * size, size, axis=axis)
