"""The loss: against numpy in float64, in chunks, with masks; no token outside the mask is felt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText import loss
from tests.helpers import LENGTH, ROWS, VOCAB, toy, toy_batch

BATCH = toy_batch()
X = np.random.default_rng(3).standard_normal((ROWS, LENGTH, 32), np.float32)
FOUR = {"fsdp": 2, "tensor": 2}


def numpy_loss(made, x=X, targets=BATCH["targets"]):
    """(nll, log z) per token in float64."""
    tied = made.cfg.logits_via_embedding
    kernel = np.asarray(made.params["embedding"]).T / np.sqrt(32) if tied else np.asarray(made.params["logits"])
    z = x.astype(np.float64) @ kernel.astype(np.float64)
    if cap := made.cfg.final_logits_soft_cap:
        z = cap * np.tanh(z / cap)
    log_z = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
    return log_z - np.take_along_axis(z, targets[..., None], -1)[..., 0], log_z


def token_loss(made, x=X, targets=BATCH["targets"]):
    arguments = made.put_rows({"targets": targets})["targets"]
    rows = jax.device_put(x, arguments.sharding)
    return made.run(lambda p, x, t: loss.token_loss(made.cfg, made.layout, p, x, t), made.params, rows, arguments)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(
    ("mesh", "model"),
    [({}, {}), ({}, {"final_logits_soft_cap": 2.0}), (FOUR, {"logits_via_embedding": True}), (FOUR, {})],
    ids=["plain", "capped", "tied-fsdp2-tensor2", "fsdp2-tensor2"],
)
def test_every_token_against_numpy(chunks, mesh, model):
    made = toy(mesh, num_vocab_tiling=chunks, **model)
    found, wanted = token_loss(made), numpy_loss(made)
    np.testing.assert_allclose(found.nll_BS, wanted[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found.log_z_BS, wanted[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunks", [1, 4])
def test_large_logits_do_not_overflow(chunks):
    made = toy(num_vocab_tiling=chunks)
    found, wanted = token_loss(made, 1e3 * X), numpy_loss(made, 1e3 * X)
    assert wanted[1].max() > 200  # exp of it is beyond float32
    np.testing.assert_allclose(found.nll_BS, wanted[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("chunks", [1, 4])
def test_sums_are_over_the_real_targets(chunks):
    made = toy(num_vocab_tiling=chunks)
    x = made.run(lambda p, b: loss.decoder.forward(made.cfg, made.layout, p, b), made.params, made.put_rows(BATCH))
    nll, log_z = numpy_loss(made, np.asarray(x))
    mask = BATCH["loss_mask"]
    found = made.run(lambda p, b: loss.sums(made.cfg, made.layout, p, b), made.params, made.put_rows(BATCH))
    assert float(found.weight) == mask.sum() < mask.size
    assert float(found.nll) == pytest.approx((nll * mask).sum(), rel=1e-5)
    assert float(found.log_z_squared) == pytest.approx((log_z**2 * mask).sum(), rel=1e-5)


def test_a_target_outside_the_mask_is_not_felt():
    made = toy()
    sums = jax.jit(lambda p, b: loss.sums(made.cfg, made.layout, p, b))
    other = np.where(BATCH["loss_mask"] == 1, BATCH["targets"], 7).astype(np.int32)
    with jax.set_mesh(made.mesh):
        found = [float(sums(made.params, made.put_rows(BATCH | {"targets": t})).nll) for t in (BATCH["targets"], other)]
    assert found[0] == found[1]


@pytest.mark.parametrize("chunks", [1, 4])
def test_masked_tokens_have_no_gradient(chunks):
    made = toy(num_vocab_tiling=chunks)
    mask, targets = BATCH["loss_mask"].astype(np.float32), BATCH["targets"]

    def total(x, params):
        return (loss.token_loss(made.cfg, made.layout, params, x, targets).nll_BS * mask).sum()

    grad = np.asarray(made.run(jax.grad(total), jnp.asarray(X), made.params))
    felt = np.abs(grad).sum(-1) > 0
    np.testing.assert_array_equal(felt, BATCH["loss_mask"] == 1)


def test_logits_are_those_of_the_loss():
    made = toy(logits_via_embedding=True, final_logits_soft_cap=2.0)
    z = made.run(lambda p, x: loss.logits(made.cfg, made.layout, p, x), made.params, jnp.asarray(X))
    assert z.shape == (ROWS, LENGTH, VOCAB) and z.dtype == jnp.float32
    picked = np.take_along_axis(np.asarray(jax.nn.log_softmax(z)), BATCH["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(-picked, token_loss(made).nll_BS, rtol=1e-4, atol=1e-5)
