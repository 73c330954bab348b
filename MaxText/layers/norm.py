"""RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from MaxText.blueprint import ONES, Param
from MaxText.layout import Layout


def declare(size: int, dim: str = "norm") -> Param:
    """The scale, one per channel."""
    return Param((size,), (dim,), ONES, kind="norm")


def rms_norm(
    layout: Layout, x: Float[Array, "*batch D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "*batch D"]:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dim; the result has x's dtype."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    whole = layout.gather(scale.astype(jnp.float32), ("norm",))
    y = x32 * jax.lax.rsqrt(variance + epsilon) * whole.reshape((1,) * (x.ndim - 1) + whole.shape)
    return y.astype(x.dtype)
