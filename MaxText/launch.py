"""`python -m MaxText launch`: the processes of one run, started, watched and ended from one place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from MaxText import config
from MaxText.errors import ConfigError, PeerLost

USAGE = """usage: python -m MaxText launch [target=local] processes=N [key=value ...] -- train.py CONFIG ...
  target=local            processes on this machine
  processes=N             how many
  devices_per_process=M   virtual CPU devices of each; left out: as many as the mesh asks for
  slices=K                equal parts of the devices that stand for slices, for the dcn_* axes: num_slices=K"""
GRACE_SECONDS = 15.0  # between the end of one process and SIGKILL for those that have not followed it
FAREWELL_SECONDS = 120.0  # the same where the first one ended well
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to ")  # a line for each device and group; no switch turns it off
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class Order:
    """What to start."""

    processes: int
    devices_per_process: int
    command: tuple[str, ...]


@dataclass
class Child:
    """A started process; `code` is its exit code, negative for a signal, None while it runs."""

    id: int
    process: subprocess.Popen[str]
    code: int | None = None
    readers: list[threading.Thread] = field(default_factory=list)

    def describe(self) -> str:
        """How it ended."""
        if self.code is not None and self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


def run(arguments: Sequence[str]) -> int:
    """The verb: returns the exit code of the first process that failed, else 0. A process that a signal n ended counts
    as 77 where the others noticed its loss, else as 128 + n.

    Raises ConfigError: "launch.usage", or what is wrong with the configuration, before anything is started.
    """
    order = parse(arguments)
    if order.command[0].endswith("train.py"):
        config.load(order.command[1:])  # so that a mistake is told once
    return Launch(order).run()


def parse(arguments: Sequence[str]) -> Order:
    """[key=value ..., "--", command ...] to an order; ConfigError ("launch.usage")."""
    own, command = list(arguments), []
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    values = {"target": "local", "devices_per_process": "0", "slices": "0"}
    for argument in own:
        key, equals, value = argument.partition("=")
        if not equals or key not in (*values, "processes"):
            raise _usage(f"{argument} is no setting of launch")
        values[key] = value
    if values["target"] != "local":
        raise _usage(f"target={values['target']}: there is only target=local")
    numbers = {key: value for key, value in values.items() if key != "target"}
    if bad := [f"{key}={value}" for key, value in numbers.items() if not re.fullmatch("[0-9]{1,4}", value)]:
        raise _usage(f"{', '.join(bad)}: not a number from 0 to 9999")
    if int(numbers.get("processes", 0)) < 1 or not command:
        raise _usage("processes=N, and a command after --, are needed")
    if command[0].endswith((".yml", ".yaml")):
        raise _usage(f"{command[0]} is no program; after -- comes train.py CONFIG ...")
    slices = int(numbers["slices"])
    return Order(
        int(numbers["processes"]),
        int(numbers["devices_per_process"]),
        (*command, *([f"num_slices={slices}"] if slices else [])),
    )


def _usage(problem: str) -> ConfigError:
    return ConfigError(f"{problem} [launch.usage]\n{USAGE}", id="launch.usage")


def environment(order: Order, id: int, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of process `id`: JAX's names for its place, and its devices."""
    added = {"PYTHONUNBUFFERED": "1"}
    if order.processes > 1:
        added |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(order.processes),
            "JAX_PROCESS_ID": str(id),
        }
    if order.devices_per_process:
        flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT_FLAG)]
        added["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT_FLAG}={order.devices_per_process}"])
    return {**environ, **added}


class Launch:
    """One launch. Output of process 0 passes through unchanged; lines of the others get their number in front."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ends: queue.Queue[Child] = queue.Queue()
        self._children: list[Child] = []
        self._print = threading.Lock()

    def run(self) -> int:
        """Start all, wait for all, and return the exit code."""
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            port = _free_port()
            for id in range(self._order.processes):
                self._start(id, port)
            return self._wait()
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, id: int, port: int) -> None:
        process = subprocess.Popen(
            [sys.executable, *self._order.command],
            env=environment(self._order, id, port, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # signals of the terminal come through us, once
            preexec_fn=_die_with(os.getpid()),
        )
        child = Child(id, process)
        self._children.append(child)
        assert process.stdout is not None and process.stderr is not None
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            child.readers.append(threading.Thread(target=self._copy, args=(id, source, target), daemon=True))
        for thread in (*child.readers, threading.Thread(target=self._await, args=(child,), daemon=True)):
            thread.start()

    def _copy(self, id: int, source: IO[str], target: IO[str]) -> None:
        with source:
            for line in source:
                if _GLOO.match(line):
                    continue
                with self._print:
                    target.write(line if id == 0 else f"[{id}] {line}")
                    target.flush()

    def _await(self, child: Child) -> None:
        code = child.process.wait()
        for thread in child.readers:
            thread.join(5.0)  # a grandchild may hold the pipe
        child.code = code
        self._ends.put(child)

    def _wait(self) -> int:
        """Until all have ended; those that do not follow the first are killed. An end like the first is not said."""
        first, failed = None, None
        deadline = float("inf")
        for _ in self._children:
            child = self._next(deadline)
            if child.code and (failed is None or child.code != failed.code):
                self._say(f"process {child.id} {child.describe()}")
            failed = failed or (child if child.code else None)
            if first is None or (failed is child):
                first = child
                deadline = time.monotonic() + (GRACE_SECONDS if failed else FAREWELL_SECONDS)
        if failed is None or failed.code is None:
            return 0
        if failed.code < 0 and any(child.code == PeerLost.exit_code for child in self._children):
            return PeerLost.exit_code  # as those say that were left: run the same command again
        return failed.code if failed.code > 0 else 128 - failed.code

    def _next(self, deadline: float) -> Child:
        while True:
            try:
                return self._ends.get(timeout=0.5)
            except queue.Empty:
                if time.monotonic() > deadline:
                    running = ", ".join(str(child.id) for child in self._children if child.process.poll() is None)
                    self._say(f"process {running} did not follow: killed")
                    self._kill()
                    deadline = float("inf")

    def _kill(self) -> None:
        for child in self._children:
            if child.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)

    def _pass_on(self, number: int, _: Any) -> None:
        for child in self._children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    def _say(self, text: str) -> None:
        with self._print:
            print(f"launch: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _die_with(parent: int) -> Callable[[], None] | None:
    """For the child, before it begins: SIGKILL when the launcher is gone, however it went. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arrange
