"""Automatic planning: legal, fitting, respecting what a person fixed, with reasons; or a refusal with numbers."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from MaxText import config, forecast, hardware
from MaxText.errors import PlanError
from MaxText.forecast import search, space
from tests.helpers import cpu, toy_config

ROOT = Path(__file__).parents[1]

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


DENSE = {"model_name": "llama3.1-8b", "dtype": "bfloat16", "scan_layers": True}


def typed(*more: str) -> config.Config:
    given = ["model_name=llama3.1-8b", "dtype=bfloat16", "hardware=v6e-16", "max_target_length=2048"]
    return config.load([str(ROOT / "configs/base.yml"), *given, "global_batch_size=17", *more])


def test_a_faster_plan_without_room_is_said_with_its_keys():
    """Typed as they stand they give that plan, which is faster, and has less room than a choice leaves."""
    made = forecast.of_config(typed("auto_plan=true"))
    (said,) = [warning for warning in made.warnings if warning.startswith("a faster plan may fit")]
    keys = [word for word in said.split() if "=" in word and word.split("=")[0] in config.Config.model_fields]
    other = forecast.of_config(typed(*keys[keys.index("auto_plan=false") :]))
    assert other.seconds.total < (1 - search.REAL) * made.seconds.total
    assert search.ROOM * made.capacity < other.memory.total <= search.HOPE * made.capacity
    assert f"({other.memory.total / made.capacity:.0%})" in said and "compile=true" in said
    assert any("no room" in one["why"] and "faster" in one["why"] for one in made.rejected)


def test_what_cannot_be_compiled_here_is_to_be_tried():
    """No compiler for GPUs is at hand; the rest of the line is the same."""
    keys = {"hardware": "h100-8", "global_batch_size": 9, "max_target_length": 2048}
    said = [warning for warning in found(**DENSE, **keys).warnings if "a faster plan" in warning]
    assert all("To try it: auto_plan=false" in warning and "compile=true" not in warning for warning in said) and said


def test_where_none_leaves_room_the_nearest_is_named_and_not_taken():
    with pytest.raises(PlanError) as caught:
        forecast.of_config(
            typed("auto_plan=true", "remat_policy=minimal_with_context", "gradient_accumulation_steps=1")
        )
    assert caught.value.id == "plan.memory" and "auto_plan=false" in str(caught.value) and "%)" in str(caught.value)


@pytest.mark.parametrize(("rows", "length"), [(7, 1024), (17, 2048)])
def test_rows_that_no_device_count_divides_are_split_by_tokens(rows, length):
    made = found(**DENSE, hardware="v6e-16", global_batch_size=rows, max_target_length=length)
    assert made.plan.mesh_shape["tensor"] * made.plan.mesh_shape["context"] == 16


def test_degrees_other_than_powers_of_two_are_tried():
    """192 chips and 64 rows: three ways are left, for copies of nothing; three ways of the tokens of a row do."""
    made = found(**DENSE, hardware="v5p-384", global_batch_size=64, max_target_length=6144)
    assert made.plan.mesh_shape["context"] % 3 == 0 and made.fits


def test_what_is_fixed_by_hand_stays():
    fixed = {"ici_tensor_parallelism": 4, "remat_policy": "full", "gradient_accumulation_steps": 4}
    made = found(**LLAMA, hardware="v5p-32", global_batch_size=64, **fixed)
    assert made.plan.ici["tensor"] == 4 and made.cfg.remat_policy == "full" and made.plan.microbatches == 4


def test_any_number_of_microbatches_that_divides_the_rows_is_tried():
    made = found(model_name="llama3.1-70b", hardware="v5p-128", max_target_length=4096, global_batch_size=192)
    assert made.plan.microbatches == 3 and made.fits


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b"])
def test_more_microbatches_divide_no_more_than_what_is_not_state(model):
    """By which numbers of microbatches are passed over."""
    keys = {"hardware": "v6e-16", "global_batch_size": 1024, "max_target_length": 2048, "remat_policy": "full"}
    made = {
        count: forecast.of_config(
            config.make(**DENSE | keys | {"model_name": model}, gradient_accumulation_steps=count)
        )
        for count in (1, 2, 4, 16, 64)
    }
    above = {count: one.memory.total - one.plan.state_bytes for count, one in made.items()}
    assert all(above[many] >= above[few] * few / many for few in above for many in above if many > few)


def test_parameters_lie_in_pieces_over_nodes_of_gpus():
    made = found(model_name="llama3.1-70b", hardware="h100-64", max_target_length=8192, global_batch_size=64)
    assert made.plan.dcn["fsdp"] == 8 and made.plan.ici["fsdp"] == 8


def test_slices_hold_copies():
    made = found(**LLAMA, hardware="2xv5p-32", global_batch_size=64)
    assert made.plan.dcn["data"] == 2 and sum(n > 1 for n in made.plan.dcn.values()) == 1


def test_meshes_hold_pipelines_within_and_across_slices():
    cfg = config.make(**LLAMA, hardware="4xv5p-32", global_batch_size=256)
    there = hardware.named("4xv5p-32")
    every = list(space.meshes(cfg, there))
    stages = {(one["ici_pipeline_parallelism"], one["dcn_pipeline_parallelism"]) for one in every}
    assert {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 4)} <= stages
    for one in every:
        inside, across = (
            [one[f"{level}_{axis}_parallelism"] for axis in forecast.MESH_AXES] for level in ("ici", "dcn")
        )
        assert math.prod(inside) == 16 and math.prod(across) == 4
        pieces, total = one.get("num_pipeline_microbatches"), inside[0] * across[0]
        assert pieces is None if total == 1 else pieces % total == 0


def test_stages_between_slices_where_copies_have_no_room():
    """70 billion parameters on small slices: each slice holds its own layers, and only the stream crosses."""
    keys = LLAMA | {"model_name": "llama3.1-70b", "max_target_length": 2048, "hardware": "4xv5e-64"}
    made = found(**keys, global_batch_size=256)
    assert made.plan.dcn["pipeline"] == 4 and made.fits and made.seconds.bubble > 0
    assert "otherwise" in made.reasons["dcn_pipeline_parallelism"]
    assert made.cfg.num_pipeline_microbatches % 4 == 0 and "(between slices)" in made.reasons["remat_policy"]
    one = found(**(keys | {"hardware": "2xv5p-32", "model_name": "llama3.1-8b"}), global_batch_size=64)
    assert "pipeline=" in one.reasons["ici_pipeline_parallelism"] and one.plan.pipeline is None


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


def test_a_run_chooses_too_and_its_plan_says_why():
    cfg = toy_config(auto_plan=True)
    made = forecast.planned(cfg, cpu(4))
    assert made.plan.devices == 4 and made.plan.global_batch_size == cfg.global_batch_size
    assert made.rejected and "fewest" in made.reasons["gradient_accumulation_steps"]
    assert forecast.planned(toy_config(), cpu(1)).cfg == toy_config()


def test_the_default_recipe_is_not_fixed_by_hand():
    cfg = config.load([str(Path(__file__).parents[1] / "configs/base.yml"), "remat_policy=full", "steps=5"])
    assert space.by_hand(cfg, "remat_policy") and not space.by_hand(cfg, "ici_fsdp_parallelism")


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("recipes/*/*.yml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_recipe_has_a_plan_that_fits(path):
    made = forecast.of_config(config.load([str(path), "plan_only=true"]))
    assert made.fits
