"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), split-halves form, angles in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Rotation = tuple[Float[Array, "B S H/2"], Float[Array, "B S H/2"]]


def angles(positions: Int[Array, "B S"], head_dim: int, min_timescale: float, max_timescale: float) -> Rotation:
    """(sin, cos) of position / (min * (max/min)^(2i/head_dim)) for each frequency pair i."""
    fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    timescale = min_timescale * (max_timescale / min_timescale) ** fraction
    angle_BSH = positions.astype(jnp.float32)[:, :, None] / timescale[None, None, :]
    return jnp.sin(angle_BSH), jnp.cos(angle_BSH)


def rotate(x_BSNH: Float[Array, "B S N H"], rotation: Rotation) -> Float[Array, "B S N H"]:
    """Each pair (x[i], x[i + H/2]) turned by its angle; the result has x's dtype."""
    sin, cos = (r[:, :, None, :] for r in rotation)
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSNH.dtype)
