"""Every family, shrunk, against the plain NumPy decoder of `naive`; each feature shown to matter; caches equal rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import toy

from MaxText import decoder, loss, step

FAMILIES = [
    "gemma-2b",
    "gemma2-27b",
    "gemma3-4b",
    "gemma3-27b",
    "gemma4-e2b",
    "gemma4-31b",
    "gemma4-26b-a4b",
    "mistral-7b-v0.1",
    "ministral-3-3b",
    "mixtral-8x7b",
    "mistral-small-4-119b",
    "mistral-large-3",
    "deepseek-v2-lite-16b",
    "deepseek-v2-236b",
    "deepseek-v3-671b",
    "deepseek-v3.2-671b",
    "kimi-k2-1t",
    "llama2-7b",
    "llama3.2-1b",
    "llama4-scout-17b-16e",
    "llama4-maverick-17b-128e",
    "qwen2.5-1.5b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "gpt3-175b",
    "olmo2-7b",
    "olmo3-7b",
]

QUICK = (
    "gemma2-27b",
    "gemma4-e2b",
    "gemma4-26b-a4b",
    "deepseek-v3.2-671b",
    "llama4-scout-17b-16e",
    "gpt-oss-20b",
    "olmo3-7b",
)


def every(model_name: str, *more):
    """A parameter of a test, slow unless the family is one of those that have most features."""
    return pytest.param(model_name, *more, marks=[] if model_name in QUICK else [pytest.mark.slow])


# A feature of a family, switched off or changed where the parameters stay the same: the logits must notice.
FEATURES = [
    ("gemma-2b", {"norm_unit_offset": False}),
    ("gemma-2b", {"scale_embedding": False}),
    ("gemma-2b", {"normalize_embedding_logits": True}),
    ("gemma-2b", {"mlp_activations": ("silu", "linear")}),
    ("gemma2-27b", {"query_pre_attn_scalar": 0}),
    ("gemma2-27b", {"attn_logits_soft_cap": 2.0}),
    ("gemma2-27b", {"final_logits_soft_cap": 0.0}),
    ("gemma2-27b", {"sliding_window_size": 7}),
    ("gemma3-4b", {"local_rope_max_timescale": -1}),
    ("gemma3-4b", {"rope_linear_scaling_factor": 1.0}),
    ("gemma3-4b", {"rope_scaling_layers": "all"}),
    ("gemma4-31b", {"global_rope_proportion": 0.5}),
    ("gemma4-31b", {"use_v_norm": False}),
    ("gemma4-31b", {"query_pre_attn_scalar": 0}),
    ("gemma4-26b-a4b", {"router_input_norm": False}),
    ("mixtral-8x7b", {"routed_scaling_factor": 2.0}),
    ("ministral-3-3b", {"temperature_tuning": False}),
    ("ministral-3-3b", {"rope_type": "default"}),
    ("mistral-small-4-119b", {"mscale": 1.0}),
    ("mistral-small-4-119b", {"norm_topk_prob": False}),
    ("deepseek-v3-671b", {"mscale": 0.0}),
    ("deepseek-v3-671b", {"rope_interleave": False}),
    ("deepseek-v3-671b", {"n_routing_groups": -1, "topk_routing_group": -1}),
    ("deepseek-v3-671b", {"norm_sigmoid_scores": False}),
    ("deepseek-v3-671b", {"routing_group_score": "max"}),
    ("deepseek-v3.2-671b", {"indexer_topk": 6}),
    ("llama3.2-1b", {"rope_factor": 8.0}),
    ("llama4-scout-17b-16e", {"temperature_tuning": False}),
    ("llama4-scout-17b-16e", {"chunk_attn_window_size": 12}),
    ("llama4-scout-17b-16e", {"scale_expert_input": False}),
    ("llama4-scout-17b-16e", {"use_qk_norm": False}),
    ("llama4-scout-17b-16e", {"nope_layer_interval": -1}),
    ("gpt-oss-20b", {"swiglu_alpha": 0.0}),
    ("gpt-oss-20b", {"mlp_activations_limit": 0.5}),
    ("gpt-oss-20b", {"rope_truncate": True}),
    ("gpt-oss-20b", {"rope_attention_scaling": False}),
    ("olmo2-7b", {"rope_max_timescale": 10_000}),
]
TOLERANCE = 2e-4  # of the largest logit, float32 against float64


@functools.cache
def expected(model_name: str) -> np.ndarray:
    cfg = toy.small(model_name)
    params = jax.tree.map(lambda x: x.astype(np.float64), toy.hot(cfg))
    row = {name: x[0] for name, x in toy.batch(cfg).items()}
    return naive.logits(cfg, params, row["inputs"], row["positions"], row["segments"])


def computed(model_name: str, **changes) -> np.ndarray:
    cfg = toy.small(model_name, **changes)
    world, layout = toy.mesh()
    with jax.set_mesh(world):
        params = toy.place(toy.small(model_name), toy.hot(toy.small(model_name)), world, layout)
        batch = toy.put(toy.batch(cfg, rows=1), world, layout)

        def run(params, batch):
            return loss.logits(cfg, layout, params, decoder.forward(cfg, layout, params, batch))

        return np.asarray(jax.jit(run)(params, batch))[0]


@pytest.mark.parametrize("model_name", [every(name) for name in FAMILIES])
def test_logits_equal_the_plain_decoder(model_name):
    want, got = expected(model_name), computed(model_name)
    real = slice(sum(toy.DOCUMENTS))  # nothing reads what the model makes of padding, which passes no expert
    assert np.abs(got - want)[real].max() < TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize(("model_name", "change"), [every(*feature) for feature in FEATURES])
def test_every_feature_matters(model_name, change):
    want, got = expected(model_name), computed(model_name, **change)
    assert np.abs(got - want).max() > 10 * TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("model_name", [every(name) for name in FAMILIES])
def test_cached_decoding_equals_the_whole_row(model_name):
    cfg = toy.small(model_name)
    world, layout = toy.mesh()
    length, prompt = 20, 13
    ids = toy.batch(cfg)["inputs"][:, :length]
    row = {"inputs": ids, "positions": np.broadcast_to(np.arange(length), ids.shape), "segments": np.ones_like(ids)}
    with jax.set_mesh(world):
        params = toy.place(cfg, toy.hot(cfg), world, layout)
        batch = toy.put({k: np.ascontiguousarray(v, np.int32) for k, v in row.items()}, world, layout)
        whole = jax.jit(lambda p, b: decoder.forward(cfg, layout, p, b))(params, batch)

        def cached(params, ids):
            cache = decoder.empty_cache(cfg, layout, len(ids), length)
            first, cache = decoder.decode(cfg, layout, params, ids[:, :prompt], jnp.int32(0), cache)

            def one(cache, slot):
                token = jax.lax.dynamic_slice_in_dim(ids, slot, 1, axis=1)
                hidden, cache = decoder.decode(cfg, layout, params, token, slot, cache)
                return cache, hidden[:, 0]

            _, rest = jax.lax.scan(one, cache, jnp.arange(prompt, length))
            return jnp.concatenate([first, jnp.moveaxis(rest, 0, 1)], axis=1)

        got = jax.jit(cached)(params, batch["inputs"])
    assert np.abs(np.asarray(got - whole)).max() < 1e-4 * np.abs(np.asarray(whole)).max()


def test_further_predictions_equal_the_plain_decoder():
    """Their logits; and the loss: the mean over predictions of each one's mean over its real targets, times the
    weight."""
    cfg = toy.small("deepseek-v3-671b", mtp_num_layers=2, mtp_loss_scaling_factor=0.3, load_balance_loss_weight=0.0)
    world, layout = toy.mesh()
    hot, rows = toy.hot(cfg), toy.batch(cfg, rows=1)
    row = {name: x[0] for name, x in rows.items()}
    with jax.set_mesh(world):
        params, batch = toy.place(cfg, hot, world, layout), toy.put(rows, world, layout)

        def run(params, batch):
            out = decoder.run(cfg, layout, params, batch)
            _, metrics = step.gradients(cfg, layout, params, {name: x[None] for name, x in batch.items()})
            return [loss.logits(cfg, layout, params, x) for x in out.further_BSD], metrics

        got, metrics = jax.jit(run)(params, batch)
    wide = jax.tree.map(lambda x: x.astype(np.float64), hot)
    want = naive.further(cfg, wide, row["inputs"], row["positions"], row["segments"])
    losses = []
    for k, (ours, theirs) in enumerate(zip(got, want, strict=True), start=1):
        # A target counts if all of it, from this token to that one, is one document.
        real = np.array(
            [s + k < toy.LENGTH and row["segments"][s] == row["segments"][s + k] for s in range(toy.LENGTH)]
        )
        real &= (row["segments"] != 0) & np.append(row["loss_mask"][k:], np.zeros(k, int)).astype(bool)
        assert np.abs(np.asarray(ours)[0] - theirs)[real].max() < TOLERANCE * np.abs(theirs).max()
        targets = np.append(row["targets"][k:], np.zeros(k, int))
        nll = np.log(np.exp(theirs).sum(-1)) - theirs[np.arange(toy.LENGTH), targets]
        losses.append(nll[real].mean())
    np.testing.assert_allclose(metrics["mtp_loss"], 0.3 * np.mean(losses), rtol=1e-4)
