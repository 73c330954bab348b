"""Attention over keys that lie on several shards, block by block, with a running softmax (Milakov & Gimelshein, 2018,
arXiv:1805.02867). Inside a wall: all arrays are one shard's own.

The blocks come to the queries in one of two ways. In a *ring* (Liu et al., 2023, arXiv:2310.01889) each shard passes
on the block that it holds while it works with it, and the gradients of a block travel with it until they are home.
*Gathered*, all blocks are there at once, in the forward and again in the backward pass. Either way no scores larger
than one pair of chunks exist, the backward pass makes them anew from log Z, and pairs of which the mask leaves nothing
are skipped: with zigzag order that is the same half on every shard.

A block holds what keys and values are made of: the keys and values themselves, or the latents from which `expand`
makes them. More letters: s queries of a chunk, t keys of a chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from MaxText import sequence
from MaxText.architecture import Reach
from MaxText.layers import dot_product
from MaxText.layers.masks import Places, visible
from MaxText.sequence import Order

Expand = Callable[[Any, Any], tuple[Array, Array]]  # (kernel or None, block) -> keys [B, T, K, H], values [B, T, K, V]


class How(NamedTuple):
    """What is fixed when the program is written."""

    order: Order
    ring: bool
    reach: Reach
    soft_cap: float
    expand: Expand


class Sofar(NamedTuple):
    """The softmax over the keys so far of one piece of the queries: largest logit, sum of powers, weighted values."""

    largest_BNs: Array
    total_BNs: Array
    values_BsNV: Array


class Saved(NamedTuple):
    """What the backward pass needs: nothing but the arguments grows with the work done."""

    q_BSNH: Array
    block: Any
    kernel: Any
    sink_N: Array | None
    q_places: Places
    all_places: Places
    out_BSNV: Array
    log_z_BNS: Array


def attention(
    how: How,
    q_BSNH: Float[Array, "B S N H"],
    block: Any,
    kernel: Any,
    sink_N: Float[Array, " N"] | None,
    q_places: Places,
    all_places: Places,
) -> Float[Array, "B S N V"]:
    """softmax(q k^T) v over the keys of all shards; q is already scaled, the softmax in float32. `all_places` are the
    places of the keys of all shards, in the order of the slots."""
    axes = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves((q_BSNH, block))))
    return _attention(how, *_vary((q_BSNH, block, kernel, sink_N), axes), q_places, all_places)


def _varying(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, typed as different along `axes`; their gradients are then summed over what was added."""

    def one(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how, q, block, kernel, sink_N, q_places, all_places):
    return _forward(how, q, block, kernel, sink_N, q_places, all_places)[0]


def _forward(how, q, block, kernel, sink_N, q_places, all_places):
    q_pieces = sequence.pieces(how.order, q)
    value_dim = jax.eval_shape(how.expand, kernel, block)[1].shape[-1]

    def visit(states: list[Sofar], block: Any, owner: Array) -> list[Sofar]:
        k, v = (sequence.pieces(how.order, x) for x in how.expand(kernel, block))
        states = list(states)
        for a, b, seen, mask in _pairs(how, q_places, all_places, owner):
            longer = functools.partial(_longer, how, q_pieces[a], k[b], v[b], mask)
            states[a] = jax.lax.cond(seen, longer, lambda sofar: sofar, states[a])
        return states

    done = _over_blocks(how, block, [_start(piece, value_dim, sink_N) for piece in q_pieces], visit)
    out = jnp.concatenate([one.values_BsNV / _beside(one.total_BNs) for one in done], axis=1).astype(q.dtype)
    log_z = jnp.concatenate([one.largest_BNs + jnp.log(one.total_BNs) for one in done], axis=2)
    return out, Saved(q, block, kernel, sink_N, q_places, all_places, out, log_z)


