"""From config, blueprint and hardware to a plan: mesh, layout, batch, exact state bytes; or a refusal with both numbers
and advice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from MaxText import blueprint, flops, pipeline, sequence
from MaxText.errors import PlanError
from MaxText.hardware import Hardware
from MaxText.layout import Layout
from MaxText.planner import legality, notes
from MaxText.planner.degrees import mesh_degrees
from MaxText.planner.rules import MESH_AXES, make_layout


@dataclass(frozen=True)
class Plan:
    """How a config runs on a hardware. Sizes in rows and bytes; `*_bytes` are per device and exact."""

    ici: dict[str, int]
    dcn: dict[str, int]
    layout: Layout
    order: sequence.Order
    tree: blueprint.Blueprint
    devices: int
    global_batch_size: int
    microbatches: int
    eval_batch_size: int
    tokens_per_step: int
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    flops_per_step_per_device: float
    pipeline: pipeline.Schedule | None = None
    notes: tuple[str, ...] = ()

    @property
    def mesh_shape(self) -> dict[str, int]:
        return {axis: self.ici[axis] * self.dcn[axis] for axis in MESH_AXES}

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes

    def describe_mesh(self) -> str:
        """For the start screen: the axes larger than one, or "1 device"."""
        large = [f"{axis}={size}" for axis, size in self.mesh_shape.items() if size > 1]
        return " x ".join(large) if large else "one device"


def _bytes(tree: blueprint.Blueprint, layout: Layout, dtype: str, spread: bool = False) -> int:
    """Bytes on one device of one array for each parameter; with `spread`, split over the data axis as well."""
    sizes = dict(layout.sizes)

    def ways(p: blueprint.Param) -> int:
        spec = layout.spread(p.axes, p.shape, "data") if spread else layout.spec(p.axes)
        axes = (axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))
        return math.prod(sizes[axis] for axis in axes)

    return sum(math.prod(p.shape) // ways(p) * p.dtype(dtype).itemsize for _, p in blueprint.leaves(tree))


def _optimizer_bytes(cfg: Any, tree: blueprint.Blueprint, layout: Layout) -> int:
    """Arrays that the optimizer keeps for each parameter (by dtype), and its int32 counters."""
    slots = {"adamw": (cfg.mu_dtype, cfg.weight_dtype), "sgd": ()}[cfg.opt_type]
    counters = {"adamw": 1, "sgd": 0}[cfg.opt_type]
    return sum(_bytes(tree, layout, dtype, cfg.shard_optimizer_over_data) for dtype in slots) + 4 * counters


def _with_even_vocabulary(cfg: Any, tree: blueprint.Blueprint, layout: Layout) -> blueprint.Blueprint:
    """The tree with the vocabulary padded, if need be, so that it can be split."""
    if cfg.vocab_size % layout.ways("vocab") == 0:
        return tree
    return blueprint.pad(tree, "vocab", layout.ways("vocab") * cfg.num_vocab_tiling)


def make(cfg: Any, tree: blueprint.Blueprint, hardware: Hardware) -> Plan:
    """The plan, or a PlanError that lists every problem of the batch and of divisibility at once. Touches no device."""
    ici, dcn = mesh_degrees(cfg, hardware)
    sizes = {axis: ici[axis] * dcn[axis] for axis in MESH_AXES}
    if unusable := legality.unusable_axes(cfg, sizes):
        raise PlanError("\n".join(unusable), id="plan.unused-axis")
    schedule = pipeline.make(cfg, sizes[pipeline.AXIS])
    owned = schedule is not None and schedule.owned
    layout = replace(make_layout(sizes, cfg.logical_axis_rules, stages_own=owned), platform=hardware.platform)
    if owned and dcn[pipeline.AXIS] > 1:  # no weight crosses slices
        layout = layout.whole_outside(pipeline.AXIS)
    tree = _with_even_vocabulary(cfg, tree, layout)
    if unmatched := legality.unmatched_rules(cfg, tree):
        raise PlanError("\n".join(unmatched), id="plan.rule")
    ways = layout.ways("activation_batch")
    rows, eval_rows, problems = legality.batch_rows(cfg, hardware.devices, ways, schedule)
    problems += legality.indivisible(cfg, tree, layout)
    problems += legality.kernels(cfg, layout)
    if problems:
        raise PlanError("\n".join(problems), id="plan.divisibility")
    tokens = rows * cfg.max_target_length
    pieces = schedule.share if schedule else 1
    return Plan(
        ici=ici,
        dcn=dcn,
        layout=layout,
        order=sequence.order(cfg, layout),
        tree=tree,
        devices=hardware.devices,
        global_batch_size=rows,
        microbatches=cfg.gradient_accumulation_steps,
        eval_batch_size=eval_rows,
        tokens_per_step=tokens,
        parameters=blueprint.count(tree),
        parameter_bytes=_bytes(tree, layout, cfg.weight_dtype),
        optimizer_bytes=_optimizer_bytes(cfg, tree, layout) + 4,  # + the step counter
        flops_per_step_per_device=flops.per_step_per_device(cfg, tokens, hardware.devices),
        pipeline=schedule,
        notes=(
            *notes.padding(cfg, tree, layout),
            *notes.whole_arrays(tree, layout),
            *notes.crossing(schedule, dcn[pipeline.AXIS]),
            *notes.experts(cfg, layout, rows // cfg.gradient_accumulation_steps // ways // pieces),
            *notes.idle(cfg, sizes),
        ),
    )
