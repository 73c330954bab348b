"""What a plan says aloud though it is legal: padding, and what stays whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from MaxText import blueprint, pipeline
from MaxText.layout import Layout
from MaxText.planner import capacity

# An array of as many entries, and of that share of the parameters; smaller ones are whole for good reason.
LARGE, SHARE = 1 << 20, 0.001


def padding(cfg: Any, tree: blueprint.Blueprint, layout: Layout) -> list[str]:
    """The vocabulary that was made longer."""
    longer = [p for _, p in blueprint.leaves(tree) if p.real and "vocab" in p.axes]
    if not longer:
        return []
    to, over = longer[0].shape[longer[0].axes.index("vocab")], " x ".join(layout.axes("vocab"))
    return [
        f"vocab_size={cfg.vocab_size} is padded to {to}, to be split {layout.ways('vocab')} ways over {over}; "
        "the padding is never predicted, nor saved"
    ]


def whole_arrays(tree: blueprint.Blueprint, layout: Layout) -> list[str]:
    """Large parameters that every one of several devices holds whole."""
    devices = math.prod(size for _, size in layout.sizes)
    every = blueprint.count(tree)
    whole = [(path, p) for path, p in blueprint.leaves(tree) if all(layout.ways(dim) == 1 for dim in p.axes)]
    large = [(path, p) for path, p in whole if p.size >= max(LARGE, SHARE * every)]
    if devices == 1 or not large:
        return []
    total = sum(p.size for _, p in large)
    names = ", ".join(path for path, _ in large[:3]) + (", ..." if len(large) > 3 else "")
    return [
        f"{len(large)} large arrays ({names}), {total / every:.0%} of the parameters, are whole on each of {devices} "
        "devices; ici_fsdp_parallelism or shard_optimizer_over_data would split them or their optimizer state"
    ]


def crossing(schedule: pipeline.Schedule | None, slices: int) -> list[str]:
    """Weights that a pipeline sends between slices."""
    if schedule is None or slices == 1 or schedule.owned:
        return []
    return [
        f"the weights of {schedule.pipelined * len(schedule.segment.pattern)} layers cross {slices} slices in every "
        "step, since no stage stores its own; num_pipeline_repeats=1 with all layers in the pipeline avoids that"
    ]


def experts(cfg: Any, layout: Layout, rows: int) -> list[str]:
    """Where experts lie, and what room a shard of them has, with `rows` rows of a microbatch on each device."""
    shards = layout.ways("experts")
    if shards == 1:
        return []
    tokens = capacity.Tokens(rows, cfg.max_target_length // layout.ways("activation_length"), cfg.max_target_length)
    limits = capacity.limits(cfg, tokens, shards)
    even = tokens.rows * tokens.length * cfg.num_experts_per_tok
    drops = "choices beyond that are dropped and counted" if limits.can_drop else "so that nothing is dropped"
    over = " x ".join(layout.axes("experts"))
    return [
        f"{cfg.num_experts} experts, {cfg.num_experts // shards} on each of {shards} shards over {over}, which splits "
        f"all other weights as fsdp does; a shard has room for {limits.buffer:,} rows, {limits.buffer / even:.3g} "
        f"times an even share, {drops}"
    ]


# Keys that act on an axis, and what they are where they ask for nothing.
ACTS_ON: dict[str, dict[str, int | bool]] = {
    "pipeline": {
        "num_pipeline_microbatches": -1,
        "num_pipeline_repeats": -1,
        "num_layers_per_pipeline_stage": -1,
        "pipeline_parallel_layers": -1,
        "pipeline_pad_layers": False,
    },
    "data": {"shard_optimizer_over_data": False},
}


def idle(cfg: Any, sizes: Mapping[str, int]) -> list[str]:
    """Keys that were set for an axis of size 1."""
    return [
        f"{key}={str(value).lower()} does nothing while the {axis} axis has size 1"
        for axis, keys in ACTS_ON.items()
        for key, nothing in keys.items()
        if sizes[axis] == 1 and (value := getattr(cfg, key)) != nothing
    ]
