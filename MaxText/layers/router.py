"""Which experts a token passes, with which weights, and the statistics that balance them.

More letters: E experts, k experts per token. Everything here is float32. A token chooses by *scores*; the correction
bias (DeepSeek-V3, arXiv:2412.19437) changes the choice alone, never the weights, and no gradient reaches it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from MaxText.blueprint import ONES, ZEROS, Param, fan_in
from MaxText.layers import norm
from MaxText.layout import Axes, Layout, project

KERNEL: Axes = ("embed", None)
LOGITS: Axes = ("activation_batch", "activation_length", None)


class Choice(NamedTuple):
    """The experts of each token and the weights of their outputs."""

    expert_BSk: Int[Array, "B S k"]
    weight_BSk: Float[Array, "B S k"]


class Routing(NamedTuple):
    """Sums over the real tokens of a batch; all of them add up over microbatches.

    `load` counts the tokens that chose each expert; `probability` sums what the router gave each, a distribution per
    token. `sequence_balance` is the balance loss of each row times its tokens; `z_squared` sums (log Z)^2 of the
    router; `dropped` counts choices beyond an expert's capacity."""

    load_E: Int[Array, " E"]
    probability_E: Float[Array, " E"]
    sequence_balance: Float[Array, ""]
    z_squared: Float[Array, ""]
    dropped: Int[Array, ""]


def declare(cfg: Any) -> dict[str, Param]:
    """kernel [D, E]; as asked: correction_bias [E] (moved by the step, not by a gradient) or bias [E], input_scale [D],
    expert_scale [E]."""
    d, e = cfg.emb_dim, cfg.num_experts
    params = {"kernel": Param((d, e), KERNEL, fan_in(d, cfg.dense_init_scale))}
    if cfg.routed_bias and cfg.routed_score_func:
        params["correction_bias"] = Param((e,), (None,), ZEROS, kind="router")
    elif cfg.routed_bias:
        params["bias"] = Param((e,), (None,), ZEROS, kind="bias")
    if cfg.router_input_norm:
        params["input_scale"] = Param((d,), ("norm",), ONES, kind="norm")
    if cfg.router_expert_scale:
        params["expert_scale"] = Param((e,), (None,), ONES, kind="norm")
    return params


def logits(cfg: Any, layout: Layout, params: dict[str, Array], x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S E"]:
    """The router's logits, with its trained bias if it has one."""
    x_BSD = x_BSD.astype(jnp.float32)
    if cfg.router_input_norm:
        x_BSD = norm.rms_norm(layout, x_BSD, params["input_scale"], cfg.normalization_layer_epsilon)
        x_BSD = x_BSD * cfg.emb_dim**-0.5
    y = project(layout, "BSD,DE->BSE", x_BSD, params["kernel"], KERNEL, LOGITS)
    return y + params["bias"].astype(jnp.float32)[None, None] if "bias" in params else y


def choose(cfg: Any, layout: Layout, params: dict[str, Array], logits_BSE: Float[Array, "B S E"]) -> Choice:
    """The k best experts of each token, by score plus correction bias, within the best groups."""
    e = cfg.num_experts
    bias_E = jax.lax.stop_gradient(params.get("correction_bias", jnp.zeros(e))).astype(jnp.float32)
    scale_E = params.get("expert_scale", jnp.ones(e)).astype(jnp.float32)

    def local(logits_BSE: Array, bias_E: Array, scale_E: Array) -> Choice:  # top_k knows no shardings: a wall around it
        scores_BSE = _scores(cfg, logits_BSE)
        ranked = _within_groups(cfg, jax.lax.stop_gradient(scores_BSE) + bias_E[None, None])
        _, expert_BSk = jax.lax.top_k(ranked, cfg.num_experts_per_tok)
        weight_BSk = _weights(cfg, jnp.take_along_axis(scores_BSE, expert_BSk, axis=-1))
        return Choice(expert_BSk, weight_BSk * scale_E[expert_BSk])

    tokens: Any = layout.spec(LOGITS)
    whole = layout.spec((None,))
    return layout.shard_map(local, in_specs=(tokens, whole, whole), out_specs=Choice(tokens, tokens))(
        logits_BSE, bias_E, scale_E
    )


def _scores(cfg: Any, logits: Array) -> Array:
    match cfg.routed_score_func:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
    return logits


def _weights(cfg: Any, chosen: Array) -> Array:
    """From the scores of the chosen experts to the weights of their outputs."""
    match cfg.routed_score_func:
        case "":
            chosen = jax.nn.softmax(chosen, axis=-1)
        case "softmax" if cfg.norm_topk_prob:
            chosen = chosen / chosen.sum(axis=-1, keepdims=True)
        case "sigmoid" if cfg.norm_sigmoid_scores:
            chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen * cfg.routed_scaling_factor


def _within_groups(cfg: Any, ranked_BSE: Array) -> Array:
    """Scores outside the best `topk_routing_group` groups at minus infinity."""
    groups = cfg.n_routing_groups
    if groups <= 1:
        return ranked_BSE
    grouped = ranked_BSE.reshape(*ranked_BSE.shape[:-1], groups, -1)
    of_group = 2 if cfg.routing_group_score == "top2" and grouped.shape[-1] > 1 else 1
    group_scores = jax.lax.top_k(grouped, of_group)[0].sum(axis=-1)
    _, best = jax.lax.top_k(group_scores, cfg.topk_routing_group)
    kept = (best[..., None] == jnp.arange(groups)[(None,) * best.ndim]).any(axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked_BSE.shape)


def statistics(
    cfg: Any,
    logits_BSE: Float[Array, "B S E"],
    expert_BSk: Int[Array, "B S k"],
    token_BS: Bool[Array, "B S"] | None,
    dropped: Int[Array, ""],
) -> Routing:
    """The sums of `Routing` over the tokens where token_BS is true."""
    e = cfg.num_experts
    real_BS = jnp.ones(logits_BSE.shape[:2], jnp.float32) if token_BS is None else token_BS.astype(jnp.float32)
    hit = expert_BSk[..., None] == jnp.arange(e)[None, None, None]
    hit_BSE = hit.sum(axis=2) * real_BS.astype(jnp.int32)[:, :, None]
    load_BE = hit_BSE.sum(axis=1)
    given_BSE = _probabilities(cfg, logits_BSE) * real_BS[:, :, None]
    given_BE = given_BSE.sum(axis=1)
    tokens_B = jnp.maximum(real_BS.sum(axis=1), 1.0)
    balance_B = (load_BE * given_BE).sum(axis=-1) * e / jnp.square(tokens_B)
    log_z = jax.nn.logsumexp(logits_BSE, axis=-1)
    return Routing(
        load_BE.sum(axis=0),
        given_BE.sum(axis=0),
        (balance_B * real_BS.sum(axis=1)).sum(),
        (jnp.square(log_z) * real_BS).sum(),
        dropped,
    )


def _probabilities(cfg: Any, logits: Array) -> Array:
    if cfg.routed_score_func == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        return scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    return jax.nn.softmax(logits, axis=-1)


def moved_bias(bias_E: Float[Array, "*layers E"], load_E: Int[Array, "*layers E"], rate: float) -> Array:
    """The correction bias after a step: up by `rate` for experts with less than the mean load, down for those with
    more."""
    load = load_E.astype(jnp.float32)
    return bias_E + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load).astype(bias_E.dtype)
