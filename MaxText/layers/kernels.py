"""The only place that knows which attention computation runs on which device. Today: plain XLA everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def dot_product_attention(
    q_BSNH: Float[Array, "B S N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    mask_BST: Bool[Array, "B S T"],
    soft_cap: float = 0.0,
) -> Float[Array, "B S N H"]:
    """softmax(q k^T) v per head, logits and softmax in float32; q is already scaled. N is a multiple of K.

    A query that sees no key at all (padding) attends evenly to everything, which keeps it finite; nothing reads it.
    """
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    q_BSKGH = q_BSNH.reshape(B, S, K, N // K, H)
    logits = jnp.einsum("BSKGH,BTKH->BKGST", q_BSKGH, k_BTKH, preferred_element_type=jnp.float32)
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(mask_BST[:, None, None, :, :], logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(v_BTKH.dtype)
    out = jnp.einsum("BKGST,BTKH->BSKGH", weights, v_BTKH)
    return out.reshape(B, S, N, H)
