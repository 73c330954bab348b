"""Bytes in the memory of a host: what a run holds beside its devices' memory. Data and the program itself aside.

A save copies the pieces of a host's own devices (P bytes) before training goes on. Where saves are asynchronous, each
tier keeps its copy for the next save; otherwise one copy is there during a save. On the way from accelerators all
pieces are there once more. A local tier below /dev/shm holds files in memory: the pieces of this host and, of several,
of the one before it, of two steps while the later one is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from MaxText import blueprint
from MaxText.cost.memory import Memory
from MaxText.hardware import Hardware
from MaxText.planner import Plan

ROOM = 0.8  # of a host's memory that all this may fill: data, the program and the system want theirs
IN_MEMORY = ("/dev/shm", "/run/shm")
SHM = 0.5  # of a host's memory: what Linux gives /dev/shm unless told otherwise


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the host that holds most; `capacity` is None where nobody has published it.

    offloaded: activations. saves: copies of the state from which checkpoints are written. arriving: the state on its
    way there. local: checkpoints of the local tier in /dev/shm."""

    offloaded: float
    saves: float
    arriving: float
    local: float
    capacity: float | None

    CLASSES = ("offloaded", "saves", "arriving", "local")

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.CLASSES)

    @property
    def has_room(self) -> bool:
        """Also where nothing is known of the host."""
        return self.capacity is None or self.total <= ROOM * self.capacity


def checkpoint_bytes(cfg: Any, plan: Plan) -> int:
    """Parameters and optimizer state, once."""
    slots = {"adamw": (cfg.mu_dtype, cfg.weight_dtype), "sgd": ()}[cfg.opt_type]
    every = (cfg.weight_dtype, *slots)
    return sum(p.size * p.dtype(dtype).itemsize for dtype in every for _, p in blueprint.leaves(plan.tree))


def forecast(cfg: Any, plan: Plan, hardware: Hardware, needs: Memory) -> HostMemory:
    """The host memory of a plan whose devices hold `needs`."""
    devices, several = hardware.devices / hardware.processes, hardware.processes > 1
    pieces = min(plan.state_bytes * devices, checkpoint_bytes(cfg, plan)) if cfg.enable_checkpointing else 0.0
    local = cfg.enable_emergency_checkpoint
    kept = 2 if local and cfg.async_checkpointing else 1
    folder = str(Path(cfg.local_checkpoint_directory).expanduser())
    in_memory = local and any(folder == place or folder.startswith(f"{place}/") for place in IN_MEMORY)
    return HostMemory(
        offloaded=needs.host * devices,
        saves=kept * pieces,
        arriving=pieces if hardware.platform != "cpu" else 0.0,
        local=2 * (2 if several else 1) * pieces if in_memory else 0.0,
        capacity=_capacity(hardware, devices),
    )


def _capacity(hardware: Hardware, devices: float) -> float | None:
    chip = hardware.slice.chip if hardware.slice else None
    if chip is None or chip.host_memory is None:
        return None
    return chip.host_memory * devices / (chip.devices_per_chip * chip.chips_per_host)
