"""Rows split over devices: loss, metrics and gradients are those of one device, whatever the strategy and the model;
and what cannot be split is refused. (`layers/test_attend.py` tests the attention alone, on more meshes.)"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import toy

from MaxText import sequence, step
from MaxText.errors import PlanError
from tests.helpers import TOY, assert_close, by_path, toy_batch, toy_config
from tests.helpers import toy as toy_world
from tests.test_planner import plan

# Models of the families and what they bring: borrowed keys, vectors of each layer's own, windows; latents and an
# indexer that learns; sinks; chunks, tempered queries; values that are keys; caps.
FAMILIES = [
    ("gemma4-e2b", "ring"),
    ("deepseek-v3.2-671b", "all_gather"),
    ("gpt-oss-20b", "ulysses"),
    ("gemma4-e2b", "all_gather"),
    ("gpt-oss-20b", "ring"),
    ("llama4-scout-17b-16e", "ring"),
    ("llama4-scout-17b-16e", "all_gather"),
    ("gemma4-26b-a4b", "ring"),
    ("gemma4-26b-a4b", "ulysses"),
    ("gemma2-27b", "ring"),
    ("gemma2-27b", "all_gather"),
    ("deepseek-v3-671b", "ring"),
    ("deepseek-v3-671b", "all_gather"),
    ("deepseek-v3-671b", "ulysses"),
]
CHANGES = {
    "deepseek-v3.2-671b": {"indexer_loss_scaling_factor": 0.5, "indexer_topk": 5},
    "deepseek-v3-671b": {"mtp_num_layers": 2},
    "gpt-oss-20b": {"capacity_factor": 0.7, "load_balance_loss_weight": 0.01, "load_balance_loss_type": "sequence"},
}


@functools.cache
def gradients(model_name, degrees=(), **changes):
    """({path: gradient}, metrics) of a packed batch."""
    cfg = toy.small(model_name, **CHANGES.get(model_name, {}), **changes)
    world, layout = toy.mesh(**dict(degrees))
    arrays = {name: x[None] for name, x in toy.batch(cfg, rows=4).items()}
    with jax.set_mesh(world):
        params = toy.place(cfg, toy.hot(cfg), world, layout)
        batch = toy.put(arrays, world, layout, sequence.order(cfg, layout))
        grads, metrics = jax.jit(lambda params, batch: step.gradients(cfg, layout, params, batch))(params, batch)
    return by_path(grads), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("mesh", [{"context": 2, "tensor": 2}, {"fsdp": 2, "context": 4}], ids=["tensor", "fsdp"])
def test_a_ring_has_the_gradients_of_one_device(mesh):
    model = {"layer_pattern": ["local_sliding", "global"], "sliding_window_size": 3, "attention_sink": True}
    model |= {"mtp_num_layers": 2, "attn_logits_soft_cap": 5.0}
    wanted, one = toy_world(**model).gradients(toy_batch())
    found, split = toy_world(mesh, **model, context_parallel_strategy="ring").gradients(toy_batch())
    assert_close(found, wanted)
    assert split == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("model_name", "strategy"), FAMILIES)
def test_every_model_has_the_gradients_of_one_device(model_name, strategy):
    wanted, one = gradients(model_name)
    found, split = gradients(model_name, (("fsdp", 2), ("context", 2)), context_parallel_strategy=strategy)
    # Some gradients are rounding and little else: of an expert that nobody chose, of a scale that a norm undoes. Seen,
    # with weights drawn hot: 1.6e-5 of a kernel's own norm, 7e-7 of the whole gradient for a scale.
    whole = np.sqrt(sum(np.linalg.norm(x) ** 2 for x in wanted.values()))
    assert found.keys() == wanted.keys()
    for path, want in wanted.items():
        error, allowed = np.linalg.norm(found[path] - want), 2e-5 * np.linalg.norm(want) + 1e-6 * whole
        assert error < allowed, f"{path}: {error / whole:.2e} of the gradient's norm"
    assert split == pytest.approx(one, rel=1e-5)


# --- refusals


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_target_length": 18}, ("max_target_length=18", "4 equal chunks", "16", "load_balance=false")),
        ({"max_target_length": 17}, ("max_target_length=17", "4 equal chunks", "16")),
        ({"max_target_length": 17, "context_parallel_load_balance": False}, ("=17", "2 equal chunks", "16")),
        ({"max_target_length": 4, "mtp_num_layers": 2}, ("mtp_num_layers=2", "1 tokens")),
        (
            {"context_parallel_strategy": "ulysses", "base_num_query_heads": 3, "base_num_kv_heads": 3},
            ("num_query_heads=3", "2 ways", "Legal here: 1, 3."),
        ),
        (
            {
                "context_parallel_strategy": "ulysses",
                "ici_context_parallelism": 4,
                "base_num_query_heads": 12,
                "base_num_kv_heads": 6,
            },
            ("num_kv_heads=6", "neither divides 4", "Legal here: 1, 2, 3, 6, 12."),
        ),
        (
            {"context_parallel_strategy": "ring", "use_indexer": True, "attention_type": "mla", "q_lora_rank": 8},
            ("indexer", "Legal here: all_gather"),
        ),
    ],
)
def test_what_cannot_be_split_is_refused(overrides, words):
    with pytest.raises(PlanError) as caught:
        plan(8, **{"ici_context_parallelism": 2} | overrides)
    assert caught.value.exit_code == 3 and all(word in str(caught.value) for word in words)


def test_the_batch_is_not_split_over_context():
    made = plan(8, ici_context_parallelism=2)
    assert made.layout.ways("activation_batch") == 4 and made.order == sequence.Order(("context",), 2, 2)
    assert made.tokens_per_step == made.global_batch_size * TOY["max_target_length"]


def test_whole_rows_have_the_reading_order():
    cfg = toy_config(context_parallel_strategy="ulysses")
    assert sequence.order(cfg, toy.mesh(context=4)[1]).pieces == 1
    assert sequence.order(toy_config(), toy.mesh(fsdp=4)[1]) == sequence.Order((), 1, 1)
