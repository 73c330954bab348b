"""What travels between devices in one optimizer step: which collective, over which axes, how often, how many bytes.

Bytes are those of the whole result of a gather, or of the whole input of a scatter or sum, on one device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from MaxText import blueprint, pipeline
from MaxText.architecture import LayerSpec
from MaxText.catalogue import Slice
from MaxText.cost import torus
from MaxText.cost.sizes import BYTES, Layers, Sizes, per_device, used
from MaxText.cost.work import expert_rows, redone
from MaxText.layout import STAGE_LAYERS, Layout
from MaxText.planner import Plan

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"]


@dataclass(frozen=True)
class Transfer:
    """One collective of a layer (or of the whole step), `forward` times in the forward pass, `backward` times in the
    backward pass. `hidden`: nothing waits for it at once, so that it runs beside the arithmetic."""

    name: str
    kind: Kind
    axes: tuple[str, ...]
    bytes: float
    forward: int
    backward: int
    hidden: bool


@dataclass(frozen=True)
class Links:
    """The degrees of the axes on both levels, and the bandwidth of each at one device."""

    where: Slice
    ici: Mapping[str, int]
    dcn: Mapping[str, int]
    placement: torus.Placement

    @classmethod
    def of(cls, where: Slice, plan: Plan) -> Links:
        return cls(where, plan.ici, plan.dcn, torus.place(where, plan.ici))

    def seconds(self, one: Transfer) -> tuple[float, float]:
        """(seconds inside a slice, seconds across slices) of one execution, by the links alone."""
        inside = math.prod(self.ici[axis] for axis in one.axes)
        across = math.prod(self.dcn[axis] for axis in one.axes)
        times = 2 if one.kind == "all-reduce" else 1
        fast = self._inside(one, inside) * times if inside > 1 else 0.0
        network = self.where.chip.network_bandwidth / self.where.chip.devices_per_chip
        share = one.bytes if one.kind == "all-to-all" else one.bytes / inside
        slow = times * share * (1 - 1 / across) / network if across > 1 else 0.0
        return fast, slow

    def _inside(self, one: Transfer, ways: int) -> float:
        rate = torus.bandwidth(self.where, self.placement, one.axes)
        if one.kind == "permute":
            return one.bytes / rate
        if one.kind == "all-to-all" and self.where.chip.dims > 1:  # over a ring of n a byte makes n/4 hops on average
            return one.bytes * max(1 - 1 / ways, ways / 4) / rate
        return one.bytes * (1 - 1 / ways) / rate


def of_weights(tree: blueprint.Blueprint, count: int, layout: Layout, cfg: Any) -> list[Transfer]:
    """ZeRO-3 for one of `count` stacked layers: weights are gathered where they are used, forward and backward, and
    their gradients scattered; a gradient is summed over the batch axes that its parameter is not split over."""
    gathered: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    summed: dict[tuple[str, ...], float] = defaultdict(float)
    batch = (*layout.axes("activation_batch"), *layout.axes("activation_length"))
    for _, param in blueprint.leaves(tree):
        split = dict(enumerate(layout.split(param.axes)))
        stages = split.pop(0) if param.axes[:1] == (STAGE_LAYERS,) else ()  # never gathered
        own = tuple(axis for axes in split.values() for axis in axes)
        stay = layout.axes("experts") if "experts" in param.axes else ()  # tokens come to them instead
        zero = tuple(axis for axis in own if axis in layout.gathered and axis not in stay)
        whole = param.size / count / math.prod(layout.size(axis) for axis in own)
        whole *= math.prod(dict(layout.sizes)[axis] for axis in zero)
        stored = param.dtype(cfg.weight_dtype).itemsize
        if zero:
            gathered[zero][0] += whole * BYTES[cfg.dtype]
            gathered[zero][1] += whole * stored
        rest = tuple(axis for axis in batch if axis not in (*own, *stages))
        if rest:
            share = math.prod(dict(layout.sizes)[axis] for axis in zero)
            summed[rest] += whole / share * stored
    found = [Transfer("weights", "all-gather", axes, b, 1, 1, True) for axes, (b, _) in gathered.items()]
    found += [Transfer("gradients", "reduce-scatter", axes, b, 0, 1, True) for axes, (_, b) in gathered.items()]
    return found + [Transfer("gradients", "all-reduce", axes, b, 0, 1, True) for axes, b in summed.items()]


def of_activations(cfg: Any, spec: LayerSpec, layout: Layout, size: Sizes) -> list[Transfer]:
    """Sums over tensor axes, exchange of tokens between experts, keys and values of a split sequence."""
    again, stream = redone(cfg), size.itemsize * size.tokens * cfg.emb_dim
    found = []

    def split(dim: str) -> tuple[str, ...]:
        return tuple(axis for axis in layout.axes(dim) if axis not in layout.gathered)

    if heads := split("heads"):
        readers = 3 if not spec.latent else 2
        found.append(Transfer("attention out", "all-reduce", heads, stream, 1, readers + again["out_proj"], False))
    if wide := (split("mlp") if spec.ffn != "moe" else split("moe_mlp")):
        readers = len(cfg.mlp_activations) if spec.ffn != "moe" else 1
        found.append(Transfer("feed-forward out", "all-reduce", wide, stream, 1, readers, False))
    if spec.experts and (experts := layout.axes("experts")):
        rows = size.itemsize * expert_rows(cfg, size) * cfg.emb_dim
        found.append(Transfer("tokens to experts", "all-to-all", experts, rows, 1, 1 + again["all"], False))
        found.append(Transfer("tokens back", "all-to-all", experts, rows, 1, 1 + again["moe_mlpwo"], False))
    if length := layout.axes("activation_length"):
        heads_here = spec.kv_heads / used(layout, "kv_heads")
        both = size.itemsize * size.tokens * layout.ways("activation_length") * heads_here
        both *= spec.head_dim + spec.value_dim
        found.append(Transfer("keys and values", "all-gather", length, both, 1, 1, False))
        found.append(Transfer("their gradients", "reduce-scatter", length, both, 0, 1, False))
    return found


def of_layer(cfg: Any, one: Layers) -> list[Transfer]:
    """Every collective of one pass through a layer."""
    return of_weights(one.tree, one.count, one.layout, cfg) + of_activations(cfg, one.spec, one.layout, one.size)


def of_pipeline(cfg: Any, plan: Plan, one: Sequence[Layers], size: Sizes) -> list[tuple[Transfer, int]]:
    """(collective, times in a microbatch) of what crosses stages: the stream of a stage's rows in every iteration; that
    of all rows on the way in and out; and where no stage owns its layers, their weights on the way in, and their
    gradients back."""
    schedule, axes = plan.pipeline, (pipeline.AXIS,)
    if schedule is None:
        return []
    passing = [layers for layers in one if layers.staged]
    stream = size.itemsize * size.tokens * cfg.emb_dim * schedule.stages
    handed = size.itemsize * passing[0].size.tokens * cfg.emb_dim
    found = [
        (Transfer("stream to the next stage", "permute", axes, handed, 1, 1, False), schedule.iterations),
        (Transfer("rows into the pipeline", "all-gather", axes, stream, 1, 0, False), 1),
        (Transfer("rows into the pipeline", "reduce-scatter", axes, stream, 0, 1, False), 1),
        (Transfer("rows out of the pipeline", "reduce-scatter", axes, stream, 1, 0, False), 1),
        (Transfer("rows out of the pipeline", "all-gather", axes, stream, 0, 1, False), 1),
    ]
    if not schedule.owned:
        share = schedule.pipelined / schedule.segment.repeats
        for name, dtype, way in (("weights to their stages", cfg.dtype, 1), ("gradients back", cfg.weight_dtype, 0)):
            count = share * sum(per_device(layers.tree, plan.layout, dtype) for layers in passing)
            found.append((Transfer(name, "all-to-all", axes, count, way, 1 - way, False), 1))
    return found


def of_rest(cfg: Any, tree: blueprint.Blueprint, layout: Layout, size: Sizes) -> list[Transfer]:
    """Of everything outside the layers: embedding, head, norms."""
    outside = {name: node for name, node in tree.items() if name not in ("decoder", "mtp")}
    found = of_weights(outside, 1, layout, cfg)
    if vocab := tuple(axis for axis in layout.axes("vocab") if axis not in layout.gathered):
        stream = size.itemsize * size.tokens * cfg.emb_dim
        found.append(Transfer("embedding rows", "all-reduce", vocab, stream, 1, 1, False))
    return found
