"""Bad input: refused with what and where, by id, and nothing is written."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from MaxText import cli, config
from MaxText.checkpoint import Store
from MaxText.convert import hf_config, safetensors, transfer
from MaxText.convert.safetensors import Wanted
from MaxText.convert.source import open_source
from MaxText.errors import MaxTextError
from tests.convert.helpers import GOLDENS, llama_gguf
from tests.runs import ROOT, tree

# What is not there is 4, what is damaged or does not fit is 7, what cannot be expressed is 2.
EXIT_CODES = {
    "convert.no-source": 4, "convert.unknown-source": 4, "convert.no-weights": 4, "score.array": 4,
    "convert.damaged": 7, "convert.truncated": 7, "convert.dtype": 7, "convert.index": 7, "convert.unfit": 7,
    "convert.integers": 7, "convert.not-finite": 7,
    "convert.refused": 2, "convert.unknown-family": 2, "config.heads": 2, "config.experts-per-token": 2,
}  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model of one file, to be damaged."""
    return Path(shutil.copytree(GOLDENS / "qwen3", tmp_path / "model"))


def rewrite(folder: Path, change) -> None:
    tensors = {name: tensor.read() for name, tensor in safetensors.read_folder(folder).items()}
    change(tensors)
    wanted = [Wanted(name, array.dtype, array.shape) for name, array in tensors.items()]
    safetensors.write_folder(folder, wanted, tensors.__getitem__)


def refused(source: Path, id: str, *said: str) -> None:
    """Import says `id` once and all words of `said`, with the exit code of the id's family, and leaves nothing."""
    out = source.parent / "out"
    before = tree(source.parent)
    with pytest.raises(MaxTextError) as caught:
        transfer.import_model(source, out, {})
    text = str(caught.value)
    assert (caught.value.id, caught.value.exit_code) == (id, EXIT_CODES[id]), text
    assert text.count(f"[{id}]") == 1 and all(word in text for word in said), text
    assert text.count(str(source)) <= 2 and "Errno" not in text, text
    assert tree(source.parent) == before and not out.exists()


def test_whole_numbers_are_no_weights(copy: Path):
    rewrite(copy, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].astype(np.int8)}))
    refused(copy, "convert.integers", "model.norm.weight (int8)")


def test_weights_that_are_not_finite(copy: Path):
    rewrite(copy, lambda tensors: tensors["model.norm.weight"].__setitem__(3, np.nan))
    refused(copy, "convert.not-finite", "final_norm")


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
    refused(copy, "convert.damaged", str(file))


@pytest.mark.parametrize(
    ("entry", "id"),
    [
        ({"dtype": "Q9"}, "convert.dtype"),
        ({"shape": [96, -1]}, "convert.damaged"),
        ({"shape": [96, "32"]}, "convert.damaged"),
        ({"data_offsets": [-4, 8]}, "convert.damaged"),
        ({"data_offsets": [0, 4]}, "convert.damaged"),
        ({"data_offsets": None}, "convert.damaged"),
    ],
    ids=str,
)
def test_a_header_that_cannot_be(copy: Path, entry: dict, id: str):
    file = copy / safetensors.SINGLE
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["lm_head.weight"] |= entry
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    refused(copy, id, "lm_head.weight")


def test_a_byte_changed_anywhere_in_the_descriptions(copy: Path, tmp_path: Path):
    """Header, index and config.json, and a GGUF file's head: read as they are, or refused in our words."""
    llama_gguf(tmp_path / "m.gguf")
    rng = np.random.default_rng(0)
    for file, source in (
        (copy / safetensors.SINGLE, copy),
        (copy / "config.json", copy),
        (tmp_path / "m.gguf", tmp_path / "m.gguf"),
    ):
        good = file.read_bytes()
        for place in rng.integers(0, min(1500, len(good)), 60):
            damaged = bytearray(good)
            damaged[place] = rng.integers(0, 256)
            file.write_bytes(damaged)
            with contextlib.suppress(MaxTextError):
                open_source(source, {})
        file.write_bytes(good)


