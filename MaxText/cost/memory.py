"""Bytes on one device, by class. State is exact; the rest follows what the TPU compiler was seen to hold.

Its plans of memory (buffer assignment) show three moments at which a step can be largest:

*head*       the logits in `dtype` and their gradient, the head's weights gathered, and what the layers saved;
*layers*     the backward pass of one layer: gradients so far, what all layers saved, and at once what that layer
             computes again, its gradients, its gathered weights and the whole gradient of its largest kernel. Where
             attention writes its scores, each is there in float32 and two or three times in `dtype`;
*after*      where the head's weight gradient comes last: that whole gradient, the logits, and all other gradients.

Beside all of them lies a copy of the layers' weights in `dtype`: the cast of a stack of layers does not depend on the
layer, and the compiler takes it out of the loop. Error and origin of each number: docs/planner.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from MaxText import architecture, blueprint, remat
from MaxText.architecture import LayerSpec
from MaxText.cost.sizes import BYTES, Layers, Sizes, layers, per_device, sizes, used
from MaxText.cost.work import expert_rows, redone
from MaxText.hardware import Hardware
from MaxText.layout import Layout
from MaxText.planner import Plan, capacity

STREAMS = 3  # arrays [rows, tokens, width] of a layer's backward pass beside those with names
ERROR = 0.15  # of this model, against the TPU compiler, 95 of 100 times: nothing is refused within it
TIGHT = 0.92  # of a device by the estimate: above it a plan is told to be tight
# Of a device by the estimate. Of 20 programs compiled, 19 needed no more than the estimate over ROOM, which is what a
# choice or a cure may fill, and 19 no less than the estimate over HOPE, above which it is idle to try.
ROOM, HOPE = 0.935, 1.08
PACKING = 0.03  # what is lost between arrays of different sizes
LATE = ("v5e", "tpu7x")  # chips for which the compiler lets weight gradients wait
LATE_TIED = ("v6e",)  # and that of a tied head alone


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the worst moment of a step, by class; `host` lies in the host's memory and does not
    count, `saved_by_layer` is what `activations` consists of, `moments` what each moment needs beside the state,
    `least` what would do if the compiler had to save: below it nothing runs."""

    parameters: float
    optimizer: float
    gradients: float
    casts: float
    activations: float
    logits: float
    experts: float
    transient: float
    batch: float
    host: float
    saved_by_layer: Mapping[str, float]
    moments: Mapping[str, float]
    least: float

    CLASSES = (
        "parameters",
        "optimizer",
        "gradients",
        "casts",
        "activations",
        "logits",
        "experts",
        "transient",
        "batch",
    )

    def by_class(self) -> dict[str, int]:
        return {name: round(getattr(self, name)) for name in self.CLASSES}

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.CLASSES)


def flash(cfg: Any, platform: str, spec: LayerSpec) -> bool:
    """Whether attention runs in a kernel that never writes its scores out: on TPUs as the program has it; on GPUs it is
    reckoned with, as the published runs have it, though this program has none."""
    if spec.latent and spec.latent.indexer:
        return False
    on_gpu = platform == "gpu" and cfg.attention != "dot_product"
    return on_gpu or architecture.takes_flash(cfg.attention, platform, cfg.max_target_length)


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
    """Bytes of what else the backward pass of a layer reads where nothing is computed again, as a compiled program
    holds it: three float32 arrays of each norm; of the feed-forward five in float32 and the product (in place of the
    branches, which have names); attention scores in float32 and as weights; what two dropouts kept, a byte each."""
    branches, wide = len(cfg.mlp_activations), spec.mlp_dim / used(layout, "mlp") if spec.ffn != "moe" else 0
    of_wide = 5 * 4 + (1 - branches) * size.itemsize
    masks = 2 if cfg.dropout_rate else 0
    found = size.tokens * ((6 * 4 + masks) * cfg.emb_dim + of_wide * wide)
    if spec.experts:
        rows = expert_rows(cfg, size)
        found += rows * (size.itemsize * cfg.emb_dim + of_wide * cfg.moe_mlp_dim / used(layout, "moe_mlp"))
    return found + (0.0 if flashes else scores(spec, layout, size, 4 + size.itemsize))


def scores(spec: LayerSpec, layout: Layout, size: Sizes, itemsize: int) -> float:
    """Bytes of one array [rows, heads, queries, keys]."""
    return itemsize * size.tokens * size.length * spec.query_heads / used(layout, "heads")


def saved(cfg: Any, one: Layers, flashes: bool) -> tuple[float, float]:
    """(bytes kept on the device, in the host's memory) of one layer between its forward and backward pass."""
    places, found = remat.places(cfg), named(cfg, one.spec, one.layout, one.size)
    device = sum(count for name, count in found.items() if places[name] == "device")
    host = sum(count for name, count in found.items() if places[name] == "offload")
    device += 0.0 if redone(cfg)["all"] else unnamed(cfg, one.spec, one.layout, one.size, flashes)
    return device, host


