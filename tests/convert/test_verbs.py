"""Every verb on every kind of source: a Hugging Face folder, a GGUF file, a run folder, the folder of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from MaxText import cli, config
from MaxText.convert import safetensors, transfer, verbs
from MaxText.convert.source import open_source
from MaxText.errors import MaxTextError
from tests.convert.helpers import GOLDENS, golden, llama_gguf

IDS = np.random.default_rng(1).integers(0, 96, (2, 12))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """One model as every kind of source."""
    folder = tmp_path_factory.mktemp("sources")
    llama_gguf(folder / "m.gguf")
    assert cli.main(["import", str(folder / "m.gguf"), str(folder / "run")]) == 0
    assert cli.main(["export", str(folder / "m.gguf"), str(folder / "hf")]) == 0
    np.save(folder / "tokens.npy", IDS)
    step = folder / "run" / "checkpoints" / "0"
    return {"GGUF": folder / "m.gguf", "run": folder / "run", "step": step, "Hugging Face": folder / "hf"}


def say(capsys, *argv: object) -> str:
    """What a verb prints."""
    assert cli.main([str(argument) for argument in argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["GGUF", "run", "step", "Hugging Face"])
def test_every_verb_takes_it(sources: dict[str, Path], kind: str, tmp_path: Path, capsys):
    source, hf = sources[kind], sources["Hugging Face"]
    expected = (hf / safetensors.SINGLE).read_bytes()
    say(capsys, "import", source, tmp_path / "in")
    said = say(capsys, "export", tmp_path / "in", tmp_path / "out", "verify=true")
    assert "verified" in said and (tmp_path / "out" / safetensors.SINGLE).read_bytes() == expected
    say(capsys, "export", source, tmp_path / "direct")
    assert (tmp_path / "direct" / safetensors.SINGLE).read_bytes() == expected
    assert (tmp_path / "direct" / "config.json").read_text() == (hf / "config.json").read_text()
    recipe = yaml.safe_load(say(capsys, "recipe", "from-hf", source))
    assert recipe["base_emb_dim"] == 32 and recipe["rope_max_timescale"] == 100_000
    say(capsys, "recipe", "from-hf", source, tmp_path / "recipe.yml")
    assert config.make(model_name=str(tmp_path / "recipe.yml")).head_dim == 8
    tokens = f"tokens={source.parent / 'tokens.npy'}" if kind != "step" else f"tokens={hf.parent / 'tokens.npy'}"
    say(capsys, "score", source, tokens, f"out={tmp_path / 'a.npz'}", "gradients=true")
    say(capsys, "score", hf, tokens, f"out={tmp_path / 'b.npz'}", "gradients=true")
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        assert a["logits"].shape == (*IDS.shape, 96) and a["loss_mask"].sum() == 22
        assert "gradient/model.layers.0.mlp.up_proj.weight" in a.files
        for name in b.files:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    ids = "ids=" + ",".join(map(str, IDS[0]))
    continued = say(capsys, "generate", source, ids, "sample_length=4")
    assert continued == say(capsys, "generate", hf, ids, "sample_length=4")
    assert len(continued.split(",")) == 16


def test_a_packed_row_is_its_documents_in_rows_of_their_own(sources: dict[str, Path], tmp_path: Path, capsys):
    """Through `score`, with segments, positions and a loss mask from files."""
    lengths = (5, 4, 3)
    documents = np.split(IDS[0], np.cumsum(lengths)[:-1])
    weights = [np.arange(length) % 3 != 1 for length in lengths]  # no loss at some targets
    given = {
        "tokens": IDS[:1],
        "segments": np.repeat([1, 2, 3], lengths)[None],
        "positions": np.concatenate([np.arange(length) for length in lengths])[None],
        "loss_mask": np.concatenate(weights)[None],
    }
    packed = scored(sources, tmp_path / "packed", capsys, given)
    apart = [
        scored(sources, tmp_path / str(i), capsys, {"tokens": document, "loss_mask": weight})
        for i, (document, weight) in enumerate(zip(documents, weights, strict=True))
    ]
    for name in ("logits", "token_loss", "loss_mask"):
        rows = np.concatenate([one[name][0] for one in apart])
        np.testing.assert_allclose(packed[name][0], rows, rtol=1e-5, atol=1e-5)
    targets = sum(one["loss_mask"].sum() for one in apart)
    assert packed["loss_mask"].sum() == targets == 6
    np.testing.assert_allclose(packed["loss"], packed["token_loss"].sum() / targets, rtol=1e-6)
    del given["positions"]  # they follow from the segments
    np.testing.assert_array_equal(scored(sources, tmp_path / "again", capsys, given)["logits"], packed["logits"])


def scored(sources: dict[str, Path], folder: Path, capsys, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `score` writes of arrays in files."""
    folder.mkdir()
    for name, array in given.items():
        np.save(folder / f"{name}.npy", array)
    files = [f"{name}={folder / name}.npy" for name in given]
    say(capsys, "score", sources["run"], *files, f"out={folder / 'out.npz'}")
    with np.load(folder / "out.npz") as found:
        return dict(found)


def test_packed_documents_of_a_window_a_cache_and_experts():
    """The same for families whose attention could look too far; the goldens hold the documents apart."""
    from MaxText.convert.score import make_batch, score
    from tests.convert.helpers import source

    for family in ("gemma3", "llama4"):
        found = golden(family)
        second, third = found["tokens_1"], found["tokens_2"]
        segments = np.repeat([1, 2], [len(second), len(third)])
        logits = score(source(family), make_batch(np.concatenate([second, third]), segments))["logits"][0]
        expected = np.concatenate([found["logits_1"], found["logits_2"]])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_an_export_that_computes_something_else_is_not_left(tmp_path: Path, monkeypatch):
    """A table that would exchange two matrices is seen by verify=true, and the folder is gone."""
    honest = transfer.mapping.Link.to_theirs

    def exchanged(self, read):
        return honest(self, read)[::-1].copy() if self.name.endswith("0.mlp.up_proj.weight") else honest(self, read)

    monkeypatch.setattr(transfer.mapping.Link, "to_theirs", exchanged)
    with pytest.raises(MaxTextError) as caught:
        transfer.export_model(GOLDENS / "qwen3", tmp_path / "out", {}, reference=verbs.FLOAT32)
    assert (caught.value.id, caught.value.exit_code) == ("convert.not-equal", 7)
    assert not list(tmp_path.iterdir())


def test_another_stored_type(sources: dict[str, Path], tmp_path: Path, capsys):
    """bfloat16 out, float32 in again: rounded once, and verified against what is rounded."""
    said = say(capsys, "export", sources["run"], tmp_path / "out", "dtype=bfloat16", "verify=true")
    assert "verified" in said
    assert open_source(tmp_path / "out", {}).dtype.name == "bfloat16"
    say(capsys, "import", tmp_path / "out", tmp_path / "in", "weight_dtype=float32")
    source = open_source(tmp_path / "in", {})
    wide = open_source(sources["run"], {}).weights.read("embedding", None)
    np.testing.assert_allclose(source.weights.read("embedding", None), wide, rtol=2**-8)
    assert source.dtype == np.float32
