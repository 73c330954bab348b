"""Bytes on one device, by class. State is exact; the rest is reckoned, and its error published in docs/planner.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from MaxText import blueprint, remat
from MaxText.architecture import LayerSpec
from MaxText.cost.sizes import BYTES, Layers, Sizes, layers, per_device, sizes, used
from MaxText.cost.work import expert_rows, redone
from MaxText.hardware import Hardware
from MaxText.layout import Layout
from MaxText.planner import Plan


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the worst moment of a step, by class; `host` lies in the host's memory and does not
    count, `saved_by_layer` is what `activations` consists of."""

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    logits: float
    experts: float
    transient: float
    batch: float
    host: float
    saved_by_layer: Mapping[str, float]

    CLASSES = ("parameters", "optimizer", "gradients", "activations", "logits", "experts", "transient", "batch")

    def by_class(self) -> dict[str, int]:
        return {name: round(getattr(self, name)) for name in self.CLASSES}

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.CLASSES)


def flash(cfg: Any, platform: str, spec: LayerSpec) -> bool:
    """Whether attention runs in a kernel that never writes its scores out."""
    return cfg.attention != "dot_product" and platform in ("tpu", "gpu")


def named(cfg: Any, spec: LayerSpec, layout: Layout, size: Sizes) -> dict[str, float]:
    """Bytes of every named intermediate of one layer that the backward pass reads, and of which a layer has one."""
    heads, kv_heads = spec.query_heads / used(layout, "heads"), spec.kv_heads / used(layout, "kv_heads")
    branches = len(cfg.mlp_activations)
    widths = {remat.LAYER_INPUT: cfg.emb_dim, "query_proj": heads * spec.head_dim, "out_proj": cfg.emb_dim}
    widths[remat.CONTEXT] = heads * spec.value_dim
    if spec.latent:
        widths |= {"query_wa_proj": spec.latent.query_rank, "kv_wa_proj": spec.latent.key_value_rank}
        widths["kv_wa_proj"] += spec.latent.rope_dim
        widths["kv_proj"] = heads * (spec.latent.nope_dim + spec.latent.value_dim)
    elif spec.keys != "borrowed":
        widths |= {"key_proj": kv_heads * spec.head_dim, "value_proj": kv_heads * spec.head_dim}
    dense = spec.mlp_dim / used(layout, "mlp") if spec.ffn != "moe" else 0
    dense += cfg.shared_experts * cfg.moe_mlp_dim / used(layout, "mlp") if spec.ffn == "moe" else 0
    widths |= {f"mlpwi_{i}": dense for i in range(branches)}
    widths["mlpwo"] = cfg.emb_dim if cfg.use_post_ffw_norm and spec.ffn != "moe" else 0
    found = {name: size.itemsize * size.tokens * width for name, width in widths.items()}
    if spec.experts:
        rows = size.itemsize * expert_rows(cfg, size)
        found |= {f"moe_mlpwi_{i}": rows * cfg.moe_mlp_dim / used(layout, "moe_mlp") for i in range(branches)}
        found["moe_mlpwo"] = rows * cfg.emb_dim
    return found


def unnamed(cfg: Any, spec: LayerSpec, layout: Layout, size: Sizes, flashes: bool) -> float:
    """Bytes of what else the backward pass of a layer reads: norms' outputs, rotated heads, activations in float32,
    attention weights where they are written out."""
    heads, kv_heads = spec.query_heads / used(layout, "heads"), spec.kv_heads / used(layout, "kv_heads")
    numbers = 3 * cfg.emb_dim + (heads + kv_heads) * spec.head_dim
    numbers += spec.mlp_dim / used(layout, "mlp") if spec.ffn != "moe" else 0
    found = size.itemsize * size.tokens * numbers
    if spec.experts:
        rows = size.itemsize * expert_rows(cfg, size)
        found += rows * (cfg.emb_dim + cfg.moe_mlp_dim / used(layout, "moe_mlp"))
    return found + (0.0 if flashes else scores(spec, layout, size, 4))


def scores(spec: LayerSpec, layout: Layout, size: Sizes, itemsize: int) -> float:
    """Bytes of one array [rows, heads, queries, keys]."""
    return itemsize * size.tokens * size.length * spec.query_heads / used(layout, "heads")


