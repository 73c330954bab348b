"""What is plugged in here, and what follows from it for number formats."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax

from MaxText import compat


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


def detect() -> Hardware:
    """Ask JAX. Starts the backend."""
    devices = jax.devices()
    first = devices[0]
    slices = {getattr(d, "slice_index", 0) or 0 for d in devices}
    return Hardware(first.platform, first.device_kind, len(devices), jax.process_count(), len(slices), _memory(first))


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
