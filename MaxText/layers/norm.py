"""Norms, computed in float32: RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467), LayerNorm, and RMSNorm over heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from MaxText.blueprint import ONES, ZEROS, Param
from MaxText.layout import Layout


def declare(size: int, dim: str = "norm", unit_offset: bool = False) -> Param:
    """The scale, one per channel. With `unit_offset` the norm multiplies by 1 + scale, which starts at zero."""
    return Param((size,), (dim,), ZEROS if unit_offset else ONES, kind="norm")


def declare_stream(cfg: Any, size: int) -> Any:
    """The norm of a stream of width `size`: its scale, or {scale, bias} for LayerNorm."""
    scale = declare(size, unit_offset=cfg.norm_unit_offset)
    return scale if cfg.norm_type == "rms" else {"scale": scale, "bias": Param((size,), ("norm",), ZEROS, kind="bias")}


def declare_head(cfg: Any, size: int) -> Param:
    """The scale of a norm over one head, the same for all heads."""
    return declare(size, "head_norm", cfg.norm_unit_offset)


def rms_norm(
    layout: Layout,
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"] | None,
    epsilon: float,
    unit_offset: bool = False,
) -> Float[Array, "*batch D"]:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dim; the result has x's dtype. No scale: 1."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    if scale is not None:
        whole = layout.gather(scale.astype(jnp.float32), ("norm",)) + (1.0 if unit_offset else 0.0)
        y = y * whole.reshape((1,) * (x.ndim - 1) + whole.shape)
    return y.astype(x.dtype)


def layer_norm(
    layout: Layout, x: Float[Array, "*batch D"], scale: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float
) -> Float[Array, "*batch D"]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last dim; the result has x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    shape = (1,) * (x.ndim - 1) + scale.shape
    whole, shift = (layout.gather(w.astype(jnp.float32), ("norm",)).reshape(shape) for w in (scale, bias))
    return (y * whole + shift).astype(x.dtype)


def stream_norm(cfg: Any, layout: Layout, x: Float[Array, "*batch D"], params: Any) -> Float[Array, "*batch D"]:
    """The norm that `declare_stream` declares."""
    epsilon = cfg.normalization_layer_epsilon
    if cfg.norm_type == "rms":
        return rms_norm(layout, x, params, epsilon, cfg.norm_unit_offset)
    scale = params["scale"] + 1.0 if cfg.norm_unit_offset else params["scale"]
    return layer_norm(layout, x, scale, params["bias"], epsilon)


def norm_all_heads(x_BSNH: Float[Array, "B S N H"], scale_NH: Array, epsilon: float) -> Float[Array, "B S N H"]:
    """RMSNorm over all heads of a token together, with a scale per channel of each head."""
    x32 = x_BSNH.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=(-2, -1), keepdims=True) + epsilon)
    return (x32 * inverse * scale_NH.astype(jnp.float32)[None, None]).astype(x_BSNH.dtype)
