"""Attention over split rows is attention: values and gradients of every strategy against all scores at once."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import NamedSharding

from MaxText import sequence
from MaxText.architecture import Reach
from MaxText.layers import attend, dot_product
from MaxText.layers.masks import Places, visible

B, S, N, H, V, C = 2, 32, 4, 4, 6, 5
KV_HEADS = ("activation_batch", "activation_length", "activation_kv_heads", None)
NARROW = ("activation_batch", "activation_length", None)
GLOBAL = Reach("global")
# (key/value heads or 0 for latents, what a query sees, soft cap, sink). Chunks of the row have 4 to 16 tokens, so that
# a reach of 5 ends in the chunk before or needs more, and one of 12 leaves out some chunks.
CASES: dict[str, tuple[int, Reach, float, bool]] = {
    "grouped": (2, GLOBAL, 0.0, False),
    "one key head, sink, cap": (1, GLOBAL, 1.5, True),
    "short window, sink": (4, Reach("local_sliding", 5), 0.0, True),
    "window, cap": (2, Reach("local_sliding", 12), 1.5, False),
    "chunks": (2, Reach("chunk", 6), 0.0, False),
    "latents": (0, GLOBAL, 0.0, False),
}
ORDERS = [("all_gather", True), ("ring", True), ("ulysses", True), ("all_gather", False), ("ring", False)]
MESHES = [{"context": 4}, {"context": 2}, {"data": 2, "context": 2, "tensor": 2}]


def places() -> Places:
    """Packed rows: three documents and padding, cut elsewhere in each row."""
    ends = np.array([[7, 18, 28], [11, 12, 32]])
    document = np.stack([1 + np.searchsorted(row, np.arange(S), "right") for row in ends])
    index = np.broadcast_to(np.arange(S), (B, S))
    first = np.take_along_axis(np.pad(ends, ((0, 0), (1, 0))), document - 1, axis=1)
    return Places(*(np.asarray(x, np.int32) for x in (index, index - first, np.where(document > 3, 0, document))))


def from_latents(kernel, parts):
    both = jnp.einsum("BTC,CNH->BTNH", parts[0], kernel)
    shared = jnp.broadcast_to(parts[1][:, :, None], (*both.shape[:3], parts[1].shape[-1]))
    return jnp.concatenate([both[..., : H - 2], shared], axis=-1), both[..., H - 2 :]


def inputs(kv_heads: int, sink: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    arrays = {"q": draw(B, S, N, H), "weight": draw(B, S, N, V), "sink": draw(N) if sink else None}
    if kv_heads:
        return arrays | {"parts": (draw(B, S, kv_heads, H), draw(B, S, kv_heads, V)), "kernel": None}
    return arrays | {"parts": (draw(B, S, C), draw(B, S, 2)), "kernel": draw(C, N, H - 2 + V)}


def gradients(run, arrays):
    """(the output, gradients of its weighted sum by all but the weight)."""

    def total(wanted, weight):
        y = run(**wanted)
        return (y * weight).sum(), y

    given = {name: x for name, x in arrays.items() if name != "weight"}
    (_, y), found = jax.jit(jax.value_and_grad(total, has_aux=True))(given, arrays["weight"])
    return {"y": y, **found}


def on_one_device(case):
    kv_heads, reach, cap, sink = CASES[case]

    def run(q, parts, kernel, sink):
        k, v = parts if kernel is None else from_latents(kernel, parts)
        return dot_product.attention(q, k, v, visible(reach, places(), places()), cap, sink)

    return gradients(run, inputs(kv_heads, sink))


def on_mesh(case, degrees, strategy, balanced):
    kv_heads, reach, cap, sink = CASES[case]
    cfg = types.SimpleNamespace(
        context_parallel_strategy=strategy, context_parallel_load_balance=balanced, attn_logits_soft_cap=cap
    )
    world, layout = toy.mesh(**degrees)
    slots = sequence.permutation(sequence.order(cfg, layout), S)

    def put(x, dims, rows=True):
        if x is None:
            return None
        x = np.asarray(x)[:, slots] if rows else np.asarray(x)
        return jax.device_put(x, NamedSharding(world, layout.spec(dims)))

    at = Places(*(put(x, attend.TOKENS) for x in places()))
    everywhere = Places(*(put(x, attend.WHOLE_ROWS) for x in places()))
    dims = KV_HEADS if kv_heads else NARROW

    def run(q, parts, kernel, sink):
        keys = attend.Keys(parts, dims)
        if kernel is not None:
            keys = attend.Keys(parts, dims, from_latents, kernel, (None, "heads", None))
        return attend.split(cfg, layout, reach, q, keys, sink, at, everywhere)

    arrays = inputs(kv_heads, sink)
    placed = {name: put(arrays[name], attend.Q_HEADS) for name in ("q", "weight")}
    placed["parts"] = tuple(put(x, dims) for x in arrays["parts"])
    placed["sink"] = put(arrays["sink"], attend.SINK, rows=False)
    placed["kernel"] = put(arrays["kernel"], (None, "heads", None), rows=False)
    with jax.set_mesh(world):
        found = gradients(run, placed)
    back = np.argsort(slots)
    whole = {name: jax.tree.map(np.asarray, found[name]) for name in found}
    return whole | {name: jax.tree.map(lambda x: x[:, back], whole[name]) for name in ("y", "q", "parts")}


def _quick(mesh, order):
    return order in ORDERS[:3] and mesh == MESHES[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("degrees", "order"),
    [
        pytest.param(mesh, order, marks=() if _quick(mesh, order) else pytest.mark.slow)
        for mesh in MESHES
        for order in ORDERS
    ],
    ids=lambda value: "-".join(f"{key}" for key in value),
)
def test_as_on_one_device(case, degrees, order):
    if CASES[case][0] == 1 and "tensor" in degrees:
        pytest.skip("one key head cannot be split over tensor")
    wanted = jax.tree.leaves_with_path(on_one_device(case))
    found = jax.tree.leaves_with_path(on_mesh(case, degrees, *order))
    assert len(found) == len(wanted)
    for (path, want), (_, have) in zip(wanted, found, strict=True):
        error = np.linalg.norm(have - want) / np.linalg.norm(want)
        assert error < 1e-5, (path, error)
