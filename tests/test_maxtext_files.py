"""Model files in MaxText's vocabulary, one for every decoder block: the same architecture as ours, or refused by name.

The files are written from what is public about MaxText's own: its keys, its defaults where a key is absent, and what it
decides by a model's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from MaxText import blueprint, config, decoder
from MaxText.convert import hf_config

ROOT = Path(__file__).resolve().parent.parent

FILES = Path(__file__).parent / "maxtext_files"
# The file, our recipe of the same model, and in what MaxText's file is another architecture (the recipes say so).
SAME = [
    ("gemma-2b", "gemma-2b", {"vocab_size": 256_128}),
    ("gemma2-9b", "gemma2-9b", {}),
    ("gemma3-27b", "gemma3-27b", {"vocab_size": 262_144}),
    ("gemma4-26b", "gemma4-26b-a4b", {"shared_experts": 1}),  # so it calls the dense branch
    ("gemma4-e2b", "gemma4-e2b", {}),
    ("mistral-7b", "mistral-7b-v0.1", {"attention_type": "global", "sliding_window_size": 0, "theta": 1_000_000}),
    ("mixtral-8x7b", "mixtral-8x7b", {}),
    ("deepseek2-16b", "deepseek-v2-lite-16b", {}),
    ("deepseek3-671b", "deepseek-v3-671b", {"n_routing_groups": -1, "topk_routing_group": -1}),
    ("deepseek3.2-671b", "deepseek-v3.2-671b", {"n_routing_groups": -1, "topk_routing_group": -1}),
    ("kimi-k2-1t", "kimi-k2-1t", {}),
    ("llama2-70b", "llama2-70b", {}),
    ("llama3.1-8b", "llama3.1-8b", {}),
    ("llama4-17b-16e", "llama4-scout-17b-16e", {"rope_factor": 8.0, "rope_high_freq_factor": 4.0}),
    ("llama4-17b-128e", "llama4-maverick-17b-128e", {}),
    ("qwen2.5-1.5b", "qwen2.5-1.5b", {}),
    ("qwen3-4b", "qwen3-4b", {}),
    ("qwen3-30b-a3b", "qwen3-30b-a3b", {"theta": 10_000_000, "base_mlp_dim": 768}),  # no layer is dense
    ("gpt-oss-20b", "gpt-oss-20b", {"mlp_activations": ("sigmoid", "linear")}),  # swiglu_alpha takes their place
    ("olmo3-7b", "olmo3-7b", {}),
]


def of_file(name):
    return config.make(model_name=str(FILES / f"{name}.yml"))


@pytest.mark.parametrize(("file", "recipe", "differences"), SAME, ids=[file for file, *_ in SAME])
def test_it_is_the_architecture_of_our_recipe(file, recipe, differences):
    differences = {"rope_max_timescale" if key == "theta" else key: value for key, value in differences.items()}
    theirs, ours = of_file(file), config.make(model_name=recipe).replace(**differences)
    assert hf_config.function_of(theirs) == hf_config.function_of(ours)
    assert decoder.declare(theirs) == decoder.declare(ours)


def test_gpt3_has_the_parameters_that_maxtext_counts():
    """52,464 is MaxText's own figure for its test model, which so has a bias in its last norm. The file also says
    how to train, in words that we know."""
    cfg = of_file("gpt3-52k")
    assert blueprint.count(decoder.declare(cfg)) == 52_464
    assert (cfg.opt_type, cfg.trainable_position_size) == ("adamw", 2048)
    assert "gpt3-52k.yml" in cfg.origin("opt_type")
    quick = config.make(model_name=str(FILES / "gpt3-52k.yml"), opt_type="sgd")  # a run's key: no model is overridden
    assert quick.opt_type == "sgd"


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("deepseek4-284b", ("deepseek4", "mhc_expansion_rate", "compressed", "o_lora_rank", "sqrtsoftplus")),
        ("qwen3-next-80b-a3b", ("qwen3_next", "gdn_conv_kernel_dim", "gdn_chunk_size")),
    ],
)
def test_what_we_cannot_express_is_refused_by_name(file, keys):
    with pytest.raises(config.InvalidConfig) as caught:
        of_file(file)
    assert "config.unknown-block" in caught.value.ids and all(key in str(caught.value) for key in keys)


def test_a_name_decides_only_for_its_own_decoder_block(tmp_path):
    mine = tmp_path / "llama3.1-8b.yml"
    mine.write_text("decoder_block: qwen3\n")
    assert config.make(model_name=str(mine)).rope_type == "default"
    mine.write_text("decoder_block: llama2\nrope_type: default\n")
    assert config.make(model_name=str(mine)).rope_type == "default"
    mine.write_text("decoder_block: llama2\n")
    cfg = config.make(model_name=str(mine))
    assert cfg.rope_type == "llama3.1" and "by_name" in cfg.origin("rope_type")


def test_a_bundle_lies_below_the_file_that_chose_it(tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text("decoder_block: gemma2\nfinal_logits_soft_cap: 5.0\n")
    cfg = config.load([str(ROOT / "configs" / "base.yml"), f"model_name={mine}"], {})
    assert (cfg.final_logits_soft_cap, cfg.attn_logits_soft_cap, cfg.num_decoder_layers) == (5.0, 50.0, 8)
    assert "gemma2.yml" in cfg.origin("attn_logits_soft_cap")
    with pytest.raises(config.InvalidConfig) as caught:
        config.load([str(ROOT / "configs" / "base.yml"), f"model_name={mine}", "attn_logits_soft_cap=1"], {})
    assert caught.value.ids == ("config.model-override",)
    by_hand = config.load([str(ROOT / "configs" / "base.yml"), "decoder_block=gemma2", "attn_logits_soft_cap=1"], {})
    assert (by_hand.attn_logits_soft_cap, by_hand.use_post_attn_norm) == (1.0, True)


def test_an_unknown_block_is_refused_by_name():
    with pytest.raises(config.InvalidConfig, match="gemma3") as caught:
        config.make(decoder_block="gemma33")
    assert caught.value.ids == ("config.unknown-block",)
    with pytest.raises(config.InvalidConfig) as caught:
        config.make().replace(decoder_block="gemma3")
    assert caught.value.ids == ("config.replace-model",)
