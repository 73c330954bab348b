"""`auto_plan=true`: mesh, microbatches and remat policy chosen together for a global batch, by the forecast itself.

Every mesh that the planner finds legal, with every policy that the program can run, is tried with the fewest
microbatches that fit; the fastest by the time model wins. To fit means to leave the room that the memory model's error
asks for; a plan that leaves less, and would be faster by a real margin, is named with the keys to type. What is fixed
by hand is not touched: a key that stands on the command line or in the environment, or has another value than its
default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from MaxText import blueprint, catalogue, cost, decoder, planner
from MaxText import hardware as hardware_room
from MaxText.config.resolved import scalar
from MaxText.cost import host, memory, timing
from MaxText.cost.memory import HOPE, ROOM
from MaxText.errors import PlanError
from MaxText.forecast import record
from MaxText.forecast.refusal import refusal
from MaxText.forecast.space import LEAN, PIECES_KEY, With, by_hand, divisors, meshes, policies, rows_of
from MaxText.forecast.text import duration, size
from MaxText.hardware import Hardware, with_rates
from MaxText.planner import MESH_AXES

SHOWN = 4
FINALISTS = 4  # meshes on which every policy is tried
ALIKE = 1.005  # within half a percent the simpler plan wins
REAL = 0.05  # of a step: what a plan without room must gain to be worth a line, about the time model's own error


@dataclass(frozen=True)
class Tried:
    """One candidate: what it changes, and what came of it. `lacks` says what is too small for the room that a choice
    leaves, "" where nothing is; `seconds` is None where it does not fit at all."""

    mesh: Mapping[str, int]
    policy: str
    microbatches: int
    changes: Mapping[str, Any]
    bytes: float
    seconds: float | None
    lacks: str = ""

    @property
    def fits(self) -> bool:
        """Whether it fits and leaves room."""
        return not self.lacks

    def words(self) -> str:
        large = " ".join(f"{axis}={n}" for axis, n in self.mesh.items() if n > 1) or "one device"
        large += " (between slices)" if self.changes.get("dcn_pipeline_parallelism", 1) > 1 else ""
        pieces = f", {self.changes[PIECES_KEY]} pieces" if PIECES_KEY in self.changes else ""
        return f"{large}{pieces}, {self.microbatches} microbatches, {self.policy}"


@dataclass(frozen=True)
class Choice:
    """What the search found: the configuration with the choices in it, {key: value} of these, {key: reason}, the best
    rejected alternatives and why each lost, and what a person may want to do otherwise."""

    cfg: Any
    changes: Mapping[str, Any]
    reasons: dict[str, str]
    rejected: tuple[dict[str, str], ...]
    warnings: tuple[str, ...]


def choose(cfg: Any, hardware: Hardware) -> Choice:
    """The fastest plan that leaves room.

    Raises:
      PlanError: where no mesh is legal, or nothing fits: the nearest miss with its numbers."""
    if hardware.slice is None:
        raise PlanError(
            f"auto_plan=true: nothing is known of the speed of {hardware.kind}. Set the degrees by hand, or name a "
            "slice with hardware=NAME.",
            id="plan.unknown-speed",
        )
    tree = decoder.declare(cfg)
    tried, illegal = _try_all(cfg, hardware, tree)
    fitting = [one for one in tried if one.fits]
    if not fitting:
        raise _nothing(cfg, hardware, tree, tried, illegal)
    least = min(fitting, key=_order).seconds or 0.0
    alike = [one for one in fitting if (one.seconds or 0.0) <= ALIKE * least]
    best = min(alike, key=lambda one: (sum(n > 1 for n in one.mesh.values()), one.microbatches, one.seconds))
    return Choice(
        cfg.replace(**best.changes),
        best.changes,
        _reasons(cfg, best, tried),
        _rejected(best, tried),
        _faster(cfg, best, tried, hardware),
    )


def of_config(cfg: Any) -> record.Forecast:
    """The forecast of a configuration on the slice it names, or on what is plugged in here."""
    found = hardware_of(cfg)
    return planned(hardware_room.resolve(cfg, found)[0], found)


def planned(cfg: Any, hardware: Hardware) -> record.Forecast:
    """The forecast of a configuration, whose dtype is resolved; with auto_plan=true of the one that the search finds,
    with its reasons."""
    if not cfg.auto_plan:
        return record.make(cfg, hardware)
    best = choose(cfg, with_rates(hardware))
    return record.make(best.cfg, hardware, reasons=best.reasons, rejected=best.rejected, warnings=best.warnings)


def hardware_of(cfg: Any) -> Hardware:
    """The slice that a configuration names, or what is plugged in here."""
    if catalogue.is_slice(cfg.hardware):
        return hardware_room.named(cfg.hardware, cfg.num_slices)
    return hardware_room.of(cfg)


def _try_all(cfg: Any, hardware: Hardware, tree: blueprint.Blueprint) -> tuple[list[Tried], dict[str, str]]:
    """(what was tried, {mesh in words: why the planner refuses it}). Every mesh is tried with the policy that needs the
    least memory; the few fastest of them with all others."""
    illegal: dict[str, str] = {}
    rows, ways = rows_of(cfg, hardware), policies(cfg, hardware)
    first = [one for mesh in meshes(cfg, hardware) for one in _legal(cfg, hardware, tree, mesh, rows, illegal)]
    tried = list(first)
    for one in sorted((one for one in first if one.fits), key=_order)[:FINALISTS]:
        for name, change in ways[:-1]:
            tried += _fewest(cfg, hardware, tree, name, {**one.changes, **change}, rows)
    return tried, illegal


def _legal(
    cfg: Any, hardware: Hardware, tree: blueprint.Blueprint, degrees: dict[str, int], rows: int, illegal: dict[str, str]
) -> list[Tried]:
    """A mesh with the policy that needs least memory, and where a host has too little for it, with the one that needs
    least of a device alone; nothing, with a note in `illegal`, where the planner refuses the mesh."""
    *others, (name, change) = policies(cfg, hardware)
    degrees = degrees | {"global_batch_size": rows}
    try:
        found = _fewest(cfg, hardware, tree, name, degrees | change, rows)
        if not found[-1].fits and found[-1].bytes <= ROOM * (hardware.memory_bytes or math.inf):
            for name, change in (way for way in others if way[0] == LEAN):
                found += _fewest(cfg, hardware, tree, name, degrees | change, rows)
        return found
    except PlanError as error:
        large = {key.removesuffix("_parallelism"): n for key, n in degrees.items() if n > 1 and "parallelism" in key}
        illegal[" ".join(f"{key}={n}" for key, n in large.items())] = str(error).splitlines()[0]
        return []


def _fewest(
    cfg: Any, hardware: Hardware, tree: blueprint.Blueprint, name: str, changes: dict[str, Any], rows: int
) -> list[Tried]:
    """The candidate with the fewest microbatches that fit (the last that is legal where none does), and before it those
    that fit without room."""
    fixed = by_hand(cfg, "gradient_accumulation_steps")
    counts = [cfg.gradient_accumulation_steps] if fixed else divisors(rows, 64)
    found: list[Tried] = []
    while counts:
        count, *counts = counts
        here = With(cfg, changes | {"gradient_accumulation_steps": count})
        try:
            plan = planner.make(here, tree, hardware)
        except PlanError:
            if not found:
                raise
            continue
        one = _candidate(here, plan, hardware, name)
        found = [*(other for other in found if other.seconds is not None), one]
        capacity = hardware.memory_bytes or math.inf
        if one.fits or plan.state_bytes > capacity:  # nor would more of them do
            break
        counts = [n for n in counts if rows // n % plan.layout.ways("activation_batch") == 0]
        # What is not state shrinks with their number at best.
        least = count * (one.bytes - plan.state_bytes) / (HOPE * capacity - plan.state_bytes)
        counts = [n for n in counts if n >= least] or counts[-1:]
    return found


def _candidate(cfg: Any, plan: planner.Plan, hardware: Hardware, policy: str) -> Tried:
    assert hardware.slice is not None
    needs = memory.forecast(cfg, plan, hardware)
    above, device = _lacks_on_host(cfg, plan, needs, hardware), _lacks(needs, hardware)
    held = not above and needs.total <= HOPE * (hardware.memory_bytes or math.inf)
    seconds = timing.forecast(cfg, plan, hardware.slice, cost.load()).total if held else None
    mesh = {axis: plan.mesh_shape[axis] for axis in MESH_AXES}
    return Tried(mesh, policy, plan.microbatches, cfg._changes, needs.total, seconds, above or device)


def _lacks(needs: memory.Memory, hardware: Hardware) -> str:
    """How much too little room a device has; "" where there is enough."""
    if hardware.memory_bytes is None or needs.total <= ROOM * hardware.memory_bytes:
        return ""
    return f"{size(needs.total)} of {size(ROOM * hardware.memory_bytes)} a device"


def _lacks_on_host(cfg: Any, plan: planner.Plan, needs: memory.Memory, hardware: Hardware) -> str:
    """The same of a host, where something is offloaded to it: what saves need there is no matter of choice."""
    found = host.forecast(cfg, plan, hardware, needs)
    if not found.offloaded or found.has_room:
        return ""
    return f"{size(found.total)} of {size(host.ROOM * (found.capacity or 0))} in the memory of a host"


def _lost(one: Tried, best: Tried) -> str:
    """Why a candidate is not the best one."""
    if one.seconds is None:
        return f"does not fit: {one.lacks}"
    assert best.seconds is not None
    slower = one.seconds / best.seconds - 1
    compared = f"{abs(slower):.0%} {'faster' if slower < 0 else 'slower'}" if abs(slower) >= 0.005 else "as fast"
    return f"{duration(one.seconds)} a step, {compared}{'; no room: ' if one.lacks else ''}{one.lacks}"


def _closer(tried: list[Tried], hardware: Hardware, seconds: float) -> list[Tried]:
    """Plans that leave no room and are faster than `seconds` by a real margin: the fastest that is within a device by
    the estimate, and one still faster that is within it only if the estimate is too high."""
    found: list[Tried] = []
    for share in (1.0, HOPE):
        near = [one for one in tried if one.lacks and one.bytes <= share * (hardware.memory_bytes or math.inf)]
        other = min(near, key=_order, default=None)
        if other is not None and other.seconds is not None and other.seconds < (1 - REAL) * seconds:
            found.append(other)
            seconds = other.seconds
    return found


def _faster(cfg: Any, best: Tried, tried: list[Tried], hardware: Hardware) -> tuple[str, ...]:
    """A line for each plan that a person may want to dare, with what to type."""
    seconds = best.seconds or 0.0
    return tuple(
        f"a faster plan may fit: {one.words()}: {duration(one.seconds or 0.0)} a step instead of {duration(seconds)}, "
        f"by the estimate {_share(one, hardware)}. auto_plan=true leaves {1 - ROOM:.1%} free, so that 19 of 20 plans "
        f"fit. {_to_try(cfg, one, hardware)}"
        for one in _closer(tried, hardware, seconds)
    )


def _share(one: Tried, hardware: Hardware) -> str:
    capacity = hardware.memory_bytes or math.inf
    return f"{size(one.bytes)} of {size(capacity)} a device ({one.bytes / capacity:.0%})"


def _to_try(cfg: Any, one: Tried, hardware: Hardware) -> str:
    """What to type for a candidate in place of auto_plan."""
    new = {key: value for key, value in one.changes.items() if getattr(cfg, key) != value}
    keys = " ".join(f"{key}={scalar(value)}" for key, value in ({"auto_plan": False} | new).items())
    return f"Ask the compiler about this one: {keys} compile=true" if hardware.has_compiler else f"To try it: {keys}"


def _reasons(cfg: Any, best: Tried, tried: list[Tried]) -> dict[str, str]:
    """For each choice the best candidate that differs in it, and why it lost."""
    found = {"global_batch_size": f"{best.changes['global_batch_size']} rows a step, as configured"}
    for axis, degree in best.mesh.items():
        others = [one for one in tried if one.mesh[axis] != degree]
        level = "dcn" if best.changes.get(f"dcn_{axis}_parallelism", 1) > 1 else "ici"
        if others and not by_hand(cfg, f"{level}_{axis}_parallelism"):
            found[f"{level}_{axis}_parallelism"] = f"{degree}: {_instead(others, best)}"
    same = [one for one in tried if one.mesh == best.mesh]
    if others := [one for one in same if one.policy != best.policy]:
        found["remat_policy"] = f"{best.policy}: {_instead(others, best)}"
    others = [one for one in same if one.changes.get(PIECES_KEY) != best.changes.get(PIECES_KEY)]
    if others and PIECES_KEY in best.changes:
        found[PIECES_KEY] = f"{best.changes[PIECES_KEY]}: {_instead(others, best)}"
    if not by_hand(cfg, "gradient_accumulation_steps"):
        found["gradient_accumulation_steps"] = f"{best.microbatches}: the fewest that fit ({size(best.bytes)} a device)"
    return found


def _order(one: Tried) -> tuple[float, float]:
    return (one.seconds if one.seconds is not None else math.inf, one.bytes)


def _instead(others: list[Tried], best: Tried) -> str:
    other = min(others, key=_order)
    return f"the best otherwise is {other.words()}: {_lost(other, best)}"


def _rejected(best: Tried, tried: list[Tried]) -> tuple[dict[str, str], ...]:
    """The best candidate of each other mesh, and each other policy on the chosen mesh."""
    per_mesh: dict[tuple[int, ...], Tried] = {}
    for one in sorted(tried, key=_order):
        per_mesh.setdefault(tuple(one.mesh.values()), one)
    meshes = [one for key, one in per_mesh.items() if key != tuple(best.mesh.values())][:SHOWN]
    same = [one for one in sorted(tried, key=_order) if one.mesh == best.mesh and one.policy != best.policy][:SHOWN]
    return tuple({"what": one.words(), "why": _lost(one, best)} for one in (*meshes, *same))


def _nothing(
    cfg: Any, hardware: Hardware, tree: blueprint.Blueprint, tried: list[Tried], illegal: dict[str, str]
) -> PlanError:
    if not tried:
        shown = "\n".join(f"  {mesh or 'one device'}: {why}" for mesh, why in list(illegal.items())[:SHOWN])
        return PlanError(
            f"auto_plan=true: no mesh is legal. The first that were tried:\n{shown}", id="plan.nothing-legal"
        )
    if close := _closer(tried, hardware, math.inf):
        return PlanError(
            f"auto_plan=true: of {len(tried)} plans none leaves {1 - ROOM:.1%} of a device free, so that 19 of 20 fit. "
            f"The nearest is {close[0].words()}, by the estimate {_share(close[0], hardware)}. "
            f"{_to_try(cfg, close[0], hardware)}",
            id="plan.memory",
        )
    nearest = min(tried, key=lambda one: one.bytes)
    one = record.make(cfg.replace(**nearest.changes), hardware, tree)
    if one.memory.total <= ROOM * (hardware.memory_bytes or math.inf):
        return PlanError(
            f"auto_plan=true: of {len(tried)} plans none fits; the nearest is {nearest.words()}, and that needs "
            f"{nearest.lacks}. Set remat_policy=full, a smaller global_batch_size, or take more hosts.",
            id="plan.memory",
        )
    return refusal(one, f"auto_plan=true: of {len(tried)} plans none fits; the nearest is {nearest.words()}.")
