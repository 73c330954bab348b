"""Per-layer embeddings (Gemma 4 E2B and E4B): each layer gets a small vector of its own for every token.

Shared by all layers: a table [V, L P] and a projection of the token's embedding, [D, L P]. In a layer: the stream gates
its vector, and the result is projected back, normed and added."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText.blueprint import Param, fan_in, normal
from MaxText.layers import embedding, mlp, norm
from MaxText.layout import Axes, Layout, project

PROJECTION: Axes = ("embed", None)
GATE: Axes = ("embed", None)
BACK: Axes = (None, "embed")
NARROW: Axes = ("activation_batch", "activation_length", None)


def declare_shared(cfg: Any) -> dict[str, Param]:
    """table [V, L P], projection [D, L P], norm [P]."""
    width = cfg.hidden_size_per_layer_input
    joint, rows = cfg.num_decoder_layers * width, cfg.vocab_size_per_layer_input or cfg.vocab_size
    return {
        "table": Param((rows, joint), embedding.TABLE, normal(width**-0.5), kind="embedding"),
        "projection": Param((cfg.emb_dim, joint), PROJECTION, fan_in(cfg.emb_dim, cfg.dense_init_scale)),
        "norm": norm.declare_stream(cfg, width),
    }


def declare(cfg: Any) -> dict[str, Param]:
    """gate [D, P], projection [P, D], norm [D]."""
    d, p, scale = cfg.emb_dim, cfg.hidden_size_per_layer_input, cfg.dense_init_scale
    return {
        "gate": Param((d, p), GATE, fan_in(d, scale)),
        "projection": Param((p, d), BACK, fan_in(p, scale)),
        "norm": norm.declare_stream(cfg, d),
    }


def shared(
    cfg: Any, layout: Layout, params: dict[str, Any], ids_BS: Int[Array, "B S"], x_BSD: Float[Array, "B S D"]
) -> Float[Array, "L B S P"]:
    """The vectors of all layers: (norm(projection of x / sqrt(D)) + row of the table * sqrt(P)) / sqrt(2)."""
    width = cfg.hidden_size_per_layer_input
    rows = embedding.lookup(layout, params["table"], ids_BS, x_BSD.dtype)
    projected = project(layout, "BSD,DJ->BSJ", x_BSD, params["projection"], PROJECTION, NARROW)
    per_layer = (*ids_BS.shape, cfg.num_decoder_layers, width)
    projected = (projected * jnp.asarray(cfg.emb_dim**-0.5, x_BSD.dtype)).reshape(per_layer)
    rows = (rows * jnp.asarray(width**0.5, x_BSD.dtype)).reshape(per_layer)
    both = norm.stream_norm(cfg, layout, projected, params["norm"]) + rows
    return jnp.moveaxis(both * jnp.asarray(2**-0.5, x_BSD.dtype), 2, 0)


def layer_input(
    cfg: Any, layout: Layout, params: dict[str, Any], x_BSD: Float[Array, "B S D"], own_BSP: Float[Array, "B S P"]
) -> Float[Array, "B S D"]:
    """What the layer's own vector adds to the stream."""
    gate = project(layout, "BSD,DP->BSP", x_BSD, params["gate"], GATE, NARROW)
    gated = mlp.ACTIVATIONS[cfg.mlp_activations[0]](gate) * own_BSP
    back = project(layout, "BSP,PD->BSD", gated, params["projection"], BACK, embedding.STREAM)
    return norm.stream_norm(cfg, layout, back, params["norm"])
