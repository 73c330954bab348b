"""Attention in a kernel that never writes its scores out (Dao et al., 2022, arXiv:2205.14135): JAX's own for TPUs,
*splash* attention, which also skips the blocks of which the mask leaves nothing.

The only place that knows which attention kernel runs where. On a CPU the kernel is interpreted: the same numbers,
slowly."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText import remat
from MaxText.architecture import Reach
from MaxText.layers.attend import Q_HEADS, SINK, TOKENS
from MaxText.layers.masks import Places
from MaxText.layout import Axes, Layout

BLOCKS = (512, 256, 128)
"""Tokens of a block of queries or keys, the first that divides the row."""


def flash(
    cfg: Any,
    layout: Layout,
    reach: Reach,
    q_BSNH: Float[Array, "B S N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKV: Float[Array, "B S K V"],
    kv_dims: Axes,
    sink_N: Float[Array, " N"] | None,
    places: Places,
) -> Float[Array, "B S N V"]:
    """softmax(q k^T) v per head of whole rows, as `dot_product.attention` with the mask of `reach`, but for tokens of
    padding, which see padding before them. q is already scaled. Its output and log Z have the name remat.CONTEXT."""
    interpret = layout.platform != "tpu"
    local = functools.partial(_local, reach, cfg.attn_logits_soft_cap, interpret)
    heads: Any = layout.spec(Q_HEADS)
    keys = layout.spec(kv_dims)
    in_specs = (heads, keys, keys, None if sink_N is None else layout.spec(SINK), layout.spec(TOKENS))
    # The kernel's results do not say on which axes they differ, so nothing is checked here.
    wall = layout.shard_map(local, in_specs=in_specs, out_specs=heads, check_vma=False)
    return wall(q_BSNH, k_BSKH, v_BSKV, sink_N, _segments(reach, places))


def _segments(reach: Reach, places: Places) -> Int[Array, "B S"]:
    """Numbers that are equal where a query may see a key at all: of the document, and of the chunk in it."""
    if reach.kind != "chunk":
        return places.document_BS
    length = places.document_BS.shape[1]
    return places.document_BS * (-(-length // reach.size)) + places.position_BS // reach.size


def _local(
    reach: Reach,
    soft_cap: float,
    interpret: bool,
    q_BSNH: Array,
    k_BSKH: Array,
    v_BSKV: Array,
    sink_N: Array | None,
    segment_BS: Array,
) -> Array:
    """The same for one device's rows and heads."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q_BSNH.shape[1:3]
    block = next(size for size in BLOCKS if length % size == 0)
    sizes = splash.BlockSizes(block, block, block, block, block, block, block, block)
    local = reach.kind == "local_sliding" and reach.size < length
    shape = (length, length)
    mask = masks.LocalMask(shape, (reach.size - 1, 0), 0) if local else masks.CausalMask(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap or None,
        residual_checkpoint_name=remat.CONTEXT,
        interpret=interpret,
    )

    def one_row(q: Array, k: Array, v: Array, segment: Array) -> Array:
        return kernel(q, k, v, segment_ids=splash.SegmentIds(segment, segment), sinks=sink_N)

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BSNH, k_BSKH, v_BSKV))
    return jnp.swapaxes(jax.vmap(one_row)(q, k, v, segment_BS), 1, 2).astype(v_BSKV.dtype)
