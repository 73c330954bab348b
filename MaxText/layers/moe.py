"""Mixture of experts: each token passes the k experts that the router chose, and the shared ones if there are any.

Two ways to bring tokens to experts, both exact against a loop over experts: *dropless* sorts the choices by expert and
multiplies group by group (MegaBlocks, arXiv:2211.15841); with a *capacity* every expert takes a fixed number of choices
of each row, first come first served, and the rest is dropped (GShard, arXiv:2006.16668). Capacity counts per row, so
that neither the mesh nor accumulation changes what is dropped.

More letters: M = choices of the local tokens, C = capacity, k = experts per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from MaxText import sequence
from MaxText.blueprint import ZEROS, Param, fan_in
from MaxText.layers import kernels, mlp, router
from MaxText.layers.router import Choice, Routing
from MaxText.layout import Axes, Layout

STREAM: Axes = ("activation_batch", "activation_length", "activation_embed")
CHOICES: Axes = ("activation_batch", "activation_length", None)
TOKENS: Axes = ("activation_batch", "activation_length")
WI: Axes = ("experts", "embed", "moe_mlp")
WO: Axes = ("experts", "moe_mlp", "embed")
WI_BIAS: Axes = ("experts", "moe_mlp")
WO_BIAS: Axes = ("experts", None)
SAVED = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")


def declare(cfg: Any, shared: bool) -> dict[str, Any]:
    """router; wi_0, wi_1 [E, D, F], wo [E, F, D], with mlp_bias a bias per expert for each; with `shared` and
    shared_experts one feed-forward of their joint width."""
    e, d, f, scale = cfg.num_experts, cfg.emb_dim, cfg.moe_mlp_dim, cfg.dense_init_scale
    branches = [f"wi_{i}" for i in range(len(cfg.mlp_activations))]
    params: dict[str, Any] = {"router": router.declare(cfg)}
    params |= dict.fromkeys(branches, Param((e, d, f), WI, fan_in(d, scale)))
    params["wo"] = Param((e, f, d), WO, fan_in(f, scale))
    if cfg.mlp_bias:
        params |= {f"{name}_bias": Param((e, f), WI_BIAS, ZEROS, kind="bias") for name in branches}
        params["wo_bias"] = Param((e, d), WO_BIAS, ZEROS, kind="bias")
    if shared and cfg.shared_experts:
        params["shared"] = mlp.declare(cfg, cfg.shared_experts * f)
    return params


def moe(
    cfg: Any,
    layout: Layout,
    params: dict[str, Any],
    x_BSD: Float[Array, "B S D"],
    router_x_BSD: Float[Array, "B S D"],
    token_BS: Bool[Array, "B S"] | None,
) -> tuple[Float[Array, "B S D"], Routing]:
    """(the experts' weighted sum and the shared experts of x, routing statistics). The router reads `router_x`; where
    token_BS is false (padding) a token counts for nothing and takes no capacity; None: all tokens count and none is
    dropped, as in generation."""
    logits_BSE = router.logits(cfg, layout, params["router"], router_x_BSD)
    choice = router.choose(cfg, layout, params["router"], logits_BSE)
    y, dropped = _experts(cfg, layout, params, x_BSD, choice, token_BS)
    if "shared" in params:
        y = y + mlp.mlp(cfg, layout, params["shared"], x_BSD)
    return y, router.statistics(cfg, logits_BSE, choice.expert_BSk, token_BS, dropped)


def _experts(
    cfg: Any, layout: Layout, params: dict[str, Any], x_BSD: Array, choice: Choice, token_BS: Array | None
) -> tuple[Array, Array]:
    """(weighted outputs [B, S, D], number of dropped choices). Every device brings its own tokens to all experts; their
    weights are gathered for the moment of use, and once more in the backward pass."""
    weights = {name: w.astype(x_BSD.dtype) for name, w in params.items() if name.startswith(("wi_", "wo"))}
    dims = {name: _dims(name) for name in weights}
    zero, split = layout.axes("embed"), layout.axes("moe_mlp")
    if not set(zero) <= set(layout.axes("activation_batch")):  # all devices have the same tokens: gather in the open
        weights = {name: layout.gather(w, dims[name]) for name, w in weights.items()}
        dims = {name: tuple(None if dim == "embed" else dim for dim in dims[name]) for name in weights}
        zero = ()
    capacity = _capacity(cfg, x_BSD.shape[1]) if token_BS is not None and cfg.capacity_factor > 0 else 0
    if token_BS is None:
        token_BS = jnp.ones(x_BSD.shape[:2], bool, out_sharding=layout.spec(TOKENS))

    order = sequence.order(cfg, layout)

    def compute(weights: dict[str, Array], x: Array, choice: Choice, token: Array) -> tuple[Array, Array]:
        weights = {name: _whole(w, dims[name], zero) for name, w in weights.items()}
        if "wo_bias" in weights and split:  # added once, not by every piece of the width
            weights["wo_bias"] = weights["wo_bias"] * (jax.lax.axis_index(split) == 0).astype(x.dtype)
        return (
            _limited(cfg, weights, x, choice, token, capacity, order)
            if capacity
            else _dropless(cfg, weights, x, choice)
        )

    def local(weights: dict[str, Array], x: Array, choice: Choice, token: Array) -> tuple[Array, Array]:
        keep = jax.checkpoint_policies.save_only_these_names(*SAVED)
        y, dropped = jax.checkpoint(compute, policy=keep)(weights, x, choice, token)
        rows = layout.axes("activation_batch") + layout.axes("activation_length") if capacity else ()
        return jax.lax.psum(y, split) if split else y, jax.lax.psum(dropped, rows) if rows else dropped

    choices: Any = layout.spec(CHOICES)
    tokens = Choice(choices, choices)
    in_specs = ({n: layout.spec(dims[n]) for n in weights}, layout.spec(STREAM), tokens, layout.spec(TOKENS))
    return layout.shard_map(local, in_specs=in_specs, out_specs=(layout.spec(STREAM), layout.spec(())))(
        weights, x_BSD, choice, token_BS
    )


def _dims(name: str) -> Axes:
    biased = name.endswith("_bias")
    return (WO_BIAS if biased else WO) if name.startswith("wo") else (WI_BIAS if biased else WI)


def _whole(piece: Array, dims: Axes, zero: tuple[str, ...]) -> Array:
    return jax.lax.all_gather(piece, zero, axis=dims.index("embed"), tiled=True) if zero and "embed" in dims else piece


def _capacity(cfg: Any, length: int) -> int:
    """Choices of one row that an expert takes."""
    return min(length, max(1, math.ceil(length * cfg.num_experts_per_tok / cfg.num_experts * cfg.capacity_factor)))


def _feed_forward(
    cfg: Any, weights: dict[str, Array], x: Array, matmul: Callable[..., Array], of_expert: Callable[[Array], Array]
) -> Array:
    """The experts' feed-forward: `matmul` multiplies rows by their expert's matrix, `of_expert` lays out biases."""

    def linear(rows: Array, name: str) -> Array:
        y = checkpoint_name(matmul(rows, weights[name]), f"moe_mlp{name}")
        return y + of_expert(weights[f"{name}_bias"]) if cfg.mlp_bias else y

    branches = [linear(x, f"wi_{i}") for i in range(len(cfg.mlp_activations))]
    return linear(mlp.combine(cfg, branches).astype(x.dtype), "wo")


def _weighted(cfg: Any, y_BSkD: Array, weight_BSk: Array, dtype: Any) -> Array:
    """The sum over a token's experts, in float32."""
    y_BSkD = y_BSkD.astype(jnp.float32)
    if cfg.scale_expert_input:
        return y_BSkD.sum(axis=2).astype(dtype)
    return jnp.einsum("BSkD,BSk->BSD", y_BSkD, weight_BSk).astype(dtype)


def _scaled(cfg: Any, rows_MD: Array, weight_M: Array) -> Array:
    return (rows_MD * weight_M[:, None]).astype(rows_MD.dtype) if cfg.scale_expert_input else rows_MD


def _dropless(cfg: Any, weights: dict[str, Array], x_BSD: Array, choice: Choice) -> tuple[Array, Array]:
    """Choices sorted by expert, multiplied group by group, and put back."""
    *_, k = choice.expert_BSk.shape
    expert_M = choice.expert_BSk.reshape(-1)
    order_M = jnp.argsort(expert_M, stable=True)
    sorted_M = expert_M[order_M]
    rows_E = jnp.bincount(expert_M, length=cfg.num_experts).astype(jnp.int32)
    x_MD = _scaled(cfg, x_BSD.reshape(-1, x_BSD.shape[-1])[order_M // k], choice.weight_BSk.reshape(-1)[order_M])
    y_MD = _feed_forward(
        cfg, weights, x_MD, lambda rows, w: kernels.grouped_matmul(rows, w, rows_E), lambda bias: bias[sorted_M]
    )
    y_BSkD = y_MD[jnp.argsort(order_M)].reshape(*choice.expert_BSk.shape, -1)
    return _weighted(cfg, y_BSkD, choice.weight_BSk, x_BSD.dtype), jnp.zeros((), jnp.int32)


def _limited(
    cfg: Any,
    weights: dict[str, Array],
    x_BSD: Array,
    choice: Choice,
    token_BS: Array,
    capacity: int,
    order: sequence.Order,
) -> tuple[Array, Array]:
    """Every expert takes the first `capacity` choices of each row; the rest adds nothing to its token. Where rows are
    split, a choice counts by its place in the whole row and takes a slot among those of this shard."""
    (B, S, k), e, D = choice.expert_BSk.shape, cfg.num_experts, x_BSD.shape[-1]
    hit_BME = (choice.expert_BSk[..., None] == jnp.arange(e)[None, None, None]) & token_BS[:, :, None, None]
    hit_BME = hit_BME.reshape(B, S * k, e)
    rank_BM = (sequence.cumsum(order, hit_BME) * hit_BME).sum(axis=-1) - 1  # -1: padding
    kept_BM = (rank_BM >= 0) & (rank_BM < capacity)
    place_BM, slots = rank_BM, min(capacity, S)
    if order.shards > 1:
        place_BM = (jnp.cumsum(hit_BME, axis=1) * hit_BME).sum(axis=-1) - 1
    slot_BM = jnp.where(kept_BM, choice.expert_BSk.reshape(B, -1) * slots + place_BM, e * slots)
    x_MD = jnp.repeat(x_BSD.reshape(-1, D), k, axis=0)
    rows_BMD = _scaled(cfg, x_MD, choice.weight_BSk.reshape(-1)).reshape(B, -1, D)
    empty = jnp.zeros((e * slots, D), x_BSD.dtype)
    taken = jax.vmap(lambda slots, rows: empty.at[slots].set(rows, mode="drop"))(slot_BM, rows_BMD)
    taken_EMD = jnp.moveaxis(taken.reshape(B, e, slots, D), 1, 0).reshape(e, -1, D)
    y_EMD = _feed_forward(
        cfg,
        weights,
        taken_EMD,
        lambda rows, w: jnp.einsum("EMD,EDF->EMF", rows, w),
        lambda bias: bias[:, None],
    )
    y_BTD = jnp.moveaxis(y_EMD.reshape(e, B, slots, -1), 0, 1).reshape(B, e * slots, -1)
    y_BMD = jax.vmap(lambda rows, slots: rows.at[slots].get(mode="fill", fill_value=0))(y_BTD, slot_BM)
    dropped = ((rank_BM >= capacity) & token_BS.repeat(k, axis=1)).sum()
    return _weighted(cfg, y_BMD.reshape(B, S, k, -1), choice.weight_BSk, x_BSD.dtype), dropped
