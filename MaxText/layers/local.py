"""What local arrays need inside `jax.shard_map`: marks of what differs between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from MaxText import compat


def varying(x: Array, axes: Sequence[str]) -> Array:
    """`x` marked as different on the devices of `axes`; its gradient is summed over them here, once."""
    missing = tuple(axis for axis in axes if axis not in compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def zeros(shape: Sequence[int], dtype: Any, *like: Array) -> Array:
    """Zeros that differ wherever one of `like` does."""
    axes: set[str] = set().union(*map(compat.varying_axes, like))
    return varying(jnp.zeros(shape, dtype), sorted(axes))


def summed_like(gradient: Array, x: Array) -> Array:
    """`gradient` summed over the devices between which `x` does not differ."""
    axes = compat.varying_axes(gradient) - compat.varying_axes(x)
    return lax.psum(gradient, tuple(sorted(axes))) if axes else gradient
