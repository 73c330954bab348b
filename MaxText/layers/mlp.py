"""The feed-forward layer: gated (Shazeer, 2020, arXiv:2002.05202) for two activations, plain for one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from MaxText.blueprint import Param, fan_in
from MaxText.layout import Axes, Layout, project

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
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
    """wo(product over i of activation_i(wi_i x)); activations and product in float32, which fuses and costs nothing."""
    branches = [
        checkpoint_name(project(layout, "BSD,DF->BSF", x_BSD, params[f"wi_{i}"], WI, HIDDEN), f"mlpwi_{i}")
        for i in range(len(cfg.mlp_activations))
    ]
    activated = (
        ACTIVATIONS[name](b.astype(jnp.float32)) for name, b in zip(cfg.mlp_activations, branches, strict=True)
    )
    hidden = functools.reduce(jnp.multiply, activated).astype(x_BSD.dtype)
    return checkpoint_name(project(layout, "BSF,FD->BSD", hidden, params["wo"], WO, OUT), "mlpwo")
