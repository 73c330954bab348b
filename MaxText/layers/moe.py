"""Mixture of experts: each token passes the k experts that the router chose, and the shared ones if there are any.

Choices are sorted by expert and multiplied group by group (MegaBlocks, arXiv:2211.15841), so no work is done for what
is not there. With a *capacity* every expert takes a fixed number of choices of each row, first come first served, and
the rest is dropped (GShard, arXiv:2006.16668). Capacity counts per row and in the row's order, so that neither the mesh
nor accumulation changes what is dropped.

How experts are split: each shard stores E/P of them, and their other dims over further axes. A shard's weights are
gathered over those where they are used, forward and backward, and their gradient is scattered back in the stored dtype;
no device ever holds another shard's experts. Tokens travel instead (`dispatch`): to the shard of their expert and back.
Where all shards have the same tokens, as in generation, nothing travels: each adds what its experts make.

More letters: M = choices of the local tokens, R = rows that a shard works on, k = experts per token."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from MaxText import sequence
from MaxText.blueprint import ZEROS, Param, fan_in
from MaxText.layers import dispatch, local, mlp, ragged, router
from MaxText.layers.router import Choice, Routing
from MaxText.layout import Axes, Layout
from MaxText.planner import capacity

STREAM: Axes = ("activation_batch", "activation_length", "activation_embed")
CHOICES: Axes = ("activation_batch", "activation_length", None)
TOKENS: Axes = ("activation_batch", "activation_length")
WI: Axes = ("experts", "moe_embed", "moe_mlp")
WO: Axes = ("experts", "moe_mlp", "moe_embed")
WI_BIAS: Axes = ("experts", "moe_mlp")
WO_BIAS: Axes = ("experts", None)
SAVED = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")


class Split(NamedTuple):
    """Mesh axes by what they split: tokens (rows, and their parts), experts, and an expert's weights along their width
    and along the embedding. `shared`: all shards of experts have the same tokens."""

    rows: tuple[str, ...]
    length: tuple[str, ...]
    experts: tuple[str, ...]
    width: tuple[str, ...]
    embed: tuple[str, ...]
    shards: int
    shared: bool

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which each device makes only a part of the output of its tokens."""
        return (*self.width, *(self.experts if self.shared else ()))


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
    token_BS is false (padding) a token passes no expert and counts for nothing; None: all tokens count and none is
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
    """(weighted outputs [B, S, D], number of dropped choices)."""
    drop = token_BS is not None
    if token_BS is None:
        token_BS = jnp.ones(x_BSD.shape[:2], bool, out_sharding=layout.spec(TOKENS))
    weights = {name: w for name, w in params.items() if name.startswith(("wi_", "wo"))}
    specs = {name: layout.spec(_dims(name)) for name in weights}
    split = _split(layout)
    if not set(split.embed) <= set(split.rows):  # all devices have the same tokens: gather in the open
        whole = {name: layout.spec(_dims(name), without=frozenset(split.embed)) for name in weights}
        weights = {name: jax.reshard(w.astype(x_BSD.dtype), whole[name]) for name, w in weights.items()}
        specs, split = whole, split._replace(embed=())
    order = sequence.order(cfg, layout)
    row_length = x_BSD.shape[1]

    def run(weights: dict[str, Array], x: Array, choice: Choice, token: Array) -> tuple[Array, Array]:
        limits = capacity.limits(cfg, capacity.Tokens(x.shape[0], x.shape[1], row_length), split.shards, drop)
        y, dropped = _local(cfg, split, limits, order, weights, x, choice, token)
        y = jax.lax.psum(y, split.partial) if split.partial else y
        everywhere = (*split.rows, *split.length)
        return y, jax.lax.psum(dropped, everywhere) if limits.can_drop and everywhere else dropped

    choices: Any = layout.spec(CHOICES)
    in_specs = (specs, layout.spec(STREAM), Choice(choices, choices), layout.spec(TOKENS))
    return layout.shard_map(run, in_specs=in_specs, out_specs=(layout.spec(STREAM), layout.spec(())))(
        weights, x_BSD, choice, token_BS
    )


def _dims(name: str) -> Axes:
    biased = name.endswith("_bias")
    return (WO_BIAS if biased else WO) if name.startswith("wo") else (WI_BIAS if biased else WI)


def _split(layout: Layout) -> Split:
    rows, experts = layout.axes("activation_batch"), layout.axes("experts")
    return Split(
        rows=rows,
        length=layout.axes("activation_length"),
        experts=experts,
        width=layout.axes("moe_mlp"),
        embed=layout.axes("moe_embed"),
        shards=layout.ways("experts"),
        shared=not set(experts) <= set(rows),
    )