def _used_ways(layout: Layout, param: blueprint.Param) -> int:
    """Into how many pieces a parameter is split while it is used."""
    sizes_of, ways = dict(layout.sizes), 1
    for dim in param.axes:
        for axis in layout.axes(dim):
            ways *= sizes_of[axis] if dim == "experts" or axis not in layout.gathered else 1
    return ways


def in_use(tree: blueprint.Blueprint, count: int, layout: Layout) -> dict[str, float]:
    """Numbers of each parameter of one of `count` layers in its layout of use, on one device."""
    return {path: param.size / count / _used_ways(layout, param) for path, param in blueprint.leaves(tree)}


def forecast(cfg: Any, plan: Plan, hardware: Hardware) -> Memory:
    """Bytes by class, at the moment that needs most."""
    everything, tree = layers(cfg, plan), plan.tree
    blocks = plan.layout.ways("activation_length") > 1 and cfg.context_parallel_strategy != "ulysses"
    shown = {one.path: blocks or flash(cfg, hardware.platform, one.spec) for one in everything}
    kept = [(one, saved(cfg, one, shown[one.path])) for one in everything]
    by_layer: dict[str, float] = {}
    for one, (device, _) in kept:
        by_layer[one.path] = by_layer.get(one.path, 0.0) + one.times * device
    late, logits = _late(cfg, hardware), _logits(cfg, plan)
    stacks = {name: tree[name] for name in ("decoder", "mtp") if name in tree}
    casts = _casts(cfg, plan, everything)
    experts = max((_experts(cfg, one) for one in everything if one.spec.experts), default=0.0)
    layer = max(_layer(cfg, one, shown[one.path], hardware) for one in everything)
    gradients = _gradients(cfg, plan, stacks)
    streams = STREAMS * BYTES[cfg.dtype] * sizes(cfg, plan).tokens * cfg.emb_dim
    flying = max(host for _, (_, host) in kept)  # of one layer, on the way to or from the host
    turned = _head_gradient(cfg, plan) if cfg.logits_via_embedding else 0.0  # the table, once more as the head needs it
    base, head = sum(by_layer.values()) + casts + flying + turned, _head(cfg, plan)
    moments = {
        "head": base + 2 * logits + head * BYTES[cfg.dtype] + streams,
        "layers": base + gradients + layer + experts + (logits if late else 2 * _head_gradient(cfg, plan)),
        "after": gradients + (logits + head * BYTES[cfg.weight_dtype] if late else 0.0) + 2 * _head_gradient(cfg, plan),
    }
    worst = max(moments, key=lambda moment: moments[moment])
    return Memory(
        parameters=plan.parameter_bytes,
        optimizer=plan.optimizer_bytes,
        batch=5 * 4 * sizes(cfg, plan).tokens * plan.microbatches,
        host=sum(one.times * host for one, (_, host) in kept),
        saved_by_layer=by_layer,
        moments=moments,
        least=plan.state_bytes + _least(cfg, plan, everything, sum(by_layer.values()), gradients, logits),
        **_classes(worst, moments[worst], gradients, casts, sum(by_layer.values()), layer, experts),
    )


def _classes(
    worst: str, total: float, gradients: float, casts: float, saved: float, layer: float, experts: float
) -> dict[str, float]:
    """What the worst moment consists of; the rest of it is the logits' and what is made of them."""
    found = {"gradients": gradients, "casts": casts, "activations": saved, "experts": experts, "transient": layer}
    absent = {"head": ("gradients", "experts", "transient"), "after": ("casts", "activations", "experts", "transient")}
    found |= dict.fromkeys(absent.get(worst, ()), 0.0)
    rest = total - sum(found.values())
    found["transient"] += PACKING * total
    return found | {"logits": rest}


def _waits(hardware: Hardware) -> bool:
    """Whether weight gradients are made later than they could be, to reduce them beside other work; elsewhere each is
    made at once, in a loop beside its reduce-scatter."""
    return hardware.slice is not None and hardware.slice.chip.name in LATE


def _late(cfg: Any, hardware: Hardware) -> bool:
    """Whether the head's weight gradient is made after the layers' backward pass, so that the logits are there all the
    while."""
    chip = hardware.slice.chip.name if hardware.slice else ""
    return cfg.num_vocab_tiling == 1 and (_waits(hardware) or cfg.logits_via_embedding and chip in LATE_TIED)


def _gradients(cfg: Any, plan: Plan, stacks: blueprint.Blueprint) -> float:
    """One array per parameter of the layers; while microbatches are summed, those of the current one beside the sum of
    all parameters'."""
    stored = per_device(stacks, plan.layout, cfg.weight_dtype)
    return stored + (per_device(plan.tree, plan.layout, cfg.grad_dtype) if plan.microbatches > 1 else 0.0)


