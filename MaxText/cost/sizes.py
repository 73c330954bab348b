"""What one device holds of one microbatch: the sizes from which work, memory and communication are counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from MaxText import architecture, blueprint, pipeline
from MaxText.architecture import LayerSpec
from MaxText.layout import Layout
from MaxText.planner import Plan

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Sizes:
    """Rows and tokens of one microbatch on one device; bytes of a number while it is computed with."""

    rows: float
    tokens: float
    length: int
    itemsize: int


@dataclass(frozen=True)
class Layers:
    """Equal layers: their record, and the parameters of `count` of them, stacked.

    A device passes such a layer `times` in a microbatch, each time on `size`, with weights that lie as `layout` says;
    in a pipeline on the rows that are in one stage at once. `idle` is the part of these passes that nothing reads."""

    path: str
    spec: LayerSpec
    count: int
    tree: blueprint.Blueprint
    times: int
    size: Sizes
    layout: Layout
    idle: float = 0.0
    staged: bool = False


def used(layout: Layout, dim: str) -> int:
    """Into how many pieces a dim of a weight is split while it is used: the axes over which it is gathered left out."""
    found = dict(layout.sizes)
    return math.prod(found[axis] for axis in layout.axes(dim) if axis not in layout.gathered)


def sizes(cfg: Any, plan: Plan) -> Sizes:
    """The sizes of a planned run."""
    rows = plan.global_batch_size / plan.microbatches / plan.layout.ways("activation_batch")
    tokens = rows * cfg.max_target_length / plan.layout.ways("activation_length")
    return Sizes(rows, tokens, cfg.max_target_length, BYTES[cfg.dtype])


def layers(cfg: Any, plan: Plan) -> list[Layers]:
    """Every kind of layer, from the embedding up, further predictions included."""
    outside, schedule = sizes(cfg, plan), plan.pipeline
    found = []
    for segment in architecture.segments(cfg):
        passing = schedule.pipelined if schedule and schedule.segment == segment else 0
        for i, spec in enumerate(segment.pattern):
            path, tree = f"decoder/{segment.name}/{i}", plan.tree["decoder"][segment.name][str(i)]
            if passing:
                found.append(_staged(path, spec, segment.repeats, tree, plan, outside))
            if left := segment.repeats - passing:
                found.append(Layers(path, spec, segment.repeats, tree, left, outside, plan.layout))
    further = architecture.further_prediction(cfg)
    return found + [
        Layers(f"mtp/{i}", further, 1, plan.tree["mtp"][str(i)], 1, outside, plan.layout)
        for i in range(cfg.mtp_num_layers)
    ]


def _staged(path: str, spec: LayerSpec, count: int, tree: blueprint.Blueprint, plan: Plan, outside: Sizes) -> Layers:
    """Layers that pass a pipeline: a stage works in every iteration on as many of them as lie on it in a round."""
    schedule = plan.pipeline
    assert schedule is not None
    part = schedule.stages / schedule.microbatches  # outside, the rows are split over the stages too
    size = Sizes(outside.rows * part, outside.tokens * part, outside.length, outside.itemsize)
    return Layers(
        path=path,
        spec=spec,
        count=count,
        tree=tree,
        times=schedule.iterations * schedule.depth,
        size=size,
        layout=plan.layout.inside(pipeline.AXIS),
        idle=schedule.waste / (1 + schedule.waste),
        staged=True,
    )


def pieces(tree: blueprint.Blueprint, layout: Layout) -> Iterator[tuple[str, blueprint.Param, float]]:
    """(path, parameter, numbers of it on one device)."""
    for path, param in blueprint.leaves(tree):
        yield path, param, param.size / math.prod(layout.pieces(param.axes))


def per_device(tree: blueprint.Blueprint, layout: Layout, dtype: str) -> float:
    """Bytes on one device of an array for each parameter, of which the router's stay float32."""
    return sum(count * param.dtype(dtype).itemsize for _, param, count in pieces(tree, layout))
