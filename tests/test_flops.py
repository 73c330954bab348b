"""FLOPs of a step by MaxText's convention, against figures that were published with it; and by hand."""

from __future__ import annotations

import pytest

from MaxText import config, flops

# 10^9 FLOPs of training on one token, at this length; each follows from published TFLOP/s and tokens/s by MaxText's
# convention (those of Trillium after taking its older count of attention out).
PER_TOKEN = [
    ("deepseek-v3-671b", 4096, 250.4499),
    ("llama3.1-405b", 8192, 2523.956),
    ("llama3.1-70b", 8192, 449.2225),
    ("qwen3-235b-a22b", 4096, 148.3305),
    ("llama3.1-8b", 8192, 51.4704),
    ("llama2-70b", 4096, 428.3852),
    ("llama2-7b", 4096, 42.8637),
    ("mistral-7b-v0.1", 8192, 47.4942),
    ("mixtral-8x7b", 4096, 79.7127),
    ("gpt3-175b", 2048, 1061.8814),
]
# Published runs on TPU7x: model, length, rows of a step, chips, seconds a step, TFLOP/s a chip (tpu-recipes, Ironwood).
PUBLISHED = [
    ("deepseek-v3-671b", 4096, 2048, 128, 27.02, 607.53),
    ("deepseek-v3-671b", 4096, 4096, 256, 26.79, 612.66),
    ("llama3.1-405b", 8192, 1536, 256, 98.34, 1261.4),
    ("llama3.1-70b", 8192, 256, 64, 12.2, 1207.05),
    ("llama3.1-70b", 8192, 1024, 256, 12.27, 1199.67),
    ("qwen3-235b-a22b", 4096, 8192, 256, 30.87, 629.79),
]


@pytest.mark.parametrize(("model_name", "length", "expected"), PER_TOKEN)
def test_one_token(model_name, length, expected):
    cfg = config.make(model_name=model_name, max_target_length=length)
    assert flops.per_token(cfg) / 1e9 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("model_name", "length", "rows", "chips", "seconds", "tflops"), PUBLISHED)
def test_one_step_of_a_published_run(model_name, length, rows, chips, seconds, tflops):
    cfg = config.make(model_name=model_name, max_target_length=length)
    found = flops.per_step_per_device(cfg, rows * length, chips) / seconds / 1e12
    assert found == pytest.approx(tflops, rel=5e-4)  # seconds have four digits


def test_trillium_counts_attention_over_the_whole_square():
    """Its published TFLOP/s and tokens/s, by the older count: 4 S heads head_dim a layer, not 2."""
    cfg = config.make(model_name="llama3.1-8b", max_target_length=8192)
    more = 3 * cfg.num_decoder_layers * 2 * 8192 * cfg.num_query_heads * cfg.head_dim
    assert (flops.per_token(cfg) + more) / 1e12 == pytest.approx(413.433 / 7138.89, rel=1e-5)


def test_windows_and_chunks_by_counting():
    """A query sees all up to itself, at most W, or its chunk so far: averaged over a row, and but for half a key."""
    size, length = 300, 900
    seen = {
        "local_sliding": sum(min(s + 1, size) for s in range(length)) / length,
        "chunk": sum(s % size + 1 for s in range(length)) / length,
        "global": sum(s + 1 for s in range(length)) / length,
    }
    for kind, keys in seen.items():
        sizes = {"sliding_window_size": size if kind == "local_sliding" else 0}
        sizes |= {"chunk_attn_window_size": size if kind == "chunk" else 0}
        cfg = config.make(attention_type=kind, max_target_length=length, **sizes)
        attention = flops.per_token(cfg) / 3 - 2 * flops.weights_per_token(cfg)
        per_key = 4 * cfg.num_decoder_layers * cfg.num_query_heads * cfg.head_dim
        assert attention / per_key == pytest.approx(keys, abs=0.51), kind


def test_further_predictions_are_counted():
    cfg = config.make(model_name="deepseek-v3-671b")
    more = flops.weights_per_token(cfg.replace(mtp_num_layers=1)) - flops.weights_per_token(cfg)
    # A layer with experts: 8 chosen and 1 shared; the pair's projection; the head once more.
    latent = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    layer = latent + 7168 * 256 + 9 * 3 * 7168 * 2048
    assert more == layer + 2 * 7168**2 + 7168 * 129_280
