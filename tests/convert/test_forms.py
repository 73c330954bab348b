"""The forms that files come in: old and new rope, GGUF and its blocks, byte pairs, patterns of dims."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from MaxText import config
from MaxText.convert import gguf, gguf_words, hf_config
from MaxText.convert.rearrange import Pattern
from MaxText.convert.source import open_source
from tests.convert.helpers import llama_gguf

OLD_LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 64,
}  # fmt: skip
SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32
}  # fmt: skip


def test_old_and_new_forms_of_rope_are_one():
    old = OLD_LLAMA | {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    older = OLD_LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **SCALING}}
    new = OLD_LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **SCALING}}
    recipes = [hf_config.read(theirs)[1] for theirs in (old, older, new)]
    assert recipes[0] == recipes[1] == recipes[2]
    assert recipes[0]["rope_max_timescale"] == 500 and recipes[0]["rope_type"] == "llama3.1"


def test_the_old_form_of_two_ropes():
    sizes = OLD_LLAMA | {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8}
    del sizes["hidden_act"]
    old = sizes | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert hf_config.read(old)[1] == hf_config.read(sizes | {"rope_parameters": both})[1]


HAVE_NO_FAMILY = {
    "gpt3-175b": "GPT-2 of Hugging Face has another layer",
    "deepseek-v3.2-671b": "its indexer has no table yet",
    "mistral-large-3": "its type is not known here",
}
RECIPES = sorted(file.stem for file in (Path(__file__).parents[2] / "configs" / "models").glob("*.yml"))


@pytest.mark.parametrize("model", [name for name in RECIPES if name not in HAVE_NO_FAMILY])
def test_recipes_of_the_tree_have_a_family(model: str):
    """`write` reads its config.json back and compares layer by layer."""
    cfg = config.make(model_name=model)
    family, theirs = hf_config.write(cfg)
    assert family.block in (cfg.decoder_block, cfg.decoder_block.removesuffix("_small"))
    assert theirs["num_hidden_layers"] == cfg.num_decoder_layers


# --- GGUF


def test_a_llama_file_and_its_row_order(tmp_path: Path):
    plain = llama_gguf(tmp_path / "m.gguf")
    source = open_source(tmp_path / "m.gguf", {})
    assert source.cfg.logits_via_embedding and source.cfg.normalization_layer_epsilon == 1e-5
    query = source.weights.read("decoder/layers/0/attention/query", 0)
    np.testing.assert_array_equal(query.reshape(32, -1).T, plain["blk.0.attn_q.weight"])
    key = source.weights.read("decoder/layers/0/attention/key", 0)
    np.testing.assert_array_equal(key.reshape(32, -1).T, plain["blk.0.attn_k.weight"])
    out = source.weights.read("decoder/layers/0/attention/out", 0)
    np.testing.assert_array_equal(out.reshape(-1, 32).T, plain["blk.0.attn_output.weight"])


def test_blocks_of_quantised_numbers():
    scale, offset = np.float16(0.5), np.float16(-1.25)
    low, high = np.arange(16) % 16, (np.arange(16) * 3) % 16
    packed = (low | high << 4).astype(np.uint8)
    both = np.concatenate([low, high]).astype(np.float32)
    q4_0 = np.frombuffer(scale.tobytes() + packed.tobytes(), np.uint8)
    q4_1 = np.frombuffer(scale.tobytes() + offset.tobytes() + packed.tobytes(), np.uint8)
    numbers = np.arange(-16, 16, dtype=np.int8)
    q8_0 = np.frombuffer(scale.tobytes() + numbers.tobytes(), np.uint8)
    np.testing.assert_array_equal(gguf.KINDS[2].unpack(q4_0), 0.5 * (both - 8))
    np.testing.assert_array_equal(gguf.KINDS[3].unpack(q4_1), 0.5 * both - 1.25)
    np.testing.assert_array_equal(gguf.KINDS[8].unpack(np.tile(q8_0, 2)), np.tile(0.5 * numbers, 2))


def test_byte_pairs():
    letters = [*gguf_words.LETTERS.values()]
    tokens = [*letters, "th", "the", "Ġthe", "<end>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"], "tokenizer.ggml.token_type": [1] * 259 + [3],
        "tokenizer.ggml.eos_token_id": 259,
    }  # fmt: skip
    words = gguf_words.make(metadata)
    assert words is not None
    ids = words.encode("the the 12é")
    assert [tokens[i] for i in ids] == ["the", "Ġthe", "Ġ", "1", "2", *(gguf_words.LETTERS[b] for b in "é".encode())]
    assert words.decode([*ids, 259]) == "the the 12é"
    assert words.token_bytes[[256, 258, 259]].tolist() == [2, 4, 0]


# --- patterns


@pytest.mark.parametrize(
    ("text", "shape", "theirs"),
    [
        ("d n h -> (n h) d", (6, 2, 4), (8, 6)),
        ("d n (t h) -> (n h t) d", (6, 2, 4), (8, 6)),
        ("p e d f -> e d (f p)", (2, 3, 4, 5), (3, 4, 10)),
        ("p e d f -> e (p f) d", (2, 3, 4, 5), (3, 10, 4)),
        ("-> 1", (), (1,)),
    ],
)
def test_patterns_go_there_and_back(text: str, shape: tuple[int, ...], theirs: tuple[int, ...]):
    pattern, array = Pattern(text), np.arange(np.prod(shape, dtype=int)).reshape(shape)
    moved = pattern.to_theirs(array)
    assert moved.shape == theirs == pattern.shape(shape)
    np.testing.assert_array_equal(pattern.to_ours(moved, shape), array)


def test_gate_and_up_lie_alternately_or_one_after_the_other():
    gate_and_up = np.stack([np.zeros((1, 2, 3)), np.ones((1, 2, 3))])
    assert Pattern("p e d f -> e d (f p)").to_theirs(gate_and_up)[0, 0].tolist() == [0, 1, 0, 1, 0, 1]
    assert Pattern("p e d f -> e d (p f)").to_theirs(gate_and_up)[0, 0].tolist() == [0, 0, 0, 1, 1, 1]
