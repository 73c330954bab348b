"""Degrees of the axes: what is fixed, what fills up, or a refusal with the numbers."""

from __future__ import annotations

import math
from typing import Any

from MaxText.errors import PlanError
from MaxText.hardware import Hardware
from MaxText.planner.rules import MESH_AXES, legal


def _degrees(cfg: Any, level: str) -> dict[str, int]:
    return {axis: getattr(cfg, f"{level}_{axis}_parallelism") for axis in MESH_AXES}


def _filled(degrees: dict[str, int], total: int, level: str, what: str) -> dict[str, int]:
    """Degrees with the one -1 replaced so that the product is `total`; otherwise a refusal with the numbers."""
    free = [axis for axis, size in degrees.items() if size == -1]
    fixed = math.prod(size for size in degrees.values() if size != -1)
    shown = (
        " x ".join(f"{level}_{axis}_parallelism={size}" for axis, size in degrees.items() if size != 1)
        or "all degrees 1"
    )
    if len(free) > 1:
        names = " and ".join(f"{level}_{axis}_parallelism" for axis in free)
        raise PlanError(
            f"{names} are both -1; only one degree can fill up to {total} {what}. Set all but one.", id="plan.two-free"
        )
    if free and total % fixed == 0:
        return {**degrees, free[0]: total // fixed}
    if free or fixed != total:
        raise PlanError(
            f"{shown}: the product of the fixed degrees is {fixed}, but there are {total} {what}. "
            f"{'It must divide' if free else 'It must equal'} {total}, whose divisors are {legal(total)}: change a "
            "degree, or set one to -1 to fill up"
            + (", or num_cpu_devices to simulate more devices on a CPU." if what.startswith("cpu") else "."),
            id="plan.mesh",
        )
    return degrees


def mesh_degrees(cfg: Any, hardware: Hardware) -> tuple[dict[str, int], dict[str, int]]:
    """(degrees within a slice, degrees across slices), every -1 filled."""
    slices = hardware.slices if cfg.num_slices == -1 else cfg.num_slices
    if slices != hardware.slices:
        raise PlanError(
            f"num_slices={slices}, but {hardware.slices} slices are here. Set num_slices=-1 to detect.",
            id="plan.slices",
        )
    dcn = _filled(_degrees(cfg, "dcn"), slices, "dcn", f"slices (num_slices={slices})")
    ici = _filled(_degrees(cfg, "ici"), hardware.devices // slices, "ici", f"{hardware.platform} devices in a slice")
    return ici, dcn
