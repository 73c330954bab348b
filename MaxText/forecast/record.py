"""The forecast of a run: what it needs and how fast it will be, with the reason of every choice. Touches no device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from MaxText import blueprint, cost, decoder, flops, planner, remat
from MaxText import hardware as hardware_room
from MaxText.cost import communication, host, memory, sizes, timing
from MaxText.forecast import notes
from MaxText.hardware import Hardware

STORAGE_BANDWIDTH = 1e9  # bytes/s that a host writes to its file system; assumed


@dataclass(frozen=True)
class Forecast:
    """A plan with its cost. `seconds` is None where nothing is known of the devices."""

    cfg: Any
    hardware: Hardware
    plan: planner.Plan
    memory: memory.Memory
    host: host.HostMemory
    seconds: timing.Seconds | None
    collectives: tuple[dict[str, Any], ...]
    reasons: dict[str, str]
    rejected: tuple[dict[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def capacity(self) -> int | None:
        """Bytes that one device has."""
        return self.hardware.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the least that could do is within the memory of a device, by the error of the estimate."""
        return self.capacity is None or self.memory.least <= self.capacity * (1 + memory.ERROR)

    @property
    def room(self) -> str:
        """ "ample", "tight" (above 92 % of a device by the estimate), "doubtful" (above all of it) or "none"."""
        if not self.fits:
            return "none"
        share = self.memory.total / self.capacity if self.capacity else 0.0
        return "doubtful" if share > 1 else "tight" if share > memory.TIGHT else "ample"

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        if self.seconds is None or self.hardware.slice is None:
            return None
        return self.plan.tokens_per_step / self.seconds.total / self.hardware.slice.chips

    @property
    def mfu(self) -> float | None:
        """By MaxText's count of FLOPs, of the bfloat16 peak (of a CPU: of its measured rate)."""
        if self.seconds is None or self.hardware.slice is None:
            return None
        chip = self.hardware.slice.chip
        peak = chip.peak("bfloat16") / chip.devices_per_chip
        return self.plan.flops_per_step_per_device / self.seconds.total / peak

    @property
    def checkpoint_bytes(self) -> int:
        """Parameters and optimizer state, once."""
        return host.checkpoint_bytes(self.cfg, self.plan)

    @property
    def checkpoint_seconds(self) -> float:
        return self.checkpoint_bytes / self.hardware.processes / STORAGE_BANDWIDTH


def make(
    cfg: Any,
    hardware: Hardware,
    tree: blueprint.Blueprint | None = None,
    reasons: dict[str, str] | None = None,
    rejected: tuple[dict[str, str], ...] = (),
    warnings: tuple[str, ...] = (),
) -> Forecast:
    """The forecast of `cfg`, whose dtype is resolved.

    Raises:
      PlanError: where the planner refuses mesh or batch."""
    tree = decoder.declare(cfg) if tree is None else tree
    return of_plan(cfg, hardware, planner.make(cfg, tree, hardware), reasons, rejected, warnings)


def of_plan(
    cfg: Any,
    hardware: Hardware,
    plan: planner.Plan,
    reasons: dict[str, str] | None = None,
    rejected: tuple[dict[str, str], ...] = (),
    warnings: tuple[str, ...] = (),
) -> Forecast:
    """The forecast of a plan that is made already."""
    hardware = hardware_room.with_rates(hardware)
    needs = memory.forecast(cfg, plan, hardware)
    beside = host.forecast(cfg, plan, hardware, needs)
    time = timing.forecast(cfg, plan, hardware.slice, cost.load()) if hardware.slice else None
    found = tuple(_collectives(cfg, plan, hardware))
    return Forecast(
        cfg=cfg,
        hardware=hardware,
        plan=plan,
        memory=needs,
        host=beside,
        seconds=time,
        collectives=found,
        reasons=notes.reasons(cfg, plan, hardware) | (reasons or {}),
        rejected=rejected,
        warnings=(*warnings, *notes.warnings(cfg, plan, hardware, needs, beside, time)),
    )


def _collectives(cfg: Any, plan: planner.Plan, hardware: Hardware) -> list[dict[str, Any]]:
    """Collectives of one step, by name, kind and axes: bytes of all executions, and seconds by the links."""
    if hardware.slice is None:
        return []
    links, e = communication.Links.of(hardware.slice, plan), cost.load()
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for one, count in _transfers(cfg, plan):
        times = count * (one.forward + one.backward) * plan.microbatches
        fast, slow = links.seconds(one)
        entry = found.setdefault(
            (one.name, one.kind, *one.axes),
            {"name": one.name, "kind": one.kind, "axes": list(one.axes), "hidden": one.hidden}
            | dict.fromkeys(("times", "bytes", "seconds_ici", "seconds_dcn"), 0),
        )
        entry["times"] += times
        entry["bytes"] += times * one.bytes
        entry["seconds_ici"] += times * fast / e.links
        entry["seconds_dcn"] += times * slow / e.network
    return list(found.values())