def _backward(how, saved, dout):
    dout = dout.astype(jnp.float32)
    share_BNS = jnp.moveaxis((dout * saved.out_BSNV).sum(axis=-1), 1, 2)
    q, dout_pieces = (sequence.pieces(how.order, x) for x in (saved.q_BSNH, dout))
    log_z, share = (sequence.pieces(how.order, x, axis=2) for x in (saved.log_z_BNS, share_BNS))

    def visit(states: tuple[list[Array], Any], block: Any, owner: Array) -> tuple[tuple[list[Array], Any], Any]:
        dq, dkernel = list(states[0]), states[1]
        made, back = jax.vjp(how.expand, saved.kernel, block)
        k, v = (sequence.pieces(how.order, x) for x in made)
        dk, dv = (_zeros(pieces) for pieces in (k, v))
        for a, b, seen, mask in _pairs(how, saved.q_places, saved.all_places, owner):
            more = functools.partial(_gradient, how, q[a], k[b], v[b], mask, dout_pieces[a], log_z[a], share[a])
            dq[a], dk[b], dv[b] = jax.lax.cond(seen, more, lambda sofar: sofar, (dq[a], dk[b], dv[b]))
        dmade = [jnp.concatenate(d, axis=1).astype(x.dtype) for d, x in zip((dk, dv), made, strict=True)]
        dkernel_here, dblock = back(tuple(dmade))
        return (dq, jax.tree.map(jnp.add, dkernel, _wide(dkernel_here))), _wide(dblock)

    start = (_zeros(q), _zeros(saved.kernel))
    (dq, dkernel), dblock = _over_blocks_and_back(how, saved.block, start, visit)
    dsink = None
    if saved.sink_N is not None:
        at_sink_BNS = jnp.exp(saved.sink_N.astype(jnp.float32)[None, :, None] - saved.log_z_BNS)
        dsink = -(at_sink_BNS * share_BNS).sum(axis=(0, 2))
    given = (saved.q_BSNH, saved.block, saved.kernel, saved.sink_N)
    gradients = (jnp.concatenate(dq, axis=1), dblock, dkernel, dsink)
    return *jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, given), None, None


_attention.defvjp(_forward, _backward)


def _start(q_BsNH: Array, value_dim: int, sink_N: Array | None) -> Sofar:
    """No keys yet; a sink is a logit without a value."""
    B, s, N, _ = q_BsNH.shape
    sofar = Sofar(jnp.full((B, N, s), dot_product.MASKED), jnp.zeros((B, N, s)), jnp.zeros((B, s, N, value_dim)))
    sofar = _vary(sofar, _varying(q_BsNH))
    if sink_N is None:
        return sofar
    sink_BNs = jnp.broadcast_to(sink_N.astype(jnp.float32)[None, :, None], (B, N, s))
    return sofar._replace(largest_BNs=sink_BNs, total_BNs=sofar.total_BNs + 1.0)


def _longer(how: How, q: Array, k: Array, v: Array, mask: Callable[[], Array], sofar: Sofar) -> Sofar:
    """The softmax with the keys k and their values."""
    logits = dot_product.capped(dot_product.scores(q, k), how.soft_cap)
    logits = jnp.where(mask()[:, None], logits, dot_product.MASKED)
    largest = jnp.maximum(sofar.largest_BNs, logits.max(axis=-1))
    shrunk = jnp.exp(sofar.largest_BNs - largest)
    powers = jnp.exp(logits - largest[..., None])
    values = dot_product.weighted(powers.astype(v.dtype), v, jnp.float32)
    return Sofar(largest, sofar.total_BNs * shrunk + powers.sum(axis=-1), sofar.values_BsNV * _beside(shrunk) + values)


