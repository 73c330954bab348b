"""Experts: what does not depend on mesh, accumulation or scan; losses and biases by hand; capacity against a loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import toy

from MaxText import architecture, balance, config, decoder, loss, optimizer, state, step
from MaxText.layers import router

EVERYTHING = {
    "routed_bias_update_rate": 0.01,
    "load_balance_loss_weight": 0.1,
    "router_z_loss_weight": 0.01,
    "mtp_num_layers": 1,
    "indexer_loss_scaling_factor": 0.1,
    "opt_type": "sgd",
    "learning_rate": 0.1,
    "warmup_steps_fraction": 0.0,
    "lr_schedule_type": "constant",
    "gradient_clipping_threshold": 0.0,
}
GLOBAL = EVERYTHING | {"load_balance_loss_type": "global"}


def train(cfg, parts=1, steps=1, **degrees):
    """(parameters, metrics) after a few steps on eight rows in `parts` microbatches.

    One step as a rule: after it rounding may turn a choice of the indexer or the router, which nothing can undo."""
    world, layout = toy.mesh(**degrees)
    with jax.set_mesh(world):
        params = toy.place(cfg, toy.hot(cfg), world, layout)
        tx = optimizer.make(cfg, decoder.declare(cfg), layout)
        now = state.TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))
        arrays = {name: x.reshape(parts, -1, toy.LENGTH) for name, x in toy.batch(cfg, rows=8).items()}
        batch = toy.put(arrays, world, layout)
        train_step = jax.jit(step.make_train_step(cfg, layout, tx))
        for _ in range(steps):
            now, metrics = train_step(now, batch)
        return jax.tree.map(np.asarray, (now.params, metrics))


def same(one, other, tolerance=2e-5):
    for (path, a), (_, b) in zip(*(jax.tree.leaves_with_path(tree) for tree in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance * max(1.0, np.abs(a).max()), err_msg=str(path))


@functools.cache
def reference(model_name, kind):
    return train(toy.small(model_name, **EVERYTHING | {"load_balance_loss_type": kind}))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("global", {"parts": 4}),
        slow("global", {"data": 2, "fsdp": 2, "tensor": 2}),
        slow("global", {"parts": 2, "fsdp": 4}),
        slow("sequence", {"parts": 4}),
        ("sequence", {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_deepseek_is_the_same_however_it_is_cut(kind, how):
    cfg = toy.small("deepseek-v3.2-671b", **EVERYTHING | {"load_balance_loss_type": kind})
    same(reference("deepseek-v3.2-671b", kind), train(cfg, **how))


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"scan_layers": False}, {"remat_policy": "full"}, {"remat_policy": "minimal"}])
def test_deepseek_is_the_same_unrolled_and_rematerialised(change):
    cfg = toy.small("deepseek-v3.2-671b", **GLOBAL, **change)
    same(reference("deepseek-v3.2-671b", "global"), train(cfg))


@pytest.mark.parametrize("capacity_factor", [0.75, slow(-1.0)])
def test_biased_experts_are_the_same_on_a_mesh(capacity_factor):
    changes = {name: value for name, value in GLOBAL.items() if not name.startswith(("routed", "indexer", "mtp"))}
    cfg = toy.small("gpt-oss-20b", capacity_factor=capacity_factor, **changes)
    same(train(cfg), train(cfg, parts=2, fsdp=2, tensor=2))


@pytest.mark.parametrize("model_name", ["mixtral-8x7b", "llama4-scout-17b-16e", "gpt-oss-20b"])
def test_capacity_equals_a_loop(model_name):
    cfg = toy.small(model_name, capacity_factor=0.75)
    world, layout = toy.mesh()
    arrays, hot = toy.batch(cfg, rows=1), toy.hot(cfg)
    with jax.set_mesh(world):
        params, batch = toy.place(cfg, hot, world, layout), toy.put(arrays, world, layout)

        def run(params, batch):
            out = decoder.run(cfg, layout, params, batch)
            return loss.logits(cfg, layout, params, out.hidden_BSD), sum(r.dropped.sum() for r in out.routing.values())

        got, dropped = jax.jit(run)(params, batch)
    row = {name: x[0] for name, x in arrays.items()}
    wide = jax.tree.map(lambda x: x.astype(np.float64), hot)
    want = naive.logits(cfg, wide, row["inputs"], row["positions"], row["segments"])
    real = row["segments"] != 0
    assert dropped > 0
    assert np.abs(np.asarray(got)[0][real] - want[real]).max() < 2e-4 * np.abs(want).max()


def test_the_bias_moves_toward_balance():
    moved = router.moved_bias(jnp.zeros((1, 4)), jnp.array([[5, 1, 3, 3]], jnp.int32), 0.5)
    np.testing.assert_array_equal(moved, [[-0.5, 0.5, 0.0, 0.0]])


def test_no_gradient_moves_the_bias_and_the_step_does():
    cfg = toy.small("deepseek-v3-671b", **GLOBAL)
    before, (after, _) = toy.hot(cfg), train(cfg, steps=1)
    change = after["decoder"]["layers_1"]["0"]["moe"]["router"]["correction_bias"]
    change = change - before["decoder"]["layers_1"]["0"]["moe"]["router"]["correction_bias"]
    assert set(np.round(np.abs(change).ravel(), 5)) <= {np.float32(0.01), np.float32(0.0)}
    assert np.abs(change).max() > 0


def test_statistics_by_hand():
    cfg = toy.small("mixtral-8x7b")
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 8)).astype(np.float32)
    chosen = np.argsort(-logits, axis=-1)[..., :2]
    real = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    got = router.statistics(cfg, logits, chosen, real, 0)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    load = np.array([[((chosen[b] == e).any(-1) & real[b]).sum() for e in range(8)] for b in range(2)])
    np.testing.assert_array_equal(got.load_E, load.sum(0))
    np.testing.assert_allclose(got.probability_E, probability[real].sum(0), rtol=1e-5)
    tokens = real.sum(1)
    of_row = [8 * (load[b] / tokens[b] * probability[b][real[b]].mean(0)).sum() * tokens[b] for b in range(2)]
    np.testing.assert_allclose(got.sequence_balance, sum(of_row), rtol=1e-5)
    np.testing.assert_allclose(got.z_squared, (np.log(np.exp(logits).sum(-1))[real] ** 2).sum(), rtol=1e-5)


def test_the_balance_loss_of_equal_use_is_the_experts_per_token():
    cfg = toy.small("mixtral-8x7b", load_balance_loss_weight=1.0, load_balance_loss_type="global")
    even = router.Routing(jnp.full((3, 8), 25), jnp.full((3, 8), 12.5), jnp.zeros(3), jnp.zeros(3), jnp.zeros(3))
    parts = balance.losses(cfg, {"a": even}, {"a": even.load_E}, jnp.float32(100))
    np.testing.assert_allclose(parts["load_balance_loss"], 2.0)


# alpha of the paper or the released configuration, and layers with experts
DEEPSEEK = [
    ("deepseek-v2-236b", 0.001, 59),
    ("deepseek-v2-lite-16b", 0.001, 26),
    ("deepseek-v3-671b", 0.0001, 58),
    ("deepseek-v3.2-671b", 0.0001, 58),
    ("kimi-k2-1t", 0.0001, 60),
]


@pytest.mark.parametrize(("model_name", "alpha", "layers"), DEEPSEEK)
def test_weights_of_deepseek_in_our_measure(model_name, alpha, layers):
    cfg = config.make(model_name=model_name)
    assert sum(spec.experts for spec in architecture.layers(cfg)) == layers
    assert cfg.load_balance_loss_weight == pytest.approx(alpha * layers / cfg.num_experts_per_tok, rel=1e-3)


def test_our_balance_loss_is_deepseeks():
    """DeepSeek adds alpha * sum_e f_e P_e in every layer, with f_e = E/(k T) * (tokens that chose e), P_e the mean of
    the normalised scores; we take the mean over layers of E sum_e f_e P_e, with f_e = 1/T * (tokens that chose e)."""
    alpha, layers, e, k, tokens = 0.0001, 3, 8, 2, 50
    cfg = toy.small("deepseek-v3-671b", load_balance_loss_weight=alpha * layers / k)
    logits = np.random.default_rng(0).normal(size=(layers, 1, tokens, e)).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits))
    given = scores / scores.sum(-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1)[..., :k]
    counts = [np.bincount(chosen[at].ravel(), minlength=e) for at in range(layers)]
    theirs = sum(alpha * (e / (k * tokens) * counts[at] * given[at, 0].mean(0)).sum() for at in range(layers))
    found = jax.vmap(lambda x, c: router.statistics(cfg, x, c, None, jnp.int32(0)))(logits, chosen)
    parts = balance.losses(cfg, {"all": found}, {"all": found.load_E}, jnp.float32(tokens))
    np.testing.assert_allclose(parts["load_balance_loss"], theirs, rtol=1e-5)


def test_groups_are_scored_with_their_bias_and_weights_are_not():
    """DeepSeek-V3: a group counts as the sum of its two best biased scores; the weights are the plain scores,
    normalised and scaled. Of 8 experts in 4 groups the two best groups are kept, and of them the two best experts."""
    cfg = toy.small("deepseek-v3-671b")
    scores = np.array([0.6, 0.5, 0.9, 0.1, 0.4, 0.4, 0.2, 0.2])
    bias = np.array([0.0, 0.0, 0.0, 0.0, 0.1, 0.3, 0.0, 0.0])  # groups: 1.1, 1.0, 1.2, 0.4
    world, layout = toy.mesh()
    with jax.set_mesh(world):
        logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)[None, None]
        choice = router.choose(cfg, layout, {"correction_bias": jnp.asarray(bias, jnp.float32)}, logits)
    assert choice.expert_BSk.ravel().tolist() == [5, 0]  # 0.7 and 0.6
    np.testing.assert_allclose(choice.weight_BSk.ravel(), np.array([0.4, 0.6]) / 1.0 * 2.5, rtol=1e-5)
