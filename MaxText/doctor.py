"""`python -m MaxText doctor CONFIG [key=value ...] [--apply]`: what is wrong with a recipe on a hardware, and its cure.

A rule looks at a forecast and returns what it found, with the keys that cure it; the forecast of the cure is made
before it is offered, so that no advice makes things worse. `--apply` writes the cures into CONFIG and looks again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from MaxText import catalogue, config, forecast
from MaxText import hardware as hardware_room
from MaxText.config.resolved import scalar
from MaxText.cost.memory import ROOM
from MaxText.errors import ConfigError, PlanError, StorageError
from MaxText.forecast import Forecast
from MaxText.forecast.text import duration, size
from MaxText.hardware import Hardware
from MaxText.plan_verb import require_config

ROUNDS = 6
WORTH = 0.02  # of a step: what a cure of slowness must gain to be offered


@dataclass(frozen=True)
class Finding:
    """A problem in words, and the values that cure it (none: it cannot be cured by keys alone)."""

    rule: str
    problem: str
    cure: Mapping[str, Any]

    def text(self) -> str:
        lines = "".join(f"\n    {key}={scalar(value)}" for key, value in self.cure.items())
        return f"{self.rule}: {self.problem}{lines}"


FATAL = ("legality", "memory")  # rules whose findings keep a recipe from running
Rule = Callable[[Forecast], Finding | None]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    def register(found: Rule) -> Rule:
        RULES[name] = found
        return found

    return register


def _with(one: Forecast, **changes: Any) -> Forecast | None:
    """The forecast with other values; None where the planner refuses them."""
    try:
        return forecast.make(one.cfg.replace(**changes), one.hardware)
    except (ConfigError, PlanError):
        return None


def _has_room(one: Forecast) -> bool:
    return one.capacity is None or one.memory.total <= ROOM * one.capacity


def _faster(one: Forecast, other: Forecast | None) -> str:
    """By how much another forecast is faster, in words; empty where it is not, or does not fit."""
    if other is None or one.seconds is None or other.seconds is None or not _has_room(other):
        return ""
    gain = 1 - other.seconds.total / one.seconds.total
    times = f"{duration(other.seconds.total)} instead of {duration(one.seconds.total)} a step"
    return times if gain >= WORTH else ""


@rule("memory")
def too_large(one: Forecast) -> Finding | None:
    """The plan does not fit."""
    if _has_room(one):
        return None
    rows, count = one.plan.global_batch_size, one.plan.microbatches
    ladder: list[dict[str, Any]] = [{"remat_policy": "full"}]
    ladder += [
        {"remat_policy": "full", "global_batch_size": rows, "gradient_accumulation_steps": count * more}
        for more in range(2, 65)
        if rows % (count * more) == 0
    ]
    ladder += [step | {"num_vocab_tiling": 8} for step in ladder]
    for cure in ladder:
        other = _with(one, **cure)
        if other is not None and _has_room(other):
            changed = {key: value for key, value in cure.items() if getattr(one.cfg, key) != value}
            return Finding("memory", f"{_needs(one)}; with these keys {_needs(other)}", changed)
    if not one.cfg.auto_plan and (other := _planned(one)) is not None:
        return Finding("memory", f"{_needs(one)}; as auto_plan chooses, {_needs(other)}", {"auto_plan": True})
    return Finding("memory", f"{_needs(one)}; no mesh, remat policy or microbatch helps: take more devices", {})


def _planned(one: Forecast) -> Forecast | None:
    """What the automatic choice makes of the same rows; None where it finds nothing."""
    try:
        rows = one.plan.global_batch_size
        return forecast.of_config(one.cfg.replace(auto_plan=True, global_batch_size=rows))
    except (ConfigError, PlanError):
        return None


def _needs(one: Forecast) -> str:
    return f"{size(one.memory.total)} of {size(one.capacity or 0)} a device"


@rule("remat")
def recomputes_for_nothing(one: Forecast) -> Finding | None:
    """Memory lies idle while the backward pass computes again."""
    if one.cfg.remat_policy != "full" or one.hardware.platform == "cpu":
        return None
    for policy in ("minimal_with_context", "save_dot_except_mlp", "save_qkv_proj", "save_out_proj"):
        if gain := _faster(one, _with(one, remat_policy=policy)):
            return Finding("remat", f"there is room to keep more: {gain}", {"remat_policy": policy})
    return None


@rule("accumulation")
def more_microbatches_than_needed(one: Forecast) -> Finding | None:
    """Weights are gathered once for every microbatch."""
    for count in range(1, one.plan.microbatches):
        if one.plan.microbatches % count == 0:
            cure = {"global_batch_size": one.plan.global_batch_size, "gradient_accumulation_steps": count}
            if gain := _faster(one, _with(one, **cure)):
                return Finding("accumulation", f"{count} microbatches fit: {gain}", cure)
    return None


@rule("precision")
def float32_on_an_accelerator(one: Forecast) -> Finding | None:
    """Matrix units are for narrow types."""
    if one.cfg.dtype != "float32" or one.hardware.platform == "cpu":
        return None
    text = f"dtype=float32 on {one.hardware.kind}, whose peak is in bfloat16; weights stay {one.cfg.weight_dtype}"
    return Finding("precision", text, {"dtype": "bfloat16"})


@rule("slices")
def pieces_across_slices(one: Forecast) -> Finding | None:
    """An axis that works in every layer lies on the slow network."""
    busy = {axis: n for axis, n in one.plan.dcn.items() if n > 1 and axis not in ("data", "pipeline")}
    if not busy:
        return None
    cure = {f"dcn_{axis}_parallelism": 1 for axis in busy} | {"dcn_data_parallelism": one.plan.dcn["data"]}
    for degree in busy.values():
        cure["dcn_data_parallelism"] *= degree
    gain = _faster(one, _with(one, **cure))
    shown = ", ".join(f"dcn_{axis}_parallelism={n}" for axis, n in busy.items())
    return (
        Finding("slices", f"{shown} works between slices in every layer; with data there: {gain}", cure)
        if gain
        else None
    )


@rule("copies")
def copies_where_pieces_would_do(one: Forecast) -> Finding | None:
    """All parameters on every device."""
    mesh = one.plan.mesh_shape
    if one.plan.ici["data"] == 1 or mesh["fsdp"] > 1 or one.plan.parameter_bytes < 1 << 30:
        return None
    cure = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": one.plan.ici["data"]}
    other = _with(one, **cure)
    if other is None:
        return None
    both = f"{size(one.plan.state_bytes)} of state, {size(other.plan.state_bytes)} in pieces"
    text = f"every device holds all parameters: {both}"
    return Finding("copies", text, cure)


@rule("tensor")
def tensor_where_fsdp_would_do(one: Forecast) -> Finding | None:
    """Sums over tensor are waited for in every layer."""
    ways = one.plan.ici["tensor"]
    if ways == 1:
        return None
    cure = {"ici_tensor_parallelism": 1, "ici_fsdp_parallelism": one.plan.ici["fsdp"] * ways}
    gain = _faster(one, _with(one, **cure))
    return Finding("tensor", f"tensor={ways} is waited for in every layer; with fsdp: {gain}", cure) if gain else None


@rule("unrolled")
def deep_and_unrolled(one: Forecast) -> Finding | None:
    """Every layer is compiled by itself."""
    if one.cfg.scan_layers or one.cfg.num_decoder_layers <= 8:
        return None
    text = f"scan_layers=false compiles {one.cfg.num_decoder_layers} layers one by one; the loop gives the same result"
    return Finding("unrolled", text, {"scan_layers": True})


@rule("checkpoints")
def saves_too_often(one: Forecast) -> Finding | None:
    """Writing a checkpoint takes longer than the steps between two."""
    cfg = one.cfg
    if not cfg.enable_checkpointing or one.seconds is None or one.hardware.platform == "cpu":
        return None
    between = cfg.checkpoint_period * one.seconds.total
    if one.checkpoint_seconds <= between:
        return None
    period = int(2 * one.checkpoint_seconds / one.seconds.total) + 1
    times = f"{duration(one.checkpoint_seconds)} to write, {cfg.checkpoint_period} steps {duration(between)}"
    text = f"a checkpoint takes {times}"
    return Finding("checkpoints", text, {"checkpoint_period": period})


@rule("offload")
def offloads_to_itself(one: Forecast) -> Finding | None:
    """On a CPU host and device memory are the same."""
    from MaxText import remat

    if one.hardware.platform != "cpu" or not remat.offloads(one.cfg):
        return None
    cure = {"remat_policy": "full"} | {
        name: _default(name) for name in remat.KEYS if getattr(one.cfg, name) != _default(name)
    }
    return Finding("offload", "on a CPU offloading copies from memory to memory", cure)


def _default(name: str) -> Any:
    return config.Config.model_fields[name].default


def examine(cfg: Any, hardware: Hardware) -> list[Finding]:
    """Every finding of every rule; a plan that is refused is the only one.

    Where memory does not suffice, advice on speed would be for a run that cannot be."""
    try:
        one = forecast.make(cfg, hardware)
    except PlanError as refused:
        return [_illegal(cfg, hardware, refused)]
    if (large := RULES["memory"](one)) is not None:
        return [large]
    return [found for check in RULES.values() if (found := check(one)) is not None]


def _illegal(cfg: Any, hardware: Hardware, refused: PlanError) -> Finding:
    """The degrees that the search finds, where it finds any."""
    keys = [f"{level}_{axis}_parallelism" for level in ("ici", "dcn") for axis in forecast.MESH_AXES]
    free = {key: _default(key) for key in keys}
    try:
        chosen = forecast.choose(cfg.replace(**free), hardware_room.with_rates(hardware)).cfg
    except (ConfigError, PlanError):
        return Finding("legality", str(refused), {})
    wanted = (*keys, "global_batch_size", "gradient_accumulation_steps", "remat_policy")
    cure = {key: getattr(chosen, key) for key in wanted if getattr(chosen, key) != getattr(cfg, key)}
    return Finding("legality", str(refused), cure)


def doctor(arguments: Sequence[str]) -> str:
    """The verb. Raises whatever config.load raises, and PlanError for a hardware that is none, or with what was found
    ("doctor.cannot-run") where the recipe as it is cannot run."""
    require_config("doctor", [argument for argument in arguments if argument != "--apply"])
    apply = "--apply" in arguments
    given = [argument for argument in arguments if argument != "--apply"]
    said: list[str] = []
    findings: list[Finding] = []
    for _ in range(ROUNDS):
        findings = _look(given)
        said += [found.text() for found in findings] or ["nothing found" if not said else "nothing more found"]
        cures = {key: value for found in findings for key, value in found.cure.items()}
        if not apply or not cures:
            break
        said.append(_write(Path(given[0]), cures, given[1:]))
        findings = []
    if any(found.rule in FATAL for found in findings):
        raise PlanError("\n".join(said), id="doctor.cannot-run")
    return "\n".join(said)


def _look(given: Sequence[str]) -> list[Finding]:
    cfg = config.load(given)
    if not catalogue.is_slice(cfg.hardware):
        from MaxText import runtime

        runtime.prepare(cfg)
    found = forecast.hardware_of(cfg)
    return examine(hardware_room.resolve(cfg, found)[0], found)


def _write(path: Path, cures: Mapping[str, Any], given: Sequence[str]) -> str:
    """Put the cures into the CONFIG file: a line that is there is changed, another is added at the end.

    Raises:
      ConfigError: where the command line says otherwise, and so would win."""
    spoken = {argument.partition("=")[0] for argument in given}
    if clash := sorted(spoken & set(cures)):
        raise ConfigError(
            f"--apply writes into {path}, and the command line wins over it: leave out {', '.join(clash)}.",
            id="doctor.command-line",
        )
    try:
        text = path.read_text(encoding="utf-8")
        for key, value in cures.items():
            line = f"{key}: {scalar(value)}"
            written = re.compile(rf"^{key}:[^#\n]*?(?=[ \t]*(?:#.*)?$)", re.MULTILINE)
            text, changed = written.subn(line.replace("\\", r"\\"), text, count=1)
            text = text if changed else f"{text.rstrip(chr(10))}\n{line}\n"
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", id="doctor.write") from error
    return f"  written into {path}: {', '.join(f'{key}={scalar(value)}' for key, value in cures.items())}"