def test_an_index_that_names_a_missing_file(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDENS / "mixtral", tmp_path / "model"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "convert.index", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("{", "convert.damaged"),
        ("[]", "convert.damaged"),
        ('{"weight_map": []}', "convert.damaged"),
        ('{"weight_map": {"model.norm.weight": "../elsewhere"}}', "convert.damaged"),
        ('{"weight_map": {"model.surprise": "model-00001-of-00003.safetensors"}}', "convert.index"),
        ('{"weight_map": {}}', "convert.unfit"),
    ],
)
def test_a_damaged_index(tmp_path: Path, text: str, id: str):
    folder = Path(shutil.copytree(GOLDENS / "mixtral", tmp_path / "model"))
    (folder / safetensors.INDEX).write_text(text)
    refused(folder, id, str(folder))


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
        ({"num_key_value_heads": 3}, "config.heads", "config.json"),
        ({"text_config": 3}, "convert.damaged", "config.json"),
    ],
)
def test_what_config_json_must_not_say(copy: Path, changes: dict, id: str, said: str):
    set_config(copy, **changes)
    refused(copy, id, said)


def test_a_layer_more_than_config_json_says(copy: Path):
    content = json.loads((copy / "config.json").read_text())
    set_config(copy, num_hidden_layers=2, layer_types=content["layer_types"][:2])
    refused(copy, "convert.unfit", "model.layers.2.mlp.up_proj.weight")


def test_more_experts_chosen_than_there_are(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDENS / "mixtral", tmp_path / "model"))
    set_config(folder, num_experts_per_tok=5)
    refused(folder, "config.experts-per-token", "5", "4")


def test_sliding_layers_without_a_window(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDENS / "gemma2", tmp_path / "model"))
    set_config(folder, sliding_window=None)
    refused(folder, "convert.refused", "layer_types")


def test_config_json_that_is_none(copy: Path):
    (copy / "config.json").write_text("{")
    refused(copy, "convert.damaged", "config.json")


def test_a_folder_without_weights(copy: Path):
    (copy / safetensors.SINGLE).unlink()
    refused(copy, "convert.no-weights", str(copy))


# --- GGUF


@pytest.mark.parametrize("keep", [10, 300, -1])
def test_a_truncated_gguf_file(tmp_path: Path, keep: int):
    file = tmp_path / "m.gguf"
    llama_gguf(file)
    file.write_bytes(file.read_bytes()[:keep])
    refused(file, "convert.truncated", str(file))


