"""The feed-forward layer: gated (Shazeer, 2020, arXiv:2002.05202) for two activations, plain for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from MaxText.blueprint import ZEROS, Param, fan_in
from MaxText.layout import Axes, Kernel, Layout, project, project_many

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
}
HIDDEN: Axes = ("activation_batch", "activation_length", "activation_mlp")
OUT: Axes = ("activation_batch", "activation_length", "activation_embed")
WI: Axes = ("mlp_embed", "mlp")
WO: Axes = ("mlp", "mlp_embed")
BRANCH = Kernel("BSD,DF->BSF", WI, HIDDEN)


def declare(cfg: Any, width: int | None = None) -> dict[str, Param]:
    """wi_0, wi_1, ... [D, F], one per activation, and wo [F, D]; with mlp_bias a bias for each. F is cfg.mlp_dim unless
    `width` is given."""
    scale, width = cfg.dense_init_scale, width or cfg.mlp_dim
    wi = Param((cfg.emb_dim, width), WI, fan_in(cfg.emb_dim, scale))
    wo = Param((width, cfg.emb_dim), WO, fan_in(width, scale))
    branches = [f"wi_{i}" for i in range(len(cfg.mlp_activations))]
    params = {**dict.fromkeys(branches, wi), "wo": wo}
    if cfg.mlp_bias:
        params |= dict.fromkeys([f"{name}_bias" for name in branches], Param((width,), ("mlp",), ZEROS, kind="bias"))
        params["wo_bias"] = Param((cfg.emb_dim,), ("norm",), ZEROS, kind="bias")
    return params


def mlp(cfg: Any, layout: Layout, params: dict[str, Array], x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """wo(product over i of activation_i(wi_i x)); activations and product in float32, which fuses and costs nothing."""
    names = [f"wi_{i}" for i in range(len(cfg.mlp_activations))]
    projected = project_many(layout, x_BSD, {name: params[name] for name in names}, dict.fromkeys(names, BRANCH))
    branches = [checkpoint_name(projected[name], f"mlp{name}") for name in names]
    if cfg.mlp_bias:
        biases = (params[f"wi_{i}_bias"].astype(x_BSD.dtype)[None, None] for i in range(len(branches)))
        branches = [branch + bias for branch, bias in zip(branches, biases, strict=True)]
    hidden = combine(cfg, branches).astype(x_BSD.dtype)
    y = checkpoint_name(project(layout, "BSF,FD->BSD", hidden, params["wo"], WO, OUT), "mlpwo")
    return y + layout.gather(params["wo_bias"].astype(y.dtype), ("norm",))[None, None] if cfg.mlp_bias else y


def combine(cfg: Any, branches: Sequence[Float[Array, "*batch F"]]) -> Float[Array, "*batch F"]:
    """The product of the activated branches, in float32.

    With mlp_activations_limit the gate is clamped from above and the others on both sides. With swiglu_alpha the gate
    is x * sigmoid(alpha x), whatever its name, and 1 is added to the other branch (gpt-oss).
    """
    wide = [branch.astype(jnp.float32) for branch in branches]
    limit = cfg.mlp_activations_limit
    if limit > 0:
        wide = [jnp.minimum(wide[0], limit), *(jnp.clip(branch, -limit, limit) for branch in wide[1:])]
    if cfg.swiglu_alpha:
        gate, up = wide
        return gate * jax.nn.sigmoid(cfg.swiglu_alpha * gate) * (up + 1.0)
    activated = (ACTIVATIONS[name](branch) for name, branch in zip(cfg.mlp_activations, wide, strict=True))
    return functools.reduce(jnp.multiply, activated)
