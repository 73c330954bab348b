"""What a chip is: `configs/chips.yml` as records."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

# In the tree the file lies beside the package, in a wheel inside it.
_FILES = (Path(__file__).parents[2] / "configs/chips.yml", Path(__file__).parents[1] / "configs/chips.yml")

_EXPONENT = re.compile(r"[0-9.]+e[0-9]+")


@dataclass(frozen=True)
class Chip:
    """One chip. FLOP/s dense, bytes, bytes/s; links are one way. `sources` holds where each field comes from."""

    name: str
    also: tuple[str, ...]
    platform: str
    kind: str
    topology: str | None
    announced: bool
    peaks: Mapping[str, float] = field(hash=False)
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    links: int
    network_bandwidth: float
    host_bandwidth: float
    host_memory: float | None
    chips_per_host: int
    devices_per_chip: int
    matrix_unit: int
    matmul_share: float
    vector_memory: float
    naming: str
    dims: int
    largest: int
    wraps: str
    sources: Mapping[str, str] = field(hash=False)

    @property
    def cores_per_chip(self) -> int:
        """How many of what a slice name counts are on a chip."""
        return 2 if self.naming == "cores" else 1

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of the chip in `dtype`; float32 matmuls run as several bfloat16 passes (six for full
        precision), CPUs and GPUs aside. A type without a figure counts as bfloat16."""
        return self.peaks.get(dtype, self.peaks["bfloat16"])


def _read(name: str, fields: dict[str, Any]) -> Chip:
    slices = fields.pop("slices")
    values = {key: _number(value) for key, (value, _) in fields.items()}
    sources = {key: source for key, (_, source) in fields.items()}
    peaks = {key.removeprefix("peak_"): values.pop(key) for key in list(values) if key.startswith("peak_")}
    return Chip(
        name=name,
        also=tuple(values.pop("also", ())),
        announced=values.pop("announced", False),
        peaks=MappingProxyType(peaks),
        naming=slices["naming"],
        dims=slices["dims"],
        largest=slices["largest"],
        wraps=str(slices["wraps"]),
        matmul_share=values.pop("matmul_share", 1.0),
        vector_memory=values.pop("vector_memory", 0.0),
        sources=MappingProxyType(sources),
        **values,
    )


def _number(value: Any) -> Any:
    """YAML takes 34.4e9 for text, since its exponent has no sign."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


@functools.cache
def chips() -> Mapping[str, Chip]:
    """Every chip of the catalogue, by its name."""
    file = next(file for file in _FILES if file.is_file())
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    return MappingProxyType({name: _read(name, fields) for name, fields in found.items()})


def chip(name: str) -> Chip | None:
    """The chip of this name or other name; None if there is none."""
    lower = name.lower()
    return next((one for one in chips().values() if lower in (one.name, *one.also)), None)
