"""Equal use of experts: two losses, and the correction bias that the step itself moves.

With f_e the share of tokens that chose expert e (their sum is the experts per token, k) and p_e the mean probability
that the router gave it, the balance loss of a layer is E * sum_e f_e p_e; it is k where all are used alike. "global"
takes f and p over the whole optimizer step, "sequence" over each row, weighted by its tokens. Losses are means over
layers.

f carries no gradient but multiplies one; so under accumulation the global loss needs f before the first gradient, and
`step` runs the forward pass once more for it. That keeps loss and gradients the same for any accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText.layers import router
from MaxText.layers.router import Routing

Loads = dict[str, Int[Array, "layers E"]]


def loads(routing: Mapping[str, Routing]) -> Loads:
    """How many tokens chose each expert, by layer."""
    return {path: jax.lax.stop_gradient(found.load_E) for path, found in routing.items()}


def needs_whole_step(cfg: Any) -> bool:
    """Whether the balance loss wants the loads of the whole step before any gradient."""
    return cfg.num_experts > 1 and cfg.load_balance_loss_weight > 0 and cfg.load_balance_loss_type == "global"


def losses(
    cfg: Any, routing: Mapping[str, Routing], step_loads: Loads, tokens: Float[Array, ""]
) -> dict[str, Float[Array, ""]]:
    """{load_balance_loss, router_z_loss}, as weighted in the objective: one microbatch's part of the step's.

    `step_loads` are the loads of the whole step, `tokens` its real tokens."""
    layers = max(sum(found.z_squared.size for found in routing.values()), 1)
    parts = {}
    if cfg.load_balance_loss_weight:
        balance = sum(_balance(cfg, found, step_loads[path], tokens) for path, found in routing.items())
        parts["load_balance_loss"] = cfg.load_balance_loss_weight * balance / layers
    if cfg.router_z_loss_weight:
        z = sum(found.z_squared.sum() for found in routing.values())
        parts["router_z_loss"] = cfg.router_z_loss_weight * z / (layers * tokens)
    return parts


def _balance(cfg: Any, found: Routing, step_load: Array, tokens: Array) -> Array:
    if cfg.load_balance_loss_type == "sequence":
        return found.sequence_balance.sum() / tokens
    return cfg.num_experts * (step_load / tokens * (found.probability_E / tokens)).sum()


def moved(cfg: Any, params: Any, step_loads: Loads) -> Any:
    """The parameters with every correction bias moved by one step toward balance."""
    if not cfg.routed_bias_update_rate:
        return params
    for path, load in step_loads.items():
        params = _moved_at(params, [*path.split("/"), "moe", "router"], load, cfg.routed_bias_update_rate)
    return params


def _moved_at(tree: Any, path: list[str], load: Array, rate: float) -> Any:
    if not path:
        return {**tree, "correction_bias": router.moved_bias(tree["correction_bias"], load, rate)}
    return {**tree, path[0]: _moved_at(tree[path[0]], path[1:], load, rate)}


def summary(step_loads: Loads, dropped: Int[Array, ""]) -> dict[str, Float[Array, ""]]:
    """For the metrics: the busiest expert's load over the mean, in the worst layer; the share of choices dropped."""
    if not step_loads:
        return {}
    every = jnp.concatenate([load.reshape(-1, load.shape[-1]) for load in step_loads.values()]).astype(jnp.float32)
    worst = (every.max(axis=-1) / jnp.maximum(every.mean(axis=-1), 1e-9)).max()
    return {"expert_load_max": worst, "dropped_choices": dropped / jnp.maximum(every.sum(), 1.0)}
