"""The arithmetic of one layer on one device, operation by operation: FLOPs, bytes to and from memory, and whether the
backward pass does it again.

More letters: M tokens on the device, D width, H heads x head width, F feed-forward width, k experts per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from MaxText import flops, remat
from MaxText.architecture import LayerSpec
from MaxText.cost.sizes import Sizes, used
from MaxText.layout import Layout

Kind = Literal["matmul", "grouped", "attention", "stream"]


@dataclass(frozen=True)
class Op:
    """One operation forward, on one device, of one layer and microbatch. `backward` is the backward pass's work over
    the forward pass's, recomputation (`again`) not counted. `inner` is the width that a matrix unit is filled with."""

    name: str
    kind: Kind
    flops: float
    bytes: float
    again: bool
    backward: float = 2.0
    inner: int = 0


def _matmul(name: str, m: float, k: float, n: float, size: Sizes, again: bool, kind: Kind = "matmul") -> Op:
    moved = size.itemsize * (m * k + k * n + m * n)
    return Op(name, kind, 2 * m * k * n, moved, again, inner=int(min(k, n)))


def _projections(cfg: Any, spec: LayerSpec, layout: Layout, size: Sizes, again: Mapping[str, bool]) -> list[Op]:
    m, d, ways = size.tokens, cfg.emb_dim, used(layout, "heads")
    heads = spec.query_heads / ways
    if spec.latent:
        r, c, p = spec.latent.query_rank, spec.latent.key_value_rank, spec.latent.rope_dim
        queries = [
            _matmul("query_a", m, d, r, size, again["query_wa_proj"]),
            _matmul("query_b", m, r, heads * spec.head_dim, size, again["query_proj"]),
        ]
        plain = [_matmul("query", m, d, heads * spec.head_dim, size, again["query_proj"])]
        wide = heads * (spec.latent.nope_dim + spec.latent.value_dim)
        found = queries if r else plain
        found += [_matmul("kv_a", m, d, c + p, size, again["kv_wa_proj"])]
        found += [_matmul("kv_b", m, c, wide, size, again["kv_proj"])]
    else:
        narrow = spec.kv_heads / used(layout, "kv_heads") * spec.head_dim
        found = [_matmul("query", m, d, heads * spec.head_dim, size, again["query_proj"])]
        if spec.keys != "borrowed":
            found += [_matmul("key", m, d, narrow, size, again["key_proj"])]
            found += [] if spec.values_are_keys else [_matmul("value", m, d, narrow, size, again["value_proj"])]
    return [*found, _matmul("out", m, heads * spec.value_dim, d, size, again["out_proj"])]


def _attention(spec: LayerSpec, layout: Layout, size: Sizes, again: bool, flash: bool) -> Op:
    """Scores and weighted sum. A flash kernel skips what the mask hides and makes the scores again in its backward
    pass; plain XLA computes all of them and writes them out in float32."""
    heads, width = spec.query_heads / used(layout, "heads"), spec.head_dim + spec.value_dim
    if flash:
        seen = flops.keys_seen(spec.reach, size.length)
        moved = size.itemsize * size.tokens * heads * width * 2
        return Op("attention", "attention", 2 * size.tokens * seen * heads * width, moved, again, 2.5, spec.head_dim)
    scores = size.tokens * size.length * heads
    return Op("attention", "attention", 2 * scores * width, scores * 16, again, 2.0, spec.head_dim)


def _dense(cfg: Any, name: str, width: float, size: Sizes, again: Mapping[str, bool]) -> list[Op]:
    m, d = size.tokens, cfg.emb_dim
    branches = len(cfg.mlp_activations)
    found = [_matmul(f"{name}_wi_{i}", m, d, width, size, again[f"mlpwi_{i}"]) for i in range(branches)]
    found += [_matmul(f"{name}_wo", m, width, d, size, again["mlpwo"] and cfg.use_post_ffw_norm)]
    gate = size.itemsize * m * width * (branches + 1)
    return [*found, Op(f"{name}_gate", "stream", 0, gate, again[f"mlpwi_{branches - 1}"] or again["all"])]


