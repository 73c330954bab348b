"""Which process of how many this is, and where process 0 listens: read from the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from MaxText.errors import ConfigError

# The first complete row counts: (address, port or None where the address holds it, number of processes, process id).
_NAMES = (
    ("JAX_COORDINATOR_ADDRESS", None, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),  # JAX's names; `launch` sets these
    ("JAX_COORDINATOR_IP", "JAX_COORDINATOR_PORT", "NNODES", "NODE_RANK"),  # MaxText's on GPU clusters
    ("JAX_COORDINATOR_ADDRESS", None, "JAX_PROCESS_COUNT", "JOB_COMPLETION_INDEX"),  # indexed jobs of Kubernetes
)
DEFAULT_PORT = 1234  # MaxText's, where the address names none


@dataclass(frozen=True)
class Place:
    """Process `id` of `count`; process 0 listens on `host`:`port`."""

    id: int
    count: int
    host: str
    port: int
    hostname: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def find(environ: Mapping[str, str]) -> Place | None:
    """The place that `environ` gives this process; None: it is alone.

    Raises ConfigError ("processes.place") where the variables are incomplete or contradict each other.
    """
    for names in _NAMES:
        given = [name for name in names if name and environ.get(name)]
        if len(given) == len([name for name in names if name]):
            address, port, count, id = (environ[name] if name else "" for name in names)
            return _place(address, port, count, id, names)
    found = sorted({name for names in _NAMES for name in names if name and environ.get(name)} - _COMMON)
    if not found:
        return None
    raise ConfigError(
        f"the environment has {', '.join(found)}, but not all of JAX_COORDINATOR_ADDRESS (host:port of process 0), "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID. Set all three for each process of a run, or none.",
        id="processes.place",
    )


_COMMON = {"JOB_COMPLETION_INDEX", "NNODES", "NODE_RANK", "JAX_PROCESS_COUNT"}  # schedulers set these for any job


def _place(address: str, port: str, count: str, id: str, names: tuple[str | None, ...]) -> Place | None:
    named = address.count(":") == 1 or "]:" in address
    host, _, inside = address.rpartition(":") if named else (address, "", "")
    numbers = {names[2]: count, names[3]: id, (names[1] or names[0]): port or inside or str(DEFAULT_PORT)}
    if bad := [f"{name}={value}" for name, value in numbers.items() if not value.isdecimal()]:
        raise ConfigError(f"{', '.join(bad)}: not a whole number from 0.", id="processes.place")
    total, own, at = int(count), int(id), int(port or inside or DEFAULT_PORT)
    if total < 1:
        raise ConfigError(f"{names[2]}={total}: a run has at least 1 process.", id="processes.place")
    if not host or not 0 < at < 65536:
        raise ConfigError(
            f"{names[0]}={address}{f', {names[1]}={port}' if port else ''}: set the host of process 0 and a free port "
            "of it from 1 to 65535, as in host:1234.",
            id="processes.place",
        )
    if own >= total:
        raise ConfigError(
            f"{names[3]}={own}, but {names[2]}={total}: the processes are numbered 0 to {total - 1}.",
            id="processes.place",
        )
    return Place(own, total, host.strip("[]"), at) if total > 1 else None
