"""The tokenizer goes with the weights, and says the same on the other side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from MaxText import cli
from MaxText.convert import gguf_words, sampling, transfer, words
from MaxText.convert.source import Source, open_source
from MaxText.errors import MaxTextError
from tests.convert.helpers import llama_gguf

TEXT = "the the  12é, don't\n\n the <end>"
TOKENS = [*gguf_words.LETTERS.values(), "th", "the", "Ġthe", "<end>"]


def byte_pairs(split: str = "smollm") -> gguf_words.BytePairs:
    found = gguf_words.make(
        {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"], "tokenizer.ggml.token_type": [1] * 259 + [3],
            "tokenizer.ggml.eos_token_id": 259, "tokenizer.ggml.bos_token_id": 259,
        }
    )  # fmt: skip
    assert found is not None
    return found


@pytest.fixture
def speaking(tmp_path: Path) -> Source:
    """A GGUF file with a tokenizer, of a vocabulary that fits it."""
    big = np.random.default_rng(0).normal(size=(260, 32))
    llama_gguf(tmp_path / "m.gguf", tensors={"token_embd.weight": big})
    return dataclasses.replace(open_source(tmp_path / "m.gguf", {}), words=byte_pairs())


@pytest.mark.parametrize("split", ["smollm", "gpt-2"])
def test_written_and_read_it_is_the_same(speaking: Source, tmp_path: Path, split: str):
    speaking = dataclasses.replace(speaking, words=byte_pairs(split))
    out = tmp_path / "out"
    out.mkdir()
    assert words.carry(speaking, out) == ["tokenizer.json", "tokenizer_config.json"]
    again = words.read(dataclasses.replace(speaking, kind="Hugging Face", path=out))
    assert again is not None and again.fingerprint == byte_pairs(split).fingerprint
    assert again.encode(TEXT).tolist() == byte_pairs(split).encode(TEXT).tolist()


@pytest.mark.parametrize("split", ["smollm", "gpt-2"])
def test_the_library_reads_it_as_the_same(split: str):
    library = pytest.importorskip("tokenizers")
    model = library.Tokenizer.from_str(json.dumps(words.as_json(byte_pairs(split))))
    model.encode_special_tokens = True
    assert model.encode(TEXT, add_special_tokens=False).ids == byte_pairs(split).encode(TEXT).tolist()


def test_it_goes_through_import_and_export(speaking: Source, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(transfer, "open_source", lambda *arguments: speaking)
    said = transfer.import_model(speaking.path, tmp_path / "in", {})
    assert "tokenizer.json" in said
    monkeypatch.undo()
    transfer.export_model(tmp_path / "in", tmp_path / "hf", {})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "in" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    texts = [sampling.continue_text(open_source(tmp_path / name, {}), TEXT, 3) for name in ("in", "hf")]
    assert texts[0] == texts[1] == sampling.continue_text(speaking, TEXT, 3)
    assert cli.main(["generate", str(tmp_path / "hf"), f"prompt={TEXT}", "sample_length=3"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == texts[0].rstrip("\n")


def test_without_a_tokenizer_words_are_refused_and_a_damaged_one_is_named(tmp_path: Path):
    llama_gguf(tmp_path / "m.gguf")
    transfer.import_model(tmp_path / "m.gguf", tmp_path / "in", {})
    for source in (tmp_path / "m.gguf", tmp_path / "in", tmp_path / "in/checkpoints/0"):
        with pytest.raises(MaxTextError) as caught:
            sampling.continue_text(open_source(source, {}), "the", 3)
        assert (caught.value.id, caught.value.exit_code) == ("convert.no-tokenizer", 2)
    (tmp_path / "in" / "tokenizer.json").write_text("{")
    with pytest.raises(MaxTextError) as caught:
        sampling.continue_text(open_source(tmp_path / "in", {}), "the", 3)
    assert (caught.value.id, caught.value.exit_code) == ("convert.tokenizer", 4)
