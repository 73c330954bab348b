"""Seconds of one optimizer step: a roofline of every operation, and what runs beside what.

An operation takes FLOPs / (share of peak) + bytes / (share of bandwidth): matrix units and memory do not overlap fully,
and a matmul reads its operands again for every tile, FLOPs / intensity bytes in all. A matrix unit is filled up to
whole widths. Beside the arithmetic of a layer run the gathers and scatters of its weights, and copies to and from the
host; the longest of the three counts, and the part `exposed` of the shorter ones. Sums over tensor axes, exchanges of
tokens and of keys are waited for.

Two steps: `ideal` counts what every pass would take at the catalogue's rates, by kind of work; `seconds` applies the
measured shares to that. Calibration repeats the second alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from MaxText import remat
from MaxText.catalogue import Slice
from MaxText.cost import communication, memory, work
from MaxText.cost.communication import Links, Transfer
from MaxText.cost.efficiency import Efficiency
from MaxText.cost.sizes import Layers, layers, per_device, sizes
from MaxText.cost.work import Op
from MaxText.planner import Plan

HIDDEN, WAITED = 0, 1


@dataclass(frozen=True)
class Pass:
    """One pass through a layer (or the head, or the optimizer), done `times` a step, `idle` of them for nothing:
    seconds at the catalogue's rates. `tiles` is FLOPs over the memory's bandwidth; `links` and `network` are (hidden,
    waited for)."""

    name: str
    times: float
    matmul: float = 0.0
    grouped: float = 0.0
    attention: float = 0.0
    tiles: float = 0.0
    stream: float = 0.0
    links: tuple[float, float] = (0.0, 0.0)
    network: tuple[float, float] = (0.0, 0.0)
    host: float = 0.0
    idle: float = 0.0

    def arithmetic(self, e: Efficiency) -> float:
        """Seconds of the arithmetic alone."""
        busy = self.matmul / e.matmul + self.grouped / e.grouped + self.attention / e.attention
        return busy + (self.tiles / e.intensity + self.stream) / e.stream

    def traffic(self, e: Efficiency, which: int) -> float:
        return self.links[which] / e.links + self.network[which] / e.network

    def seconds(self, e: Efficiency) -> float:
        """With what runs beside."""
        beside = sorted((self.arithmetic(e), self.traffic(e, HIDDEN), self.host / e.host))
        return beside[2] + e.exposed * (beside[0] + beside[1]) + self.traffic(e, WAITED)


@dataclass(frozen=True)
class Step:
    """Everything of one optimizer step."""

    passes: tuple[Pass, ...]
    slices: int
    chip: str
    platform: str

    @property
    def fed(self) -> float:
        """Seconds for which the matrix units would be fed at the rate that the chip's own matmuls reach."""
        return sum(p.times * (p.matmul + p.grouped + p.attention) for p in self.passes)


@dataclass(frozen=True)
class Seconds:
    """Of one step on one device. `total` counts overlap; the parts are what each would take by itself."""

    total: float
    arithmetic: float
    links: float
    network: float
    host: float
    optimizer: float
    bubble: float
    stragglers: float


