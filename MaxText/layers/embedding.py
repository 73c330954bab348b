"""Token embedding: a lookup into a table whose rows (vocabulary) and columns (embed) may both be split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText.blueprint import Param, normal
from MaxText.layout import Axes, Layout

TABLE: Axes = ("vocab", "embed")
POSITIONS: Axes = ("positions", "embed")
IDS: Axes = ("activation_batch", "activation_length")
STREAM: Axes = ("activation_batch", "activation_length", "activation_embed")


def declare(cfg: Any) -> Param:
    """The table [V, D], of variance 1 in the stream."""
    std = cfg.emb_dim**-0.5 if cfg.scale_embedding else 1.0
    return Param((cfg.vocab_size, cfg.emb_dim), TABLE, normal(std), kind="embedding")


def declare_positions(cfg: Any) -> Param:
    """The table of learned positions [P, D]."""
    return Param((cfg.trainable_position_size, cfg.emb_dim), POSITIONS, normal(1.0), kind="embedding")


def lookup(
    layout: Layout, table: Float[Array, "V D"], ids_BS: Int[Array, "B S"], dtype: Any, dims: Axes = TABLE
) -> Float[Array, "B S D"]:
    """Row `ids` of the table (whose dims are `dims`), in `dtype`.

    Each device looks up the ids that its rows hold and gives zeros for the rest; the sum over the pieces of the
    vocabulary is the answer. Under `shard_map`, since both the lookup and its gradient (a scatter-add of a split batch)
    are then local by construction."""
    columns, rows = layout.axes("embed"), layout.axes(dims[0])
    table_dims = dims
    if not set(columns) <= set(
        layout.axes("activation_batch")
    ):  # every device looks up the same ids: gather in the open
        table, table_dims, columns = jax.reshard(table, layout.compute_spec(dims)), (dims[0], None), ()

    def local(piece: Array, ids: Array) -> Array:
        piece = piece.astype(dtype)
        if columns:
            piece = jax.lax.all_gather(piece, columns, axis=1, tiled=True)
        if not rows:
            return piece[ids]
        first = jax.lax.axis_index(rows) * piece.shape[0]
        mine = (ids >= first) & (ids < first + piece.shape[0])
        values = jnp.where(mine[..., None], piece[jnp.where(mine, ids - first, 0)], 0)
        return jax.lax.psum(values, rows)

    specs = (layout.spec(table_dims), layout.spec(IDS))
    return layout.shard_map(local, in_specs=specs, out_specs=layout.spec(STREAM))(table, ids_BS)
