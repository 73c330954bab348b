"""Whole runs of a toy model: `main` in this process, on the eight virtual devices, in a folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from MaxText import config, metrics
from MaxText.train import main

ROOT = Path(__file__).parents[1]
# Two rows a device, so that there are padded rows in evaluation; text enough for forty steps.
TOY_RUN: dict[str, Any] = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 2,
    "max_target_length": 16,
    "global_batch_size": 16,
    "eval_per_device_batch_size": 2.0,
    "eval_steps": 2,
    "dtype": "float32",
    "dropout_rate": 0.1,  # a random number in each step, so that a resume could lose it
    "steps": 6,
    "checkpoint_period": 2,
    "sample_length": 0,
    "run_name": "toy",
    "train_files": ["builtin:austen/emma.txt"],
    "jax_cache_dir": "",  # the tests have a compile cache of their own
}
# What a clock says is not reproducible.
CLOCKS = {
    "seconds", "tokens_per_second_per_device", "tflops_per_device", "data_wait_seconds", "save_stall_seconds",
    "eval_seconds",
}  # fmt: skip


def arguments(folder: Path, **overrides: Any) -> list[str]:
    """[CONFIG, "key=value", ...] of a toy run below `folder`."""
    values = TOY_RUN | {"base_output_directory": str(folder)} | overrides
    return [str(ROOT / "configs" / "base.yml"), *(f"{key}={_text(value)}" for key, value in values.items())]


def _text(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def run(folder: Path, **overrides: Any) -> int:
    """The exit code of a toy run in this process."""
    return main(arguments(folder, **overrides))


def start(folder: Path, environ: dict[str, str], **overrides: Any) -> subprocess.Popen[str]:
    """A toy run as a process of its own; wait for it with a limit."""
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    command = [sys.executable, str(ROOT / "train.py"), *arguments(folder, **{"jax_cache_dir": cache} | overrides)]
    environ = {key: value for key, value in environ.items() if not key.startswith("PYTEST")}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def records(folder: Path, run_name: str = "toy") -> list[dict[str, Any]]:
    """The metrics of a run without what clocks say; each step's line and each evaluation's."""
    lines = metrics.read(folder / run_name / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def toy_config(folder: Path, **overrides: Any) -> config.Config:
    return config.load(arguments(folder, **overrides))


def kept(folder: Path, run_name: str = "toy") -> list[int]:
    """The steps of the complete checkpoints of a run."""
    from MaxText.checkpoint import Store

    return Store(folder / run_name / "checkpoints").steps()


def tree(folder: Path) -> set[str]:
    """Everything in a folder, by relative path."""
    return {os.path.relpath(path, folder) for path in folder.rglob("*")}
