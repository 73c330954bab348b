"""Every rule has a recipe that trips it and one that does not; cures cure; --apply writes and looks again."""

from __future__ import annotations

from pathlib import Path

import pytest

from MaxText import config, doctor, hardware
from MaxText.errors import ConfigError, PlanError

ROOT = Path(__file__).parents[1]
GOOD = {
    "model_name": "llama3.1-8b",
    "hardware": "v5p-32",
    "max_target_length": 4096,
    "per_device_batch_size": 2.0,
    "remat_policy": "minimal_with_context",
    "dtype": "bfloat16",
    "scan_layers": True,
    "checkpoint_period": 1000,
}
TRIPS = {
    "memory": {"hardware": "v5e-16", "per_device_batch_size": 16.0},
    "remat": {"remat_policy": "full"},
    "accumulation": {"gradient_accumulation_steps": 4, "per_device_batch_size": 1.0},
    "precision": {"dtype": "float32", "per_device_batch_size": 1.0},
    "slices": {
        "hardware": "2xv5p-32",
        "dcn_context_parallelism": 2,
        "dcn_data_parallelism": 1,
    },
    "copies": {"model_name": "llama3.2-1b", "ici_data_parallelism": 16, "ici_fsdp_parallelism": 1},
    "tensor": {"ici_tensor_parallelism": 8, "per_device_batch_size": 1.0},
    "unrolled": {"scan_layers": False},
    "checkpoints": {"checkpoint_period": 1},
    "legality": {"ici_fsdp_parallelism": 3},
}
ON_A_CPU = {
    "dtype": "float32",
    "hardware": "cpu",
    "remat_policy": "custom",
    "decoder_layer_input": "offload",
    "scan_layers": True,
}


def examine(**keys) -> list[doctor.Finding]:
    cfg = config.make(**keys)
    if cfg.hardware == "cpu":
        return doctor.examine(cfg, hardware.Hardware("cpu", "cpu", 1, 1, 1, 16 << 30))
    return doctor.examine(cfg, hardware.named(cfg.hardware, cfg.num_slices))


def test_a_good_recipe_trips_nothing():
    assert examine(**GOOD) == []


@pytest.mark.parametrize("rule", TRIPS)
def test_a_rule_is_tripped_and_its_cure_cures(rule):
    keys = GOOD | TRIPS[rule]
    findings = {found.rule: found for found in examine(**keys)}
    assert rule in findings, findings
    found = findings[rule]
    assert found.cure and any(character.isdigit() for character in found.problem)
    assert rule not in {again.rule for again in examine(**(keys | dict(found.cure)))}


def test_a_cure_that_gains_nothing_is_not_offered():
    """Parameters in pieces over two slices: by the forecast a step with copies there takes as long."""
    across = {
        "hardware": "2xv5p-32",
        "dcn_fsdp_parallelism": 2,
        "dcn_data_parallelism": 1,
        "per_device_batch_size": 3.0,
    }
    assert [found.rule for found in examine(**(GOOD | across))] == []


def test_offloading_on_a_cpu():
    (found,) = [one for one in examine(**ON_A_CPU) if one.rule == "offload"]
    assert found.cure["remat_policy"] == "full"
    assert examine(**(ON_A_CPU | dict(found.cure))) == []


def test_every_rule_is_tested():
    assert set(TRIPS) | {"offload"} == set(doctor.RULES) | {"legality"}


def test_apply_writes_and_looks_again(tmp_path):
    file = tmp_path / "mine.yml"
    base = ROOT / "configs/base.yml"
    file.write_text(
        f"base_config: {base}\nmodel_name: llama3.1-8b\nhardware: v5p-32  # ours\nremat_policy: full  # small\n"
        "per_device_batch_size: 4\nmax_target_length: 4096\nscan_layers: true\ncheckpoint_period: 1\n"
    )
    said = doctor.doctor([str(file), "--apply"])
    text = file.read_text()
    assert "remat: " in said and "checkpoints: " in said and "nothing more found" in said
    assert "remat_policy: full" not in text and "# small" in text and "hardware: v5p-32  # ours" in text
    assert doctor.doctor([str(file)]) == "nothing found"


def test_a_recipe_that_cannot_run_has_the_exit_code_of_a_plan():
    given = [str(ROOT / "configs/base.yml"), "model_name=llama3.1-405b", "hardware=v5e-16"]
    with pytest.raises(PlanError) as caught:
        doctor.doctor(given)
    assert caught.value.id == "doctor.cannot-run" and "take more devices" in str(caught.value)


def test_apply_refuses_to_write_what_the_command_line_overrules(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(f"base_config: {ROOT / 'configs/base.yml'}\nmodel_name: llama3.1-8b\nhardware: v5p-32\n")
    with pytest.raises(ConfigError) as caught:
        doctor.doctor([str(file), "scan_layers=false", "remat_policy=full", "--apply"])
    assert caught.value.id == "doctor.command-line" and "scan_layers" in str(caught.value)
