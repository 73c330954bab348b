"""Attention in one piece: all scores at once, in plain XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def attention(
    q_BSNH: Float[Array, "B S N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K V"],
    mask_BST: Bool[Array, "B S T"],
    soft_cap: float = 0.0,
    sink_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B S N V"]:
    """softmax(q k^T) v per head, logits and softmax in float32; q is already scaled. N is a multiple of K.

    A sink is one more logit of each head, whose share of the softmax goes nowhere. A query that sees no key at all
    (padding) attends evenly to everything, which keeps it finite; nothing reads it.
    """
    logits = capped(scores(q_BSNH, k_BTKH), soft_cap)
    logits = jnp.where(mask_BST[:, None, :, :], logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1) if sink_N is None else _softmax_with_sink(logits, sink_N)
    return weighted(weights.astype(v_BTKH.dtype), v_BTKH)


def capped(logits: Array, soft_cap: float) -> Array:
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


# Where each query head has its own keys there is no dim of groups: a dim of size 1 costs transposes on CPU.
def scores(q_BSNH: Float[Array, "B S N H"], k_BTKH: Float[Array, "B T K H"]) -> Float[Array, "B N S T"]:
    """q k^T per head, in float32."""
    B, S, N, H = q_BSNH.shape
    T, K = k_BTKH.shape[1:3]
    if N == K:
        return jnp.einsum("BSNH,BTNH->BNST", q_BSNH, k_BTKH, preferred_element_type=jnp.float32)
    q_BSKGH = q_BSNH.reshape(B, S, K, N // K, H)
    return jnp.einsum("BSKGH,BTKH->BKGST", q_BSKGH, k_BTKH, preferred_element_type=jnp.float32).reshape(B, N, S, T)


def weighted(
    weights_BNST: Float[Array, "B N S T"], v_BTKH: Float[Array, "B T K H"], dtype: Any = None
) -> Float[Array, "B S N H"]:
    """The weighted sum of the values, in `dtype` (none: theirs)."""
    B, N, S, T = weights_BNST.shape
    K, H = v_BTKH.shape[2:]
    if N == K:
        return jnp.einsum("BNST,BTNH->BSNH", weights_BNST, v_BTKH, preferred_element_type=dtype)
    weights_BKGST = weights_BNST.reshape(B, K, N // K, S, T)
    return jnp.einsum("BKGST,BTKH->BSKGH", weights_BKGST, v_BTKH, preferred_element_type=dtype).reshape(B, S, N, H)


def _softmax_with_sink(logits_BNST: Array, sink_N: Array) -> Array:
    sink = sink_N.astype(jnp.float32)[None, :, None, None]
    largest = jax.lax.stop_gradient(jnp.maximum(logits_BNST.max(axis=-1, keepdims=True), sink))
    powers = jnp.exp(logits_BNST - largest)
    return powers / (powers.sum(axis=-1, keepdims=True) + jnp.exp(sink - largest))
