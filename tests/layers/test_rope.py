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


# --- stretched


def turns(kind: Rope) -> np.ndarray:
    """Radians per position of each pair."""
    return rope.frequencies(kind).astype(np.float64)


def test_linear_stretching_divides_positions():
    np.testing.assert_allclose(
        turns(Rope(H, 100.0, scaling="linear", factor=8.0)) * 8, turns(Rope(H, 100.0)), rtol=1e-6
    )


def test_llama_3_keeps_fast_pairs_stretches_slow_ones_and_blends_between():
    """Wavelengths below length / high are kept, above length / low divided by the factor."""
    kind = Rope(64, 500_000.0, scaling="llama3.1", factor=8.0, original_length=8192, low=1.0, high=4.0)
    before, after = turns(Rope(64, 500_000.0)), turns(kind)
    wavelength = 2 * math.pi / before
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(after[fast], before[fast], rtol=1e-6)
    np.testing.assert_allclose(after[slow], before[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    share = (8192 / wavelength[between] - 1) / 3
    np.testing.assert_allclose(after[between], before[between] * (share + (1 - share) / 8), rtol=1e-6)
    assert fast.any() and slow.any() and between.any()


def test_yarn_ramps_between_two_numbers_of_turns():
    """DeepSeek-V3's: pairs up to the 10th are kept, from the 23rd on stretched 40 times, linear between."""
    kind = Rope(64, 10_000.0, scaling="yarn", factor=40.0, original_length=4096, beta_fast=32.0, beta_slow=1.0)
    before, after = turns(Rope(64, 10_000.0)), turns(kind)
    pair = [64 * math.log(4096 / (beta * 2 * math.pi)) / (2 * math.log(10_000)) for beta in (32, 1)]
    first, last = math.floor(pair[0]), math.ceil(pair[1])
    assert (first, last) == (10, 23)
    share = np.clip((np.arange(32) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(after, before * (1 - share) + before / 40 * share, rtol=1e-6)


def test_what_stands_still_and_what_is_not_rotated():
    """turning=1: the other pairs do not turn, and exponents count over the whole; channels beyond `dim` stay."""
    still = turns(Rope(H, 100.0, turning=1))
    assert still[0] == turns(Rope(H, 100.0))[0] and (still[1:] == 0).all()
    at = rope.rotation(jnp.full((1, 1), 5), Rope(4, 100.0))
    found = np.asarray(rope.rotate(jnp.asarray(Q, jnp.float32), at)).reshape(H)
    np.testing.assert_array_equal(found[4:], Q.reshape(H)[4:].astype(np.float32))
    assert np.abs(found[:4] - Q.reshape(H)[:4]).max() > 0.1


def test_interleaved_pairs_are_neighbours():
    """The same rotation as in halves, of channels in another order."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # neighbours -> halves
    at = rope.rotation(jnp.full((1, 1), 5), PLAIN)
    x = jnp.asarray(Q, jnp.float32)
    neighbours = np.asarray(rope.rotate(x, at, interleave=True))[..., order]
    np.testing.assert_allclose(neighbours, np.asarray(rope.rotate(x[..., jnp.array(order)], at)), rtol=1e-6)
