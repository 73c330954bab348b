"""The train step by the TPU's own compiler, which needs no TPU: that it lowers and compiles for each generation, and
what it sends. Slow, and skipped aloud where libtpu is not installed (requirements-tpu.txt)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# One process for each kind of chip: JAX reads the compiler's settings when it starts.
COMPILE = """
import json, os, re, sys
from MaxText.aot import compile as aot
aot.prepare()
import jax
from MaxText import architecture, catalogue, config, decoder, hardware, planner

def small(model, slices, axes):
    degrees = {f"ici_{axis}_parallelism": size for axis, size in axes.items()}
    cfg = config.make(model_name=model, dtype="bfloat16", max_target_length=256, num_slices=slices,
                      global_batch_size=32, ici_fsdp_parallelism=-1, scan_layers=True, **degrees)
    return architecture.scale_down(cfg)

MESHES = ((1, {}), (2, {"tensor": 2}), (1, {"pipeline": 2}))
for model, meshes in (("llama3.1-8b", MESHES), ("mixtral-8x7b", (*MESHES, (1, {"expert": 2})))):
    for slices, axes in meshes:
        cfg = small(model, slices, axes)
        there = hardware.named(sys.argv[1], slices)
        plan = planner.make(cfg, decoder.declare(cfg), there)
        text = aot.compile_step(cfg, plan, there.slice).program.as_text()
        kinds = ("reduce-scatter", "all-gather", "all-reduce", "collective-permute", "ragged-all-to-all", "megascale")
        # Up to v6e a reduce-scatter is written as a fusion of all-reduce and slice, by the name of all-reduce-scatter.
        calls = {kind: f" {kind}(-start)?[(]|calls=%all-{kind}" for kind in kinds} | {"megascale": "megascale"}
        calls |= {"flash": "%splash_mha_[a-z_]+[.0-9]* = "}
        counts = {kind: sum(1 for _ in re.finditer(pattern, text)) for kind, pattern in calls.items()}
        found = {"model": model, "slices": slices, "axes": axes, "devices": plan.devices}
        print(json.dumps(found | counts), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e-4", "v5p-8", "v6e-4", "tpu7x-8"])
def test_a_step_compiles_for(chip):
    """A dense and an expert model, on one slice, on two, and as a pipeline. Gradients of sharded weights are scattered,
    not summed whole as on CPU; with two slices something crosses the network between them; stages hand over."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install -r requirements-tpu.txt")
    done = subprocess.run([sys.executable, "-c", COMPILE, chip], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 7
    for one in found:
        assert one["reduce-scatter"] > 0 and one["all-gather"] > 0, one
        assert one["flash"] >= 3, one  # forward, and backward for queries and for keys
        assert (one["megascale"] > 0) == (one["slices"] == 2), one
        assert "pipeline" not in one["axes"] or one["collective-permute"] > 0, one
        assert (one["ragged-all-to-all"] > 0) == ("expert" in one["axes"]), one
