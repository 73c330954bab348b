"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434): keys and values are made from one narrow vector
per token, which alone is cached, beside a rotated key that all heads share.

More letters: R query latent, C key/value latent, P rotated part of a head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from MaxText import remat, sequence
from MaxText.architecture import LayerSpec
from MaxText.blueprint import Param, fan_in
from MaxText.layers import attend, dot_product, indexer, masks, norm, rope
from MaxText.layers.attention import OUT, Q_HEADS, QUERY, STREAM, Context, append, whole_rows
from MaxText.layout import Axes, Layout, project

DOWN: Axes = ("embed", None)
UP: Axes = ("latent", "heads", "head_dim")
NARROW: Axes = ("activation_batch", "activation_length", None)
ALL_NARROW: Axes = ("activation_batch", None, None)
ALL_KEYS: Axes = ("activation_batch", None, "activation_heads", None)


class LatentCache(NamedTuple):
    """The normed latent and the rotated shared key of the tokens so far, and the indexer's keys if there is one."""

    latent_BTC: Float[Array, "B T C"]
    key_BTP: Float[Array, "B T P"]
    index_BTI: Float[Array, "B T I"] | None = None


def declare(cfg: Any, spec: LayerSpec) -> dict[str, Any]:
    """query [D, N, H], or query_a [D, R], query_a_norm [R], query_b [R, N, H]; kv_a [D, C + P], kv_a_norm [C], kv_b
    [C, N, nope + value]; out [N, value, D]."""
    latent, scale = spec.latent, cfg.dense_init_scale
    assert latent is not None
    d, n, h, r, c = cfg.emb_dim, spec.query_heads, spec.head_dim, latent.query_rank, latent.key_value_rank
    params: dict[str, Any] = {}
    if r:
        params["query_a"] = Param((d, r), DOWN, fan_in(d, scale))
        params["query_a_norm"] = norm.declare(r, "head_norm", cfg.norm_unit_offset)
        params["query_b"] = Param((r, n, h), UP, fan_in(r, scale))
    else:
        params["query"] = Param((d, n, h), QUERY, fan_in(d, scale))
    params["kv_a"] = Param((d, c + latent.rope_dim), DOWN, fan_in(d, scale))
    params["kv_a_norm"] = norm.declare(c, "head_norm", cfg.norm_unit_offset)
    params["kv_b"] = Param((c, n, latent.nope_dim + latent.value_dim), UP, fan_in(c, scale))
    params["out"] = Param((n, latent.value_dim, d), OUT, fan_in(n * latent.value_dim, scale))
    return params | ({"indexer": indexer.declare(cfg, r)} if latent.indexer else {})


def mla(
    cfg: Any,
    spec: LayerSpec,
    layout: Layout,
    params: dict[str, Any],
    x_BSD: Float[Array, "B S D"],
    context: Context,
    cache: Any = None,
) -> tuple[Float[Array, "B S D"], Any, Float[Array, ""] | None]:
    """Latent self-attention of x: (y, the cache, what the indexer has to learn: a sum over tokens, if it learns).

    With a cache, latents and shared keys are appended at `context.slot`."""
    assert spec.latent is not None
    q, compressed = _queries(cfg, spec, layout, params, x_BSD, context)
    new = _latents(cfg, spec, layout, params, x_BSD, context)
    cache = None if cache is None else append(cache, new, context.slot)
    seen = new if cache is None else cache
    y, loss = _attend(cfg, spec, layout, params, x_BSD, (q, compressed), seen, context)
    return checkpoint_name(project(layout, "BSNH,NHD->BSD", y, params["out"], OUT, STREAM), "out_proj"), cache, loss


def _attend(
    cfg: Any,
    spec: LayerSpec,
    layout: Layout,
    params: dict[str, Any],
    x_BSD: Array,
    queries: tuple[Array, Array | None],
    seen: LatentCache,
    context: Context,
) -> tuple[Array, Array | None]:
    """(attention to the latents seen, what the indexer has to learn)."""
    (q, compressed), loss = queries, None
    if attend.is_split(layout) and seen.index_BTI is None:
        kernel = layout.gather(params["kv_b"].astype(x_BSD.dtype), UP)
        made_of = attend.Keys(seen[:2], NARROW, functools.partial(_made, spec), kernel, UP)
        y = attend.split(cfg, layout, spec.reach, q, made_of, None, context.places, context.all_places)
        return checkpoint_name(y, remat.CONTEXT), None
    if attend.is_split(layout):
        # The choice needs the scores of all keys, in reading order, since of equal ones the earlier is chosen.
        read = functools.partial(sequence.read, sequence.order(cfg, layout))
        seen = LatentCache(*(read(layout.constrain(x, *ALL_NARROW)) for x in seen if x is not None))
        mask = masks.visible(spec.reach, context.places, masks.Places(*map(read, context.all_places)))
    else:
        mask = context.masks_BST[spec.reach]
    k, v = _expand(layout, spec, params, seen)
    if seen.index_BTI is None:
        return whole_rows(cfg, layout, spec.reach, q, k, v, ALL_KEYS, None, context), None
    if compressed is not None:
        wanted = indexer.scores(cfg, spec, layout, params["indexer"], x_BSD, compressed, seen.index_BTI, context)
        mask = indexer.choose(cfg, layout, wanted, mask)
        if cfg.indexer_loss_scaling_factor and context.token_BS is not None:
            loss = indexer.divergence(wanted, q, k, mask, context.token_BS)
    y = dot_product.attention(q, k, v, mask, cfg.attn_logits_soft_cap)
    return checkpoint_name(y, remat.CONTEXT), loss


