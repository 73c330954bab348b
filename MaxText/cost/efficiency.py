"""How much of the catalogue's rates a program gets: the measured part of the time model, in `configs/efficiency.yml`.

The file is written by `python -m benchmarks.calibrate` from published step times and by nothing else."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

_FILES = (Path(__file__).parents[2] / "configs/efficiency.yml", Path(__file__).parents[1] / "configs/efficiency.yml")


@dataclass(frozen=True)
class Efficiency:
    """Shares of peak rates, unless said otherwise.

    matmul, grouped, attention: of the matrix units' FLOP/s, while they are fed. intensity: FLOPs that a matmul does per
    byte that its tiles read again from memory. stream: of the memory's bandwidth. links, network, host: of the links
    inside a slice, between slices, to the host's memory. exposed: part of hidden traffic (or of the arithmetic, where
    that is shorter) that is waited for after all. straggler: part of a step lost with two slices, growing with their
    number to the power `straggler_power`. chips: seconds measured over seconds modelled, for chips that were seen.
    busiest: the most that any published step made of the rate that its chip's own matmuls reach; a chip that was not
    seen counts as no better.

    How far to trust it: most_slices, that a step was published of; rows, published steps of each chip; model_left_out
    and chip_left_out, the error (median, worst) on models and on chips that were not fitted to."""

    matmul: float = 0.95
    grouped: float = 0.6
    attention: float = 0.5
    intensity: float = 600.0
    stream: float = 0.8
    links: float = 0.85
    network: float = 0.7
    host: float = 0.8
    exposed: float = 0.15
    straggler: float = 0.022
    straggler_power: float = 0.47
    chips: Mapping[str, float] = field(default_factory=dict, hash=False)
    busiest: float = 1.0
    most_slices: int = 1
    rows: Mapping[str, int] = field(default_factory=dict, hash=False)
    model_left_out: tuple[float, float] = (0.0, 0.0)
    chip_left_out: tuple[float, float] = (0.0, 0.0)

    def error(self, chip: str) -> tuple[float, float]:
        """(median, worst) error of the step time on `chip`, by what was left out."""
        return self.model_left_out if chip in self.rows else self.chip_left_out


@functools.cache
def load() -> Efficiency:
    """What the last calibration found."""
    file = next(file for file in _FILES if file.is_file())
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    names = {one.name for one in dataclasses.fields(Efficiency)}
    errors = {name: tuple(value) for name, value in found.items() if name.endswith("_left_out")}
    return Efficiency(**{name: value for name, value in found.items() if name in names} | errors)
