"""What dropout drops follows from seed, step, token and layer alone: the same on every mesh, in every cut."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText import decoder, loss, step
from MaxText.layers import dropout
from tests.helpers import assert_close, by_path, toy, toy_batch

RATE = {"dropout_rate": 0.25, "base_num_decoder_layers": 4}
BATCH = toy_batch()


def gradients(made, at: int = 3):
    """(gradients by path, loss) of a training step number `at`."""

    def work(params, batch):
        return step.gradients(made.cfg, made.layout, params, dropout.with_keys(made.cfg, made.layout, batch, at))

    grads, metrics = made.run(work, made.params, made.put(BATCH))
    return by_path(grads), float(metrics["loss"])


CUTS = {
    "fsdp-tensor-accumulated": ({"fsdp": 2, "tensor": 2}, {"gradient_accumulation_steps": 4}),
    "pipeline-context": ({"pipeline": 2, "context": 2}, {"remat_policy": "full"}),
}
SLOW = {
    "data-fsdp-unrolled": ({"data": 2, "fsdp": 2}, {"scan_layers": False, "remat_policy": "none"}),
    "context-zigzag": ({"context": 2, "fsdp": 2}, {"remat_policy": "full"}),
    "context-ulysses": ({"context": 2}, {"context_parallel_strategy": "ulysses"}),
    "pipeline": ({"pipeline": 2, "fsdp": 2}, {"remat_policy": "minimal", "num_layers_per_pipeline_stage": 1}),
    "pipeline-rest": ({"pipeline": 2}, {"base_num_decoder_layers": 5, "pipeline_parallel_layers": 4}),
}


@functools.cache
def reference(layers: int, rate: float):
    return gradients(toy(base_num_decoder_layers=layers, dropout_rate=rate, mtp_num_layers=1))


@pytest.mark.parametrize("cut", [*CUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_loss_and_gradients_do_not_depend_on_the_cut(cut):
    mesh, how = (CUTS | SLOW)[cut]
    layers = how.get("base_num_decoder_layers", 4)
    found, loss_found = gradients(toy(mesh, **RATE | how, mtp_num_layers=1))
    wanted, loss_wanted = reference(layers, 0.25)
    assert_close(found, wanted)
    assert loss_found == pytest.approx(loss_wanted, rel=1e-6)
    assert abs(reference(4, 0.0)[1] - loss_wanted) > 1e-3  # something was dropped


def kept(made, layer: int = 0, sublayer: int = 0, at: int = 0):
    """Which elements of [A, B, S, D] are kept, from a stream of ones."""

    def work(batch):
        batch = dropout.with_keys(made.cfg, made.layout, batch, at)

        def rows(batch):
            noise = dropout.noise(batch).of_layer(layer)
            ones = jnp.ones((*batch["inputs"].shape, made.cfg.emb_dim))
            return dropout.dropout(made.cfg, made.layout, noise, ones, sublayer)

        return jax.lax.map(rows, batch)

    return np.asarray(made.run(work, made.put(BATCH)))


def test_the_share_and_the_scale():
    values = kept(toy(**RATE))
    assert set(np.unique(values)) == {np.float32(0), np.float32(1 / 0.75)}
    dropped = (values == 0).mean()
    assert abs(dropped - 0.25) < 4 * (0.25 * 0.75 / values.size) ** 0.5
    tokens = (values == 0).mean(axis=-1)  # none is special
    assert tokens.min() > 0
    assert tokens.max() < 0.7


def test_every_place_has_its_own():
    """Steps, seeds, layers, sublayers and tokens: no two share what they drop."""
    made = toy(**RATE)
    other = toy(**RATE, init_weights_seed=1)
    base = kept(made) == 0
    for found in (kept(made, at=1), kept(other), kept(made, layer=1), kept(made, sublayer=1),
                  kept(made, sublayer=dropout.EMBEDDING)):  # fmt: skip
        both = (base & (found == 0)).mean()
        assert abs(both - 0.0625) < 5 * (0.0625 / base.size) ** 0.5
    tokens = base.reshape(-1, base.shape[-1])
    assert len(np.unique(tokens, axis=0)) == len(tokens)
    np.testing.assert_array_equal(base, kept(made) == 0)


def test_nothing_is_dropped_in_evaluation_and_without_a_rate():
    made, whole = toy(**RATE), toy(**RATE | {"dropout_rate": 0.0})
    rows = made.put_rows(BATCH)
    found = made.run(lambda p, b: loss.sums(made.cfg, made.layout, p, b).nll, made.params, rows)
    wanted = whole.run(lambda p, b: loss.sums(whole.cfg, whole.layout, p, b).nll, whole.params, rows)
    assert found == wanted
    program = jax.jit(lambda p, b: decoder.forward(made.cfg, made.layout, p, b))
    with jax.set_mesh(made.mesh):
        assert "_bernoulli" not in str(jax.make_jaxpr(program)(made.params, rows))
        assert "_bernoulli" not in str(jax.make_jaxpr(lambda s, b: step.make_train_step(
            whole.cfg, whole.layout, whole.tx)(s, b))(whole.state_type, whole.put(BATCH)))  # fmt: skip
        assert "_bernoulli" in str(jax.make_jaxpr(lambda s, b: step.make_train_step(
            made.cfg, made.layout, made.tx)(s, b))(made.state_type, made.put(BATCH)))  # fmt: skip
