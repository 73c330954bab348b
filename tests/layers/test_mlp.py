"""The feed-forward layer against numpy, gated and plain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from MaxText.layers import mlp
from tests.helpers import toy

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "linear": lambda x: x,
}


@pytest.mark.parametrize("names", [("silu", "linear"), ("gelu", "linear"), ("relu",), ("gelu",), ("linear",)])
def test_against_numpy(names):
    made = toy(mlp_activations=names)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 32), np.float32)
    params = {name: rng.standard_normal(p.shape, np.float32) * 0.2 for name, p in mlp.declare(made.cfg).items()}
    assert len(params) == len(names) + 1
    found = made.run(lambda p, x: mlp.mlp(made.cfg, made.layout, p, x), params, x)
    hidden = math.prod(ACTIVATIONS[name](x @ params[f"wi_{i}"]) for i, name in enumerate(names))
    np.testing.assert_allclose(found, hidden @ params["wo"], rtol=1e-4, atol=1e-5)