def _transfers(cfg: Any, plan: planner.Plan) -> list[tuple[communication.Transfer, int]]:
    """(collective, how often) of one microbatch."""
    size, everything = sizes.sizes(cfg, plan), sizes.layers(cfg, plan)
    found = [(transfer, one.times) for one in everything for transfer in communication.of_layer(cfg, one)]
    found += communication.of_pipeline(cfg, plan, everything, size)
    return found + [(transfer, 1) for transfer in communication.of_rest(cfg, plan.tree, plan.layout, size)]


def as_dict(one: Forecast) -> dict[str, Any]:
    """For programs; units are in the names: bytes, seconds."""
    cfg, plan, hw = one.cfg, one.plan, one.hardware
    kept = remat.places(cfg)
    return {
        "fits": one.fits,
        "room": one.room,
        "hardware": {
            "name": hw.slice.name if hw.slice else hw.kind,
            "platform": hw.platform,
            "chips": hw.slice.chips if hw.slice else None,
            "devices": hw.devices,
            "hosts": hw.processes,
            "slices": hw.slices,
            "memory_bytes_per_device": hw.memory_bytes,
        },
        "mesh": plan.mesh_shape,
        "mesh_ici": dict(plan.ici),
        "mesh_dcn": dict(plan.dcn),
        "parameters": plan.parameters,
        "active_parameters": flops.active_parameters(cfg, plan.tree),
        "global_batch_size": plan.global_batch_size,
        "microbatches": plan.microbatches,
        "tokens_per_step": plan.tokens_per_step,
        "remat": {"policy": cfg.remat_policy} | {name: place for name, place in kept.items() if place != "remat"},
        "memory_bytes_per_device": one.memory.by_class() | {"total": round(one.memory.total)},
        "saved_bytes_by_layer": {path: round(count) for path, count in one.memory.saved_by_layer.items()},
        "least_memory_bytes_per_device": round(one.memory.least),
        "host_memory_bytes_per_device": round(one.memory.host),
        "host_memory_bytes_per_host": _of_host(one.host),
        "state_bytes_per_device": plan.state_bytes,
        "tflops_per_step_per_device": plan.flops_per_step_per_device / 1e12,
        "step_seconds": one.seconds.total if one.seconds else None,
        "seconds": dict(vars(one.seconds)) if one.seconds else None,
        "step_seconds_error": _error(hw) if one.seconds else None,
        "tokens_per_second_per_chip": one.tokens_per_second_per_chip,
        "mfu": one.mfu,
        "collectives": list(one.collectives),
        "checkpoint": {"bytes": one.checkpoint_bytes, "save_seconds": one.checkpoint_seconds},
        "shardings": shardings(one),
        "reasons": one.reasons,
        "rejected": list(one.rejected),
        "warnings": list(one.warnings),
    }


def _of_host(one: host.HostMemory) -> dict[str, int | None]:
    found = {name: round(getattr(one, name)) for name in (*one.CLASSES, "total")}
    return found | {"capacity": None if one.capacity is None else round(one.capacity)}


def _error(hw: Hardware) -> dict[str, Any] | None:
    """What the time stands on: published steps of this chip, and the error on what was left out of the calibration."""
    if hw.slice is None or hw.platform == "cpu":
        return None
    name, e = hw.slice.chip.name, cost.load()
    return {"published_steps": e.rows.get(name, 0)} | dict(zip(("median", "worst"), e.error(name), strict=True))


def shardings(one: Forecast) -> list[dict[str, Any]]:
    """Every parameter: shape, dims, the axes of each, and bytes on one device."""
    layout, cfg = one.plan.layout, one.cfg
    return [
        {
            "name": path,
            "shape": list(param.shape),
            "dims": list(param.axes),
            "axes": [list(layout.axes(dim)) for dim in param.axes],
            "bytes_per_device": param.size
            * param.dtype(cfg.weight_dtype).itemsize
            // math.prod(layout.ways(dim) for dim in param.axes),
        }
        for path, param in blueprint.leaves(one.plan.tree)
    ]
