"""Latent attention by itself: against loops in NumPy, and what its cache holds."""

from __future__ import annotations

import jax
import naive
import numpy as np
import pytest
import toy

from MaxText import architecture, config, decoder
from MaxText.layers import mla
from MaxText.layers.masks import Places


@pytest.mark.parametrize("model_name", ["deepseek-v3-671b", "deepseek-v2-lite-16b"], ids=["compressed", "plain"])
def test_it_is_what_loops_compute(model_name):
    """Queries compressed or not; norms of both latents, rope on a part of the head, one rotated key for all heads."""
    cfg = toy.small(model_name)
    spec = architecture.layers(cfg)[0]
    world, layout = toy.mesh()
    row = {name: x[0] for name, x in toy.batch(cfg, rows=1).items()}
    hot = naive.layer_params(cfg, toy.hot(cfg))[0]["attention"]
    x = np.random.default_rng(1).standard_normal((1, toy.LENGTH, cfg.emb_dim), np.float32)

    def run(params, x, positions, segments):
        places = Places(np.arange(toy.LENGTH, dtype=np.int32)[None], positions, segments)
        context = decoder._context(cfg, layout, places, places, None, None)
        return mla.mla(cfg, spec, layout, params, x, context)[0]

    with jax.set_mesh(world):
        found = jax.jit(run)(hot, x, row["positions"][None], row["segments"][None])
    wide = jax.tree.map(lambda w: w.astype(np.float64), hot)
    wanted = naive.latent_attention(cfg, wide, x[0].astype(np.float64), row["positions"], row["segments"])
    assert np.abs(np.asarray(found)[0] - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_cache_holds_one_latent_and_one_key_a_token():
    """Of DeepSeek-V3 at full size: 512 + 64 numbers a token and layer, whatever the heads; with an indexer 128 more."""
    world, layout = toy.mesh()
    for model_name, expected in (("deepseek-v3-671b", 576), ("deepseek-v3.2-671b", 704)):
        cfg = config.make(model_name=model_name, dtype="bfloat16")
        with jax.set_mesh(world):
            cache = jax.eval_shape(lambda cfg=cfg: decoder.empty_cache(cfg, layout, 1, 1))
        numbers = sum(leaf.size for leaf in jax.tree.leaves(cache))
        assert numbers == cfg.num_decoder_layers * expected