@pytest.mark.parametrize(
    ("metadata", "tensors", "id", "said"),
    [
        ({"general.architecture": (8, "mamba")}, {}, "convert.unknown-family", "mamba"),
        ({"llama.expert_count": (4, 8)}, {}, "convert.refused", "8 experts"),
        ({"llama.rope.scaling.type": (8, "yarn")}, {}, "convert.refused", "yarn"),
        ({"llama.attention.head_count": (4, 0)}, {}, "convert.refused", "head_count"),
        ({"llama.attention.head_count_kv": (4, 3)}, {}, "config.heads", "m.gguf"),
        ({"general.alignment": (4, 0)}, {}, "convert.damaged", "alignment"),
        ({}, {"blk.0.ffn_up.weight": np.zeros((47, 32))}, "convert.unfit", "[47, 32]"),
        ({}, {"blk.7.surprise": np.zeros(3)}, "convert.unfit", "blk.7.surprise"),
        ({"llama.block_count": (4, 2)}, {}, "convert.unfit", "blk.1.attn_norm.weight"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_gguf_file_that_cannot_be(tmp_path: Path, metadata: dict, tensors: dict, id: str, said: str):
    llama_gguf(tmp_path / "m.gguf", metadata, tensors)
    refused(tmp_path / "m.gguf", id, said)


# --- the verbs


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


def verb_refused(capsys, folder: Path, code: int, id: str, *argv: str) -> str:
    """The verb ends with `code`, says `id` once and nothing twice, and leaves nothing in `folder`."""
    before = tree(folder)
    assert cli.main(argv) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.count(f"[{id}]") == 1 and "Traceback" not in said.err, said
    assert "Errno" not in said.err and "make()" not in said.err
    assert tree(folder) == before
    return said.err


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_a_source_that_is_none(tmp_path: Path, capsys, name: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("words")
    np.save(tmp_path / "t.npy", np.zeros(4, int))
    source, out, tokens = str(tmp_path / name), str(tmp_path / "out"), f"tokens={tmp_path / 't.npy'}"
    id = "convert.no-source" if name == "nowhere" else "convert.unknown-source"
    for argv in (
        ["import", source, out],
        ["export", source, out],
        ["recipe", "from-hf", source, out],
        ["score", source, tokens, f"out={out}"],
        ["generate", source, "ids=1"],
    ):
        assert source in verb_refused(capsys, tmp_path, 4, id, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["import", "a"], ["import", "a", "b", "c"], ["import", "x=1", "a", "b"],
        ["export", "a", "b", "verify=maybe"], ["export", "a", "b", "dtype=int4"], ["recipe", "a"], ["score", "a"],
        ["generate", "a"], ["generate", "a", "ids=1", "prompt=a"], ["generate", "a", "ids=one"],
        ["generate", "a", "ids=1", "sample_length=0"], ["generate", "a", "ids=1", "temperature=-1"],
    ],
)  # fmt: skip
def test_wrong_usage(argv, capsys, tmp_path):
    verb_refused(capsys, tmp_path, 2, "cli.usage", *argv)


@pytest.mark.parametrize("verb", ["import", "export", "score", "generate"])
def test_a_key_that_is_none_is_answered_before_jax_is_there(verb: str, tmp_path: Path):
    own = {"score": ["tokens=t.npy", "out=o.npz"], "generate": ["ids=1"]}.get(verb, ["out"])
    program = "import sys; from MaxText import cli; sys.exit(cli.main(sys.argv[1:]) + 100 * ('jax' in sys.modules))"
    command = [sys.executable, "-c", program, verb, "nowhere", *own, "foo=3", "base_emb_dim=1.5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "foo=3 (command line)" in done.stderr and "base_emb_dim=1.5 (command line)" in done.stderr


def test_an_override_that_contradicts_the_source(copy: Path, capsys):
    err = verb_refused(capsys, copy, 2, "config.heads", "generate", str(copy), "ids=1", "base_num_kv_heads=3")
    assert "base_num_kv_heads=3 (command line)" in err and "base_num_query_heads=4" in err and "config.json" in err


@pytest.mark.parametrize(
    ("array", "id"),
    [
        (None, "convert.no-source"),
        (b"words", "score.array"),
        (np.zeros(4), "score.array"),
        (np.zeros((2, 3, 4), int), "score.array"),
        (np.full(4, 96), "score.ids"),
        (np.full(4, -1), "score.ids"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_scored(copy: Path, tmp_path: Path, capsys, array, id: str):
    if isinstance(array, bytes):
        (tmp_path / "t.npy").write_bytes(array)
    elif array is not None:
        np.save(tmp_path / "t.npy", array)
    argv = ["score", str(copy), f"tokens={tmp_path / 't.npy'}", f"out={tmp_path / 'out.npz'}"]
    verb_refused(capsys, tmp_path, 4, id, *argv)


def test_segments_of_another_shape_and_a_place_that_is_none(copy: Path, tmp_path: Path, capsys):
    np.save(tmp_path / "t.npy", np.zeros(4, int))
    np.save(tmp_path / "s.npy", np.zeros(3, int))
    argv = ["score", str(copy), f"tokens={tmp_path / 't.npy'}"]
    verb_refused(capsys, tmp_path, 4, "score.shape", *argv, f"segments={tmp_path / 's.npy'}", f"out={tmp_path / 'o'}")
    verb_refused(capsys, tmp_path, 7, "convert.not-written", *argv, f"out={tmp_path / 'no' / 'out.npz'}")


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
