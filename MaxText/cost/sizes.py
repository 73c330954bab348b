"""What one device holds of one microbatch: the sizes from which work, memory and communication are counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from MaxText import architecture, blueprint
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
    """`count` equal layers: their record, and the parameters of all of them, stacked."""

    path: str
    spec: LayerSpec
    count: int
    tree: blueprint.Blueprint


def used(layout: Layout, dim: str) -> int:
    """Into how many pieces a dim of a weight is split while it is used: the axes over which it is gathered left out."""
    found = dict(layout.sizes)
    return math.prod(found[axis] for axis in layout.axes(dim) if axis not in layout.gathered)


def sizes(cfg: Any, plan: Plan) -> Sizes:
    """The sizes of a planned run."""
    rows = plan.global_batch_size / plan.microbatches / plan.layout.ways("activation_batch")
    tokens = rows * cfg.max_target_length / plan.layout.ways("activation_length")
    return Sizes(rows, tokens, cfg.max_target_length, BYTES[cfg.dtype])


def layers(cfg: Any, tree: blueprint.Blueprint) -> list[Layers]:
    """Every kind of layer, from the embedding up, further predictions included."""
    found = [
        Layers(f"decoder/{segment.name}/{i}", spec, segment.repeats, tree["decoder"][segment.name][str(i)])
        for segment in architecture.segments(cfg)
        for i, spec in enumerate(segment.pattern)
    ]
    further = architecture.further_prediction(cfg)
    return found + [Layers(f"mtp/{i}", further, 1, tree["mtp"][str(i)]) for i in range(cfg.mtp_num_layers)]


def pieces(tree: blueprint.Blueprint, layout: Layout) -> Iterator[tuple[str, blueprint.Param, float]]:
    """(path, parameter, numbers of it on one device)."""
    for path, param in blueprint.leaves(tree):
        yield path, param, param.size / math.prod(layout.pieces(param.axes))


def per_device(tree: blueprint.Blueprint, layout: Layout, dtype: str) -> float:
    """Bytes on one device of an array for each parameter, of which the router's stay float32."""
    return sum(count * param.dtype(dtype).itemsize for _, param, count in pieces(tree, layout))
