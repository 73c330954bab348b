"""The one place that knows JAX versions. JAX 0.10.2 (Python 3.11) up to 0.12 (Python 3.12+)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3])

# Measured on cores with AMX: bfloat16 matmuls of 0.12 run about four times faster than those of 0.10.2 (docs/log.md).
CPU_HAS_FAST_BFLOAT16_MATMUL: bool = JAX_VERSION >= (0, 12)


def explicit_mesh(devices: np.ndarray, axis_names: Sequence[str]) -> Mesh:
    """A mesh whose every axis is Explicit. `Mesh(...)` alone gives Auto axes while `jax.make_mesh` gives Explicit
    ones."""
    return Mesh(devices, tuple(axis_names), axis_types=(AxisType.Explicit,) * len(axis_names))


def allocated_bytes(stats: Any) -> int:
    """What a compiler puts aside for a program on one device, from `memory_analysis()`: arguments, results and
    temporaries as they are packed. Older versions do not say; then the sum of the three."""
    packed = getattr(stats, "total_allocation_bytes", 0)
    parts = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return packed or parts + stats.output_size_in_bytes - stats.alias_size_in_bytes


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Inside `jax.shard_map`: the mesh axes over whose devices `x` may differ."""
    return jax.typeof(x).mat.varying
