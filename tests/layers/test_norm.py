"""RMSNorm against numpy, its invariances, and its dtypes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers import norm
from tests.helpers import MESHES, toy

RNG = np.random.default_rng(0)
X, SCALE = RNG.standard_normal((2, 3, 32), np.float32), RNG.standard_normal(32, np.float32)


def rms_norm(x, scale=SCALE, epsilon=1e-5, mesh="one"):
    made = toy(MESHES[mesh])
    return np.asarray(made.run(lambda x, s: norm.rms_norm(made.layout, x, s, epsilon), x, scale))


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_against_numpy(epsilon):
    wanted = X / np.sqrt((X.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon) * SCALE
    np.testing.assert_allclose(rms_norm(X, epsilon=epsilon), wanted, rtol=1e-5, atol=1e-6)


def test_a_factor_on_the_input_does_not_matter():
    np.testing.assert_allclose(rms_norm(1000 * X, epsilon=0.0), rms_norm(X, epsilon=0.0), rtol=1e-5)


def test_zeros_stay_finite():
    assert (rms_norm(np.zeros_like(X)) == 0).all()


def test_bfloat16_is_normalised_in_float32():
    """The mean of squares of 300 overflows nothing and keeps its precision; only the result is rounded."""
    x = jnp.asarray(300 + X, jnp.bfloat16)
    found = rms_norm(x, np.ones(32, np.float32))
    x32 = np.asarray(x, np.float32)
    wanted = jnp.asarray(x32 / np.sqrt((x32**2).mean(-1, keepdims=True) + 1e-5), jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wanted)


def test_the_scale_is_one_and_does_not_decay():
    param = norm.declare(7)
    assert (param.shape, param.init.law, param.kind) == ((7,), "ones", "norm")
