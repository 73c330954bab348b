"""Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with rotary positions, packed documents and a KV
cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from MaxText.blueprint import Param, fan_in
from MaxText.layers import kernels, norm, rope
from MaxText.layout import Axes, Layout, project

QUERY: Axes = ("embed", "heads", "head_dim")
KEY_VALUE: Axes = ("embed", "kv_heads", "head_dim")
OUT: Axes = ("heads", "head_dim", "embed")
Q_HEADS: Axes = ("activation_batch", "activation_length", "activation_heads", None)
KV_HEADS: Axes = ("activation_batch", "activation_length", "activation_kv_heads", None)
STREAM: Axes = ("activation_batch", "activation_length", "activation_embed")


class Cache(NamedTuple):
    """Keys and values of the tokens so far, in slots [0, length); the rest is not read."""

    k_BTKH: Float[Array, "B T K H"]
    v_BTKH: Float[Array, "B T K H"]


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    rotation: rope.Rotation
    mask_BST: Bool[Array, "B S T"]
    slot: Int[Array, ""] | None = None  # where the first query of this call goes in the cache


def declare(cfg: Any) -> dict[str, Param]:
    """query [D, N, H], key and value [D, K, H], out [N, H, D]; with use_qk_norm a scale per head channel for q and for
    k."""
    d, n, k, h = cfg.emb_dim, cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim
    scale = cfg.dense_init_scale
    params = {
        "query": Param((d, n, h), QUERY, fan_in(d, scale)),
        "key": Param((d, k, h), KEY_VALUE, fan_in(d, scale)),
        "value": Param((d, k, h), KEY_VALUE, fan_in(d, scale)),
        "out": Param((n, h, d), OUT, fan_in(n * h, scale)),
    }
    if cfg.use_qk_norm:
        params |= {"query_norm": norm.declare(h, "head_norm"), "key_norm": norm.declare(h, "head_norm")}
    return params


def causal_mask(segments_BS: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Query s sees key t if t <= s and both belong to the same document. Padding (segment 0) sees padding only."""
    length = segments_BS.shape[1]
    same_document = segments_BS[:, :, None] == segments_BS[:, None, :]
    return same_document & jnp.tri(length, dtype=bool)[None, :, :]


def attention(
    cfg: Any,
    layout: Layout,
    params: dict[str, Array],
    x_BSD: Float[Array, "B S D"],
    context: Context,
    cache: Cache | None = None,
) -> tuple[Float[Array, "B S D"], Cache | None]:
    """Self-attention of x; with a cache, its keys and values are appended at `context.slot` and all of the cache is
    attended to."""
    q, k, v = _project_heads(cfg, layout, params, x_BSD)
    q, k = rope.rotate(q, context.rotation), rope.rotate(k, context.rotation)
    q = q * jnp.asarray(cfg.head_dim**-0.5, q.dtype)
    if cache is not None:
        assert context.slot is not None, "a cache needs the slot of its first new token"
        at = (0, context.slot, 0, 0)
        cache = Cache(*(jax.lax.dynamic_update_slice(old, new, at) for old, new in zip(cache, (k, v), strict=True)))
        k, v = cache
    y = kernels.dot_product_attention(q, k, v, context.mask_BST, cfg.attn_logits_soft_cap)
    y = checkpoint_name(y, "attention_out")
    y = checkpoint_name(project(layout, "BSNH,NHD->BSD", y, params["out"], OUT, STREAM), "out_proj")
    return y, cache


def _project_heads(cfg: Any, layout: Layout, params: dict[str, Array], x_BSD: Array) -> tuple[Array, Array, Array]:
    q = checkpoint_name(project(layout, "BSD,DNH->BSNH", x_BSD, params["query"], QUERY, Q_HEADS), "query_proj")
    k = checkpoint_name(project(layout, "BSD,DKH->BSKH", x_BSD, params["key"], KEY_VALUE, KV_HEADS), "key_proj")
    v = checkpoint_name(project(layout, "BSD,DKH->BSKH", x_BSD, params["value"], KEY_VALUE, KV_HEADS), "value_proj")
    if cfg.use_qk_norm:
        q = norm.rms_norm(layout, q, params["query_norm"], cfg.normalization_layer_epsilon)
        k = norm.rms_norm(layout, k, params["key_norm"], cfg.normalization_layer_epsilon)
    return q, k, v
