"""The only place that knows which grouped matmul runs on which device. Today: plain XLA everywhere."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int


def grouped_matmul(
    x_MD: Float[Array, "M D"], w_EDF: Float[Array, "E D F"], rows_E: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Row m times the matrix of its group: the first rows_E[0] rows belong to group 0, and so on. Local arrays only."""
    return jax.lax.ragged_dot(x_MD, w_EDF, rows_E)