def expert_rows(cfg: Any, size: Sizes) -> float:
    """Rows that the experts multiply: every choice, or what the capacity has room for."""
    if cfg.capacity_factor <= 0:
        return size.tokens * cfg.num_experts_per_tok
    even = size.length * cfg.num_experts_per_tok / cfg.num_experts * cfg.capacity_factor
    capacity = min(size.length, max(1, math.ceil(even)))
    return size.tokens / size.length * cfg.num_experts * capacity


def _experts(cfg: Any, spec: LayerSpec, layout: Layout, size: Sizes, again: Mapping[str, bool]) -> list[Op]:
    m, d, width = size.tokens, cfg.emb_dim, cfg.moe_mlp_dim / used(layout, "moe_mlp")
    rows, branches = expert_rows(cfg, size), len(cfg.mlp_activations)
    local = cfg.num_experts / layout.ways("experts")

    kind: Kind = "grouped" if cfg.capacity_factor <= 0 else "matmul"  # equal groups are a batched matmul

    def grouped(name: str, k: float, n: float, redone: bool) -> Op:
        moved = size.itemsize * (rows * k + local * k * n + rows * n)
        return Op(name, kind, 2 * rows * k * n, moved, redone, inner=int(min(k, n)))

    found = [_matmul("router", m, d, cfg.num_experts, Sizes(size.rows, m, size.length, 4), again["all"])]
    found += [grouped(f"expert_wi_{i}", d, width, again[f"moe_mlpwi_{i}"]) for i in range(branches)]
    found += [grouped("expert_wo", width, d, again["moe_mlpwo"])]
    found += [Op("expert_gate", "stream", 0, size.itemsize * rows * width * (branches + 1), again["all"])]
    found += [Op("dispatch", "stream", 0, size.itemsize * rows * d * 6, again["all"])]
    if cfg.shared_experts and spec.ffn == "moe":
        found += _dense(cfg, "shared", cfg.shared_experts * width, size, again)
    return found


def redone(cfg: Any) -> dict[str, bool]:
    """For every name whether the backward pass computes it again; "all" for what has no name."""
    nothing = cfg.remat_policy == "none"
    return {name: place == "remat" for name, place in remat.places(cfg).items()} | {"all": not nothing}


def of_layer(cfg: Any, spec: LayerSpec, layout: Layout, size: Sizes, flash: bool) -> list[Op]:
    """Every operation of a layer."""
    again = redone(cfg)
    m, d = size.tokens, cfg.emb_dim
    rotated = spec.query_heads / used(layout, "heads") + spec.kv_heads / used(layout, "kv_heads")
    found = [Op("norms and sums", "stream", 0, size.itemsize * m * d * 8, again["all"])]
    found += [Op("rope", "stream", 0, size.itemsize * m * rotated * spec.head_dim * 2, again["all"])]
    found += _projections(cfg, spec, layout, size, again)
    kept = not again[remat.CONTEXT] and flash
    found += [_attention(spec, layout, size, not kept and again["all"], flash)]
    if spec.ffn != "moe":
        found += _dense(cfg, "mlp", spec.mlp_dim / used(layout, "mlp"), size, again)
    if spec.experts:
        found += _experts(cfg, spec, layout, size, again)
    return found


def of_head(cfg: Any, layout: Layout, size: Sizes) -> list[Op]:
    """The output head and the loss over its logits, once, and once for each further prediction."""
    vocab = cfg.vocab_size / used(layout, "vocab")
    tiled = cfg.num_vocab_tiling > 1
    once = [
        _matmul("head", size.tokens, cfg.emb_dim, vocab, size, tiled),
        Op("loss", "stream", 0, 4 * size.tokens * vocab * 3, tiled),
    ]
    return once * (1 + cfg.mtp_num_layers)