def _local(
    cfg: Any,
    split: Split,
    limits: capacity.Limits,
    order: sequence.Order,
    weights: dict[str, Array],
    x_BSD: Array,
    choice: Choice,
    token_BS: Array,
) -> tuple[Array, Array]:
    """One device's part of `_experts`; what is split over the width, or over shards of the same tokens, is still to be
    summed."""
    k, D = cfg.num_experts_per_tok, x_BSD.shape[-1]
    expert_BSk, over = _taken(cfg, split, limits, order, choice.expert_BSk, token_BS)
    weight_BSk = local.varying(choice.weight_BSk, split.partial)  # gradients are summed here, once a token
    x_TD = local.varying(x_BSD, split.partial).reshape(-1, D)
    chosen = dispatch.by_expert(expert_BSk.reshape(-1), cfg.num_experts // (split.shards if split.shared else 1))
    x_MD = dispatch.spread(x_TD, chosen.order, k)
    if cfg.scale_expert_input:
        x_MD = (x_MD * weight_BSk.reshape(-1, 1)[chosen.order.to_M]).astype(x_MD.dtype)
    if split.experts and not split.shared:
        y_MD, dropped = _elsewhere(cfg, split, limits, weights, x_MD, chosen.rows_E)
        over = over + dropped if limits.can_drop else over
    else:
        y_MD = _feed_forward(cfg, split, weights, x_MD, chosen.rows_E)
    y_MD = dispatch.permuted(y_MD, dispatch.Order(chosen.order.back_M, chosen.order.to_M))
    y_BSkD = y_MD.reshape(*expert_BSk.shape, D).astype(jnp.float32)
    y = y_BSkD.sum(axis=2) if cfg.scale_expert_input else jnp.einsum("BSkD,BSk->BSD", y_BSkD, weight_BSk)
    return y.astype(x_BSD.dtype), over


def _taken(
    cfg: Any, split: Split, limits: capacity.Limits, order: sequence.Order, expert_BSk: Array, token_BS: Array
) -> tuple[Array, Array]:
    """(the expert of each choice, counted from the first of this device where shards have the same tokens, the number
    of experts if it passes none; how many choices were beyond the capacity)."""
    e = cfg.num_experts
    expert_BSk = jnp.where(token_BS[:, :, None], expert_BSk, e)
    over = jnp.zeros((), jnp.int32)
    if limits.capped:
        beyond = dispatch.places(expert_BSk, e, order) >= limits.of_row
        over = (beyond & (expert_BSk < e)).sum(dtype=jnp.int32)
        expert_BSk = jnp.where(beyond, e, expert_BSk)
    if split.shared and split.experts:
        e = e // split.shards
        mine = expert_BSk - e * jax.lax.axis_index(split.experts)
        expert_BSk = jnp.where((mine >= 0) & (mine < e), mine, e)
    return expert_BSk, over


def _elsewhere(
    cfg: Any, split: Split, limits: capacity.Limits, weights: dict[str, Array], x_MD: Array, rows_E: Array
) -> tuple[Array, Array]:
    """(results of sorted choices that travel to the shards of their experts and back, choices that found no room)."""
    size = ragged.Size(x_MD.shape[0], limits.buffer, limits.pair)
    got = dispatch.between_shards(rows_E, split.shards, limits.buffer, split.experts)
    x_RD = dispatch.permuted(ragged.exchange(x_MD, got.routes, size, split.experts), got.order)
    y_RD = _feed_forward(cfg, split, weights, x_RD, got.rows_e)
    y_RD = dispatch.permuted(y_RD, dispatch.Order(got.order.back_M, got.order.to_M))
    home = ragged.Size(size.after, size.before, size.pair)
    return ragged.exchange(y_RD, ragged.Routes(got.routes.back, got.routes.there), home, split.experts), got.dropped


def _feed_forward(cfg: Any, split: Split, weights: dict[str, Array], x_RD: Array, rows_e: Array) -> Array:
    """The feed-forward of rows grouped by expert; zeros beyond all groups."""
    group_R = dispatch.groups(rows_e, x_RD.shape[0]) if cfg.mlp_bias else None

    def linear(rows: Array, name: str) -> Array:
        embed = _dims(name).index("moe_embed")
        y = checkpoint_name(expert_matmul(rows, weights[name], rows_e, split.embed, embed), f"moe_mlp{name}")
        return y if group_R is None else y + _bias(split, weights[f"{name}_bias"], group_R, name).astype(y.dtype)

    branches = [linear(x_RD, f"wi_{i}") for i in range(len(cfg.mlp_activations))]
    return linear(mlp.combine(cfg, branches).astype(x_RD.dtype), "wo")


def _bias(split: Split, bias_eF: Array, group_R: Array, name: str) -> Array:
    """Each row's bias, and zeros beyond all groups. A product with ones and zeros, so that its gradient is one too."""
    if name == "wo" and split.width:  # added once, not by every piece of the width
        bias_eF = bias_eF * (jax.lax.axis_index(split.width) == 0).astype(bias_eF.dtype)
    hot_Re = (group_R[:, None] == jnp.arange(bias_eF.shape[0])[None]).astype(jnp.float32)
    return jnp.dot(hot_Re, bias_eF.astype(jnp.float32), precision="highest")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def expert_matmul(
    x_RD: Float[Array, "R D"], w_eDF: Float[Array, "e D F"], rows_e: Int[Array, " e"], axes: tuple[str, ...], dim: int
) -> Float[Array, "R F"]:
    """Rows times the matrix of their group, in the dtype of the rows. `w` is stored in pieces over `axes` along `dim`:
    gathered forward and once more backward, and its gradient is scattered over them, in its own dtype."""
    return ragged.matmul(x_RD, _whole(x_RD, w_eDF, axes, dim), rows_e)


def _whole(like: Array, w: Array, axes: tuple[str, ...], dim: int) -> Array:
    w = w.astype(like.dtype)
    return jax.lax.all_gather(w, axes, axis=dim, tiled=True) if axes else w


def _matmul_backward(axes, dim, saved, dy):
    x, w, rows = saved
    dx = ragged.matmul_transposed(dy, _whole(dy, w, axes, dim), rows)
    dw = ragged.outer(x, dy, rows).astype(w.dtype)
    dw = jax.lax.psum_scatter(dw, axes, scatter_dimension=dim, tiled=True) if axes else dw
    return local.summed_like(dx, x), local.summed_like(dw, w), None


expert_matmul.defvjp(
    lambda x, w, rows, axes, dim: (expert_matmul(x, w, rows, axes, dim), (x, w, rows)), _matmul_backward
)
