"""Grouped-query attention against loops in numpy; the mask; finite where nothing is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.architecture import Reach
from MaxText.layers import dot_product
from MaxText.layers.masks import Places, visible

B, S, T, H = 2, 5, 7, 4
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]])


def naive(q, k, v, mask, cap=0.0):
    """One head, one query, one key at a time."""
    out = np.zeros(q.shape)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    for b, s, n in np.ndindex(q.shape[0], q.shape[1], heads):
        seen = [t for t in range(k.shape[1]) if mask[b, s, t]]
        scores = np.array([q[b, s, n] @ k[b, t, n // group] for t in seen])
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max())
        out[b, s, n] = sum(w * v[b, t, n // group] for w, t in zip(weights / weights.sum(), seen, strict=True))
    return out


def draw(heads, kv_heads, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, S, heads, H), (B, T, kv_heads, H), (B, T, kv_heads, H)
    mask = rng.random((B, S, T)) < 0.6
    mask[..., 0] = True
    return *(rng.standard_normal(shape, np.float32) for shape in shapes), mask


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_against_loops(heads, kv_heads, cap):
    q, k, v, mask = draw(heads, kv_heads)
    found = jax.jit(dot_product.attention, static_argnums=4)(q, k, v, mask, cap)
    np.testing.assert_allclose(found, naive(q, k, v, mask, cap), atol=2e-6)


def test_what_is_masked_has_no_gradient():
    q, k, v, mask = draw(4, 2)
    mask[:, :, 3] = False
    grads = jax.grad(lambda k, v: dot_product.attention(q, k, v, mask).sum(), argnums=(0, 1))(k, v)
    for grad in grads:
        assert (np.asarray(grad)[:, 3] == 0).all() and np.abs(grad).sum() > 0


def test_a_query_that_sees_nothing_is_finite():
    q, k, v, _ = draw(4, 2)
    nothing = np.zeros((B, S, T), bool)
    value, grad = jax.value_and_grad(lambda v: dot_product.attention(q, k, v, nothing).sum())(v)
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_bfloat16_softmax_is_in_float32():
    """255 equal keys: each weight is 1/255; summed up in bfloat16 they would be far from one."""
    q, v = jnp.zeros((1, 1, 1, H), jnp.bfloat16), jnp.ones((1, 255, 1, H), jnp.bfloat16)
    out = dot_product.attention(q, v, v, np.ones((1, 1, 255), bool))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=1e-2)


def test_mask_is_causal_within_one_document():
    index = np.broadcast_to(np.arange(T), SEGMENTS.shape)
    places = Places(*map(jnp.asarray, (index, index, SEGMENTS)))
    found = np.asarray(visible(Reach("global"), places, places))
    wanted = [[[t <= s and row[s] == row[t] for t in range(len(row))] for s in range(len(row))] for row in SEGMENTS]
    np.testing.assert_array_equal(found, wanted)
