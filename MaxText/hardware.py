"""What is plugged in here, and what follows from it for number formats."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from MaxText import compat
from MaxText.errors import PlanError


@dataclass(frozen=True)
class Hardware:
    """The devices of this run. `memory_bytes` is per device, None where the platform does not say."""

    platform: str
    kind: str
    devices: int
    processes: int
    slices: int
    memory_bytes: int | None

    @property
    def simulated(self) -> bool:
        """Several devices on one CPU: right for testing, no faster."""
        return self.platform == "cpu" and self.devices > self.processes


def detect(num_slices: int = -1) -> Hardware:
    """Ask JAX. Starts the backend. On CPU, where nothing is a slice, `num_slices` > 1 equal parts count as slices.

    Raises PlanError: "plan.unequal-devices", "plan.slices".
    """
    devices = jax.devices()
    first = devices[0]
    _require_equal(collections.Counter(d.process_index for d in devices))
    slices = len({getattr(d, "slice_index", 0) or 0 for d in devices})
    if first.platform == "cpu" and num_slices > 1:
        slices = num_slices
        if len(devices) % slices:
            raise PlanError(
                f"num_slices={slices} cannot share {len(devices)} CPU devices equally. "
                f"Set num_cpu_devices to a multiple of {slices}.",
                id="plan.slices",
            )
    return Hardware(first.platform, first.device_kind, len(devices), jax.process_count(), slices, _memory(first))


def _require_equal(devices: Mapping[int, int]) -> None:
    """Refuse processes with different numbers of devices: their shares of a batch would differ."""
    if len(set(devices.values())) > 1:
        shown = ", ".join(f"process {process} has {count}" for process, count in sorted(devices.items())[:20])
        raise PlanError(
            f"the processes have different numbers of devices: {shown}. Give all the same number.",
            id="plan.unequal-devices",
        )


def _memory(device: jax.Device) -> int | None:
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total // jax.local_device_count()
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def choose_dtype(platform: str) -> tuple[str, str]:
    """(compute dtype, reason) for `dtype=auto`. CPU figures: docs/log.md."""
    if platform != "cpu":
        return "bfloat16", f"{platform} multiplies bfloat16 at full rate"
    if compat.CPU_HAS_FAST_BFLOAT16_MATMUL and _has_amx():
        return "bfloat16", "this CPU multiplies bfloat16 in AMX tiles, and this JAX uses them"
    return "float32", "without AMX tiles (or with JAX before 0.12) whole steps are faster in float32 on CPU"


def _has_amx() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return any("amx_bf16" in line for line in lines if line.startswith("flags"))
    except OSError:
        return False


def resolve(cfg: Any, hardware: Hardware) -> tuple[Any, str]:
    """(config without `auto` in it, the reason for what was chosen)."""
    if cfg.dtype != "auto":
        return cfg, f"as configured ({cfg.origin('dtype')})"
    dtype, reason = choose_dtype(hardware.platform)
    return cfg.replace(dtype=dtype), reason
