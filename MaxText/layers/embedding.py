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
    """The table [V, D]."""
    return Param((cfg.vocab_size, cfg.emb_dim), TABLE, normal(_std(cfg)), kind="embedding")


def _std(cfg: Any) -> float:
    """1, so that the stream has variance 1; but rows of length 1 where the stream is multiplied by sqrt(D), and where
    the table is the output projection as it stands: else the first loss would be hundreds of nats."""
    is_head = cfg.logits_via_embedding and not cfg.normalize_embedding_logits
    return cfg.emb_dim**-0.5 if cfg.scale_embedding or is_head else 1.0


def declare_positions(cfg: Any) -> Param:
    """The table of learned positions [P, D], as large as the rows that they are added to."""
    return Param((cfg.trainable_position_size, cfg.emb_dim), POSITIONS, normal(_std(cfg)), kind="embedding")


def lookup(
    layout: Layout, table: Float[Array, "V D"], ids_BS: Int[Array, "B S"], dtype: Any, dims: Axes = TABLE
) -> Float[Array, "B S D"]:
    """Row `ids` of the table (whose dims are `dims`), in `dtype`.

    Each device looks up the ids that its rows hold and gives zeros for the rest; the sum over the pieces of the
    vocabulary is the answer. Under `shard_map`, since both the lookup and its gradient (a scatter-add of a split batch)
    are then local by construction."""
    columns, rows, spec = layout.axes("embed"), layout.axes(dims[0]), layout.spec(dims)
    batch = layout.axes("activation_batch")
    if not set(columns) <= set(batch) or set(rows) & set(batch):  # the batch is not cut as the table is: in the open
        spec, columns = layout.compute_spec(dims), ()
        table, rows = jax.reshard(table, spec), tuple(axis for axis in rows if axis not in layout.gathered)

    def local(piece: Array, ids: Array) -> Array:
        piece = _apart(piece.astype(dtype), ids)
        if columns:
            piece = jax.lax.all_gather(piece, columns, axis=1, tiled=True)
        if not rows:
            return piece[ids]
        first = jax.lax.axis_index(rows) * piece.shape[0]
        mine = (ids >= first) & (ids < first + piece.shape[0])
        values = jnp.where(mine[..., None], piece[jnp.where(mine, ids - first, 0)], 0)
        return jax.lax.psum(values, rows)

    return layout.shard_map(local, in_specs=(spec, layout.spec(IDS)), out_specs=layout.spec(STREAM))(table, ids_BS)


def _apart(piece: Array, like: Array) -> Array:
    """The same piece, as one that may differ wherever `like` does. Said before the gather, so that the gradient is
    first scattered and then summed over the other axes of the batch: only its own part crosses between slices."""
    axes = tuple(sorted(jax.typeof(like).manual_axis_type.varying - jax.typeof(piece).manual_axis_type.varying))
    return jax.lax.pcast(piece, axes, to="varying") if axes else piece
