"""Slices as people name them: a chip with a number, whose meaning differs by chip, or with a shape."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from dataclasses import dataclass

from MaxText.catalogue.chip import Chip, chip, chips
from MaxText.errors import PlanError

PLATFORMS = ("auto", "cpu", "gpu", "tpu")
MOST = 1_000_000  # chips of one run: the largest installation that was ever announced (TPU8t)
_NAME = re.compile(r"(?:(?P<count>\d{1,9})x)?(?P<chip>[a-z][a-z0-9]*)-(?P<size>\d{1,9}(?:x\d{1,9})*)", re.IGNORECASE)
# Tori smaller than a cube of 4x4x4, and the flat ones of v5e and v6e.
_SMALL_3D = ((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))


@dataclass(frozen=True)
class Slice:
    """`slices` times the same block of chips, whose links are fast inside; `shape` is its torus in chips, sorted."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """As a shape, which is never ambiguous."""
        times = f"{self.slices}x" if self.slices > 1 else ""
        return f"{times}{self.chip.name}-{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chips * self.chip.devices_per_chip

    @property
    def hosts(self) -> int:
        """Virtual machines; the flat slices have one of up to 8 chips, or several of 4."""
        chips = math.prod(self.shape)
        alone = self.chip.dims == 2 and chips <= 8
        return self.slices * (1 if alone else max(1, chips // self.chip.chips_per_host))

    @property
    def device_memory(self) -> int:
        """Bytes of one JAX device."""
        return int(self.chip.memory / self.chip.devices_per_chip)

    def wraps(self, size: int) -> bool:
        """Whether a dim of `size` chips is a ring; a ring of two is the same two links."""
        match self.chip.wraps:
            case "never":
                return False
            case "multiples of 4":
                return size >= 4 and size % 4 == 0 and math.prod(self.shape) >= 64
        return size == int(self.chip.wraps)


def is_slice(hardware: str) -> bool:
    """Whether a value of the key `hardware` names a slice, rather than a platform."""
    return hardware.lower() not in PLATFORMS


@functools.cache
def legal_shapes(one: Chip) -> tuple[tuple[int, ...], ...]:
    """Every shape that a slice of this chip comes in, smallest first."""
    if one.dims == 1:
        return tuple((n,) for n in (1, 2, 4, 8) if n <= one.largest)
    if one.dims == 2:
        return _FLAT
    limit = 32
    sides = range(4, limit + 1, 4)
    large = [s for s in itertools.combinations_with_replacement(sides, 3) if math.prod(s) <= one.largest]
    return _SMALL_3D + tuple(sorted(large, key=lambda s: (math.prod(s), max(s))))


def slice_of(hardware: str, num_slices: int = 1) -> Slice:
    """The slice that people mean by this name. `2xv6e-256` and num_slices=2 both mean two.

    Raises:
      PlanError: for an unknown chip, a shape or number that no slice has, with the nearest legal ones.
    """
    found = _NAME.fullmatch(hardware)
    one = chip(found["chip"]) if found else chip(hardware)
    if one is None:
        raise _unknown(hardware, found["chip"] if found else hardware)
    if found is None:
        raise PlanError(
            f"hardware={hardware} names a chip without a size. Write, for example, hardware={_example(one)}.",
            id="plan.slice-size",
        )
    size = found["size"]
    times = int(found["count"] or 1)
    if times < 1:
        raise PlanError(f"hardware={hardware} means {times} slices; there is at least one.", id="plan.slices")
    if times > 1 and num_slices not in (1, -1, times):
        raise PlanError(
            f"hardware={hardware} means {times} slices, and num_slices={num_slices}: leave one of them out.",
            id="plan.slices",
        )
    times = max(times, num_slices)
    if "x" in size:
        meant = Slice(one, _shaped(hardware, one, tuple(sorted(map(int, size.split("x"))))), times)
    else:
        meant = _numbered(hardware, one, int(size), times)
    if meant.chips > MOST:
        each = meant.chips // meant.slices
        raise PlanError(
            f"hardware={hardware} means {meant.slices:,} slices of {each:,} chips, {meant.chips:,} in all; the largest "
            f"installation that was ever announced has {MOST:,}. Legal here: up to {MOST // each:,} slices.",
            id="plan.slices",
        )
    return meant


def of_devices(platform: str, kind: str, devices: int, slices: int) -> Slice | None:
    """The slice that real devices make; None for a platform or a number that the catalogue does not know."""
    one = next((one for one in chips().values() if one.platform == platform and kind.startswith(one.kind)), None)
    if one is None or devices % (slices * one.devices_per_chip):
        return None
    shape = _of_size(one, devices // slices // one.devices_per_chip)
    return Slice(one, shape, slices) if shape else None


def _numbered(hardware: str, one: Chip, number: int, times: int) -> Slice:
    inside, outside = number, times
    if one.naming == "gpus" and number > one.largest and number % one.largest == 0:
        inside, outside = one.largest, times * (number // one.largest)  # the network between nodes is the slow level
    shape = _of_size(one, inside // one.cores_per_chip) if inside % one.cores_per_chip == 0 else None
    if shape is None:
        sizes = sorted({math.prod(s) * one.cores_per_chip for s in legal_shapes(one)})
        near = sorted(sorted(sizes, key=lambda n: abs(n - number))[:6])
        counted = {"cores": "TensorCores, two a chip", "chips": "chips", "gpus": "GPUs"}[one.naming]
        more = f", or a multiple of {one.largest}" if one.naming == "gpus" else ""
        raise PlanError(
            f"hardware={hardware}: no slice of {one.name} has {number} {counted}. Legal near it: "
            f"{', '.join(f'{one.name}-{n}' for n in near)}{more}.",
            id="plan.slice-size",
        )
    return Slice(one, shape, outside)


def _of_size(one: Chip, count: int) -> tuple[int, ...] | None:
    """The most cube-like shape of `count` chips."""
    return min((s for s in legal_shapes(one) if math.prod(s) == count), key=max, default=None)


def _shaped(hardware: str, one: Chip, shape: tuple[int, ...]) -> tuple[int, ...]:
    legal = legal_shapes(one)
    if shape in legal:
        return shape
    count = math.prod(shape)
    near = sorted(sorted(legal, key=lambda s: (abs(math.prod(s) - count), max(s)))[:6], key=math.prod)
    rule = {
        3: "sides are multiples of 4, or the slice is one of 1x1x1, 2x2x1, 2x2x2, 2x2x4, 2x4x4",
        2: "sides are powers of two up to 16, one at most twice the other",
        1: "one node",
    }[one.dims]
    raise PlanError(
        f"hardware={hardware}: no slice of {one.name} has the shape {'x'.join(map(str, shape))} ({count} chips; the "
        f"largest has {one.largest}). The rule: {rule}. Legal near it: "
        f"{', '.join(one.name + '-' + 'x'.join(map(str, s)) for s in near)}.",
        id="plan.slice-shape",
    )


def _example(one: Chip) -> str:
    return f"{one.name}-{8 if one.naming == 'gpus' else 64 * one.cores_per_chip}"


def _unknown(hardware: str, name: str) -> PlanError:
    if not name:
        raise PlanError(
            f"hardware is empty. Write a platform ({', '.join(PLATFORMS)}), or a slice such as v5p-512.",
            id="plan.unknown-chip",
        )
    known = {word: one for one in chips().values() for word in (one.name, *one.also)}
    near = difflib.get_close_matches(name.lower(), [*known, *PLATFORMS], n=3, cutoff=0.4)
    did = f" Did you mean {' or '.join(near)}?" if near else ""
    return PlanError(
        f"hardware={hardware}: no chip is called {name}.{did} Platforms: {', '.join(PLATFORMS)}. Chips: "
        f"{', '.join(chips())}; a slice is CHIP-NUMBER or CHIP-SHAPE, such as v5p-512 or tpu7x-4x4x8.",
        id="plan.unknown-chip",
    )