def _gradient(
    how: How,
    q: Array,
    k: Array,
    v: Array,
    mask: Callable[[], Array],
    dout_BsNV: Array,
    log_z_BNs: Array,
    share_BNs: Array,
    sofar: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """`sofar` (dq, dk, dv) and what this pair adds. share = dout . out, what the softmax takes off each weight's
    gradient."""
    logits, back_to_qk = jax.vjp(lambda q, k: dot_product.capped(dot_product.scores(q, k), how.soft_cap), q, k)
    weights = jnp.where(mask()[:, None], jnp.exp(logits - log_z_BNs[..., None]), 0.0)
    _, back_to_v = jax.vjp(lambda w, v: dot_product.weighted(w, v, jnp.float32), weights.astype(v.dtype), v)
    dweights, dv = back_to_v(dout_BsNV)
    dq, dk = back_to_qk(weights * (dweights - share_BNs[..., None]))
    return jax.tree.map(lambda sum, more: sum + more.astype(sum.dtype), sofar, (dq, dk, dv))


def _pairs(
    how: How, q_places: Places, all_places: Places, owner: Array
) -> Iterator[tuple[int, int, Array, Callable[[], Array]]]:
    """(piece of the queries, piece of the keys of shard `owner`, whether any of these sees any of those, their mask),
    for all pairs. Whether is answered from the numbers of the chunks alone."""
    order, length = how.order, q_places.index_BS.shape[1]
    k_places = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, owner * length, length, axis=1), all_places)
    q_pieces, k_pieces = ([sequence.pieces(order, x) for x in places] for places in (q_places, k_places))
    me, chunk = jax.lax.axis_index(order.axes), length // order.pieces
    for a in range(order.pieces):
        for b in range(order.pieces):
            apart = order.number(me, a) - order.number(owner, b)
            seen = apart >= 0
            if how.reach.size:  # the nearest two tokens of chunks n apart are (n - 1) chunk + 1 apart
                seen &= (apart - 1) * chunk + 1 < how.reach.size
            at = Places(*(x[a] for x in q_pieces)), Places(*(x[b] for x in k_pieces))
            yield a, b, seen, functools.partial(visible, how.reach, *at)


def _over_blocks(how: How, block: Any, state: Any, visit: Callable[[Any, Any, Array], Any]) -> Any:
    """state = visit(state, block, its owner) for the block of every shard."""
    shards, axes = how.order.shards, how.order.axes
    if not how.ring:
        whole = _gathered(how, block)
        return jax.lax.scan(lambda state, i: (visit(state, _take(whole, i), i), None), state, jnp.arange(shards))[0]
    me = jax.lax.axis_index(axes)

    def step(carry: tuple[Any, Any], i: Array) -> tuple[tuple[Any, Any], None]:
        state, block = carry
        following = _passed_on(how, block)  # asked for before the work, so that it can travel meanwhile
        return (visit(state, block, (me - i) % shards), following), None

    (state, block), _ = jax.lax.scan(step, (state, block), jnp.arange(shards - 1))
    return visit(state, block, (me + 1) % shards)


def _over_blocks_and_back(how: How, block: Any, state: Any, visit: Callable[[Any, Any, Array], Any]) -> tuple[Any, Any]:
    """(state, dblock): (state, what is added to dblock) = visit(state, block, its owner) for the block of every shard;
    the sum over all visitors of a block is returned to its owner."""
    shards, axes = how.order.shards, how.order.axes
    if not how.ring:
        whole = _gathered(how, block)
        state, parts = jax.lax.scan(lambda state, i: visit(state, _take(whole, i), i), state, jnp.arange(shards))
        return state, jax.tree.map(lambda x: jax.lax.psum_scatter(x, axes, scatter_dimension=0), parts)
    me = jax.lax.axis_index(axes)

    def step(carry: tuple[Any, Any, Any], i: Array) -> tuple[tuple[Any, Any, Any], None]:
        state, block, dblock = carry
        following = _passed_on(how, block)
        state, more = visit(state, block, (me - i) % shards)
        return (state, following, _passed_on(how, jax.tree.map(jnp.add, dblock, more))), None

    (state, block, dblock), _ = jax.lax.scan(step, (state, block, _zeros(block)), jnp.arange(shards - 1))
    state, more = visit(state, block, (me + 1) % shards)
    return state, _passed_on(how, jax.tree.map(jnp.add, dblock, more))


def _passed_on(how: How, tree: Any) -> Any:
    shards = how.order.shards
    ring = [(i, (i + 1) % shards) for i in range(shards)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, how.order.axes, ring), tree)


def _gathered(how: How, block: Any) -> Any:
    """The blocks of all shards, stacked."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, how.order.axes), block)


def _take(stack: Any, i: Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stack)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _zeros(tree: Any) -> Any:
    """Zeros for sums over the blocks, in float32."""
    return jax.tree.map(lambda x: _vary(jnp.zeros(x.shape), _varying(x)), tree)


def _beside(x_BNs: Array) -> Array:
    """As a factor of [B, s, N, V]."""
    return jnp.moveaxis(x_BNs, 1, 2)[..., None]
