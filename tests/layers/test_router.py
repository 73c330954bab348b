"""The router by itself: which experts, with which weights, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from MaxText.layers import router

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(1, 6, 8)).astype(np.float32)


def choose(cfg, params=None, logits=LOGITS):
    world, layout = toy.mesh()
    with jax.set_mesh(world):
        choice = router.choose(cfg, layout, params or {}, jnp.asarray(logits))
    return np.asarray(choice.expert_BSk)[0], np.asarray(choice.weight_BSk)[0]


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("change", "scores", "normalised"),
    [
        ({"routed_score_func": ""}, softmax, True),
        ({"routed_score_func": "softmax", "norm_topk_prob": True}, softmax, True),
        ({"routed_score_func": "softmax"}, softmax, False),
        ({"routed_score_func": "sigmoid"}, lambda x: 1 / (1 + np.exp(-x)), True),
        ({"routed_score_func": "sigmoid", "norm_sigmoid_scores": False}, lambda x: 1 / (1 + np.exp(-x)), False),
    ],
)
def test_scores_and_weights(change, scores, normalised):
    cfg = toy.small("mixtral-8x7b", routed_scaling_factor=2.5, **change)
    experts, weights = choose(cfg)
    np.testing.assert_array_equal(experts, np.argsort(-LOGITS[0], axis=-1)[:, :2])
    wanted = np.take_along_axis(scores(LOGITS[0]), experts, -1)
    wanted = wanted / wanted.sum(-1, keepdims=True) if normalised else wanted
    np.testing.assert_allclose(weights, 2.5 * wanted, rtol=1e-5)


def test_a_bias_changes_the_choice_and_not_the_weight():
    cfg = toy.small("mixtral-8x7b", routed_score_func="sigmoid", norm_sigmoid_scores=False)
    bias = np.zeros(8, np.float32)
    bias[3] = 10.0
    experts, weights = choose(cfg, {"correction_bias": jnp.asarray(bias)})
    assert (experts[:, 0] == 3).all()
    np.testing.assert_allclose(weights[:, 0], 1 / (1 + np.exp(-LOGITS[0, :, 3])), rtol=1e-5)


def test_no_gradient_reaches_the_correction_bias_and_one_reaches_the_logits():
    cfg = toy.small("mixtral-8x7b", routed_score_func="sigmoid")
    world, layout = toy.mesh()
    with jax.set_mesh(world):

        def total(bias, logits):
            return (router.choose(cfg, layout, {"correction_bias": bias}, logits).weight_BSk ** 2).sum()

        of_bias, of_logits = jax.grad(total, argnums=(0, 1))(jnp.zeros(8), jnp.asarray(LOGITS))
    assert (np.asarray(of_bias) == 0).all() and np.abs(np.asarray(of_logits)).max() > 0


def test_a_scale_by_expert_multiplies_the_weight():
    cfg = toy.small("mixtral-8x7b")
    scale = np.arange(1.0, 9.0, dtype=np.float32)
    experts, weights = choose(cfg, {"expert_scale": jnp.asarray(scale)})
    np.testing.assert_allclose(weights, choose(cfg)[1] * scale[experts], rtol=1e-6)


def test_the_input_norm_has_no_say_in_the_length_of_the_stream():
    """Logits of x / rms(x) * scale / sqrt(D): ten times the stream gives the same."""
    cfg = toy.small("gemma4-26b-a4b")
    world, layout = toy.mesh()
    d = cfg.emb_dim
    x = RNG.normal(size=(1, 3, d)).astype(np.float32)
    params = {"kernel": RNG.normal(size=(d, 8)).astype(np.float32), "input_scale": RNG.normal(size=d).astype("float32")}
    with jax.set_mesh(world):
        once, tenfold = (np.asarray(router.logits(cfg, layout, params, jnp.asarray(f * x))) for f in (1.0, 10.0))
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True)) * params["input_scale"] * d**-0.5 @ params["kernel"]
    np.testing.assert_allclose(once, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tenfold, once, rtol=1e-4, atol=1e-5)
