"""What a checkpoint costs: stall, save, restore, verification, beside plain files of the same bytes. One JSON line.

    python -m benchmarks.checkpoint [megabytes=100] [rounds=5] [folder=WHERE]

The floor is a plain file: written and sent to the disk (save), copied with shutil (`copy_seconds`), read into memory
(restore). Restores are measured from the system's cache of files, and, as after a restart on another host, without it
(`cold`). The state is that of a small decoder with AdamW: three trees of float32 matrices. The least of `rounds` is
told, since other work on the machine only adds; the first save, which has to import Orbax and to get its memory from
the system, stands apart.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from MaxText.checkpoint import Local, Store
from MaxText.processes import Alone


def make_state(megabytes: int) -> dict[str, Any]:
    """Random float32 parameters and two moments of the same shapes; `megabytes` x 10^6 bytes in all."""
    rng = np.random.default_rng(0)
    rows = megabytes * 1_000_000 // (3 * 4 * 4 * 1024)
    trees = {
        tree: {
            name: rng.standard_normal((rows, 1024), dtype=np.float32) for name in ("attention", "mlp", "norm", "embed")
        }
        for tree in ("params", "mu", "nu")
    }
    return jax.block_until_ready(jax.device_put(trees))


def seconds(work: Callable[[], Any]) -> float:
    """Duration of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def least(rounds: int, work: Callable[[], Any]) -> float:
    """Least duration of `rounds` calls, after one that does not count."""
    work()
    return min(seconds(work) for _ in range(rounds))


def write_plain(path: Path, arrays: list[np.ndarray]) -> None:
    """The least that a durable save can do."""
    with open(path, "wb") as file:
        for array in arrays:
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def timed_saves(store: Store | Local, state: Any, rounds: int) -> tuple[list[float], list[float]]:
    """Stalls and whole lengths of saves, one after another."""
    stalls, totals = [], []
    for step in range(rounds + 1):
        begun = time.perf_counter()
        stalls.append(store.save(step, state, {}))
        store.wait()
        totals.append(time.perf_counter() - begun)
    return stalls, totals


def saves(store: Store, state: Any, rounds: int) -> dict[str, float]:
    """The first save, which finds no buffers, and the least of the others."""
    stalls, totals = timed_saves(store, state, rounds)
    return {
        "first_save_stall_seconds": stalls[0],
        "first_save_seconds": totals[0],
        "save_stall_seconds": min(stalls[1:]),
        "save_seconds": min(totals[1:]),
    }


def forget(folder: Path) -> None:
    """Take the files of `folder`, which are on the disk, out of the system's cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restores(store: Store, state: Any, rounds: int) -> dict[str, float]:
    """Restore with and without verification, from the cache and without it, in turn and in changing order. What
    verification adds is the median over neighbours: the least of each would compare different moments."""
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    step = store.steps()[-1]
    names = {True: "restore", False: "restore_unverified"}
    taken: dict[str, list[float]] = {prefix + name: [] for prefix in ("", "cold_") for name in names.values()}
    for number in range(rounds + 1):
        for prefix, prepare in (("", lambda: None), ("cold_", lambda: forget(store.path(step)))):
            for verify in (True, False) if number % 2 else (False, True):
                prepare()
                restore = lambda v=verify: jax.block_until_ready(store.restore(step, target, verify=v))  # noqa: E731
                taken[prefix + names[verify]].append(seconds(restore))
    pairs = {
        f"verification_of_{prefix}restore": statistics.median(
            verified / not_verified
            for verified, not_verified in zip(
                taken[f"{prefix}restore"][1:], taken[f"{prefix}restore_unverified"][1:], strict=True
            )
        )
        - 1
        for prefix in ("", "cold_")
    }
    return {f"{name}_seconds": min(values[1:]) for name, values in taken.items()} | pairs


def local_saves(folder: Path, state: Any, rounds: int) -> dict[str, float]:
    """The same for the local tier, in /dev/shm where there is one."""
    node = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    with tempfile.TemporaryDirectory(dir=node) as place:
        (folder / "run" / "checkpoints").mkdir(parents=True)
        local = Local(Path(place), folder / "run", Alone(), asynchronous=True, seconds=60)
        local.survey()
        local.prepare()
        stalls, totals = timed_saves(local, state, rounds)
        local.close()
    return {
        "local_save_stall_seconds": min(stalls[1:]),
        "local_save_seconds": min(totals[1:]),
    }


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Everything, in `folder`."""
    state = make_state(megabytes)
    host = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    size = sum(array.nbytes for array in host)
    plain, copy = folder / "plain", folder / "copy"
    floor = {
        "plain_write_seconds": least(rounds, lambda: write_plain(plain, host)),
        "copy_seconds": least(rounds, lambda: shutil.copyfile(plain, copy)),
        "plain_read_seconds": least(rounds, lambda: np.fromfile(plain, np.uint8)),
    }
    with Store(folder / "checkpoints", keep=1) as store:
        ours = saves(store, state, rounds) | restores(store, state, rounds)
    ours |= local_saves(folder, state, rounds)
    return {
        "benchmark": "checkpoint",
        "jax": jax.__version__,
        "bytes": size,
        **floor,
        **ours,
        **ratios(floor | ours, size),
    }


def ratios(took: dict[str, float], size: int) -> dict[str, float]:
    """What the numbers mean."""
    return {
        "save_bytes_per_second": size / took["save_seconds"],
        "restore_bytes_per_second": size / took["restore_seconds"],
        "stall_of_save": took["save_stall_seconds"] / took["save_seconds"],
        "save_over_plain_write": took["save_seconds"] / took["plain_write_seconds"],
        "save_over_copy": took["save_seconds"] / took["copy_seconds"],
        "restore_over_plain_read": took["restore_seconds"] / took["plain_read_seconds"],
    }


def main() -> None:
    """Read key=value arguments, print one JSON line."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=given.get("folder")) as folder:
        result = measure(Path(folder), int(given.get("megabytes", 100)), int(given.get("rounds", 5)))
    print(json.dumps({key: round(value, 5) if isinstance(value, float) else value for key, value in result.items()}))


if __name__ == "__main__":
    main()
