"""The lightning indexer of sparse attention (DeepSeek-V3.2): a small scorer that chooses the keys each query sees.

score[s, t] = sum over heads of weight[s, head] * relu(query[s, head] . key[t] / sqrt(I)). The choice has no gradient;
with `indexer_loss_scaling_factor` the indexer learns by itself to score as attention attends, from inputs without
gradient. The reference also turns queries and keys by one Hadamard matrix, for 8-bit numbers; their products do not
change, and it is left out.

More letters: X heads of the indexer, I their width, R query latent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from MaxText.architecture import LayerSpec
from MaxText.blueprint import ONES, ZEROS, Param, fan_in
from MaxText.layers import dot_product, norm, rope
from MaxText.layers.attention import Context
from MaxText.layout import Axes, Layout, project

QUERY: Axes = ("latent", None, "head_dim")
KEY: Axes = ("embed", None)
HEADS: Axes = ("activation_batch", "activation_length", None, None)
NARROW: Axes = ("activation_batch", "activation_length", None)
EPSILON = 1e-6


def declare(cfg: Any, query_rank: int) -> dict[str, Any]:
    """query [R, X, I], key [D, I] with a LayerNorm, weight [D, X]."""
    heads, width, scale = cfg.indexer_n_heads, cfg.indexer_head_dim, cfg.dense_init_scale
    return {
        "query": Param((query_rank, heads, width), QUERY, fan_in(query_rank, scale)),
        "key": Param((cfg.emb_dim, width), KEY, fan_in(cfg.emb_dim, scale)),
        "key_norm": {
            "scale": Param((width,), ("head_norm",), ONES, kind="norm"),
            "bias": Param((width,), ("head_norm",), ZEROS, kind="bias"),
        },
        "weight": Param((cfg.emb_dim, heads), KEY, fan_in(cfg.emb_dim, scale)),
    }


def keys(
    cfg: Any, spec: LayerSpec, layout: Layout, params: dict[str, Any], x_BSD: Array, context: Context
) -> Float[Array, "B S I"]:
    """The indexer's keys of x, which a cache keeps."""
    y = project(layout, "BSD,DI->BSI", jax.lax.stop_gradient(x_BSD), params["key"], KEY, NARROW)
    y = norm.layer_norm(layout, y, params["key_norm"]["scale"], params["key_norm"]["bias"], EPSILON)
    return _turned(spec, y[:, :, None], context)[:, :, 0]


def scores(
    cfg: Any,
    spec: LayerSpec,
    layout: Layout,
    params: dict[str, Any],
    x_BSD: Float[Array, "B S D"],
    compressed_BSR: Float[Array, "B S R"],
    key_BTI: Float[Array, "B T I"],
    context: Context,
) -> Float[Array, "B S T"]:
    """How much each query wants each key, float32; causality is not applied."""
    x_BSD, compressed_BSR = jax.lax.stop_gradient((x_BSD, compressed_BSR))
    q = project(layout, "BSR,RXI->BSXI", compressed_BSR, params["query"], QUERY, HEADS)
    q = _turned(spec, q, context)
    weight = project(layout, "BSD,DX->BSX", x_BSD, params["weight"], KEY, NARROW).astype(jnp.float32)
    alike = jnp.einsum("BSXI,BTI->BSXT", q, key_BTI, preferred_element_type=jnp.float32)
    alike = jax.nn.relu(alike * cfg.indexer_head_dim**-0.5)
    return jnp.einsum("BSXT,BSX->BST", alike, weight * cfg.indexer_n_heads**-0.5)


def _turned(spec: LayerSpec, y_BSXI: Array, context: Context) -> Array:
    """Its rope rotates the first channels in halves, whatever the attention does."""
    return y_BSXI if spec.rope is None else rope.rotate(y_BSXI, context.rotations[spec.rope])


def choose(
    cfg: Any, layout: Layout, scores_BST: Float[Array, "B S T"], mask_BST: Bool[Array, "B S T"]
) -> Bool[Array, "B S T"]:
    """The mask, cut down to the `indexer_topk` best keys of each query."""
    if mask_BST.shape[-1] <= cfg.indexer_topk:
        return mask_BST

    def local(scores: Array, mask: Array) -> Array:  # top_k knows no shardings: a wall around it
        ranked = jnp.where(mask, jax.lax.stop_gradient(scores), -jnp.inf)
        _, best = jax.lax.top_k(ranked, cfg.indexer_topk)
        row, query = (jnp.arange(size) for size in mask.shape[:2])
        return mask & jnp.zeros_like(mask).at[row[:, None, None], query[None, :, None], best].set(True)

    dims = layout.spec(NARROW)
    return layout.shard_map(local, in_specs=(dims, dims), out_specs=dims)(scores_BST, mask_BST)


def divergence(
    scores_BST: Float[Array, "B S T"],
    q_BSNH: Float[Array, "B S N H"],
    k_BTNH: Float[Array, "B T N H"],
    mask_BST: Bool[Array, "B S T"],
    token_BS: Bool[Array, "B S"],
) -> Float[Array, ""]:
    """Sum over real tokens of KL(attention, averaged over heads | softmax of the scores), both over the keys of the
    mask. No gradient reaches the attention."""
    q, k = jax.lax.stop_gradient((q_BSNH, k_BTNH))
    logits = jnp.einsum("BSNH,BTNH->BNST", q, k, preferred_element_type=jnp.float32)
    attended = jax.nn.softmax(jnp.where(mask_BST[:, None], logits, dot_product.MASKED), axis=-1).mean(axis=1)
    wanted = jax.nn.log_softmax(jnp.where(mask_BST, scores_BST, dot_product.MASKED), axis=-1)
    told = jnp.where(mask_BST, attended * (jnp.log(jnp.maximum(attended, 1e-30)) - wanted), 0.0).sum(axis=-1)
    return (told * token_BS).sum()
