"""The start screen's line on the model: sizes, and how many parameters a token passes."""

from __future__ import annotations

from MaxText import screen
from MaxText.hardware import Hardware
from tests.helpers import place, toy_config


def line(**keys) -> str:
    made = place(toy_config(**keys))
    hardware = Hardware("cpu", "cpu", 1, 1, 1, None)
    return dict(screen.plan(made.cfg, hardware, made.plan, "asked for"))["model"]


def test_a_dense_model_is_all_active():
    assert "all active" in line() and "experts" not in line()


def test_of_experts_only_the_chosen_are_active():
    text = line(num_experts=4, num_experts_per_tok=2, shared_experts=1, base_moe_mlp_dim=16)
    d, layers, vocabulary, heads = 32, 2, 96, 8
    attention = d * heads * (4 + 2 + 2 + 4)
    layer = attention + 2 * d + d * 4 + 3 * 3 * d * 16  # norms, router, two chosen and one shared of three matrices
    active = layers * layer + d + vocabulary * d  # the last norm, the head; the embedding is only looked up
    total = active + layers * 2 * 3 * d * 16 + vocabulary * d
    assert f"{total:,} parameters, {active:,} active" in text
    assert "4 experts of 16 (2 a token + 1 shared)" in text


def test_latent_heads_are_called_so():
    text = line(attention_type="mla", kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    assert "4 heads x 12 (latent)" in text
