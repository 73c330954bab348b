"""`auto_plan=true`: mesh, microbatches and remat policy chosen together for a global batch, by the forecast itself.

Every mesh that the planner finds legal, with every policy that the program can run, is tried with the fewest
microbatches that fit; the fastest by the time model wins. What is fixed by hand is not touched: a key that stands on
the command line or in the environment, or has another value than its default."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from MaxText import blueprint, catalogue, cost, decoder, pipeline, planner
from MaxText import hardware as hardware_room
from MaxText.config.schema import Schema
from MaxText.cost import memory, timing
from MaxText.cost.memory import ROOM
from MaxText.errors import PlanError
from MaxText.forecast import record
from MaxText.forecast.refusal import refusal
from MaxText.forecast.text import duration, size
from MaxText.hardware import Hardware, with_rates
from MaxText.planner import MESH_AXES

SHOWN = 4
FINALISTS = 4  # meshes on which every policy is tried
ALIKE = 1.005  # within half a percent the simpler plan wins
OFFLOADED = "decoder_layer_input=offload"
# From the least recomputation to the least memory; the later ones need a host with memory of its own.
KEPT = ("minimal_with_context", "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "full")
ON_THE_HOST = ("minimal_offloaded", "qkv_proj_offloaded")
PIECES_KEY = "num_pipeline_microbatches"
LARGEST = {"tensor": 16, "context": 8, "expert": 32}
STAGES = (2, 4, 8)  # of a pipeline within a slice
PIECES = (1, 2, 4)  # microbatches of a pipeline, times its stages
HOST_ROOM = 0.8  # of a host's memory that offloaded activations may fill


class With:
    """A configuration with a few other values: enough to plan with, at no cost. Not checked; `replace` is."""

    def __init__(self, cfg: Any, changes: Mapping[str, Any]):
        self._cfg, self._changes = cfg, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._cfg, name)


@dataclass(frozen=True)
class Tried:
    """One candidate: what it changes, and what came of it. `seconds` is None where it does not fit, and `lacks`
    says what is too small."""

    mesh: Mapping[str, int]
    policy: str
    microbatches: int
    changes: Mapping[str, Any]
    bytes: float
    seconds: float | None
    lacks: str = ""

    def words(self) -> str:
        large = " ".join(f"{axis}={n}" for axis, n in self.mesh.items() if n > 1) or "one device"
        large += " (between slices)" if self.changes.get("dcn_pipeline_parallelism", 1) > 1 else ""
        pieces = f", {self.changes[PIECES_KEY]} pieces" if PIECES_KEY in self.changes else ""
        return f"{large}{pieces}, {self.microbatches} microbatches, {self.policy}"


def by_hand(cfg: Any, key: str) -> bool:
    """Whether a person set this key, so that it stays."""
    origin = str(cfg.origin(key))
    return (
        origin == "command line"
        or origin.startswith("environment")
        or getattr(cfg, key) != Schema.model_fields[key].default
    )


def choose(cfg: Any, hardware: Hardware) -> tuple[Any, dict[str, str], tuple[dict[str, str], ...]]:
    """(the configuration with the choices in it, {key: reason}, the best rejected alternatives and why each lost).

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
    times = [one.seconds for one in tried if one.seconds is not None]
    if not times:
        raise _nothing(cfg, hardware, tree, tried, illegal)
    alike = [one for one in tried if one.seconds is not None and one.seconds <= ALIKE * min(times)]
    best = min(alike, key=lambda one: (sum(n > 1 for n in one.mesh.values()), one.microbatches, one.seconds))
    return cfg.replace(**best.changes), _reasons(cfg, best, tried, hardware), _rejected(best, tried, hardware)


def chosen(cfg: Any, hardware: Hardware) -> Any:
    """The configuration itself, or with auto_plan=true the one that the search finds."""
    return choose(cfg, with_rates(hardware))[0] if cfg.auto_plan else cfg