def _work(ops: Sequence[Op], where: Slice, dtype: str, way: str) -> dict[str, Any]:
    """Fields of a Pass: ideal seconds of operations by kind, forward or backward."""
    chip, parts = where.chip, where.chip.devices_per_chip
    found = dict.fromkeys(("matmul", "grouped", "attention", "tiles", "stream"), 0.0)
    for op in ops:
        times = 1.0 if way == "forward" else op.backward + op.again
        found["stream"] += times * op.bytes / chip.memory_bandwidth * parts
        if op.kind != "stream":
            unit, inner = chip.matrix_unit, max(op.inner, 1)
            filled = -(-inner // unit) * unit / inner if op.kind != "attention" else 1.0
            found[op.kind] += times * op.flops * filled / chip.peak(dtype) * parts / chip.matmul_share
        if op.kind in ("matmul", "grouped"):
            found["tiles"] += times * op.flops / chip.memory_bandwidth * parts
    return found


def _traffic(transfers: Sequence[Transfer], links: Links, way: str) -> dict[str, Any]:
    inside, across = [0.0, 0.0], [0.0, 0.0]
    for one in transfers:
        fast, slow = links.seconds(one)
        inside[HIDDEN if one.hidden else WAITED] += getattr(one, way) * fast
        across[HIDDEN if one.hidden else WAITED] += getattr(one, way) * slow
    return {"links": (inside[0], inside[1]), "network": (across[0], across[1])}


def ideal(cfg: Any, plan: Plan, where: Slice) -> Step:
    """What a step of the plan would take at the catalogue's rates, pass by pass."""
    size, links, layout = sizes(cfg, plan), Links.of(where, plan), plan.layout
    parts = where.chip.devices_per_chip
    everything = layers(cfg, plan)
    passes = []
    for one in everything:
        ops = work.of_layer(cfg, one.spec, one.layout, one.size, memory.flash(cfg, where.chip.platform, one.spec))
        transfers, host = communication.of_layer(cfg, one), _offloaded(cfg, one) / where.chip.host_bandwidth * parts
        passes += [
            Pass(
                f"{one.path} {way}",
                plan.microbatches * one.times,
                **_work(ops, where, cfg.dtype, way),
                **_traffic(transfers, links, way),
                host=host,
                idle=one.idle,
            )
            for way in ("forward", "backward")
        ]
    passes += [
        Pass(f"{transfer.name} {way}", plan.microbatches * times, **_traffic([transfer], links, way))
        for transfer, times in communication.of_pipeline(cfg, plan, everything, size)
        for way in ("forward", "backward")
    ]
    head, transfers = work.of_head(cfg, layout, size), communication.of_rest(cfg, plan.tree, layout, size)
    passes += [
        Pass(
            f"head {way}",
            plan.microbatches,
            **_work(head, where, cfg.dtype, way),
            **_traffic(transfers, links, way),
        )
        for way in ("forward", "backward")
    ]
    passes.append(Pass("optimizer", 1, stream=_updated(cfg, plan) / where.chip.memory_bandwidth * parts))
    return Step(tuple(passes), where.slices, where.chip.name, where.chip.platform)


def _offloaded(cfg: Any, one: Layers) -> float:
    places, kept = remat.places(cfg), memory.named(cfg, one.spec, one.layout, one.size)
    return sum(count for name, count in kept.items() if places[name] == "offload")


def _updated(cfg: Any, plan: Plan) -> float:
    """Bytes that the update moves: gradients are read for their norm and again, parameters and moments read and
    written."""
    return 2 * per_device(plan.tree, plan.layout, cfg.grad_dtype) + 2 * plan.state_bytes


def seconds(step: Step, e: Efficiency) -> Seconds:
    """Ideal seconds with the measured shares. A chip that no calibration saw counts as those that one saw, and keeps
    its matrix units no busier than the busiest of them."""
    own = e.chips.get(step.chip, 1.0)
    busy = own * sum(p.times * p.seconds(e) for p in step.passes)
    if step.chip not in e.chips:
        busy = max(busy, step.fed / e.busiest)
    lost = e.straggler * step.slices**e.straggler_power if step.slices > 1 and step.platform == "tpu" else 0.0
    return Seconds(
        total=busy * (1 + lost),
        arithmetic=own * sum(p.times * p.arithmetic(e) for p in step.passes if p.name != "optimizer"),
        links=sum(p.times * sum(p.links) / e.links for p in step.passes),
        network=sum(p.times * sum(p.network) / e.network for p in step.passes),
        host=sum(p.times * p.host / e.host for p in step.passes),
        optimizer=sum(p.times * p.seconds(e) for p in step.passes if p.name == "optimizer"),
        bubble=own * sum(p.idle * p.times * p.seconds(e) for p in step.passes),
        stragglers=busy * lost,
    )


def forecast(cfg: Any, plan: Plan, where: Slice, e: Efficiency) -> Seconds:
    """Seconds of one optimizer step of a plan on a slice."""
    return seconds(ideal(cfg, plan, where), e)
