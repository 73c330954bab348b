"""Whole runs whose data change form, documents or place: what must go on exactly, and what is refused."""

import json
import sys

import numpy as np
import pytest

from MaxText import tokenizer
from MaxText.data import prepare
from tests.runs import records, run, toy_config

pytestmark = pytest.mark.slow


@pytest.fixture
def web(tmp_path):
    random = np.random.default_rng(2)
    texts = [bytes(random.integers(97, 123, n).tolist()).decode() for n in random.integers(3, 300, 60)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return {"train_files": [tmp_path / "web.jsonl"], "eval_files": [], "num_epoch": -1}


def test_a_run_goes_over_from_sources_to_prepared_rows_and_back(tmp_path, web, capsys):
    assert run(tmp_path / "whole", **web) == 0
    assert run(tmp_path / "cut", **web, steps=2, learning_rate_schedule_steps=6) == 0
    cfg = toy_config(tmp_path, **web)
    prepare.prepare(cfg, tokenizer.make(cfg), tmp_path / "rows", 1)
    rows = {"dataset_type": "prepared", "dataset_path": tmp_path / "rows", "num_epoch": -1, "eval_files": []}
    assert run(tmp_path / "cut", **rows, steps=4, learning_rate_schedule_steps=6) == 0
    assert run(tmp_path / "cut", **web, learning_rate_schedule_steps=6) == 0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert "data: 96 rows, " in capsys.readouterr().out  # the account at the end


def test_what_is_in_quarantine_stays_there(tmp_path, web, capsys):
    assert run(tmp_path, **web, steps=2) == 0
    assert run(tmp_path, **web, steps=3, quarantine=["web.jsonl:7"]) == 0
    assert "1 documents train nothing from here on: web.jsonl:7" in capsys.readouterr().out
    assert run(tmp_path, **web, steps=4) == 2
    assert "web.jsonl:7" in capsys.readouterr().err
    assert run(tmp_path, **web, steps=4, quarantine=["web.jsonl:7", "web.jsonl:9"]) == 0


@pytest.mark.parametrize("change", [{"packing_type": "best_fit"}, {"data_shuffle_seed": 5}, {"held_out_every": 9}])
def test_another_recipe_is_refused_with_the_difference(tmp_path, web, change, capsys):
    assert run(tmp_path, **web, steps=2) == 0
    assert run(tmp_path, **web | change, steps=4) == 2
    said = capsys.readouterr().err
    assert "run.other-data" in said or "was trained on other data" in said
    assert "in the checkpoint" in said


@pytest.mark.filterwarnings("ignore")
def test_a_stream_goes_on_exactly(tmp_path, web):
    pytest.importorskip("datasets")
    keys = {
        "dataset_type": "hf", "hf_path": "json", "hf_train_files": web["train_files"], "hf_streaming": True,
        "num_epoch": -1, "eval_files": [], "learning_rate_schedule_steps": 7,
    }  # fmt: skip
    assert run(tmp_path / "whole", **keys, steps=7) == 0
    for steps in (1, 4, 7):
        sys.modules["MaxText.data.formats.hub"].load.cache_clear()
        assert run(tmp_path / "cut", **keys, steps=steps) == 0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
