"""The decoder: a model as segments of repeated layer patterns.

`llama -> 32 x (layer)`. The parameters of a segment are stacked over its repeats, and `lax.scan` runs over them; with
scan_layers=false the same loop is unrolled, on the same parameters, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText import blueprint
from MaxText.blueprint import Param, normal
from MaxText.layers import attention, embedding, mlp, norm, rope
from MaxText.layers.attention import Cache, Context
from MaxText.layout import Axes, Layout

LOGITS: Axes = ("embed", "vocab")
# What a policy keeps for the backward pass, beside the input of each layer. `none` keeps everything.
SAVED_BY_POLICY: dict[str, tuple[str, ...]] = {
    "full": (),
    "minimal": ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"),
}


@dataclass(frozen=True)
class Segment:
    """`repeats` times the same pattern of layers; the pattern is unrolled inside the scan."""

    name: str
    repeats: int
    pattern: tuple[str, ...] = ("global",)


def segments(cfg: Any) -> tuple[Segment, ...]:
    """The stack of this configuration, from the embedding up."""
    return (Segment("layers", cfg.num_decoder_layers),)


def _declare_layer(cfg: Any) -> dict[str, Any]:
    return {
        "attention_norm": norm.declare(cfg.emb_dim),
        "attention": attention.declare(cfg),
        "mlp_norm": norm.declare(cfg.emb_dim),
        "mlp": mlp.declare(cfg),
    }


def declare(cfg: Any) -> dict[str, Any]:
    """The blueprint of the whole model: `{embedding, decoder: {segment: {position: layer}}, final_norm[, logits]}`."""
    stacks = {
        segment.name: {
            str(i): blueprint.stack(_declare_layer(cfg), segment.repeats) for i in range(len(segment.pattern))
        }
        for segment in segments(cfg)
    }
    tree = {"embedding": embedding.declare(cfg), "decoder": stacks, "final_norm": norm.declare(cfg.emb_dim)}
    if not cfg.logits_via_embedding:
        tree["logits"] = Param((cfg.emb_dim, cfg.vocab_size), LOGITS, normal(cfg.emb_dim**-0.5))
    return tree


def _layer(cfg: Any, layout: Layout, params: dict[str, Any], x: Array, context: Context, cache: Cache | None):
    epsilon = cfg.normalization_layer_epsilon
    y, cache = attention.attention(
        cfg, layout, params["attention"], norm.rms_norm(layout, x, params["attention_norm"], epsilon), context, cache
    )
    x = x + y
    return x + mlp.mlp(cfg, layout, params["mlp"], norm.rms_norm(layout, x, params["mlp_norm"], epsilon)), cache


def _run_segment(cfg: Any, layout: Layout, segment: Segment, params: Any, x: Array, context: Context, caches: Any):
    def body(x: Array, slices: tuple[Any, Any]):
        layer_params, layer_caches = slices
        new_caches = {}
        for i in map(str, range(len(segment.pattern))):
            cache = None if layer_caches is None else layer_caches[i]
            x, new_caches[i] = _layer(cfg, layout, layer_params[i], x, context, cache)
        return x, new_caches

    if caches is None and cfg.remat_policy != "none":
        keep = jax.checkpoint_policies.save_only_these_names(*SAVED_BY_POLICY[cfg.remat_policy])
        body = jax.checkpoint(body, policy=keep, prevent_cse=not cfg.scan_layers)
    return jax.lax.scan(body, x, (params, caches), unroll=1 if cfg.scan_layers else segment.repeats)


def _run(cfg: Any, layout: Layout, params: Any, x: Array, context: Context, caches: Any = None):
    new_caches = {}
    for segment in segments(cfg):
        stack_caches = None if caches is None else caches[segment.name]
        x, new_caches[segment.name] = _run_segment(
            cfg, layout, segment, params["decoder"][segment.name], x, context, stack_caches
        )
    return norm.rms_norm(layout, x, params["final_norm"], cfg.normalization_layer_epsilon), new_caches


def _rotation(cfg: Any, positions: Array) -> rope.Rotation:
    return rope.angles(positions, cfg.head_dim, cfg.rope_min_timescale, cfg.rope_max_timescale)


def forward(cfg: Any, layout: Layout, params: Any, batch: dict[str, Int[Array, "B S"]]) -> Float[Array, "B S D"]:
    """The final hidden states of a batch (after the last norm); `logits` or `loss` turn them into predictions."""
    x = embedding.lookup(layout, params["embedding"], batch["inputs"], jnp.dtype(cfg.dtype))
    context = Context(_rotation(cfg, batch["positions"]), attention.causal_mask(batch["segments"]))
    return _run(cfg, layout, params, x, context)[0]


def output_kernel(cfg: Any, params: Any) -> tuple[Float[Array, "D V"], Axes, float]:
    """(kernel, its dims, factor on the logits). Tied to the embedding, the kernel is its transpose."""
    if not cfg.logits_via_embedding:
        return params["logits"], LOGITS, 1.0
    return params["embedding"].T, LOGITS, cfg.emb_dim**-0.5 if cfg.normalize_embedding_logits else 1.0


def empty_cache(cfg: Any, layout: Layout, batch: int, length: int) -> dict[str, Any]:
    """A KV cache for `length` tokens of `batch` rows."""
    spec = layout.spec(("layers", *attention.KV_HEADS))

    def stacked(segment: Segment) -> dict[str, Cache]:
        shape = (segment.repeats, batch, length, cfg.num_kv_heads, cfg.head_dim)
        zeros = jnp.zeros(shape, cfg.dtype, out_sharding=spec)
        return {str(i): Cache(zeros, zeros) for i in range(len(segment.pattern))}

    return {segment.name: stacked(segment) for segment in segments(cfg)}


def decode(
    cfg: Any, layout: Layout, params: Any, ids_BS: Int[Array, "B S"], slot: Int[Array, ""], cache: Any
) -> tuple[Float[Array, "B S D"], Any]:
    """Hidden states of `ids`, which stand at positions slot, slot+1, ...; returns (hidden [B, S, D], cache)."""
    batch, length = ids_BS.shape
    positions = slot + jnp.arange(length)
    total = jax.tree.leaves(cache)[0].shape[2]
    mask = jnp.broadcast_to(jnp.arange(total)[None, :] <= positions[:, None], (batch, length, total))
    x = embedding.lookup(layout, params["embedding"], ids_BS, jnp.dtype(cfg.dtype))
    context = Context(_rotation(cfg, jnp.broadcast_to(positions, ids_BS.shape)), mask, slot)
    return _run(cfg, layout, params, x, context, cache)
