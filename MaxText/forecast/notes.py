"""The words of a forecast: why each value is what it is, and what should be looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from MaxText import cost, planner, remat
from MaxText.cost import host, memory, sizes, timing
from MaxText.hardware import Hardware

GIB = 1 << 30

_OF_AXIS = {
    "pipeline": "stages of layers, which hand the stream on",
    "data": "rows of the batch; parameters are copies",
    "fsdp": "rows of the batch; parameters, gradients and optimizer state in pieces, gathered for use (ZeRO-3)",
    "fsdp_transpose": "rows of the batch, like fsdp; splits the other dim of the feed-forward kernels",
    "expert": "rows of the batch, and experts",
    "context": "tokens of a row",
    "tensor": "heads, feed-forward and vocabulary",
}


def _origin(cfg: Any, key: str) -> str:
    """Where a value was written; what the program put there itself was chosen for this hardware."""
    written = str(cfg.origin(key))
    return {"replace()": "chosen for this hardware", "make()": "given"}.get(written, written)


def reasons(cfg: Any, plan: planner.Plan, hardware: Hardware) -> dict[str, str]:
    """{key: why it has this value} for what decides how a run is split; a search adds its own."""
    found = {}
    for level, degrees in (("ici", plan.ici), ("dcn", plan.dcn)):
        for axis, degree in degrees.items():
            key = f"{level}_{axis}_parallelism"
            written = getattr(cfg, key)
            if written == -1:
                total = "devices of a slice" if level == "ici" else "slices"
                found[key] = f"{degree}: the rest of {math.prod(degrees.values())} {total} ({_origin(cfg, key)})"
            elif degree > 1:
                found[key] = f"{degree}: as configured ({_origin(cfg, key)})"
    given = "global_batch_size" if cfg.global_batch_size else "per_device_batch_size"
    found["global_batch_size"] = f"{plan.global_batch_size} rows from {given} ({_origin(cfg, given)})"
    found["gradient_accumulation_steps"] = f"{plan.microbatches}: {_origin(cfg, 'gradient_accumulation_steps')}"
    found["remat_policy"] = f"{cfg.remat_policy}: {_origin(cfg, 'remat_policy')}"
    found["dtype"] = f"{cfg.dtype} on {hardware.platform} ({_origin(cfg, 'dtype')})"
    return found


def warnings(
    cfg: Any,
    plan: planner.Plan,
    hardware: Hardware,
    needs: memory.Memory,
    beside: host.HostMemory,
    time: timing.Seconds | None,
) -> Iterator[str]:
    """What is legal and may still be a mistake."""
    yield from _memory(hardware, needs)
    yield from _host(beside)
    yield from plan.notes
    yield from _axes(cfg, plan)
    yield from _attention(cfg, plan, hardware)
    if hardware.slice:
        yield from _chip(cfg, plan, hardware)
    if time and time.links > time.arithmetic:
        yield (
            f"traffic inside a slice takes {time.links:.2f} s of a step, more than the arithmetic's "
            f"{time.arithmetic:.2f} s: it cannot hide. Give each device more tokens, or use fewer ways of fsdp."
        )


def _memory(hardware: Hardware, needs: memory.Memory) -> Iterator[str]:
    capacity = hardware.memory_bytes
    if capacity and memory.TIGHT * capacity < needs.total and needs.least <= (1 + memory.ERROR) * capacity:
        what = "doubtful" if needs.total > capacity else "tight"
        yield (
            f"memory is {what}: {needs.total / GIB:.1f} of {capacity / GIB:.1f} GiB a device, and the estimate has an "
            f"error of up to {memory.ERROR:.0%}; at least {needs.least / GIB:.1f} are needed."
            f"{' Ask the compiler: compile=true.' if hardware.has_compiler else ''}"
        )


def _host(beside: host.HostMemory) -> Iterator[str]:
    capacity = beside.capacity
    if capacity is None:
        return
    if not beside.has_room:
        cures = {
            "offloaded": "offload fewer activations",
            "saves": "set async_checkpointing=false",
            "local": "put local_checkpoint_directory on a disk",
        }
        named = [f"{name} {getattr(beside, name) / GIB:.1f}" for name in beside.CLASSES if getattr(beside, name)]
        helps = [cure for name, cure in cures.items() if getattr(beside, name)]
        yield (
            f"a host needs {beside.total / GIB:.1f} GiB ({', '.join(named)}) of its {capacity / GIB:.1f}, and data, "
            f"program and system need theirs: {', '.join(helps)}, or take more hosts."
        )
    if beside.local > host.SHM * capacity:
        yield (
            f"local checkpoints take {beside.local / GIB:.1f} GiB of /dev/shm, which has half of a host's "
            f"{capacity / GIB:.1f} GiB unless it was mounted larger."
        )


def _attention(cfg: Any, plan: planner.Plan, hardware: Hardware) -> Iterator[str]:
    """On GPUs the program's attention writes its scores out; kernels of published runs do not."""
    every = sizes.layers(cfg, plan)
    if cfg.attention == "flash" and hardware.platform == "cpu":
        yield "attention=flash: on a CPU the kernel is interpreted, which is slow; it is meant for tests."
    if hardware.platform != "gpu" or not any(memory.flash(cfg, hardware.platform, one.spec) for one in every):
        return
    written = max(memory.scores(one.spec, one.layout, one.size, 4) for one in every)
    if written > 0.02 * (hardware.memory_bytes or GIB):
        yield (
            f"memory and time are those of a flash kernel. The attention of this version writes its scores out, "
            f"{written / GIB:.1f} GiB a layer here; attention=dot_product reckons with that."
        )


