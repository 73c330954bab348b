"""Automatic planning: legal, fitting, respecting what a person fixed, with reasons; or a refusal with numbers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from MaxText import config, forecast
from MaxText.errors import PlanError
from MaxText.forecast import search
from tests.helpers import cpu, toy_config

LLAMA = {"model_name": "llama3.1-8b", "max_target_length": 8192, "dtype": "bfloat16", "scan_layers": True}


def found(**keys) -> forecast.Forecast:
    return forecast.of_config(config.make(auto_plan=True, **keys))


@pytest.fixture(scope="module")
def llama() -> forecast.Forecast:
    return found(**LLAMA, hardware="v6e-16", global_batch_size=128)


def test_a_choice_fits_keeps_the_batch_and_says_why(llama):
    assert llama.fits and llama.plan.global_batch_size == 128
    assert llama.memory.total <= search.ROOM * llama.capacity
    assert "otherwise" in llama.reasons["remat_policy"] and "fewest" in llama.reasons["gradient_accumulation_steps"]
    assert llama.rejected and all({"what", "why"} <= set(one) for one in llama.rejected)
    assert any("slower" in one["why"] or "does not fit" in one["why"] for one in llama.rejected)


def test_no_rejected_alternative_is_better(llama):
    """Every other policy on the chosen mesh, with the same microbatches: slower, or too large."""
    cfg = llama.cfg.replace(auto_plan=False)
    for policy in ("minimal_with_context", "save_qkv_proj", "full"):
        other = forecast.make(cfg.replace(remat_policy=policy, decoder_layer_input="device"), llama.hardware)
        too_large = other.memory.total > search.ROOM * llama.capacity
        assert too_large or other.seconds.total >= llama.seconds.total


def test_what_is_fixed_by_hand_stays():
    fixed = {"ici_tensor_parallelism": 4, "remat_policy": "full", "gradient_accumulation_steps": 4}
    made = found(**LLAMA, hardware="v5p-32", global_batch_size=64, **fixed)
    assert made.plan.ici["tensor"] == 4 and made.cfg.remat_policy == "full" and made.plan.microbatches == 4


def test_slices_hold_copies():
    made = found(**LLAMA, hardware="2xv5p-32", global_batch_size=64)
    assert made.plan.dcn["data"] == 2 and sum(n > 1 for n in made.plan.dcn.values()) == 1


def test_a_large_model_on_two_thousand_devices_takes_seconds():
    begin = time.process_time()
    made = found(
        model_name="deepseek-v3-671b",
        hardware="tpu7x-8x8x16",
        global_batch_size=8192,
        max_target_length=4096,
        dtype="bfloat16",
        scan_layers=True,
    )
    assert made.fits and time.process_time() - begin < 20


def test_nothing_that_fits_is_a_refusal_with_the_nearest_miss():
    with pytest.raises(PlanError) as caught:
        found(model_name="llama3.1-405b", hardware="v5e-16", global_batch_size=64, dtype="bfloat16", scan_layers=True)
    assert caught.value.id == "plan.memory" and "nearest" in str(caught.value) and "GiB" in str(caught.value)


def test_no_legal_mesh_is_a_refusal_with_the_rules():
    with pytest.raises(PlanError) as caught:
        found(**LLAMA, hardware="v5p-32", global_batch_size=64, ici_tensor_parallelism=3)
    assert caught.value.id in ("plan.nothing-legal", "plan.mesh")


def test_a_run_chooses_too():
    cfg = toy_config(auto_plan=True)
    chosen = forecast.chosen(cfg, cpu(4))
    made = forecast.make(chosen, cpu(4))
    assert made.plan.devices == 4 and made.plan.global_batch_size == cfg.global_batch_size
    assert forecast.chosen(toy_config(), cpu(1)) == toy_config()


def test_the_default_recipe_is_not_fixed_by_hand():
    cfg = config.load([str(Path(__file__).parents[1] / "configs/base.yml"), "remat_policy=full", "steps=5"])
    assert search.by_hand(cfg, "remat_policy") and not search.by_hand(cfg, "ici_fsdp_parallelism")
