"""Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with rotary positions, packed documents and a KV
cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from MaxText import architecture, remat
from MaxText.architecture import LayerSpec, Reach, Rope
from MaxText.blueprint import ONES, ZEROS, Init, Param, fan_in, normal
from MaxText.layers import attend, dot_product, kernels, norm, rope
from MaxText.layers.dropout import Noise
from MaxText.layers.masks import Places
from MaxText.layout import Axes, Kernel, Layout, project, project_many

QUERY: Axes = ("embed", "heads", "head_dim")
KEY_VALUE: Axes = ("embed", "kv_heads", "head_dim")
OUT: Axes = ("heads", "head_dim", "embed")
Q_HEADS: Axes = ("activation_batch", "activation_length", "activation_heads", None)
KV_HEADS: Axes = ("activation_batch", "activation_length", "activation_kv_heads", None)
STREAM: Axes = ("activation_batch", "activation_length", "activation_embed")
KERNELS = {
    "query": Kernel("BSD,DNH->BSNH", QUERY, Q_HEADS),
    "key": Kernel("BSD,DKH->BSKH", KEY_VALUE, KV_HEADS),
    "value": Kernel("BSD,DKH->BSKH", KEY_VALUE, KV_HEADS),
}


class Cache(NamedTuple):
    """Keys and values of the tokens so far, in slots [0, length); the rest is not read."""

    k_BTKH: Float[Array, "B T K H"]
    v_BTKH: Float[Array, "B T K H"]


class Context(NamedTuple):
    """What every layer of one forward pass shares. Masks are by reach, rotations by kind of rope."""

    rotations: Mapping[Rope, rope.Rotation]
    masks_BST: Mapping[Reach, Bool[Array, "B S T"]]  # none where rows are split: made where they are used
    places: Places  # of this call's tokens
    all_places: Places  # of the keys [B, T]; whole on every device
    temper_BS: Float[Array, "B S"] | None = None  # factor on the queries of tempered layers
    token_BS: Bool[Array, "B S"] | None = None  # False on padding; None: no padding
    slot: Int[Array, ""] | None = None  # where the first query of this call goes in the cache
    noise: Noise | None = None  # None: nothing is dropped

    def of_layer(self, number: Any) -> Context:
        """The same for one layer, counted over the whole model."""
        return self if self.noise is None else self._replace(noise=self.noise.of_layer(number))


def declare(cfg: Any, spec: LayerSpec) -> dict[str, Param]:
    """query [D, N, H], key and value [D, K, H], out [N, H, D], and as asked: norms, biases, a sink per head."""
    d, n, k, h = cfg.emb_dim, spec.query_heads, spec.kv_heads, spec.head_dim
    scale = cfg.dense_init_scale
    kv_heads = "kv_heads" if cfg.shard_kv_heads else None
    params = {"query": Param((d, n, h), QUERY, fan_in(d, scale))}
    if spec.keys != "borrowed":
        params["key"] = Param((d, k, h), ("embed", kv_heads, "head_dim"), fan_in(d, scale))
        if not spec.values_are_keys:
            params["value"] = params["key"]
    params["out"] = Param((n, h, d), OUT, fan_in(n * h, scale))
    heads = {"query": (n, "heads"), "key": (k, kv_heads), "value": (k, kv_heads)}
    heads = {name: width for name, width in heads.items() if name in params}
    if cfg.attention_bias:
        params |= {f"{name}_bias": _bias((size, h), (dim, "head_dim")) for name, (size, dim) in heads.items()}
    if cfg.attention_out_bias:
        params["out_bias"] = _bias((d,), ("norm",))
    if cfg.attention_sink:
        params["sink"] = Param((n,), ("heads",), normal(0.02), kind="bias")
    return params | _declare_norms(cfg, spec, heads)


def _bias(shape: tuple[int, ...], axes: Axes, init: Init = ZEROS) -> Param:
    return Param(shape, axes, init, kind="bias")


def _declare_norms(cfg: Any, spec: LayerSpec, heads: Mapping[str, tuple[int, str | None]]) -> dict[str, Param]:
    params = {}
    for name in ("query", "key"):
        if name in heads and spec.qk_norm == "head" and cfg.qk_norm_with_scale:
            params[f"{name}_norm"] = norm.declare_head(cfg, spec.head_dim)
        elif name in heads and spec.qk_norm == "projection":
            size, dim = heads[name]
            params[f"{name}_norm"] = Param((size, spec.head_dim), (dim, "head_dim"), ONES, kind="norm")
    if cfg.use_v_norm and cfg.v_norm_with_scale and spec.keys != "borrowed":
        params["value_norm"] = norm.declare_head(cfg, spec.head_dim)
    return params


def attention(
    cfg: Any,
    spec: LayerSpec,
    layout: Layout,
    params: dict[str, Array],
    x_BSD: Float[Array, "B S D"],
    context: Context,
    cache: Cache | None = None,
    lent: Cache | None = None,
) -> tuple[Float[Array, "B S D"], Cache | None, Cache]:
    """Self-attention of x: (y, the cache, the keys and values it used).

    With a cache, its keys and values are appended at `context.slot` and all of the cache is attended to. A layer that
    borrows has no cache and uses `lent`, the keys and values of the layer that lends.
    """
    projected = _projected(cfg, layout, params, x_BSD)
    q = _norm_head(cfg, spec, layout, params, "query", projected["query"])
    q = _rotated(cfg, spec, layout, q, context)
    q = q * jnp.asarray(spec.query_scale, q.dtype)
    if spec.tempered and context.temper_BS is not None:
        q = (q * context.temper_BS[:, :, None, None]).astype(q.dtype)
    if spec.keys == "borrowed":
        assert lent is not None, "a layer that borrows keys comes after one that lends"
        k, v = lent
    else:
        k, v = _keys_and_values(cfg, spec, layout, params, projected, context)
        cache = None if cache is None else append(cache, Cache(k, v), context.slot)
        k, v = (k, v) if cache is None else cache
    y = _attend(cfg, spec, layout, q, Cache(k, v), params.get("sink"), context)
    y = checkpoint_name(project(layout, "BSNH,NHD->BSD", y, params["out"], OUT, STREAM), "out_proj")
    if "out_bias" in params:
        y = y + layout.gather(params["out_bias"].astype(y.dtype), ("norm",))[None, None]
    return y, cache, Cache(k, v)


def _attend(
    cfg: Any, spec: LayerSpec, layout: Layout, q: Array, keys: Cache, sink_N: Array | None, context: Context
) -> Array:
    if attend.is_split(layout):
        made_of = attend.Keys(tuple(keys), KV_HEADS)
        y = attend.split(cfg, layout, spec.reach, q, made_of, sink_N, context.places, context.all_places)
        return checkpoint_name(y, remat.CONTEXT)
    return whole_rows(cfg, layout, spec.reach, q, *keys, KV_HEADS, sink_N, context)


def whole_rows(
    cfg: Any,
    layout: Layout,
    reach: Reach,
    q: Array,
    k: Array,
    v: Array,
    kv_dims: Axes,
    sink_N: Array | None,
    context: Context,
) -> Array:
    """softmax(q k^T) v where every device has whole rows: in a kernel, or in one piece. What the backward pass needs of
    its result has the name remat.CONTEXT."""
    if context.slot is None and architecture.takes_flash(cfg.attention, layout.platform, q.shape[1]):
        return kernels.flash(cfg, layout, reach, q, k, v, kv_dims, sink_N, context.places)
    y = dot_product.attention(q, k, v, context.masks_BST[reach], cfg.attn_logits_soft_cap, sink_N)
    return checkpoint_name(y, remat.CONTEXT)


def append(cache: Any, new: Any, slot: Int[Array, ""] | None) -> Any:
    """The cache with the tuple of arrays `new` written from `slot` on (dim 1 of each; None stays None)."""
    assert slot is not None, "a cache needs the slot of its first new token"
    placed = [
        None if old is None else jax.lax.dynamic_update_slice(old, piece, (0, slot) + (0,) * (old.ndim - 2))
        for old, piece in zip(cache, new, strict=True)
    ]
    return type(cache)(*placed)


def _projected(cfg: Any, layout: Layout, params: dict[str, Array], x_BSD: Array) -> dict[str, Array]:
    """Queries, keys and values as the kernels give them, as far as the layer has kernels of its own."""
    kernels = {name: params[name] for name in KERNELS if name in params}
    if not cfg.shard_kv_heads:
        kernels |= {name: _spread(layout, w, KEY_VALUE) for name, w in kernels.items() if name != "query"}
    found = {}
    for name, y in project_many(layout, x_BSD, kernels, KERNELS).items():
        y, bias = checkpoint_name(y, f"{name}_proj"), params.get(f"{name}_bias")
        if bias is not None and name != "query" and not cfg.shard_kv_heads:
            bias = _spread(layout, bias, KEY_VALUE[1:])
        found[name] = y if bias is None else y + bias.astype(y.dtype)[None, None]
    return found


def _spread(layout: Layout, w: Array, dims: Axes) -> Array:
    """A stored array of all key/value heads as its shards use it: each head as often as there are shards that need it,
    split over them. Every shard has its copies already; only gradients travel."""
    axis = dims.index("kv_heads")
    heads = w.shape[axis]
    return layout.constrain(jnp.repeat(w, heads_in_use(layout, heads) // heads, axis=axis), *dims)


def heads_in_use(layout: Layout, kv_heads: int) -> int:
    """Key/value heads, counted over all shards: more than there are where they do not divide."""
    return math.lcm(kv_heads, layout.ways("activation_kv_heads"))


def _keys_and_values(
    cfg: Any, spec: LayerSpec, layout: Layout, params: dict[str, Array], projected: dict[str, Array], context: Context
) -> tuple[Array, Array]:
    k = _norm_head(cfg, spec, layout, params, "key", projected["key"])
    v = projected["key" if spec.values_are_keys else "value"]
    if cfg.use_v_norm:
        v = norm.rms_norm(layout, v, params.get("value_norm"), cfg.normalization_layer_epsilon, cfg.norm_unit_offset)
    return _rotated(cfg, spec, layout, k, context), v


def _norm_head(cfg: Any, spec: LayerSpec, layout: Layout, params: dict[str, Array], name: str, y: Array) -> Array:
    match spec.qk_norm:
        case "head":
            scale = params.get(f"{name}_norm")
            return norm.rms_norm(layout, y, scale, cfg.normalization_layer_epsilon, cfg.norm_unit_offset)
        case "projection":
            scale = params[f"{name}_norm"]
            if name == "key" and not cfg.shard_kv_heads:
                scale = _spread(layout, scale, KEY_VALUE[1:])
            return norm.norm_all_heads(y, scale, cfg.normalization_layer_epsilon)
    return y


def _rotated(cfg: Any, spec: LayerSpec, layout: Layout, y_BSNH: Array, context: Context) -> Array:
    if spec.rope is not None:
        y_BSNH = rope.rotate(y_BSNH, context.rotations[spec.rope], spec.rope.interleave)
    if spec.qk_norm == "l2":
        y_BSNH = norm.rms_norm(layout, y_BSNH, None, cfg.normalization_layer_epsilon)
    return y_BSNH