def of_config(cfg: Any) -> record.Forecast:
    """The forecast of a configuration on the slice it names, or on what is plugged in here."""
    found = hardware_of(cfg)
    cfg, _ = hardware_room.resolve(cfg, found)
    if not cfg.auto_plan:
        return record.make(cfg, found)
    cfg, reasons, rejected = choose(cfg, with_rates(found))
    return record.make(cfg, found, reasons=reasons, rejected=rejected)


def hardware_of(cfg: Any) -> Hardware:
    """The slice that a configuration names, or what is plugged in here."""
    if catalogue.is_slice(cfg.hardware):
        return hardware_room.named(cfg.hardware, cfg.num_slices)
    return hardware_room.of(cfg)


def _rows(cfg: Any, hardware: Hardware) -> int:
    """Rows of an optimizer step."""
    per_step = cfg.per_device_batch_size * hardware.devices * cfg.gradient_accumulation_steps
    return cfg.global_batch_size or max(1, round(per_step))


def _powers(number: int, limit: int) -> list[int]:
    """1 and the powers of two up to `limit` that divide `number`."""
    return [1 << n for n in range(limit.bit_length()) if number % (1 << n) == 0]


def _divisors(number: int, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def meshes(cfg: Any, hardware: Hardware) -> Iterator[dict[str, int]]:
    """Degrees within and across slices that multiply to the devices, and the pieces of a pipeline: {key: value}. Axes
    set by hand are kept; data takes what fsdp cannot divide, and a pipeline stands beside neither data nor context."""
    for across in _across(cfg, hardware):
        for inside in _inside(cfg, hardware):
            stages = across.get("dcn_pipeline_parallelism", cfg.dcn_pipeline_parallelism)
            stages *= inside["ici_pipeline_parallelism"]
            if stages == 1:
                yield inside | across
            else:
                yield from (inside | across | pieces for pieces in _pieces(With(cfg, inside | across), stages))


def _pieces(cfg: Any, stages: int) -> list[dict[str, int]]:
    """How the rows may pass a pipeline; empty layers fill it where its own do not divide. None where it cannot be."""
    filled: dict[str, int] = {}
    if pipeline.problems(cfg, stages):
        filled = {"pipeline_pad_layers": True}
        if pipeline.problems(With(cfg, filled), stages):
            return []
    return [filled] if by_hand(cfg, PIECES_KEY) else [filled | {PIECES_KEY: stages * times} for times in PIECES]


def _inside(cfg: Any, hardware: Hardware) -> Iterator[dict[str, int]]:
    """Degrees within a slice."""
    inside, rows = hardware.devices // hardware.slices, _rows(cfg, hardware)
    keys = {axis: f"ici_{axis}_parallelism" for axis in MESH_AXES}
    fixed = {axis: getattr(cfg, key) for axis, key in keys.items() if by_hand(cfg, key) and getattr(cfg, key) != -1}
    choices = {
        axis: [fixed[axis]]
        if axis in fixed
        else [n for n in _powers(inside, limit) if _useful(cfg, axis, n, rows, hardware.devices)]
        for axis, limit in LARGEST.items()
    }
    choices["pipeline"] = [fixed["pipeline"]] if "pipeline" in fixed else [1, *(n for n in STAGES if inside % n == 0)]
    for combination in itertools.product(*choices.values()):
        degrees = {"fsdp_transpose": fixed.get("fsdp_transpose", 1)} | dict(zip(choices, combination, strict=True))
        rest, odd = divmod(inside, math.prod(degrees.values()))
        if odd or rest == 0 or (_new_pipeline(degrees, fixed) and degrees["context"] > 1):
            continue
        for data in [fixed["data"]] if "data" in fixed else [1] if _new_pipeline(degrees, fixed) else _powers(rest, 8):
            fsdp, odd = divmod(rest, data)
            if not odd and fixed.get("fsdp", fsdp) == fsdp:
                found = degrees | {"data": data, "fsdp": fsdp}
                yield {keys[axis]: found[axis] for axis in MESH_AXES}


def _new_pipeline(degrees: Mapping[str, int], fixed: Mapping[str, int]) -> bool:
    return degrees["pipeline"] > 1 and "pipeline" not in fixed


def _useful(cfg: Any, axis: str, degree: int, rows: int, devices: int) -> bool:
    if axis == "expert" and degree > 1:
        return "expert" in dict(planner.RULES)["experts"] and cfg.num_experts % degree == 0
    long = cfg.max_target_length >= 16_384 or rows < devices  # else rows are enough to split
    return axis != "context" or degree == 1 or (long and cfg.max_target_length // degree >= 2048)


def _across(cfg: Any, hardware: Hardware) -> list[dict[str, int]]:
    """Slices hold copies, so that only gradients cross the network, or stages; unless set by hand. The network between
    nodes of GPUs is fast enough for pieces as well."""
    keys = [f"dcn_{axis}_parallelism" for axis in MESH_AXES]
    if any(by_hand(cfg, key) for key in keys):
        return [{}]
    one, slices = dict.fromkeys(keys, 1), hardware.slices
    found = [
        one | {"dcn_data_parallelism": slices // n, "dcn_pipeline_parallelism": n} for n in _powers(slices, slices)
    ]
    if hardware.platform == "gpu" and slices > 1:
        found.append(one | {"dcn_fsdp_parallelism": slices})
    return found


def policies(cfg: Any, hardware: Hardware) -> list[tuple[str, dict[str, Any]]]:
    """(name, changes); the one set by hand alone."""
    if by_hand(cfg, "remat_policy"):
        return [(cfg.remat_policy, {})]
    here = {"decoder_layer_input": "device"}
    kept = [(name, here | {"remat_policy": name}) for name in KEPT]
    if hardware.platform == "cpu":  # host and device memory are the same there
        return [("none", here | {"remat_policy": "none"}), *kept]
    host = [(name, here | {"remat_policy": name}) for name in ON_THE_HOST]
    return [*kept, *host, (OFFLOADED, {"remat_policy": "custom", "decoder_layer_input": "offload"})]


def _try_all(cfg: Any, hardware: Hardware, tree: blueprint.Blueprint) -> tuple[list[Tried], dict[str, str]]:
    """(what was tried, {mesh in words: why the planner refuses it}). Every mesh is tried with the policy that needs the
    least memory; the few fastest of them with all others."""
    illegal: dict[str, str] = {}
    rows, ways = _rows(cfg, hardware), policies(cfg, hardware)
    first = [one for degrees in meshes(cfg, hardware) if (one := _legal(cfg, hardware, tree, degrees, rows, illegal))]
    tried = list(first)
    for one in sorted(first, key=_order)[:FINALISTS]:
        tried += [_fewest(cfg, hardware, tree, name, {**one.changes, **change}, rows) for name, change in ways[:-1]]
    return tried, illegal


def _legal(
    cfg: Any, hardware: Hardware, tree: blueprint.Blueprint, degrees: dict[str, int], rows: int, illegal: dict[str, str]
) -> Tried | None:
    """A mesh with the last policy; None with a note in `illegal` where the planner refuses it."""
    name, change = policies(cfg, hardware)[-1]
    try:
        return _fewest(cfg, hardware, tree, name, degrees | change | {"global_batch_size": rows}, rows)
    except PlanError as error:
        shown = " ".join(f"{key.split('_')[1]}={n}" for key, n in degrees.items() if n > 1)
        illegal[shown] = str(error).splitlines()[0]
        return None


def _fewest(
    cfg: Any, hardware: Hardware, tree: blueprint.Blueprint, name: str, changes: dict[str, Any], rows: int
) -> Tried:
    """The candidate with the fewest microbatches that fit; the last that is legal where none does."""
    fixed = by_hand(cfg, "gradient_accumulation_steps")
    last: Tried | None = None
    ways = 1
    for count in [cfg.gradient_accumulation_steps] if fixed else _divisors(rows, 64):
        if rows // count % ways:
            continue
        here = With(cfg, changes | {"gradient_accumulation_steps": count})
        try:
            plan = planner.make(here, tree, hardware)
        except PlanError:
            if last is None:
                raise
            continue
        ways = plan.layout.ways("activation_batch")
        needs = memory.forecast(here, plan, hardware)
        mesh = {axis: plan.mesh_shape[axis] for axis in MESH_AXES}
        lacks = _lacks(needs, hardware)
        last = Tried(mesh, name, count, here._changes, needs.total, None, lacks)
        if not lacks:
            assert hardware.slice is not None
            time = timing.forecast(here, plan, hardware.slice, cost.load()).total
            return Tried(mesh, name, count, here._changes, needs.total, time)
    assert last is not None
    return last


def _lacks(needs: memory.Memory, hardware: Hardware) -> str:
    """What does not fit on the device, or for what is offloaded on its host; "" where all does."""
    chip = hardware.slice.chip if hardware.slice else None
    host = needs.host * chip.chips_per_host * chip.devices_per_chip if chip else 0.0
    if chip and chip.host_memory and host > HOST_ROOM * chip.host_memory:
        return f"{size(host)} of {size(HOST_ROOM * chip.host_memory)} in the memory of a host"
    if hardware.memory_bytes is None or needs.total <= ROOM * hardware.memory_bytes:
        return ""
    return f"{size(needs.total)} of {size(ROOM * hardware.memory_bytes)} a device"


def _lost(one: Tried, best: Tried) -> str:
    """Why a candidate is not the best one."""
    if one.seconds is None:
        return f"does not fit: {one.lacks}"
    assert best.seconds is not None
    return f"{duration(one.seconds)} a step, {one.seconds / best.seconds - 1:.0%} slower"


def _reasons(cfg: Any, best: Tried, tried: list[Tried], hardware: Hardware) -> dict[str, str]:
    """For each choice the best candidate that differs in it, and why it lost."""
    found = {"global_batch_size": f"{_rows(cfg, hardware)} rows a step, as configured"}
    for axis, degree in best.mesh.items():
        others = [one for one in tried if one.mesh[axis] != degree]
        level = "dcn" if best.changes.get(f"dcn_{axis}_parallelism", 1) > 1 else "ici"
        if others and not by_hand(cfg, f"{level}_{axis}_parallelism"):
            found[f"{level}_{axis}_parallelism"] = f"{degree}: {_instead(others, best, hardware)}"
    same = [one for one in tried if one.mesh == best.mesh]
    if others := [one for one in same if one.policy != best.policy]:
        found["remat_policy"] = f"{best.policy}: {_instead(others, best, hardware)}"
    others = [one for one in same if one.changes.get(PIECES_KEY) != best.changes.get(PIECES_KEY)]
    if others and PIECES_KEY in best.changes:
        found[PIECES_KEY] = f"{best.changes[PIECES_KEY]}: {_instead(others, best, hardware)}"
    if not by_hand(cfg, "gradient_accumulation_steps"):
        found["gradient_accumulation_steps"] = f"{best.microbatches}: the fewest that fit ({size(best.bytes)} a device)"
    return found


def _order(one: Tried) -> tuple[float, float]:
    return (one.seconds if one.seconds is not None else math.inf, one.bytes)


def _instead(others: list[Tried], best: Tried, hardware: Hardware) -> str:
    other = min(others, key=_order)
    return f"the best otherwise is {other.words()}: {_lost(other, best)}"


def _rejected(best: Tried, tried: list[Tried], hardware: Hardware) -> tuple[dict[str, str], ...]:
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
    nearest = min(tried, key=lambda one: one.bytes)
    one = record.make(cfg.replace(**nearest.changes), hardware, tree)
    if one.memory.total <= ROOM * (hardware.memory_bytes or math.inf):
        return PlanError(
            f"auto_plan=true: of {len(tried)} plans none fits; the nearest is {nearest.words()}, and that needs "
            f"{nearest.lacks}. Set remat_policy=full, a smaller global_batch_size, or take more hosts.",
            id="plan.memory",
        )
    return refusal(one, f"auto_plan=true: of {len(tried)} plans none fits; the nearest is {nearest.words()}.")
