"""The floor: the same model, loss and optimizer written by hand in plain JAX, with no config, no plan, no layout.

emb D, N heads x H, gated SiLU MLP F, L layers scanned with full remat, untied output, AdamW with clipping on the global
norm. It is what a careful person would write for exactly this one shape; the project's step is measured against it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Shape(NamedTuple):
    """The common yardstick: 8.39 M parameters, 4 x 512 tokens a step."""

    emb: int = 256
    heads: int = 4
    head_dim: int = 64
    mlp: int = 1024
    layers: int = 4
    vocab: int = 8192
    batch: int = 4
    length: int = 512


def init(shape: Shape, key: jax.Array) -> dict:
    """Fresh float32 parameters."""
    d, n, h, f, layers, v = shape[:6]
    sizes = {
        "norm1": (layers, d), "q": (layers, d, n * h), "k": (layers, d, n * h), "v": (layers, d, n * h),
        "o": (layers, n * h, d),
        "norm2": (layers, d), "gate": (layers, d, f), "up": (layers, d, f), "down": (layers, f, d),
    }  # fmt: skip
    keys = iter(jax.random.split(key, 16))
    stack = {
        name: jnp.ones(size) if "norm" in name else jax.random.normal(next(keys), size) * size[-2] ** -0.5
        for name, size in sizes.items()
    }
    table = jax.random.normal(next(keys), (v, d))
    return {"table": table, "stack": stack, "norm": jnp.ones(d), "out": jax.random.normal(next(keys), (d, v)) * d**-0.5}


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


@jax.custom_vjp
def dense(x, w):
    """x @ w in x's dtype. The weight's gradient is contracted into float32: plain autodiff makes it in x's dtype, which
    is less exact, and on CPU (JAX 0.12, bfloat16) several times slower."""
    return x @ w.astype(x.dtype)


def _dense_backward(saved, dy):
    x, w = saved
    return dy @ w.astype(x.dtype).T, jnp.einsum("bsd,bsf->df", x, dy, preferred_element_type=w.dtype)


dense.defvjp(lambda x, w: (dense(x, w), (x, w)), _dense_backward)


def rotate(x, sin, cos):
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def loss_fn(params: dict, tokens: jax.Array, targets: jax.Array, shape: Shape, dtype) -> jax.Array:
    """Mean cross-entropy of [B, S] tokens."""
    B, S = tokens.shape
    n, h = shape.heads, shape.head_dim
    angle = jnp.arange(S)[:, None] / 10000.0 ** (jnp.arange(0, h, 2) / h)[None]
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    causal = jnp.tri(S, dtype=bool)

    def layer(x, p):
        y = rms_norm(x, p["norm1"])
        q, k, v = (dense(y, p[w]).reshape(B, S, n, h) for w in "qkv")
        q, k = rotate(q, sin, cos) * jnp.asarray(h**-0.5, dtype), rotate(k, sin, cos)
        logits = jnp.einsum("bsnh,btnh->bnst", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(causal, logits, -1e30)).astype(dtype)
        x = x + dense(jnp.einsum("bnst,btnh->bsnh", weights, v).reshape(B, S, n * h), p["o"])
        y = rms_norm(x, p["norm2"])
        gate, up = (dense(y, p[w]).astype(jnp.float32) for w in ("gate", "up"))
        return x + dense((jax.nn.silu(gate) * up).astype(dtype), p["down"]), None

    x, _ = jax.lax.scan(
        jax.checkpoint(layer, prevent_cse=False), params["table"].astype(dtype)[tokens], params["stack"]
    )
    logits = dense(rms_norm(x, params["norm"]), params["out"]).astype(jnp.float32)
    hit = jnp.arange(shape.vocab)[None, None, :] == targets[..., None]
    at_target = jnp.where(hit, logits, 0.0).sum(
        -1
    )  # faster on every backend tried than take_along_axis and its scatter
    return jnp.mean(jax.nn.logsumexp(logits, -1) - at_target)


def make_step(shape: Shape, dtype):
    """AdamW (0.9, 0.95, decay 0.1 on everything but norms) after clipping to 1; returns step(state, tokens,
    targets)."""

    def adam(path, p, g, m, v, t):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        direction = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8)
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
        return p - 1e-3 * (direction + decay * p), m, v

    def step(state, tokens, targets):
        params, mu, nu, t = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets, shape, dtype)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
        t = t + 1
        out = jax.tree_util.tree_map_with_path(lambda path, *a: adam(path, *a, t), params, grads, mu, nu)
        params, mu, nu = (jax.tree.map(lambda _, o, i=i: o[i], params, out) for i in range(3))
        return (params, mu, nu, t), loss

    return step