def saved(cfg: Any, one: Layers, layout: Layout, size: Sizes, flashes: bool) -> tuple[float, float]:
    """(bytes kept on the device, in the host's memory) of one layer between its forward and backward pass."""
    places, found = remat.places(cfg), named(cfg, one.spec, layout, size)
    device = sum(count for name, count in found.items() if places[name] == "device")
    host = sum(count for name, count in found.items() if places[name] == "offload")
    device += 0.0 if redone(cfg)["all"] else unnamed(cfg, one.spec, layout, size, flashes)
    return device, host


def gathered(tree: blueprint.Blueprint, count: int, layout: Layout, cfg: Any) -> float:
    """Bytes of the weights of one of `count` layers in their layout of use."""
    total = 0.0
    for _, param in blueprint.leaves(tree):
        ways = 1
        for dim in param.axes:
            for axis in layout.axes(dim):
                stays = dim == "experts" or axis not in layout.gathered
                ways *= dict(layout.sizes)[axis] if stays else 1
        total += param.size / count / ways * BYTES[cfg.dtype]
    return total


def forecast(cfg: Any, plan: Plan, hardware: Hardware) -> Memory:
    """Bytes by class. At the worst moment the gradients are there, what the layers saved, and the logits or the
    backward pass of the largest layer: what it gathers, computes again and works with. Chips whose vector units know
    no bfloat16 work in float32 on what was saved, and were seen to hold both at once (docs/planner.md)."""
    size, layout, platform = sizes(cfg, plan), plan.layout, hardware.platform
    everything = layers(cfg, plan.tree)
    stages = plan.mesh_shape["pipeline"]
    wide = hardware.slice is not None and not hardware.slice.chip.vector_bfloat16 and cfg.dtype == "bfloat16"
    kept = {one.path: saved(cfg, one, layout, size, flash(cfg, platform, one.spec)) for one in everything}
    by_layer = {one.path: one.count / stages * kept[one.path][0] * (2 if wide else 1) for one in everything}
    host = sum(one.count / stages * kept[one.path][1] for one in everything)
    logits = _logits(cfg, layout, size)
    experts = max((_experts(cfg, one.spec, layout, size) for one in everything if one.spec.experts), default=0.0)
    layer = max(_layer(cfg, one, layout, size, flash(cfg, platform, one.spec), 1 if wide else 2) for one in everything)
    return Memory(
        parameters=plan.parameter_bytes,
        optimizer=plan.optimizer_bytes,
        gradients=_gradients(cfg, plan),
        activations=sum(by_layer.values()),
        logits=logits if wide else max(logits - layer - experts, 0.0),
        experts=experts,
        transient=layer,
        batch=5 * 4 * size.tokens * plan.microbatches,
        host=host,
        saved_by_layer=by_layer,
    )


def _gradients(cfg: Any, plan: Plan) -> float:
    """One array per parameter; while microbatches are summed, those of the current one beside the sum."""
    stored = per_device(plan.tree, plan.layout, cfg.grad_dtype)
    return stored * (2 if plan.microbatches > 1 else 1)


def _logits(cfg: Any, layout: Layout, size: Sizes) -> float:
    """Logits of a microbatch (a chunk of them with num_vocab_tiling) in float32; their gradient takes their place."""
    vocab = cfg.vocab_size / used(layout, "vocab") / cfg.num_vocab_tiling
    return size.tokens * vocab * 4


def _experts(cfg: Any, spec: LayerSpec, layout: Layout, size: Sizes) -> float:
    """Rows brought to the experts and back, with their gradients."""
    rows = expert_rows(cfg, size)
    return size.itemsize * rows * (3 * cfg.emb_dim + 3 * cfg.moe_mlp_dim / used(layout, "moe_mlp"))


def _layer(cfg: Any, one: Layers, layout: Layout, size: Sizes, flashes: bool, copies: int) -> float:
    """Weights of use, and what the backward pass of one layer holds at once."""
    weights = gathered(one.tree, one.count, layout, cfg)
    found = named(cfg, one.spec, layout, size)
    again = sum(count for name, count in found.items() if not name.startswith("moe_"))
    workspace = unnamed(cfg, one.spec, layout, size, True)
    if not flashes:
        workspace += scores(one.spec, layout, size, 4) * copies
    return weights + again + workspace
