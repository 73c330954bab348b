"""Reading compiled programs; and, where libtpu is installed and slow tests are asked for, the TPU compiler itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from MaxText import aot, cli, forecast
from MaxText.aot import hlo
from MaxText.errors import ConfigError, PlanError
from tests.helpers import cpu, toy, toy_config

ROOT = Path(__file__).parents[1]
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.mark.parametrize(
    ("notation", "first"),
    [
        ("replica_groups={{0,2},{1,3}}, x", [0, 2]),
        ("replica_groups=[4,2]<=[8], x", [0, 1]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", [0, 2, 4, 6]),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}, x", [0, 2, 4, 6]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, x", [0, 1]),
        ("source_target_pairs={{0,1},{1,0}}", [0, 1]),
        ("replica_groups={}", []),
    ],
)
def test_notations_of_groups(notation, first):
    assert hlo.group(notation) == first


@pytest.mark.parametrize(
    ("shape", "size"),
    [("bf16[4,8]{1,0}", 64), ("(f32[2,2]{1,0}, f32[8,2]{1,0})", 64), ("pred[3]", 3), ("f8e4m3fn[5]", 5), ("f32[]", 4)],
)
def test_sizes(shape, size):
    assert hlo.size(shape) == size


def test_collectives_of_a_step_by_kind_axes_and_depth():
    """A layer's seven kernels are gathered inside the loops, embedding and head outside; sums over tensor as well."""
    made = toy({"fsdp": 4, "tensor": 2})
    found = hlo.collectives(made.compiled_step.as_text(), made.mesh)
    gathers = {one.depth: one.count for one in found if (one.kind, one.axes) == ("all-gather", "fsdp")}
    assert gathers == {0: 2, 1: 14}
    assert any(one.axes == "tensor" and one.kind == "all-reduce" and one.depth == 1 for one in found)
    assert all(one.bytes > 0 for one in found)


def test_the_compiler_is_asked_for_tpu_slices_only():
    with pytest.raises(PlanError) as caught:
        aot.ask(forecast.make(toy_config(), cpu(1)))
    assert caught.value.id == "plan.no-compiler"


def test_options_are_checked(capsys):
    for arguments in (["compile=yes"], ["compiled=x"], ["json="]):
        with pytest.raises(ConfigError):
            from MaxText import plan_verb

            plan_verb.split(arguments)
    assert cli.main(["plan", str(ROOT / "configs/base.yml"), "compile=maybe"]) == 2


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is here")
def test_without_the_compiler_the_verb_says_how_to_install_it(capsys):
    keys = ["hardware=v5e-4", "compile=true", "remat_policy=full"]
    done = subprocess.run(
        [sys.executable, "-m", "MaxText", "plan", "configs/base.yml", *keys], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 3 and "requirements-tpu.txt" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIBTPU, reason="needs libtpu")
@pytest.mark.parametrize("hardware", ["v5e-4", "tpu7x-8", "2xv6e-8"])
def test_the_tpu_compiler_agrees_on_the_state_to_the_byte(hardware, tmp_path):
    file, program = tmp_path / "plan.json", tmp_path / "step.bin"
    keys = [f"hardware={hardware}", "compile=true", f"json={file}", f"compiled={program}"]
    keys += ["remat_policy=full", "scan_layers=true", "dtype=bfloat16", "base_num_decoder_layers=2"]
    done = subprocess.run(
        [sys.executable, "-m", "MaxText", "plan", "configs/base.yml", *keys],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    compiled = found["compiled"]
    wanted = found["state_bytes_per_device"] + found["memory_bytes_per_device"]["batch"]
    assert abs(compiled["argument_bytes"] - wanted) < 4096
    kinds = {(one["kind"], one["depth"]) for one in compiled["collectives"]}
    assert ("all-gather", 1) in kinds
    across = [one for one in compiled["collectives"] if one["axes"] == "across slices"]
    assert bool(across) == hardware.startswith("2x"), across
    assert program.stat().st_size > 10_000 and "stored in" in done.stdout and "collective" in done.stdout
    assert compiled["total_bytes"] == compiled["argument_bytes"] + compiled["packed_bytes"]
