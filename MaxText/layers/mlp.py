"""The feed-forward layer: gated (Shazeer, 2020, arXiv:2002.05202) for two activations, plain for one."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from MaxText.blueprint import Param, fan_in
from MaxText.layout import Axes, Layout, project

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "linear": lambda x: x,
}
HIDDEN: Axes = ("activation_batch", "activation_length", "activation_mlp")
OUT: Axes = ("activation_batch", "activation_length", "activation_embed")
WI: Axes = ("embed", "mlp")
WO: Axes = ("mlp", "embed")


def declare(cfg: Any) -> dict[str, Param]:
    """wi_0, wi_1, ... [D, F], one per activation, and wo [F, D]."""
    scale = cfg.dense_init_scale
    wi = Param((cfg.emb_dim, cfg.mlp_dim), WI, fan_in(cfg.emb_dim, scale))
    wo = Param((cfg.mlp_dim, cfg.emb_dim), WO, fan_in(cfg.mlp_dim, scale))
    return {**{f"wi_{i}": wi for i in range(len(cfg.mlp_activations))}, "wo": wo}


def mlp(cfg: Any, layout: Layout, params: dict[str, Array], x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """wo(product over i of activation_i(wi_i x))."""
    hidden = None
    for i, name in enumerate(cfg.mlp_activations):
        branch = project(layout, "BSD,DF->BSF", x_BSD, params[f"wi_{i}"], WI, HIDDEN)
        branch = ACTIVATIONS[name](checkpoint_name(branch, f"mlpwi_{i}"))
        hidden = branch if hidden is None else hidden * branch
    return checkpoint_name(project(layout, "BSF,FD->BSD", hidden, params["wo"], WO, OUT), "mlpwo")
