"""Which config may continue which checkpoint: refused, announced, or the same."""

from __future__ import annotations

import pytest

from tests.resume.conftest import STEPS, WHOLE
from tests.runs import kept, run


def test_a_complete_run_says_so(unbroken, capsys):
    before = (unbroken / "toy/metrics.jsonl").read_bytes()
    assert run(unbroken, **WHOLE) == 0
    assert f"complete: {STEPS} steps" in capsys.readouterr().out
    assert (unbroken / "toy/metrics.jsonl").read_bytes() == before


def test_demands(halfway, tmp_path_factory, capsys):
    empty = tmp_path_factory.mktemp("empty")
    assert run(empty, start="resume") == 2
    assert "start=resume" in capsys.readouterr().err and not list(empty.iterdir())
    assert run(halfway, start="fresh") == 2
    assert "start=fresh" in capsys.readouterr().err and kept(halfway) == [2, 4]


def test_a_changed_schedule_is_announced(halfway, capsys):
    assert run(halfway, learning_rate=1e-4, learning_rate_schedule_steps=12) == 0
    said = capsys.readouterr().out
    assert "schedule changed: learning_rate 0.003 -> 0.0001" in said
    assert "learning_rate_schedule_steps 6 -> 12" in said and "learning rate at step 4" in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"eval_files": ["builtin:austen/sensesensibility.txt"]}, "persuasion.txt"),
        ({"eval_per_device_batch_size": 1.0}, "rows: 32 in the checkpoint, 16 now"),
        ({}, ""),
    ],
)
def test_another_held_out_set_is_announced(halfway, capsys, change, named):
    assert run(halfway, **WHOLE, **change) == 0
    said = capsys.readouterr().out
    assert ("measured on another set from here on" in said) == bool(change) and named in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data_shuffle_seed": 1}, "seed"),
        ({"max_target_length": 32}, "length"),
        ({"global_batch_size": 32}, "batch"),
        ({"train_files": ["builtin:austen/sensesensibility.txt"]}, "sha"),
    ],
)
def test_other_data_are_refused(halfway, capsys, change, named):
    before = (halfway / "toy/metrics.jsonl").read_bytes()
    assert run(halfway, **WHOLE, **change) == 2
    message = capsys.readouterr().err
    assert "in the checkpoint" in message and named in message and "Traceback" not in message
    assert (halfway / "toy/metrics.jsonl").read_bytes() == before and kept(halfway) == [2, 4]


def test_another_model_is_refused_before_anything_is_read(halfway, capsys):
    assert run(halfway, **WHOLE, base_mlp_dim=64) == 7
    message = capsys.readouterr().err
    assert "wi_0" in message and "48" in message and "64" in message and "Traceback" not in message
    assert kept(halfway) == [2, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"rope_max_timescale": 500_000},
        {"mlp_activations": ["gelu", "linear"]},
        {"normalization_layer_epsilon": 0.1},
        {"attention_type": "local_sliding", "sliding_window_size": 4},
        {"final_logits_soft_cap": 1.0},
        {"scale_embedding": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_function_of_the_same_parameters_is_refused(halfway, tmp_path, capsys, change):
    before = (halfway / "toy/metrics.jsonl").read_bytes()
    assert run(halfway, **WHOLE, **change) == 2
    message = capsys.readouterr().err
    assert "trained as another model" in message and "Traceback" not in message
    assert (halfway / "toy/metrics.jsonl").read_bytes() == before and kept(halfway) == [2, 4]


def test_of_another_run_it_is_announced(halfway, tmp_path, capsys):
    source = halfway / "toy/checkpoints/4"
    assert run(tmp_path, **WHOLE, run_name="new", load_full_state_path=source, scale_embedding=True, adam_b1=0.5) == 0
    said = capsys.readouterr().out
    assert "NEW, goes on after 4 steps of another run" in said and "FRESH" not in said
    assert "not as there: scale_embedding" in said and "trained otherwise from here on: adam_b1 0.9 -> 0.5" in said


def test_other_training_is_announced(halfway, capsys):
    change = {"adam_b2": 0.5, "gradient_clipping_threshold": 0.01, "dropout_rate": 0.2, "z_loss_multiplier": 0.1}
    assert run(halfway, **WHOLE, **change) == 0
    said = capsys.readouterr().out
    for text in ("adam_b2 0.95 -> 0.5", "gradient_clipping_threshold 1.0 -> 0.01", "dropout_rate 0.1 -> 0.2"):
        assert text in said
    assert "z_loss_multiplier 0.0 -> 0.1" in said and "adam_b1" not in said


def test_a_run_without_checkpoints_keeps_out_of_the_folder_of_one_that_has_them(halfway, capsys):
    before = (halfway / "toy/metrics.jsonl").read_bytes()
    assert run(halfway, **WHOLE, enable_checkpointing=False) == 2
    assert "newest: 4" in capsys.readouterr().err
    assert (halfway / "toy/metrics.jsonl").read_bytes() == before
