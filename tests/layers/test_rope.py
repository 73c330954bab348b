"""Rotary positions: a rotation whose scores depend on the distance of two tokens alone."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.architecture import Rope
from MaxText.layers import rope

H = 8
PLAIN = Rope(dim=H, theta=10_000)
RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 1, 1, 1, H))


def rotated(x, position: int) -> np.ndarray:
    at = rope.rotation(jnp.full((1, 1), position), PLAIN)
    return np.asarray(rope.rotate(jnp.asarray(x, jnp.float32), at))


@settings(deadline=None)
@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 90))
def test_scores_depend_on_the_distance_alone(first, second, distance):
    scores = [(rotated(Q, p + distance) * rotated(K, p)).sum() for p in (first, second)]
    assert scores[0] == pytest.approx(scores[1], abs=2e-3)  # float32 angles of some thousand radians


def test_position_zero_changes_nothing_and_lengths_stay():
    np.testing.assert_array_equal(rotated(Q, 0), Q.astype(np.float32))
    assert np.linalg.norm(rotated(Q, 1234)) == pytest.approx(np.linalg.norm(Q), rel=1e-6)


def test_by_hand():
    """Pair i of position 3 turns by 3 / 10000^(2i/8): i with i + 4."""
    x, found = Q.reshape(H), rotated(Q, 3).reshape(H)
    for i in range(H // 2):
        angle = 3 / 10_000 ** (2 * i / H)
        sin, cos = math.sin(angle), math.cos(angle)
        turned = x[i] * cos - x[i + 4] * sin, x[i + 4] * cos + x[i] * sin
        assert (found[i], found[i + 4]) == pytest.approx(turned, rel=1e-5)


@pytest.mark.parametrize(("low", "high"), [(1, 10_000), (1, 500_000), (2, 100)])
def test_timescales(low, high):
    sin, cos = rope.rotation(jnp.ones((1, 1), jnp.int32), Rope(dim=H, theta=high, min_timescale=low))
    wanted = 1 / (low * (high / low) ** (np.arange(0, H, 2) / H))
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 0], wanted, rtol=1e-5)


def test_the_dtype_stays():
    at = rope.rotation(jnp.ones((1, 1), jnp.int32), PLAIN)
    assert rope.rotate(jnp.asarray(Q, jnp.bfloat16), at).dtype == jnp.bfloat16
