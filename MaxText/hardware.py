"""What is plugged in here, or what a run is planned for; and what follows from it for number formats."""

from __future__ import annotations

import collections
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from MaxText import catalogue, compat
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
    slice: catalogue.Slice | None = None

    @property
    def has_compiler(self) -> bool:
        """Whether compile=true can ask about it: its compiler needs no device."""
        return self.slice is not None and self.slice.chip.topology is not None

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
    known = catalogue.of_devices(first.platform, first.device_kind, len(devices), slices)
    return Hardware(first.platform, first.device_kind, len(devices), jax.process_count(), slices, _memory(first), known)


def _require_equal(devices: Mapping[int, int]) -> None:
    """Refuse processes with different numbers of devices: their shares of a batch would differ."""
    if len(set(devices.values())) > 1:
        shown = ", ".join(f"process {process} has {count}" for process, count in sorted(devices.items())[:20])
        raise PlanError(
            f"the processes have different numbers of devices: {shown}. Give all the same number.",
            id="plan.unequal-devices",
        )


def named(name: str, num_slices: int = -1) -> Hardware:
    """The hardware that a slice name means, such as v5p-512; nothing is asked of JAX.

    Raises:
      PlanError: for a name that is none, or a shape that no slice has.
    """
    meant = catalogue.slice_of(name, num_slices)
    return Hardware(
        platform=meant.chip.platform,
        kind=meant.chip.kind,
        devices=meant.devices,
        processes=meant.hosts,
        slices=meant.slices,
        memory_bytes=meant.device_memory,
        slice=meant,
    )


def of(cfg: Any) -> Hardware:
    """What `cfg` runs on: what is here, which must be the slice that `hardware` names, if it names one."""
    try:
        found = detect(cfg.num_slices)
    except RuntimeError as error:  # JAX finds no backend that it was asked for
        raise PlanError(
            f"hardware={cfg.hardware}: JAX cannot start it here: {str(error).splitlines()[0]}. Set hardware=auto, or "
            "install the requirements of that platform.",
            id="plan.other-hardware",
        ) from error
    if not catalogue.is_slice(cfg.hardware):
        if cfg.hardware.lower() not in ("auto", found.platform):
            raise PlanError(
                f"hardware={cfg.hardware}, and JAX found {found.devices} x {found.platform} here. Set hardware=auto, "
                "or install the requirements of that platform.",
                id="plan.other-hardware",
            )
        return found
    meant = named(cfg.hardware, cfg.num_slices)
    if (found.kind, found.devices, found.slices) != (meant.kind, meant.devices, meant.slices):
        raise PlanError(
            f"hardware={cfg.hardware} is {meant.devices} x {meant.kind} in {meant.slices} slices; here are "
            f"{found.devices} x {found.kind} in {found.slices}. Run it there, set hardware=auto, or add "
            "plan_only=true to plan without it.",
            id="plan.other-hardware",
        )
    return found


def with_rates(hardware: Hardware) -> Hardware:
    """The same with a slice: a CPU's speed is measured now (a fifth of a second). Unknown devices stay without one."""
    if hardware.slice is not None or hardware.platform != "cpu":
        return hardware
    rates = _measured() if hardware.processes == 1 else NOMINAL  # several processes must come to the same plan
    return replace(hardware, slice=catalogue.Slice(_cpu(hardware.devices, *rates), (1,)))


NOMINAL = (1e11, 1e10)  # FLOP/s and bytes/s


@functools.cache
def _measured() -> tuple[float, float]:
    """FLOP/s of a float32 matmul and bytes/s of a copy on this machine: the best of eight, in two digits, so that one
    plan is like the next."""
    x = np.ones((1024, 1024), np.float32)
    big = np.ones(16 << 20, np.uint8)
    rates = 2 * 1024**3 / _seconds(lambda: x @ x), 2 * big.size / _seconds(big.copy)
    return float(f"{rates[0]:.1e}"), float(f"{rates[1]:.1e}")


def _cpu(devices: int, flops: float, copied: float) -> catalogue.Chip:
    """This machine as one chip that its devices share."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    measured = "measured when the plan was made"
    return catalogue.Chip(
        name="cpu",
        also=(),
        platform="cpu",
        kind="cpu",
        topology=None,
        announced=False,
        peaks=MappingProxyType({"bfloat16": flops, "float32": flops}),
        memory=float(memory),
        memory_bandwidth=copied,
        link_bandwidth=copied,
        links=1,
        network_bandwidth=1.25e9,
        host_bandwidth=copied,
        host_memory=float(memory),
        chips_per_host=1,
        devices_per_chip=devices,
        matrix_unit=1,
        matmul_share=1.0,
        vector_memory=0.0,
        naming="chips",
        dims=1,
        largest=1,
        wraps="never",
        sources=MappingProxyType({"peak_float32": measured, "memory_bandwidth": measured}),
    )


def _seconds(work: Any) -> float:
    """The shortest of a few runs."""
    found = []
    for _ in range(8):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


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
