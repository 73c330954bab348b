"""One layer of the decoder: attention and feed-forward, each between norms, added to the stream."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from MaxText.architecture import LayerSpec
from MaxText.blueprint import ONES, Param
from MaxText.layers import attention, dropout, layer_input, mla, mlp, moe, norm
from MaxText.layers.attention import Cache, Context
from MaxText.layers.router import Routing
from MaxText.layout import Layout


class Side(NamedTuple):
    """What a layer returns beside the stream: its cache, the keys and values that it lends, routing statistics, and
    what its indexer has to learn."""

    cache: Any = None
    keys: Cache | None = None
    routing: Routing | None = None
    index_loss: Float[Array, ""] | None = None


def declare(cfg: Any, spec: LayerSpec) -> dict[str, Any]:
    """The parameters of one layer; names of parts that a layer lacks are absent."""
    stream = norm.declare_stream(cfg, cfg.emb_dim)
    pre = cfg.use_pre_norm
    parts: list[tuple[bool, str, Any]] = [
        (pre, "attention_norm", stream),
        (True, "attention", mla.declare(cfg, spec) if spec.latent else attention.declare(cfg, spec)),
        (cfg.use_post_attn_norm, "attention_post_norm", stream),
        (pre, "mlp_norm", stream),
    ]
    if spec.ffn != "moe":
        parts.append((True, "mlp", mlp.declare(cfg, spec.mlp_dim)))
    if spec.experts:
        parts.append((True, "moe", moe.declare(cfg, shared=spec.ffn == "moe")))
    parallel = spec.ffn == "parallel"
    parts += [(parallel, name, stream) for name in ("dense_post_norm", "moe_norm", "moe_post_norm")]
    parts.append((cfg.use_post_ffw_norm, "mlp_post_norm", stream))
    if cfg.hidden_size_per_layer_input:
        parts.append((True, "layer_input", layer_input.declare(cfg)))
    parts.append((cfg.layer_output_scale, "output_scale", Param((), (), ONES, kind="norm")))
    return {name: part for present, name, part in parts if present}


def _normed(cfg: Any, layout: Layout, params: dict[str, Any], name: str, x: Array) -> Array:
    """x after the norm of that name, or as it is where the layer has none."""
    return norm.stream_norm(cfg, layout, x, params[name]) if name in params else x


def _feed_forward(
    cfg: Any, spec: LayerSpec, layout: Layout, params: dict[str, Any], x: Array, context: Context
) -> tuple[Array, Routing | None]:
    inner = _normed(cfg, layout, params, "mlp_norm", x)
    if spec.ffn == "dense":
        return mlp.mlp(cfg, layout, params["mlp"], inner), None
    if spec.ffn == "moe":
        return moe.moe(cfg, layout, params["moe"], inner, inner, context.token_BS)
    dense = _normed(cfg, layout, params, "dense_post_norm", mlp.mlp(cfg, layout, params["mlp"], inner))
    inner = _normed(cfg, layout, params, "moe_norm", x)
    y, routing = moe.moe(cfg, layout, params["moe"], inner, x, context.token_BS)
    return dense + _normed(cfg, layout, params, "moe_post_norm", y), routing


def block(
    cfg: Any,
    spec: LayerSpec,
    layout: Layout,
    params: dict[str, Any],
    x: Float[Array, "B S D"],
    context: Context,
    cache: Any = None,
    lent: Cache | None = None,
    own_BSP: Float[Array, "B S P"] | None = None,
) -> tuple[Float[Array, "B S D"], Side]:
    """The stream after the layer, and what it leaves beside. `lent` are keys and values for a layer that borrows,
    `own_BSP` the layer's own vectors where it has any."""
    inner = _normed(cfg, layout, params, "attention_norm", x)
    keys = index_loss = None
    if spec.latent:
        y, cache, index_loss = mla.mla(cfg, spec, layout, params["attention"], inner, context, cache)
    else:
        y, cache, keys = attention.attention(cfg, spec, layout, params["attention"], inner, context, cache, lent)
    y = _normed(cfg, layout, params, "attention_post_norm", y)
    x = x + dropout.dropout(cfg, layout, context.noise, y, dropout.ATTENTION)
    y, routing = _feed_forward(cfg, spec, layout, params, x, context)
    y = _normed(cfg, layout, params, "mlp_post_norm", y)
    x = x + dropout.dropout(cfg, layout, context.noise, y, dropout.FEED_FORWARD)
    if own_BSP is not None:
        x = x + layer_input.layer_input(cfg, layout, params["layer_input"], x, own_BSP)
    if "output_scale" in params:
        x = (x * params["output_scale"]).astype(x.dtype)
    return x, Side(cache, keys if spec.keys == "lent" else None, routing, index_loss)