def _casts(cfg: Any, plan: Plan, everything: Sequence[Layers]) -> float:
    """The weights of looped layers once more, in the type of computation, in which they also pass the door of a
    pipeline that no stage owns."""
    if not cfg.scan_layers:
        return 0.0
    again = 0.0
    for one in everything:
        share = one.times / one.count if not one.staged else 1.0
        stored = share * per_device(one.tree, plan.layout, cfg.weight_dtype)
        moved = one.staged and plan.pipeline is not None and not plan.pipeline.owned
        if moved or cfg.dtype != cfg.weight_dtype:
            again += stored * BYTES[cfg.dtype] / BYTES[cfg.weight_dtype]
    return again


def _logits(cfg: Any, plan: Plan) -> float:
    """Logits of a microbatch (a chunk of them with num_vocab_tiling), before they become float32."""
    vocab = cfg.vocab_size / used(plan.layout, "vocab") / cfg.num_vocab_tiling
    return BYTES[cfg.dtype] * sizes(cfg, plan).tokens * vocab


def _head(cfg: Any, plan: Plan) -> float:
    """Numbers of the head's kernel in its layout of use, or of a chunk of it."""
    return cfg.emb_dim * cfg.vocab_size / used(plan.layout, "vocab") / cfg.num_vocab_tiling


def _head_gradient(cfg: Any, plan: Plan) -> float:
    """Bytes of its gradient in the stored layout."""
    tree = {name: plan.tree[name] for name in ("logits", "embedding") if name in plan.tree}
    one = {"logits": tree["logits"]} if "logits" in tree else tree
    return per_device(one, plan.layout, cfg.weight_dtype)


def _again(cfg: Any, names: Mapping[str, float]) -> float:
    """Bytes of arrays with names, each with its gradient, those twice that are computed again."""
    places = remat.places(cfg)
    return sum(count * (1 if places[name] == "device" else 2) for name, count in names.items())


def _experts(cfg: Any, one: Layers) -> float:
    """Rows of the experts: as many arrays of their width as of a dense feed-forward, and one as wide as the stream;
    where shards exchange them, of the whole buffer, and five: sent, received, sorted, and on the way back."""
    shards, rows, streams = one.layout.ways("experts"), expert_rows(cfg, one.size), 1
    if shards > 1:
        length = one.size.tokens / one.size.rows
        tokens = capacity.Tokens(max(1, round(one.size.rows)), max(1, round(length)), one.size.length)
        rows, streams = capacity.limits(cfg, tokens, shards).buffer, 5
    width = (len(cfg.mlp_activations) + 1) * cfg.moe_mlp_dim / used(one.layout, "moe_mlp")
    return one.size.itemsize * rows * (streams * cfg.emb_dim + width)


def _layer(cfg: Any, one: Layers, flashes: bool, hardware: Hardware) -> float:
    """What the backward pass of one layer holds at once, experts' rows aside: while it passes the feed-forward, or
    while it passes attention, when what the feed-forward's weight gradients need may still be there."""
    found = named(cfg, one.spec, one.layout, one.size)
    wide = max(found["mlpwi_0"], 0.0) * (len(cfg.mlp_activations) + 1)
    around = {name: count for name, count in found.items() if "mlp" not in name}
    weights = in_use(one.tree, one.count, one.layout)
    whole = BYTES[cfg.weight_dtype] * max(weights.values())
    gathered = [BYTES[cfg.dtype] * numbers for numbers in weights.values()]
    attention = BYTES[cfg.dtype] * sum(n for path, n in weights.items() if path.startswith("attention/"))
    written, short = 0.0 if flashes else scores(one.spec, one.layout, one.size, 1), one.size.itemsize
    near = hardware.slice.chip.vector_memory if hardware.slice else 0.0
    first = (4 + short) * written + whole + sum(gathered) - _beside([short * written, *gathered], near)
    first += _again(cfg, around) - sum(around.values())
    copies = 3 if one.spec.query_heads > one.spec.kv_heads else 2  # once more regrouped, where heads share keys
    then = (4 + copies * short) * written + attention - _beside([short * written] * copies, near) + _again(cfg, around)
    then += wide if _waits(hardware) else 0.0
    return STREAMS * one.size.itemsize * one.size.tokens * cfg.emb_dim + max(first + wide, then)


def _beside(arrays: Sequence[float], room: float) -> float:
    """Bytes of those arrays, the largest first, that find room in the memory beside a core."""
    found = 0.0
    for count in sorted(arrays, reverse=True):
        found += count if found + count <= room else 0.0
    return found


def _least(cfg: Any, plan: Plan, everything: Sequence[Layers], saved: float, gradients: float, logits: float) -> float:
    """Bytes of a step beside its state if nothing waits for anything: gradients as they are born, in the type of
    computation, one kernel gathered at a time with its gradient, no array there longer than its use."""
    narrow = BYTES[cfg.dtype] / BYTES[cfg.weight_dtype]
    layer = max(max(in_use(one.tree, one.count, one.layout).values()) * 2 * BYTES[cfg.dtype] for one in everything)
    layer += max(sum(named(cfg, one.spec, one.layout, one.size).values()) / 2 for one in everything)
    return saved + max(logits, gradients * min(narrow, 1.0) + layer)
