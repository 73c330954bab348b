"""Invariance to the cut: loss and gradient of a step do not depend on how the work is divided. Plain SGD, float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText import optimizer, state, step
from MaxText.state import TrainState
from tests.helpers import MESHES, Toy, assert_close, by_path, toy, toy_batch

BATCH = toy_batch()
ONE, FSDP8, TENSOR, THREE = MESHES.values()
FOUR = {"fsdp": 2, "tensor": 2}
Z = {"z_loss_multiplier": 1e-2}


@pytest.fixture(scope="module")
def reference():
    """Gradients and metrics on one device, by the features of the model."""
    found = {}

    def get(**model):
        key = tuple(sorted(model.items()))
        if key not in found:
            found[key] = toy(**model).gradients(BATCH)
        return found[key]

    return get


def assert_same_step(made: Toy, expected) -> None:
    grads, metrics = made.gradients(BATCH)
    wanted_grads, wanted = expected
    assert_close(grads, wanted_grads)
    assert metrics == pytest.approx(wanted, rel=1e-5)
    assert metrics["total_weights"] == BATCH["loss_mask"].sum()


CUTS = {
    "fsdp8": (FSDP8, {}),
    "fsdp4-tensor2": (TENSOR, {}),
    "data2-fsdp2-tensor2": (THREE, {}),
    "fsdp_transpose2-tensor2": ({"fsdp_transpose": 2, "tensor": 2}, {}),
    "accumulate2": (ONE, {"gradient_accumulation_steps": 2}),
    "accumulate4-fsdp2-tensor2": (FOUR, {"gradient_accumulation_steps": 4}),
    "unrolled": (ONE, {"scan_layers": False}),
    "unrolled-fsdp2-tensor2": (FOUR, {"scan_layers": False}),
    "minimal": (ONE, {"remat_policy": "minimal"}),
    "full": (ONE, {"remat_policy": "full"}),
    "offloaded": (FSDP8, {"remat_policy": "custom", "decoder_layer_input": "offload", "query_proj": "offload"}),
    "minimal-unrolled": (ONE, {"remat_policy": "minimal", "scan_layers": False}),
    "chunks4": (ONE, {"num_vocab_tiling": 4}),
    "optimizer-over-data": ({"data": 2, "fsdp": 2}, {"shard_optimizer_over_data": True}),
    "user-rules": (
        {"fsdp": 2, "fsdp_transpose": 2, "tensor": 2},
        {"logical_axis_rules": ["embed=fsdp", "mlp_embed=", "mlp=tensor+fsdp_transpose+fsdp"]},
    ),
    "user-rules-over-data": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"logical_axis_rules": ["vocab=tensor+data", "heads=data", "mlp_embed=data", "norm=data", "mlp=fsdp"]},
    ),
    "everything": (
        THREE,
        {"gradient_accumulation_steps": 2, "remat_policy": "full", "num_vocab_tiling": 4},
    ),
}


@pytest.mark.parametrize("cut", CUTS)
def test_loss_and_gradients_do_not_depend_on_the_cut(reference, cut):
    mesh, how = CUTS[cut]
    assert_same_step(toy(mesh, **Z, **how), reference(**Z))


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (TENSOR, {}),
        (THREE, {"num_vocab_tiling": 4, "gradient_accumulation_steps": 2}),
    ],
)
def test_the_same_for_tied_embeddings(reference, mesh, how):
    assert_same_step(toy(mesh, **Z, logits_via_embedding=True, **how), reference(**Z, logits_via_embedding=True))


def test_the_same_for_every_optional_feature_of_a_layer(reference):
    model = {
        "use_qk_norm": True,
        "attn_logits_soft_cap": 2.0,
        "final_logits_soft_cap": 3.0,
        "mlp_activations": ("gelu", "linear"),
    }
    assert_same_step(toy(TENSOR, **model, remat_policy="minimal", num_vocab_tiling=2), reference(**model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [1, 7])
def test_a_padded_vocabulary_changes_nothing(tied, chunks):
    """98 ids split four ways: the padding gets no gradient, and the rest the same as on one device."""
    model = Z | {"vocab_size": 98, "base_num_kv_heads": 4, "logits_via_embedding": tied}
    batch = toy_batch(vocab=98)
    made = toy({"fsdp": 2, "tensor": 4}, **model, num_vocab_tiling=chunks)
    grads, metrics = made.run(lambda p, b: step.gradients(made.cfg, made.layout, p, b), made.params, made.put(batch))
    padded = {path: grad for path, grad in by_path(grads).items() if max(grad.shape) > 98}
    assert len(padded) == (1 if tied else 2)
    assert all(not grad[98:].any() if path == "embedding" else not grad[:, 98:].any() for path, grad in padded.items())
    with jax.set_mesh(made.mesh):
        real = jax.jit(lambda g: state.without_padding(made.plan.tree, g))(grads)
    wanted_grads, wanted = toy(**model).gradients(batch)
    assert_close(by_path(real), wanted_grads)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(wanted, rel=1e-5)


def test_padding_is_not_saved_and_comes_back():
    made = toy({"fsdp": 2, "tensor": 4}, vocab_size=98, base_num_kv_heads=4)
    before, types = made.state(), made.state_type
    with jax.set_mesh(made.mesh):
        stored = jax.jit(lambda now: state.without_padding(made.plan.tree, now))(before)
        after = jax.jit(lambda now: state.with_padding(made.plan.tree, now, types))(stored)
    one = toy(vocab_size=98, base_num_kv_heads=4)
    assert jax.tree.map(np.shape, stored) == jax.tree.map(np.shape, one.state())
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert jax.tree.map(lambda x: x.sharding.spec, after.params) == jax.tree.map(
        lambda x: x.sharding.spec, before.params
    )


def test_a_feature_that_changes_the_model_changes_the_gradient(reference):
    """The comparison above can fail."""
    plain, capped = reference(**Z)[0], reference(**Z, logits_via_embedding=True)[0]
    with pytest.raises(AssertionError):
        assert_close({k: v for k, v in plain.items() if k in capped}, capped)


def test_gradients_are_the_slope_of_the_loss():
    """Central difference of the loss along the gradient, in float32."""
    made = toy(**Z)
    grads, metrics, *_ = made.run(
        lambda p, b: step.gradients(made.cfg, made.layout, p, b), made.params, made.put(BATCH)
    )
    norm = float(np.sqrt(sum((g**2).sum() for g in by_path(grads).values())))

    def loss_at(distance):
        moved = jax.tree.map(lambda p, g: p + distance / norm * g, made.params, grads)
        return dataclasses.replace(made).run(
            lambda p, b: step.gradients(made.cfg, made.layout, p, b)[1]["loss"], moved, made.put(BATCH)
        )

    slope = float(loss_at(0.02) - loss_at(-0.02)) / 0.04
    assert slope == pytest.approx(norm, rel=5e-3)


# --- the whole step


def sgd_step(mesh=None, **how):
    """(state before, state after, metrics) of one step of plain SGD at a constant learning rate."""
    how = {"opt_type": "sgd", "lr_schedule_type": "constant", "warmup_steps_fraction": 0.0, "learning_rate": 0.5} | how
    made = toy(mesh, **how)
    tx = optimizer.make(made.cfg, made.plan.tree, made.layout)
    before = TrainState(jnp.zeros((), jnp.int32), made.params, tx.init(made.params))
    after, metrics = made.run(step.make_train_step(made.cfg, made.layout, tx), before, made.put(BATCH))
    return before, after, {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize("threshold", [0.0, 0.1, 1e9])
def test_a_step_subtracts_the_clipped_gradient_once(reference, threshold):
    before, after, metrics = sgd_step(gradient_clipping_threshold=threshold)
    grads = reference()[0]
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    factor = min(1.0, threshold / norm) if threshold else 1.0
    old, new = by_path(before.params), by_path(after.params)
    for path, grad in grads.items():
        np.testing.assert_allclose(new[path], old[path] - 0.5 * factor * grad, atol=3e-7, rtol=1e-6)
    assert int(after.step) == 1 and metrics["learning_rate"] == 0.5


def test_accumulation_clips_once_on_the_global_norm():
    how = {"gradient_clipping_threshold": 0.1, "learning_rate": 10.0}
    _, whole, metrics = sgd_step(**how)
    _, cut, cut_metrics = sgd_step(THREE, gradient_accumulation_steps=2, **how)
    assert cut_metrics == pytest.approx(metrics, rel=1e-5)
    for path, want in by_path(whole.params).items():
        np.testing.assert_allclose(by_path(cut.params)[path], want, atol=1e-5)


def test_a_batch_without_targets_moves_nothing():
    made = toy()
    empty = BATCH | {"loss_mask": np.zeros_like(BATCH["loss_mask"])}
    grads, metrics = made.gradients(empty)
    assert metrics == {"loss": 0.0, "lm_loss": 0.0, "z_loss": 0.0, "total_weights": 0.0}
    assert all((g == 0).all() for g in grads.values())


def test_the_parts_of_the_loss_add_up(reference):
    metrics = reference(**Z)[1]
    assert metrics["z_loss"] > 0
    assert metrics["loss"] == pytest.approx(metrics["lm_loss"] + metrics["z_loss"], rel=1e-6)


def test_the_eval_step_sums_the_same_loss(reference):
    made = toy(TENSOR)
    sums = made.run(step.make_eval_step(made.cfg, made.layout), made.params, made.put_rows(BATCH))
    assert float(sums["weight"]) == BATCH["loss_mask"].sum()
    assert float(sums["nll"] / sums["weight"]) == pytest.approx(reference()[1]["lm_loss"], rel=1e-5)


@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
def test_gradients_have_the_configured_dtype(grad_dtype):
    made = toy(grad_dtype=grad_dtype)
    with jax.set_mesh(made.mesh):
        grads, *_ = jax.eval_shape(
            lambda p, b: step.gradients(made.cfg, made.layout, p, b), made.params, made.put(BATCH)
        )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(grads)} == {grad_dtype}
