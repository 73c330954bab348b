"""Bad input: refused with what and where, by id, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from MaxText import cli, config
from MaxText.checkpoint import Store
from MaxText.convert import hf_config, safetensors, transfer
from MaxText.convert.safetensors import Wanted
from MaxText.convert.source import open_source
from MaxText.errors import MaxTextError
from tests.convert.helpers import GOLDENS


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model of one file, to be damaged."""
    return Path(shutil.copytree(GOLDENS / "qwen3", tmp_path / "model"))


def rewrite(folder: Path, change) -> None:
    tensors = {name: tensor.read() for name, tensor in safetensors.read_folder(folder).items()}
    change(tensors)
    wanted = [Wanted(name, array.dtype, array.shape) for name, array in tensors.items()]
    safetensors.write_folder(folder, wanted, tensors.__getitem__)


def refused(folder: Path, id: str, *said: str) -> None:
    out = folder.parent / "out"
    with pytest.raises(MaxTextError) as caught:
        transfer.import_model(folder, out, {})
    assert caught.value.id == id
    assert all(word in str(caught.value) for word in said), caught.value
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


def test_a_missing_an_extra_and_a_misshapen_tensor_are_one_table(copy: Path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.surprise"] = np.zeros(3, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:90]

    rewrite(copy, change)
    refused(copy, "convert.unfit", "model.norm.weight", "model.surprise", "[90, 32]", "[96, 32]")


def test_a_vocabulary_that_does_not_fit(copy: Path):
    set_config(copy, vocab_size=128)
    refused(copy, "convert.unfit", "model.embed_tokens.weight", "128", "96")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_truncated_file(copy: Path, keep: int):
    file = copy / safetensors.SINGLE
    file.write_bytes(file.read_bytes()[:keep])
    refused(copy, "convert.truncated", str(file))


def test_a_damaged_header(copy: Path):
    file = copy / safetensors.SINGLE
    data = bytearray(file.read_bytes())
    data[8:12] = b"!!!!"
    file.write_bytes(data)
    refused(copy, "convert.damaged")


def test_an_index_that_names_a_missing_file(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDENS / "mixtral", tmp_path / "model"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "convert.index", "model-00002-of-00003.safetensors")


def set_config(folder: Path, **changes) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("changes", "id", "said"),
    [
        ({"model_type": "mamba"}, "convert.unknown-family", "mamba"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "convert.refused", "longrope"),
        ({"quantization_config": {"bits": 4}}, "convert.refused", "quantization_config"),
        ({"hidden_act": "gelu"}, "convert.refused", "hidden_act"),
        ({"layer_types": ["linear_attention"] * 3}, "convert.refused", "linear_attention"),
        ({"num_key_value_heads": 3}, "config.heads", "3"),
    ],
)
def test_what_config_json_must_not_say(copy: Path, changes: dict, id: str, said: str):
    set_config(copy, **changes)
    refused(copy, id, said)


def test_what_is_there_is_not_overwritten(copy: Path):
    (copy.parent / "out").mkdir()
    (copy.parent / "out" / "precious").write_text("x")
    with pytest.raises(MaxTextError) as caught:
        transfer.import_model(copy, copy.parent / "out", {})
    assert caught.value.id == "convert.not-empty"
    assert (copy.parent / "out" / "precious").read_text() == "x"


def test_a_damaged_checkpoint_is_not_exported(copy: Path):
    imported = copy.parent / "in"
    transfer.import_model(copy, imported, {})
    (chunk,) = (imported / "checkpoints/0/state").glob("params.final_norm/0")
    chunk.write_bytes(chunk.read_bytes()[:-4])
    with pytest.raises(MaxTextError) as caught:
        transfer.export_model(imported, copy.parent / "out", {})
    assert caught.value.id == "checkpoint.damaged"
    assert not (copy.parent / "out").exists()


def test_no_family_for_a_mixture_of_features():
    cfg = config.make(decoder_block="gemma", attention_sink=True)
    with pytest.raises(MaxTextError) as caught:
        hf_config.write(cfg)
    assert caught.value.id == "convert.no-family"
    assert "attention_sink" in str(caught.value)


def test_a_source_that_is_none(tmp_path: Path):
    with pytest.raises(MaxTextError) as caught:
        open_source(tmp_path, {})
    assert caught.value.id == "convert.unknown-source"


@pytest.mark.parametrize(
    "argv",
    [["import", "a"], ["export", "a", "b", "verify=maybe"], ["recipe", "a"], ["score", "a"], ["generate", "a"]],
)
def test_wrong_usage(argv, capsys):
    assert cli.main(argv) == 2
    assert "[cli.usage]" in capsys.readouterr().err


def test_a_step_of_imported_weights_is_a_step_like_any_other(copy: Path):
    import jax

    transfer.import_model(copy, copy.parent / "in", {})
    store = Store(copy.parent / "in" / "checkpoints")
    leaves = store.manifest(0)["leaves"]
    target = {name: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"]) for name, leaf in leaves.items()}
    nested: dict = {}
    for name, leaf in target.items():
        *parents, last = name.split("/")
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    restored = store.restore(0, nested)
    theirs = safetensors.read_folder(copy)["lm_head.weight"].read()
    np.testing.assert_array_equal(restored["params"]["logits"], theirs.T)