def _queries(
    cfg: Any, spec: LayerSpec, layout: Layout, params: dict[str, Any], x_BSD: Array, context: Context
) -> tuple[Array, Array | None]:
    """(queries [B, S, N, H], scaled and rotated; the compressed queries [B, S, R] that they were made of)."""
    compressed = None
    if "query_a" in params:
        down = checkpoint_name(project(layout, "BSD,DR->BSR", x_BSD, params["query_a"], DOWN, NARROW), "query_wa_proj")
        compressed = _latent_norm(cfg, layout, down, params["query_a_norm"])
        q = project(layout, "BSR,RNH->BSNH", compressed, params["query_b"], UP, Q_HEADS)
    else:
        q = project(layout, "BSD,DNH->BSNH", x_BSD, params["query"], QUERY, Q_HEADS)
    q = checkpoint_name(q, "query_proj") * jnp.asarray(spec.query_scale, q.dtype)
    assert spec.latent is not None
    plain, turning = q[..., : spec.latent.nope_dim], q[..., spec.latent.nope_dim :]
    q = jnp.concatenate([plain, _turned(spec, turning, context)], axis=-1)
    if spec.tempered and context.temper_BS is not None:
        q = (q * context.temper_BS[:, :, None, None]).astype(q.dtype)
    return q, compressed


def _latents(
    cfg: Any, spec: LayerSpec, layout: Layout, params: dict[str, Any], x_BSD: Array, context: Context
) -> LatentCache:
    assert spec.latent is not None
    rank = spec.latent.key_value_rank
    down = checkpoint_name(project(layout, "BSD,DC->BSC", x_BSD, params["kv_a"], DOWN, NARROW), "kv_wa_proj")
    key = _turned(spec, down[:, :, None, rank:], context)[:, :, 0]
    latent = _latent_norm(cfg, layout, down[..., :rank], params["kv_a_norm"])
    if not spec.latent.indexer:
        return LatentCache(latent, key)
    return LatentCache(latent, key, indexer.keys(cfg, spec, layout, params["indexer"], x_BSD, context))


def _expand(layout: Layout, spec: LayerSpec, params: dict[str, Any], seen: LatentCache) -> tuple[Array, Array]:
    """Keys [B, T, N, H] and values [B, T, N, value] of all heads."""
    both = project(layout, "BTC,CNH->BTNH", seen.latent_BTC, params["kv_b"], UP, ALL_KEYS)
    return _joined(spec, checkpoint_name(both, "kv_proj"), seen.key_BTP, layout.spec(ALL_KEYS))


def _made(spec: LayerSpec, kernel_CNH: Array, seen: tuple[Array, Array]) -> tuple[Array, Array]:
    """The same inside a wall, of the heads of the kernel."""
    latent_BTC, key_BTP = seen
    return _joined(spec, jnp.einsum("BTC,CNH->BTNH", latent_BTC, kernel_CNH), key_BTP, None)


def _joined(spec: LayerSpec, both_BTNH: Array, key_BTP: Array, sharding: Any) -> tuple[Array, Array]:
    assert spec.latent is not None
    plain, v = both_BTNH[..., : spec.latent.nope_dim], both_BTNH[..., spec.latent.nope_dim :]
    shape = (*plain.shape[:3], key_BTP.shape[-1])
    shared = jnp.broadcast_to(key_BTP[:, :, None], shape, out_sharding=sharding)
    return jnp.concatenate([plain, shared], axis=-1), v


def _latent_norm(cfg: Any, layout: Layout, x: Array, scale: Array) -> Array:
    return norm.rms_norm(layout, x, scale, cfg.normalization_layer_epsilon, cfg.norm_unit_offset)


def _turned(spec: LayerSpec, x_BSNP: Array, context: Context) -> Array:
    if spec.rope is None:
        return x_BSNP
    return rope.rotate(x_BSNP, context.rotations[spec.rope], spec.rope.interleave)
