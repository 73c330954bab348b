"""`load_parameters_path`: a run begins with the weights of another, exactly, on any mesh, from any kind of source."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from MaxText import decoder, session, walk
from MaxText.checkpoint import Store, Tiers
from MaxText.checkpoint.stream import Reader
from MaxText.convert import start, transfer
from tests.runs import run, toy_config, tree

SMALL = {"base_num_decoder_layers": 1, "eval_files": []}
# A step so small that no float32 weight moves.
STILL = SMALL | {"steps": 1, "learning_rate": 1e-38}


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Path:
    """A folder with the run `toy` of two steps, and with the same as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("before")
    assert run(folder, steps=2, **SMALL) == 0
    transfer.export_model(folder / "toy", folder / "hf", {})
    return folder


def parameters(step: Path) -> dict[str, np.ndarray]:
    reader = Reader(step, "params/")
    return {name: reader.read(name) for name in reader.names()}


BOTH = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}


@pytest.mark.parametrize(
    ("where", "mesh"), [("toy", {}), ("toy/checkpoints/2", {}), ("hf", {}), ("hf", BOTH)], ids=lambda value: str(value)
)
def test_a_run_begins_with_the_weights(before: Path, tmp_path: Path, where: str, mesh: dict, capsys):
    assert run(tmp_path, load_parameters_path=before / where, **STILL, **mesh) == 0
    said = capsys.readouterr().out
    assert "FRESH" in said and str(before / where) in said and "not as there" not in said
    old, new = parameters(before / "toy/checkpoints/2"), parameters(tmp_path / "toy/checkpoints/1")
    assert old.keys() == new.keys()
    for name in old:
        np.testing.assert_array_equal(old[name], new[name], err_msg=name)


def test_its_own_checkpoint_comes_first(before: Path, tmp_path: Path, capsys):
    shutil.copytree(before / "toy", tmp_path / "toy")
    assert run(tmp_path, steps=2, load_parameters_path=before / "hf", **SMALL) == 0
    assert "complete: 2 steps" in capsys.readouterr().out
    made = session.prepare(toy_config(tmp_path, steps=3, load_parameters_path=before / "hf", **SMALL))
    beginning = walk.find_beginning(made, Tiers(Store(tmp_path / "toy/checkpoints")))
    assert (beginning.done, beginning.resumed, beginning.source) == (2, str(tmp_path / "toy/checkpoints/2"), None)


def test_another_function_of_the_same_weights_is_announced(before: Path, tmp_path: Path):
    cfg = toy_config(tmp_path, load_parameters_path=before / "toy", rope_max_timescale=500, **SMALL)
    _, said = start.open_for(cfg, decoder.declare(cfg))
    assert "rope of layer 0" in said[1] and len(said) == 2


@pytest.mark.parametrize(
    ("path", "change", "code", "id"),
    [
        ("toy", {"base_mlp_dim": 64}, 7, "mlp/wi_0"),
        ("nowhere", {}, 4, "[convert.no-source]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    before: Path, tmp_path: Path, capsys, path, change, code, id
):
    assert run(tmp_path, load_parameters_path=before / path, **STILL, **change) == code
    assert id in capsys.readouterr().err
    assert not tree(tmp_path)
