"""Every family against the reference implementation: what it computes, and that each feature is part of it."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from MaxText.checkpoint import Store
from MaxText.convert import mapping, safetensors, transfer
from MaxText.convert.sampling import continue_ids
from MaxText.convert.score import score
from MaxText.convert.source import open_source
from MaxText.errors import MaxTextError
from tests.convert.helpers import FAMILIES, FLOAT32, GOLDENS, batch, golden, rows, source

# The reference keeps them as buffers, or computes them without a gradient.
NO_GRADIENT_THERE = re.compile(r"layer_scalar$|correction_bias$|\.indexer\.")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_reference_does(family: str):
    expected = golden(family)
    found = score(source(family), batch(expected), gradients=True, devices=jax.devices()[:1])
    size = np.abs(rows(expected, "logits")).max()
    np.testing.assert_allclose(found["logits"], rows(expected, "logits"), rtol=0, atol=1e-4 * size)
    np.testing.assert_allclose(found["token_loss"], rows(expected, "token_loss"), rtol=0, atol=1e-4 * size)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    theirs = {name: value for name, value in expected.items() if name.startswith("gradient/")}
    ours = {name: value for name, value in found.items() if name.startswith("gradient/")}
    assert theirs.keys() == {name for name in ours if not NO_GRADIENT_THERE.search(name)}
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_continues_as_the_reference_does_from_its_cache(family: str):
    expected = golden(family)["greedy"].tolist()
    assert continue_ids(source(family), expected[:8], len(expected) - 8, devices=jax.devices()[:1]) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_gives_the_same_bytes(family: str, tmp_path):
    transfer.import_model(GOLDENS / family, tmp_path / "in", {})
    Store(tmp_path / "in" / "checkpoints").verify(0)
    transfer.export_model(tmp_path / "in", tmp_path / "out", {})
    before, after = (safetensors.read_folder(folder) for folder in (GOLDENS / family, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        left, right = before[name].read(), after[name].read()
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()), name
    single = GOLDENS / family / safetensors.SINGLE
    if single.is_file():
        assert single.read_bytes() == (tmp_path / "out" / safetensors.SINGLE).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read_as_the_same_model(family: str, tmp_path):
    """Also the architecture of config.json, and the mapping total and one to one."""
    first, _ = transfer.export_model(GOLDENS / family, tmp_path / "out", {}, shard_bytes=50_000)
    again = open_source(tmp_path / "out", {})
    assert (tmp_path / "out" / safetensors.INDEX).is_file()
    differing = {key for key, value in first.recipe.items() if again.recipe.get(key) != value}
    assert differing <= {"rope_scaling_layers"}
    assert isinstance(first.tree, dict) and first.tree.keys() == again.tree.keys()


def test_a_model_of_experts_is_scored_the_same_on_a_mesh():
    expected = golden("mixtral")
    split = source("mixtral", ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
    found = score(split, batch(expected), devices=jax.devices()[:4])
    size = np.abs(rows(expected, "logits")).max()
    np.testing.assert_allclose(found["logits"], rows(expected, "logits"), rtol=0, atol=1e-4 * size)


# --- the check of the check: each of these, changed alone, is seen

FEATURES = [
    ("llama", {"rope_type": "default"}),
    ("llama", {"rope_high_freq_factor": 2.0}),
    ("mistral", {"attention_type": "global", "sliding_window_size": 0}),
    ("mistral", {"sliding_window_size": 7}),
    ("qwen2", {"attention_bias": False}),
    ("qwen3", {"use_qk_norm": False}),
    ("gemma", {"scale_embedding": False}),
    ("gemma", {"norm_unit_offset": False}),
    ("gemma", {"mlp_activations": ["silu", "linear"]}),
    ("gemma", {"normalize_embedding_logits": True}),
    ("gemma2", {"attn_logits_soft_cap": 0.0}),
    ("gemma2", {"final_logits_soft_cap": 0.0}),
    ("gemma2", {"query_pre_attn_scalar": 0.0}),
    ("gemma2", {"layer_pattern": ["global", "local_sliding"]}),
    ("gemma2", {"use_post_ffw_norm": False}),
    ("gemma3", {"rope_linear_scaling_factor": 1.0}),
    ("gemma3", {"rope_scaling_layers": "all"}),
    ("gemma3", {"local_rope_max_timescale": -1}),
    ("gemma4", {"share_kv_projections": False}),
    ("gemma4", {"use_v_norm": False}),
    ("gemma4", {"global_rope_proportion": 1.0}),
    ("gemma4", {"layer_output_scale": False}),
    ("gemma4", {"router_input_norm": False}),
    ("gemma4", {"router_expert_scale": False}),
    ("gemma4", {"parallel_dense_mlp": False}),
    ("gemma4_small", {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}),
    ("gemma4_small", {"hidden_size_per_layer_input": 0}),
    ("gemma4_small", {"query_pre_attn_scalar": 0.0}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("deepseek_v2", {"routed_scaling_factor": 1.0}),
    ("deepseek_v2", {"n_routing_groups": -1, "topk_routing_group": -1}),
    ("deepseek_v2", {"routing_group_score": "top2"}),
    ("deepseek_v2", {"rope_interleave": False}),
    ("deepseek_v2", {"mscale": 0.0}),
    ("deepseek_v3", {"routed_score_func": "softmax"}),
    ("deepseek_v3", {"norm_sigmoid_scores": False}),
    ("deepseek_v3", {"routed_bias": False}),
    ("deepseek_v3", {"n_routing_groups": -1, "topk_routing_group": -1}),
    ("deepseek_v3", {"routing_group_score": "max"}),
    ("deepseek_v3", {"beta_slow": 0.01}),
    ("deepseek_v3", {"first_num_dense_layers": 0}),
    ("deepseek_v3", {"shared_experts": 0}),
    ("deepseek_v32", {"use_indexer": False}),
    ("deepseek_v32", {"indexer_topk": 6}),
    ("gpt2", {"trainable_position_size": -1}),
    ("gpt2", {"mlp_activations": ["silu"]}),
    ("gpt2", {"norm_type": "rms"}),
    ("gpt2", {"attention_bias": False}),
    ("gpt_oss", {"attention_sink": False}),
    ("gpt_oss", {"swiglu_alpha": 0.0}),
    ("gpt_oss", {"mlp_activations_limit": -1.0}),
    ("gpt_oss", {"rope_truncate": True}),
    ("gpt_oss", {"beta_fast": 0.5}),
    ("gpt_oss", {"rope_attention_scaling": False}),
    ("olmo2", {"qk_norm_type": "head"}),
    ("olmo2", {"use_pre_norm": True}),
    ("olmo3", {"rope_scaling_layers": "all"}),
    ("llama4", {"nope_layer_interval": -1}),
    ("llama4", {"temperature_tuning": False}),
    ("llama4", {"temperature_tuning_offset": 0}),
    ("llama4", {"scale_expert_input": False}),
    ("llama4", {"chunk_attn_window_size": 12}),
    ("llama4", {"use_qk_norm": False}),
    ("llama4", {"rope_interleave": False}),
    ("ministral3", {"temperature_tuning": False}),
    ("ministral3", {"rope_attention_scaling": True}),
    ("mistral4", {"temperature_tuning": False}),
    ("mistral4", {"norm_topk_prob": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "change"), FEATURES, ids=[f"{f}-{'-'.join(c)}" for f, c in FEATURES])
def test_a_feature_changed_is_seen(family: str, change: dict):
    """Either the weights no longer fit, or the logits are far off."""
    expected = golden(family)
    try:
        changed = open_source(GOLDENS / family, FLOAT32 | change)
    except MaxTextError as error:
        assert error.id in ("convert.unfit", "convert.no-name"), error
        return
    logits = score(changed, batch(expected), devices=jax.devices()[:1])["logits"]
    wanted = rows(expected, "logits")
    assert np.abs(logits - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_two_names_for_one_parameter_are_no_table():
    from MaxText.convert import rows as tables

    model = source("llama")
    with pytest.raises(AssertionError, match="two rows"):
        mapping.make(model.cfg, model.tree, tables.PLAIN + tables.PRE_NORMS + tables.PRE_NORMS, "llama")
