"""From the command to the first finished step, with an empty and a full compile cache: `python -m benchmarks.startup`.

One JSON line: cold_seconds and warm_seconds (whole process of a one-step first run), the same of the hand-written floor
(import JAX, initialise, compile, one step of the same shapes), their ratios, and the parts of ours from its own ledger.
config_error_seconds is the time to answer a misspelt key.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from MaxText import goodput

ROOT = Path(__file__).parents[1]
ONE_STEP = ("steps=1", "sample_length=0", "eval_files=[]", "enable_checkpointing=false")
FLOOR = """
import jax, jax.numpy as jnp
from benchmarks import floor
shape = floor.Shape(emb=128, heads=4, head_dim=32, mlp=512, layers=4, vocab=288, batch=16, length=128)
params = jax.jit(lambda: floor.init(shape, jax.random.key(0)))()
zeros = jax.tree.map(jnp.zeros_like, params)
tokens = jnp.zeros((16, 128), jnp.int32)
step = jax.jit(floor.make_step(shape, jnp.float32))
jax.block_until_ready(step((params, zeros, zeros, jnp.zeros(())), tokens, tokens))
"""


def seconds(command: list[str], cache: str, expected: int = 0) -> float:
    """Wall seconds of a process that must end with the exit code expected."""
    environ = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - begin


def ours(folder: str, name: str) -> tuple[float, dict[str, float]]:
    """(wall seconds, {activity: seconds}) of a first run of one step; its compile cache is folder/ours."""
    run = [f"run_name={name}", f"base_output_directory={folder}", f"jax_cache_dir={folder}/ours"]
    wall = seconds([sys.executable, "train.py", "configs/base.yml", *ONE_STEP, *run], f"{folder}/ours")
    spent = goodput.read(Path(folder) / name).us
    return wall, {kind: round(us / 1e6, 2) for kind, us in spent.items() if us}


def measure() -> dict[str, object]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        (cold, cold_parts), (warm, warm_parts) = ours(folder, "cold"), ours(folder, "warm")
        floor_cold, floor_warm = (seconds([sys.executable, "-c", FLOOR], f"{folder}/floor") for _ in range(2))
        misspelt = [sys.executable, "train.py", "configs/base.yml", "stps=5"]
        error = min(seconds(misspelt, folder, expected=2) for _ in range(3))
    return {
        "benchmark": "startup",
        "cold_seconds": round(cold, 2),
        "warm_seconds": round(warm, 2),
        "floor_cold_seconds": round(floor_cold, 2),
        "floor_warm_seconds": round(floor_warm, 2),
        "cold_ratio": round(cold / floor_cold, 2),
        "warm_ratio": round(warm / floor_warm, 2),
        "cold_parts": cold_parts,
        "warm_parts": warm_parts,
        "config_error_seconds": round(error, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
