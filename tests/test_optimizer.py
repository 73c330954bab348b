"""The schedule to the letter of its rule, decay by role, clipping, and AdamW against plain numpy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText import blueprint, decoder, optimizer
from tests.helpers import assert_close, by_path, toy, toy_batch, toy_config

PEAK, FINAL = 2e-3, 0.1


def rates(count: int = 50, **overrides) -> np.ndarray:
    """The learning rate of steps 0 .. count - 1."""
    cfg = toy_config(**{"steps": 40, "learning_rate": PEAK, "learning_rate_final_fraction": FINAL} | overrides)
    return np.asarray(jax.vmap(optimizer.schedule(cfg))(jnp.arange(count)))


def by_the_rule(step: int, kind: str, total: int, warmup: int, decay: int, linear: bool = False) -> float:
    """The rule in plain Python: decay over `decay` steps of which the last has exactly the final rate."""
    final = PEAK * FINAL
    if step >= total:
        return 0.0
    if step < warmup:
        return PEAK * step / warmup
    if kind == "constant" or step < total - decay:
        return PEAK
    part = (step - (total - decay)) / (decay - 1)
    share = 1 - part if linear else (1 + math.cos(math.pi * part)) / 2
    return PEAK * share + final * (1 - share)


@pytest.mark.parametrize(
    ("overrides", "warmup", "decay"),
    [
        ({"lr_schedule_type": "cosine"}, 4, 36),
        ({"lr_schedule_type": "cosine", "warmup_steps_fraction": 0.0}, 0, 40),
        ({"lr_schedule_type": "cosine", "warmup_steps_fraction": 0.26}, 10, 30),  # int(10.4)
        ({"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.25}, 4, 10),
        ({"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.25, "wsd_decay_style": "cosine"}, 4, 10),
        ({"lr_schedule_type": "constant"}, 4, 0),
    ],
)
def test_every_step_by_the_rule(overrides, warmup, decay):
    kind = overrides["lr_schedule_type"]
    linear = kind == "wsd" and "wsd_decay_style" not in overrides
    wanted = [by_the_rule(step, kind, 40, warmup, decay, linear) for step in range(50)]
    np.testing.assert_allclose(rates(**overrides), wanted, rtol=1e-5, atol=1e-12)


def test_the_landmarks_in_numbers():
    cosine = rates(lr_schedule_type="cosine")
    assert cosine[0] == 0.0 and cosine[1] == pytest.approx(5e-4) and cosine[4] == pytest.approx(2e-3)
    assert cosine[39] == pytest.approx(2e-4, rel=1e-6) and (cosine[40:] == 0).all()
    wsd = rates(lr_schedule_type="wsd", wsd_decay_steps_fraction=0.25)
    assert (wsd[4:31] == np.float32(2e-3)).all() and wsd[31] < wsd[30]
    assert wsd[30] - wsd[31] == pytest.approx(1.8e-3 / 9, rel=1e-3) and wsd[39] == pytest.approx(2e-4, rel=1e-6)
    assert (rates(lr_schedule_type="constant")[40:] == 0).all()


def test_a_schedule_longer_than_the_run_and_shorter():
    long = rates(learning_rate_schedule_steps=80, count=80)
    assert long[8] == pytest.approx(PEAK) and long[39] > 0.5 * PEAK and long[79] == pytest.approx(PEAK * FINAL)
    assert (rates(learning_rate_schedule_steps=20)[20:] == 0).all()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_tiny_schedules_are_finite(steps):
    for kind in ("cosine", "wsd", "constant"):
        found = rates(steps=steps, lr_schedule_type=kind)
        assert np.isfinite(found).all() and (found >= 0).all() and found.max() <= np.float32(PEAK) * 1.0001


# --- decay, clipping, AdamW


def test_what_decays():
    mask = optimizer.decay_mask(decoder.declare(toy_config(use_qk_norm=True)))
    by_name = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(mask)}
    kept = {path for path, decays in by_name.items() if not decays}
    assert kept == {path for path in by_name if path.endswith("norm")} and len(kept) == 5


def test_the_decay_is_described_with_its_numbers():
    tree = decoder.declare(toy_config())
    norms = sum(p.size for _, p in blueprint.leaves(tree) if p.kind == "norm")
    said = optimizer.describe_decay(toy_config(adam_weight_decay=0.25), tree)
    assert f"{blueprint.count(tree) - norms:,} of {blueprint.count(tree):,}" in said and "0.25" in said


@pytest.mark.parametrize(("threshold", "factor"), [(0.0, 1.0), (2.5, 0.5), (5.0, 1.0), (50.0, 1.0)])
def test_clipping(threshold, factor):
    grads = {"a": jnp.asarray([3.0]), "b": jnp.asarray([[4.0]], jnp.bfloat16)}
    clipped = optimizer.clip_by_global_norm(grads, jnp.asarray(5.0), threshold)
    assert float(clipped["a"][0]) == 3 * factor and float(clipped["b"][0, 0]) == 4 * factor
    assert clipped["b"].dtype == jnp.bfloat16


def test_clipping_keeps_a_gradient_of_zero():
    clipped = optimizer.clip_by_global_norm({"a": jnp.zeros(2)}, jnp.asarray(0.0), 1.0)
    assert (np.asarray(clipped["a"]) == 0).all()


def numpy_adamw(p, grads, rate, b1, b2, eps, decay):
    """Loshchilov & Hutter (2019, arXiv:1711.05101), with the learning rate on the decay as well."""
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * p)
    return p


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_against_numpy(decay):
    made = toy(adam_weight_decay=decay, adam_b1=0.8, adam_b2=0.9, adam_eps=1e-6)
    tx = optimizer.make(made.cfg, made.plan.tree, made.layout)
    rng = np.random.default_rng(0)
    start = jax.tree.map(np.asarray, made.params)
    draws = [jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), start) for _ in range(3)]
    params, opt_state = start, tx.init(start)
    for grads in draws:
        direction, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda d: -0.01 * d, direction))
    mask = optimizer.decay_mask(made.plan.tree)
    wanted = jax.tree.map(
        lambda decays, p, *gs: numpy_adamw(p.astype(np.float64), gs, 0.01, 0.8, 0.9, 1e-6, decay * decays),
        mask,
        start,
        *draws,
    )
    jax.tree.map(lambda found, want: np.testing.assert_allclose(found, want, rtol=2e-4, atol=1e-5), params, wanted)


@pytest.mark.parametrize("mu_dtype", ["float32", "bfloat16"])
def test_the_first_moment_has_its_own_dtype(mu_dtype):
    made = toy(mu_dtype=mu_dtype)
    moments = optax.tree.get(made.state().opt_state, "mu"), optax.tree.get(made.state().opt_state, "nu")
    dtypes = [{str(leaf.dtype) for leaf in jax.tree.leaves(moment)} for moment in moments]
    assert dtypes == [{mu_dtype}, {"float32"}]


def test_optimizer_state_over_data_halves_it_and_changes_nothing():
    """ZeRO-1: two steps of AdamW with the state split over data = 2 give the parameters of the whole state."""
    found = {}
    for split in (False, True):
        made = toy({"data": 2, "fsdp": 2}, shard_optimizer_over_data=split, warmup_steps_fraction=0.0)
        train_step, now = made.compiled_step, made.state()
        with jax.set_mesh(made.mesh):
            for _ in range(2):
                now, _ = train_step(now, made.put(toy_batch()))
        found[split] = made, now
    mu, nu = (optax.tree.get(found[True][1].opt_state, name) for name in ("mu", "nu"))
    assert all("data" in str(leaf.sharding.spec) for leaf in jax.tree.leaves((mu, nu)))
    assert not any("data" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(found[True][1].params))
    whole, parts = (found[split][0].plan.optimizer_bytes - 8 for split in (False, True))  # but for two counters
    assert parts == whole // 2
    assert_close(by_path(found[True][1].params), by_path(found[False][1].params), 1e-6)
