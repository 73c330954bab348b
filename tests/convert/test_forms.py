"""The forms that files come in: old and new rope, GGUF and its blocks, byte pairs, patterns of dims."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from MaxText import architecture, blueprint, config
from MaxText.convert import gguf, gguf_words, hf_config, safetensors, transfer, weights
from MaxText.convert.rearrange import Pattern
from MaxText.convert.source import open_source
from MaxText.errors import MaxTextError
from tests.convert.helpers import GOLDENS, llama_gguf

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


# --- the same weights in other forms

FUSED = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
APART = ("mlp", "gate_proj", "up_proj", "down_proj")


def rewritten(folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int = 10**9, **changes: Any) -> Path:
    """The model in `folder` with these tensors and this config.json."""
    theirs = json.loads((folder / "config.json").read_text()) | changes
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(theirs))
    wanted = [safetensors.Wanted(name, array.dtype, array.shape) for name, array in tensors.items()]
    safetensors.write_folder(folder, wanted, tensors.__getitem__, shard_bytes)
    return folder


def stored(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in safetensors.read_folder(folder).items()}


def require_same(left: Path, right: Path) -> None:
    """Both import to the same arrays, and both write the same bytes."""
    before, after = open_source(left, {}), open_source(right, {})
    assert before.cfg == after.cfg
    for path, param in blueprint.leaves(before.tree):
        for index in weights.pieces(param):
            np.testing.assert_array_equal(before.weights.read(path, index), after.weights.read(path, index), path)
    for source, out in ((left, "left"), (right, "right")):
        transfer.export_model(source, right.parent / out, {})
    one, other = (right.parent / out / safetensors.SINGLE for out in ("left", "right"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("family", FUSED)
def test_experts_in_one_tensor_are_experts_apart(tmp_path: Path, family: str):
    folder = Path(shutil.copytree(GOLDENS / family, tmp_path / "model"))
    block, gate, up, down = FUSED[family]
    tensors = stored(folder)
    for layer in {int(name.split(".")[2]) for name in tensors if f"{block}.experts." in name}:
        here, there = f"model.layers.{layer}.{block}.", f"model.layers.{layer}.mlp."
        experts = range(sum(name.startswith(f"{here}experts.") for name in tensors) // 3)
        each = [[tensors.pop(f"{here}experts.{e}.{part}.weight") for part in (gate, up, down)] for e in experts]
        tensors[f"{there}experts.gate_up_proj"] = np.stack([np.concatenate(two[:2]) for two in each])
        tensors[f"{there}experts.down_proj"] = np.stack([three[2] for three in each])
        tensors[f"{there}gate.weight"] = tensors.pop(f"{here}gate.weight")
    require_same(GOLDENS / family, rewritten(folder, tensors))


def test_experts_apart_are_experts_in_one_tensor(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDENS / "mistral4", tmp_path / "model"))
    tensors = stored(folder)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        prefix = name.removesuffix("gate_up_proj")
        downs = tensors.pop(f"{prefix}down_proj")
        for e, (both, down) in enumerate(zip(tensors.pop(name), downs, strict=True)):
            gate, up = np.split(both, 2)
            tensors |= {f"{prefix}{e}.{part}.weight": w for part, w in zip(APART[1:], (gate, up, down), strict=True)}
    require_same(GOLDENS / "mistral4", rewritten(folder, tensors))


@pytest.mark.parametrize("form", ["index", "prefix", "buffers"])
def test_the_same_in_other_files_and_under_other_names(tmp_path: Path, form: str):
    folder = Path(shutil.copytree(GOLDENS / "gemma3", tmp_path / "model"))
    tensors, how = stored(folder), {}
    if form == "index":
        how = {"shard_bytes": 20_000}
    elif form == "prefix":  # as a multimodal model holds its text model
        tensors = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
        tensors["model.vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    else:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # a copy of what is tied
    rewritten(folder, tensors, **how)
    assert (folder / safetensors.INDEX).is_file() == (form == "index")
    require_same(GOLDENS / "gemma3", folder)
    assert bool(open_source(folder, {}).notes) == (form != "index")


def test_heads_of_multi_token_prediction_are_left_out_aloud(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDENS / "deepseek_v3", tmp_path / "model"))
    tensors = stored(folder) | {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    rewritten(folder, tensors)
    assert "model.layers.3.eh_proj.weight" in open_source(folder, {}).notes[0]
    require_same(GOLDENS / "deepseek_v3", folder)


def test_a_nested_config_is_the_text_model(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDENS / "gemma3", tmp_path / "model"))
    inner = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(outer))
    require_same(GOLDENS / "gemma3", folder)


def test_tied_and_untied(tmp_path: Path):
    """What is untied needs a tensor of its own; the recipe says which."""
    folder = Path(shutil.copytree(GOLDENS / "qwen3", tmp_path / "model"))
    tensors = stored(folder)
    assert "logits" in open_source(folder, {}).tree
    head = tensors.pop("lm_head.weight")
    tied = open_source(rewritten(folder, tensors, tie_word_embeddings=True), {})
    assert tied.cfg.logits_via_embedding and "logits" not in tied.tree
    with pytest.raises(MaxTextError) as caught:  # another head than the embedding is no copy to be left out in silence
        open_source(rewritten(folder, tensors | {"lm_head.weight": head}), {})
    assert caught.value.id == "convert.unfit" and "lm_head.weight" in str(caught.value)


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


@pytest.mark.parametrize("written", [None, ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2])
def test_the_last_layer_of_gemma_4_is_global_whatever_is_written(written):
    theirs = json.loads((GOLDENS / "gemma4" / "config.json").read_text()) | {"num_hidden_layers": 8}
    theirs = {key: value for key, value in theirs.items() if key not in ("layer_types", "per_layer_config")}
    theirs |= {"layer_types": written, "global_head_dim": 16, "num_global_key_value_heads": 1}
    _, recipe = hf_config.read(
        {key: value for key, value in theirs.items() if value is not None or key == "layer_types"}
    )
    kinds = [reach.kind for reach in architecture.reaches(config.make(**recipe))]
    assert kinds == ["local_sliding"] * 5 + ["global", "local_sliding", "global"]