def _axes(cfg: Any, plan: planner.Plan) -> Iterator[str]:
    sizes_of = plan.mesh_shape
    split = {axis for dim, _ in plan.layout.rules for axis in plan.layout.axes(dim)}
    for axis, size in sizes_of.items():
        if size > 1 and axis not in split and axis != "pipeline":
            yield f"{axis}={size} splits nothing: these devices repeat the work of others."
    for axis, degree in plan.dcn.items():
        if degree > 1 and axis in ("fsdp", "fsdp_transpose", "tensor", "context", "expert"):
            yield (
                f"dcn_{axis}_parallelism={degree}: {_OF_AXIS[axis].split(',')[0]} over the network between slices, in "
                "every layer. dcn_data_parallelism sums gradients once a microbatch instead."
            )
    if plan.devices > 1 and sizes_of["data"] == plan.devices:
        yield f"data={plan.devices}: every device holds all parameters; fsdp splits them at little cost."


def _chip(cfg: Any, plan: planner.Plan, hardware: Hardware) -> Iterator[str]:
    assert hardware.slice is not None
    chip = hardware.slice.chip
    if unseen(chip.name, chip.platform):
        median, worst = cost.load().chip_left_out
        yield (
            f"the time is calibrated by no published step of {chip.name}, only by those of other chips: on chips left "
            f"out of the calibration it was off by {median:.1%} (median), {worst:.1%} at worst."
        )
    if chip.platform == "tpu" and hardware.slices > (most := cost.load().most_slices):
        yield (
            f"what {hardware.slices} slices lose to each other is extrapolated: the published steps had up to {most}, "
            "and the part of a step that is lost grows with their number."
        )
    if chip.announced:
        yield f"{chip.name} is announced, not measured: its rates are the vendor's, and some are assumed."
    width = cfg.moe_mlp_dim / sizes.used(plan.layout, "moe_mlp")
    if cfg.num_experts > 1 and width < 4 * chip.matrix_unit:
        yield (
            f"experts are {width:g} wide on a device; a matrix unit of {chip.name} is {chip.matrix_unit}, and below "
            f"{4 * chip.matrix_unit} small matmuls leave it waiting."
        )
    if chip.platform == "cpu" and remat.offloads(cfg):
        yield "host and device memory are the same on a CPU: offloading saves nothing here."


def unseen(chip: str, platform: str) -> bool:
    """Whether the time model saw no step of this chip; that of a CPU is measured when it is planned for."""
    return platform != "cpu" and chip not in cost.load().rows


def trust(chip: str) -> str:
    """What the time of a step on this chip stands on, in words."""
    rows = cost.load().rows.get(chip, 0)
    median, worst = cost.load().error(chip)
    left_out = "models left out" if rows else "chips left out"
    steps = "1 published step" if rows == 1 else f"{rows or 'no'} published steps"
    return f"{steps} of {chip}; error on {left_out}: median {median:.1%}, worst {worst:.1%}"


def axis_meaning(axis: str) -> str:
    """What an axis splits, in words."""
    return _OF_AXIS[axis]
