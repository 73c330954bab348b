"""What an automatic choice may try: meshes, pieces of a pipeline, policies; what is fixed by hand stands still."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from MaxText import pipeline, planner
from MaxText.config.schema import Schema
from MaxText.hardware import Hardware
from MaxText.planner import MESH_AXES

OFFLOADED = "decoder_layer_input=offload"
# From the least recomputation to the least memory; the later ones need a host with memory of its own.
LEAN = "full"  # least of a device without a host
KEPT = ("minimal_with_context", "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", LEAN)
ON_THE_HOST = ("minimal_offloaded", "qkv_proj_offloaded")
PIECES_KEY = "num_pipeline_microbatches"
LARGEST = {"tensor": 16, "context": 64, "expert": 32}
STAGES = (2, 4, 8)  # of a pipeline within a slice
PIECES = (1, 2, 4)  # microbatches of a pipeline, times its stages


class With:
    """A configuration with a few other values: enough to plan with, at no cost. Not checked; `replace` is."""

    def __init__(self, cfg: Any, changes: Mapping[str, Any]):
        self._cfg, self._changes = cfg, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._cfg, name)


def by_hand(cfg: Any, key: str) -> bool:
    """Whether a person set this key, so that it stays."""
    origin = str(cfg.origin(key))
    return (
        origin == "command line"
        or origin.startswith("environment")
        or getattr(cfg, key) != Schema.model_fields[key].default
    )


def rows_of(cfg: Any, hardware: Hardware) -> int:
    """Rows of an optimizer step."""
    per_step = cfg.per_device_batch_size * hardware.devices * cfg.gradient_accumulation_steps
    return cfg.global_batch_size or max(1, round(per_step))


def divisors(number: int, limit: int) -> list[int]:
    """What divides `number`, from 1 up to `limit`."""
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
    inside, rows = hardware.devices // hardware.slices, rows_of(cfg, hardware)
    keys = {axis: f"ici_{axis}_parallelism" for axis in MESH_AXES}
    fixed = {axis: getattr(cfg, key) for axis, key in keys.items() if by_hand(cfg, key) and getattr(cfg, key) != -1}
    choices = {
        axis: [fixed[axis]]
        if axis in fixed
        else [n for n in divisors(inside, limit) if _useful(cfg, axis, n, rows, hardware.devices)]
        for axis, limit in LARGEST.items()
    }
    choices["pipeline"] = [fixed["pipeline"]] if "pipeline" in fixed else [1, *(n for n in STAGES if inside % n == 0)]
    for combination in itertools.product(*choices.values()):
        degrees = {"fsdp_transpose": fixed.get("fsdp_transpose", 1)} | dict(zip(choices, combination, strict=True))
        rest, odd = divmod(inside, math.prod(degrees.values()))
        if odd or rest == 0 or (_new_pipeline(degrees, fixed) and degrees["context"] > 1):
            continue
        for data in [fixed["data"]] if "data" in fixed else [1] if _new_pipeline(degrees, fixed) else divisors(rest, 8):
            fsdp, odd = divmod(rest, data)
            if not odd and fixed.get("fsdp", fsdp) == fsdp:
                found = degrees | {"data": data, "fsdp": fsdp}
                yield {keys[axis]: found[axis] for axis in MESH_AXES}


def _new_pipeline(degrees: Mapping[str, int], fixed: Mapping[str, int]) -> bool:
    return degrees["pipeline"] > 1 and "pipeline" not in fixed


def _useful(cfg: Any, axis: str, degree: int, rows: int, devices: int) -> bool:
    if axis == "expert" and degree > 1:
        return "expert" in dict(planner.RULES)["experts"] and cfg.num_experts % degree == 0
    if axis != "context" or degree == 1 or rows % devices:  # such rows alone cannot be split over all devices
        return True
    return cfg.max_target_length >= 16_384 and cfg.max_target_length // degree >= 2048


def _across(cfg: Any, hardware: Hardware) -> list[dict[str, int]]:
    """Slices hold copies, so that only gradients cross the network, or stages; unless set by hand. The network between
    nodes of GPUs is fast enough for pieces as well."""
    keys = [f"dcn_{axis}_parallelism" for axis in MESH_AXES]
    if any(by_hand(cfg, key) for key in keys):
        return [{}]
    one, slices = dict.fromkeys(keys, 1), hardware.slices
    found = [
        one | {"dcn_data_parallelism": slices // n, "dcn_pipeline_parallelism": n}
        for n in divisors(slices, cfg.num_decoder_layers)
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
