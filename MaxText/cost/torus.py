"""Where the axes of a mesh lie on the links of a slice, and how fast a collective over them can be.

Axes are placed innermost first, each on whole dims of the torus where some product fits, else on a part of one. A ring
moves data both ways at once; a line, or a part of a ring, ends at a chip that is reached by one link only. The two
devices of a chip that has two count as an innermost dim without a limit of its own: they share the chip's links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from MaxText.catalogue import Slice
from MaxText.planner import MESH_AXES

CORES = -1  # the dim of the devices of one chip


@dataclass(frozen=True)
class Placed:
    """Part of an axis on one dim of the torus: how many chips of it, and whether they close to a ring."""

    dim: int
    extent: int
    ring: bool


Placement = Mapping[str, tuple[Placed, ...]]


def place(where: Slice, degrees: Mapping[str, int]) -> Placement:
    """For every mesh axis larger than one (sizes within a slice) the dims that it lies on."""
    free: dict[int, int] = {dim: size for dim, size in enumerate(where.shape) if size > 1}
    if where.chip.devices_per_chip > 1:
        free[CORES] = where.chip.devices_per_chip
    found: dict[str, tuple[Placed, ...]] = {}
    for axis in reversed(MESH_AXES):
        if degrees.get(axis, 1) > 1:
            found[axis] = _take(where, free, degrees[axis])
    return found


def _take(where: Slice, free: dict[int, int], degree: int) -> tuple[Placed, ...]:
    dims = sorted(free)
    for count in range(1, len(dims) + 1):
        for chosen in itertools.combinations(dims, count):
            if math.prod(free[dim] for dim in chosen) == degree:
                return tuple(_used(where, free, dim, free[dim]) for dim in chosen)
    placed = []
    for dim in dims:
        part = math.gcd(degree, free[dim])
        if part > 1:
            placed.append(_used(where, free, dim, part))
            degree //= part
    return tuple(placed)


def _used(where: Slice, free: dict[int, int], dim: int, extent: int) -> Placed:
    whole = dim != CORES and extent == where.shape[dim]
    free[dim] //= extent
    if free[dim] == 1:
        del free[dim]
    return Placed(dim, extent, whole and where.wraps(extent))


def bandwidth(where: Slice, placement: Placement, axes: Sequence[str]) -> float:
    """Bytes/s that arrive at one device in an all-gather over these axes, by the links alone."""
    placed = [part for axis in axes for part in placement.get(axis, ())]
    links = sum((2 if part.ring else 1) for part in placed if part.dim != CORES)
    shared = 1 if any(part.dim == CORES for part in placed) else where.chip.devices_per_chip
    if not links:  # inside a chip: its own memory is the path
        return where.chip.memory_bandwidth / where.chip.devices_per_chip
    return where.chip.link_bandwidth * links / shared


def describe(where: Slice, parts: Sequence[Placed]) -> str:
    """In words: which neighbours an axis has."""
    words = [
        "the devices of a chip"
        if part.dim == CORES
        else f"{'ring' if part.ring else 'line'} of {part.extent} along dim {part.dim} ({where.shape[part.dim]} chips)"
        for part in parts
    ]
    return ", ".join(words) or "one device"
