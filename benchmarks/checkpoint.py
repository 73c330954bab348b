"""What a checkpoint costs: stall, save, restore, verification, beside plain files of the same bytes. One JSON line.

    python -m benchmarks.checkpoint [megabytes=100] [rounds=5]

The floor is a plain file: written and sent to the disk (save), copied with shutil (`copy_seconds`), read into memory
(restore). The state is that of a small decoder with AdamW: three trees of float32 matrices. Medians over `rounds`;
the first save, which has to import Orbax and to get its memory from the system, stands apart.
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

from MaxText.checkpoint import Store


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


def median(rounds: int, work: Callable[[], Any]) -> float:
    """Median duration of `rounds` calls, after one that does not count."""
    work()
    return statistics.median(seconds(work) for _ in range(rounds))


def write_plain(path: Path, arrays: list[np.ndarray]) -> None:
    """The least that a durable save can do."""
    with open(path, "wb") as file:
        for array in arrays:
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def saves(store: Store, state: Any, rounds: int) -> dict[str, float]:
    """Stall and whole length of saves, one after another."""
    stalls, totals = [], []
    for step in range(rounds + 1):
        begun = time.perf_counter()
        stalls.append(store.save(step, state, {}))
        store.wait()
        totals.append(time.perf_counter() - begun)
    return {
        "first_save_stall_seconds": stalls[0],
        "first_save_seconds": totals[0],
        "save_stall_seconds": statistics.median(stalls[1:]),
        "save_seconds": statistics.median(totals[1:]),
    }


def restores(store: Store, state: Any, rounds: int) -> dict[str, float]:
    """Restore with and without verification, alternating."""
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    step = store.steps()[-1]
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds + 1):
        for verify in taken:
            taken[verify].append(seconds(lambda v=verify: jax.block_until_ready(store.restore(step, target, verify=v))))
    return {
        "restore_seconds": statistics.median(taken[True][1:]),
        "restore_unverified_seconds": statistics.median(taken[False][1:]),
    }


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Everything, in `folder`."""
    state = make_state(megabytes)
    host = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    size = sum(array.nbytes for array in host)
    plain, copy = folder / "plain", folder / "copy"
    floor = {
        "plain_write_seconds": median(rounds, lambda: write_plain(plain, host)),
        "copy_seconds": median(rounds, lambda: shutil.copyfile(plain, copy)),
        "plain_read_seconds": median(rounds, lambda: np.fromfile(plain, np.uint8)),
    }
    with Store(folder / "checkpoints", keep=1) as store:
        ours = saves(store, state, rounds) | restores(store, state, rounds)
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
        "verification_of_restore": took["restore_seconds"] / took["restore_unverified_seconds"] - 1,
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
