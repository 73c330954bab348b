"""Toy runs in several real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from tests import runs


class World:
    """`count` processes of one toy run, as a person would start them by hand; the first that is to blame counts."""

    def __init__(self, folder: Path, environ: dict[str, str], count: int, devices: int, **overrides: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as one:
            self.address = f"127.0.0.1:{one.getsockname()[1]}"
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        several = {"JAX_COORDINATOR_ADDRESS": self.address, "JAX_NUM_PROCESSES": str(count)} if count > 1 else {}
        how = {"jax_distributed_initialization_timeout": 150, "process_wait_timeout": 150} | overrides
        places = [{"JAX_PROCESS_ID": str(id)} if count > 1 else {} for id in range(count)]
        self.processes: list[subprocess.Popen[str]] = []
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads: list[threading.Thread] = []
        for place in places:
            self.add(runs.start(folder, environ | flags | several | place, **how))

    def add(self, process: subprocess.Popen[str]) -> None:
        """One more process, whose output is collected."""
        id = len(self.processes)
        self.processes.append(process)
        for texts, pipe in ((self.out, process.stdout), (self.err, process.stderr)):
            texts.append("")
            self._threads.append(threading.Thread(target=self._read, args=(texts, id, pipe), daemon=True))
            self._threads[-1].start()

    def _read(self, texts: list[str], id: int, pipe: Any) -> None:
        with pipe:
            for line in pipe:
                texts[id] += line

    def until(self, text: str, limit: float = 150) -> None:
        """Wait until process 0 has said `text`."""
        stop = time.monotonic() + limit
        while text not in self.out[0]:
            assert time.monotonic() < stop and self.processes[0].poll() is None, self.out + self.err
            time.sleep(0.02)

    def end(self, limit: float = 150) -> list[int]:
        """The exit codes of all, in order of their ids; nothing is left running."""
        stop = time.monotonic() + limit
        try:
            codes = [process.wait(max(0.1, stop - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.out + self.err) from None
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join(10)
        return codes

    def said(self) -> str:
        return os.linesep.join([*self.out, *self.err])
