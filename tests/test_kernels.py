"""The flash kernel gives what attention in one piece does. On a CPU it is interpreted: the same program, slowly."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText import config, planner
from MaxText.architecture import Reach, takes_flash
from MaxText.errors import ConfigError, PlanError
from MaxText.hardware import Hardware
from MaxText.layers import dot_product, kernels
from MaxText.layers.masks import Places, visible
from tests.helpers import TOY, assert_close, toy, toy_batch

B, S = 4, 256
CASES = {
    "global": (Reach("global", 0), (4, 2, 16, 16), {}),
    "sliding-capped": (Reach("local_sliding", 37), (4, 4, 8, 8), {"cap": 3.0}),
    "chunk-sink": (Reach("chunk", 50), (4, 2, 16, 16), {"sink": True}),
    "latent": (Reach("global", 0), (4, 4, 24, 16), {}),
}


def places(rng: np.random.Generator) -> Places:
    """Rows of several documents, two of them with padding at the end."""
    index = np.broadcast_to(np.arange(S), (B, S))
    document, position = np.zeros((B, S), np.int32), np.zeros((B, S), np.int32)
    for row in range(B):
        end = S - 40 * (row % 2)
        cuts = [0, *sorted(rng.choice(np.arange(1, end), row + 1, replace=False)), end]
        for number, (first, stop) in enumerate(zip(cuts, cuts[1:], strict=False), start=1):
            document[row, first:stop], position[row, first:stop] = number, np.arange(stop - first)
    return Places(*map(jnp.asarray, (index, position, document)))


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_attention_in_one_piece(case, monkeypatch):
    """Values and gradients, over several blocks, with rows and heads split over devices."""
    reach, (n, k, h, v), how = CASES[case]
    monkeypatch.setattr(kernels, "BLOCKS", (128,))
    rng = np.random.default_rng(1)
    made = toy({"fsdp": 2, "tensor": 2}, attn_logits_soft_cap=how.get("cap", 0.0), max_target_length=S)
    at = places(rng)
    real = (at.document_BS > 0)[..., None, None]
    arrays = [rng.standard_normal((B, S, *heads), np.float32) for heads in ((n, h), (k, h), (k, v))]
    arrays += [rng.standard_normal(n, np.float32)] if how.get("sink") else []
    weight = rng.standard_normal((B, S, n, v), np.float32)

    def by_kernel(*given):
        q, k, v, *sink = given
        dims = ("activation_batch", "activation_length", "activation_kv_heads", None)
        y = kernels.flash(made.cfg, made.layout, reach, q, k, v, dims, *(sink or [None]), at)
        return jnp.where(real, y * weight, 0).sum()

    def in_one_piece(*given):
        q, k, v, *sink = given
        y = dot_product.attention(q, k, v, visible(reach, at, at), made.cfg.attn_logits_soft_cap, *sink)
        return jnp.where(real, y * weight, 0).sum()

    every = tuple(range(len(arrays)))
    wanted, want_grads = jax.jit(jax.value_and_grad(in_one_piece, every))(*arrays)
    heads = PartitionSpec("fsdp", None, "tensor", None)
    specs = [heads, heads, heads, PartitionSpec("tensor")]
    with jax.set_mesh(made.mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(made.mesh, spec))  # noqa: E731
        at = jax.tree.map(lambda x: put(x, PartitionSpec("fsdp", None)), at)
        found, grads = jax.jit(jax.value_and_grad(by_kernel, every))(*map(put, arrays, specs[: len(arrays)]))
    assert found == pytest.approx(float(wanted), abs=1e-3)  # a sum of 16,000 terms near 1
    names = ("q", "k", "v", "sink")
    assert_close(
        {name: np.asarray(x) for name, x in zip(names, grads, strict=False)},
        {name: np.asarray(x) for name, x in zip(names, want_grads, strict=False)},
        3e-6,
    )


LONG = {"max_target_length": 128, "attn_logits_soft_cap": 4.0, "remat_policy": "minimal_with_context"}
WHOLE = {
    "sliding": ({"fsdp": 2, "tensor": 2}, {"layer_pattern": ["local_sliding", "global"], "sliding_window_size": 20}),
}
SLOW = {
    "pipeline": ({"pipeline": 2, "fsdp": 2}, {"base_num_decoder_layers": 4, "remat_policy": "full"}),
    "latent": (
        {"fsdp": 2, "tensor": 2},
        {"decoder_block": "deepseek", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 4, "v_head_dim": 8, "rope_type": "default"},
    ),
    "sink-unrolled": ({"fsdp": 4}, {"attention_sink": True, "scan_layers": False, "remat_policy": "none"}),
}  # fmt: skip


@pytest.mark.parametrize("case", [*WHOLE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_step_with_the_kernel_is_a_step_without(case):
    mesh, how = (WHOLE | SLOW)[case]
    batch = toy_batch(length=128)
    found, metrics = toy(mesh, **LONG | how, attention="flash").gradients(batch)
    wanted, want_metrics = toy(**LONG | how, attention="dot_product").gradients(batch)
    assert_close(found, wanted)
    assert metrics["loss"] == pytest.approx(want_metrics["loss"], rel=1e-6)


def test_who_takes_the_kernel():
    assert takes_flash("autoselected", "tpu", 256)
    assert not takes_flash("autoselected", "tpu", 200)
    assert not takes_flash("autoselected", "cpu", 256)
    assert not takes_flash("autoselected", "gpu", 256)
    assert not takes_flash("dot_product", "tpu", 256)
    assert takes_flash("flash", "cpu", 256)


def test_what_the_kernel_cannot_is_refused():
    with pytest.raises(ConfigError, match="set max_target_length=128 or attention=autoselected"):
        config.make(**TOY | {"attention": "flash", "max_target_length": 200})
    split = {"attention": "flash", "max_target_length": 128, "ici_fsdp_parallelism": 1, "ici_context_parallelism": 2}
    cfg = config.make(**TOY | split)
    with pytest.raises(PlanError, match="splits them 2 ways"):
        planner.make(cfg, planner_tree(cfg), Hardware("cpu", "cpu", 2, 1, 1, None))
    cfg = config.make(**TOY | {"attention": "flash", "max_target_length": 128})
    with pytest.raises(PlanError, match="no such kernel for a GPU"):
        planner.make(cfg, planner_tree(cfg), dataclasses.replace(Hardware("cpu", "cpu", 1, 1, 1, None), platform="gpu"))


def planner_tree(cfg):
    from MaxText import decoder

    return decoder.declare(cfg)
