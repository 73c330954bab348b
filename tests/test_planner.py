"""The plan: degrees filled, every refusal by id with its numbers, and bytes that are the real ones."""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import AxisType

from MaxText import blueprint, decoder, flops, planner, step
from MaxText.errors import PlanError
from tests.helpers import MESHES, TOY, cpu, toy, toy_config


def plan(devices: int, slices: int = 1, **overrides) -> planner.Plan:
    cfg = toy_config(**{"ici_fsdp_parallelism": -1, "global_batch_size": 0, "per_device_batch_size": 2.0} | overrides)
    return planner.make(cfg, decoder.declare(cfg), cpu(devices, slices))


def refused(id: str, *words: object):
    """A PlanError with this id whose text holds every word, numbers among them."""
    return pytest.raises(PlanError, check=lambda e: e.id == id and all(str(word) in str(e) for word in words))


@pytest.mark.parametrize(
    ("devices", "degrees", "expected"),
    [
        (8, {}, {"fsdp": 8}),
        (8, {"ici_tensor_parallelism": 2}, {"fsdp": 4, "tensor": 2}),
        (
            8,
            {"ici_fsdp_parallelism": 2, "ici_data_parallelism": -1, "ici_tensor_parallelism": 2},
            MESHES["data2-fsdp2-tensor2"],
        ),
        (1, {}, {}),
        (6, {"ici_tensor_parallelism": 2}, {"fsdp": 3, "tensor": 2}),
    ],
)
def test_the_free_degree_takes_the_rest(devices, degrees, expected):
    sizes = {"global_parameter_scale": 1, "base_emb_dim": 96}
    made = plan(devices, **degrees, **sizes)
    assert {axis: size for axis, size in made.mesh_shape.items() if size > 1} == expected
    assert tuple(made.mesh_shape) == planner.MESH_AXES and made.devices == devices


def test_slices_multiply():
    made = plan(8, slices=2, ici_tensor_parallelism=2)
    assert (made.ici["fsdp"], made.dcn["data"], made.mesh_shape["data"]) == (2, 2, 2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_mesh_has_every_axis_in_order(size):
    made = plan(size)
    mesh = planner.build_mesh(made, jax.devices()[:size])
    assert mesh.axis_names == planner.MESH_AXES and dict(mesh.shape) == made.mesh_shape
    assert list(mesh.devices.flat) == jax.devices()[:size]
    assert set(mesh.axis_types) == {AxisType.Explicit}


# --- refusals


@pytest.mark.parametrize(
    ("devices", "degrees", "numbers"),
    [
        (8, {"ici_fsdp_parallelism": 3}, (3, 8)),
        (8, {"ici_tensor_parallelism": 3}, (3, 8)),
        (4, {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4}, (8, 4)),
        (1, {"ici_fsdp_parallelism": 2}, (2, 1)),
    ],
)
def test_a_product_other_than_the_devices_is_refused(devices, degrees, numbers):
    with refused("plan.mesh", *numbers, *degrees):
        plan(devices, **degrees)


def test_slices_that_are_not_there_are_refused():
    with refused("plan.slices", 2, 1, "num_slices"):
        plan(8, num_slices=2)
    with refused("plan.mesh", 3, 2, "dcn_data_parallelism=3"):
        plan(8, slices=2, dcn_data_parallelism=3)


def test_a_vocabulary_that_does_not_divide_is_padded_and_said():
    odd = {"vocab_size": 97, "base_num_kv_heads": 4}
    made, even = plan(8, ici_tensor_parallelism=4, **odd), plan(8, **odd)
    assert made.parameters == even.parameters and not even.notes
    (note,) = made.notes
    assert all(word in note for word in ("vocab_size=97", "100", "4 ways"))
    assert {p.shape for p in made.tree.values() if isinstance(p, blueprint.Param) and p.real} == {(100, 32), (32, 100)}
    chunked = plan(8, ici_tensor_parallelism=4, base_num_kv_heads=4, vocab_size=98, num_vocab_tiling=7)
    assert chunked.tree["logits"].shape == (32, 112)


def test_large_arrays_that_stay_whole_are_said():
    large = {"base_emb_dim": 1024, "base_mlp_dim": 1024}
    (note,) = plan(2, ici_data_parallelism=2, ici_fsdp_parallelism=1, **large).notes
    assert "3 large arrays" in note and "mlp/wi_0" in note and "each of 2 devices" in note
    assert not plan(2, **large).notes and not plan(1, **large).notes


def test_a_rule_that_matches_nothing_is_refused():
    with refused("plan.rule", "latent", "embed"):
        plan(8, logical_axis_rules=["latent=fsdp"])


def test_rules_that_collide_are_refused():
    with refused("plan.collision", "fsdp", "mlp_embed", "mlp"):
        plan(8, logical_axis_rules=["mlp=fsdp"])


def test_experts_need_a_model_that_has_them():
    with refused("plan.unused-axis", "expert_parallelism = 2", "num_experts=1", "Use fsdp"):
        plan(8, ici_expert_parallelism=2)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16}


def test_experts_that_do_not_divide_are_refused():
    with refused("plan.divisibility", "num_experts=6", "4 ways over expert", "1, 2, 3, 6."):
        plan(8, ici_expert_parallelism=4, **EXPERTS)


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        ({}, "room for 128 rows, 2 times an even share, so that nothing is dropped"),
        ({"ragged_buffer_factor": 1.25}, "room for 80 rows, 1.25 times an even share, choices beyond that are dropped"),
        ({"capacity_factor": 1.0}, "room for 72 rows, 1.12 times an even share, choices beyond that are dropped"),
    ],
)
def test_the_plan_says_where_experts_are_and_what_room_they_have(changes, room):
    (note,) = plan(8, ici_expert_parallelism=2, **EXPERTS, **changes).notes
    assert note.startswith("6 experts, 3 on each of 2 shards over expert") and room in note


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"ici_tensor_parallelism": 4}, ("num_kv_heads=2", "4 ways", "Legal here: 1, 2.")),
        ({"ici_tensor_parallelism": 8, "base_num_kv_heads": 4}, ("num_query_heads=4", "8 ways", "1, 2, 4.")),
        ({"ici_tensor_parallelism": 2, "base_mlp_dim": 49}, ("mlp_dim=49", "2 ways", "1, 7, 49.")),
        ({"base_emb_dim": 36}, ("emb_dim=36", "8 ways over fsdp", "1, 2, 3, 4, 6, 9, 12, 18, 36.")),
    ],
)
def test_dims_that_do_not_divide_are_refused(overrides, words):
    with refused("plan.divisibility", *words):
        plan(8, **overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"global_batch_size": 12}, ("global_batch_size=12", "12 rows", "multiple of 8", "8 rows")),
        ({"global_batch_size": 16, "gradient_accumulation_steps": 4}, ("4 rows", "multiple of 8")),
        ({"per_device_batch_size": 0.5}, ("per_device_batch_size=0.5", "4 rows", "multiple of 8", "8 rows")),
        ({"per_device_batch_size": 1.3}, ("1.3 x 8 devices", "10.4 rows", "multiple of 8")),
        ({"eval_per_device_batch_size": 1.5}, ("eval_per_device_batch_size=1.5", "12 rows", "multiple of 8")),
    ],
)
def test_rows_that_do_not_divide_are_refused(overrides, words):
    with refused("plan.divisibility", *words):
        plan(8, **overrides)


def test_every_problem_is_reported_at_once():
    with refused("plan.divisibility", "num_kv_heads=2", "mlp_dim=50", "global_batch_size=3"):
        plan(8, ici_tensor_parallelism=4, base_mlp_dim=50, global_batch_size=3)


# --- rows


@pytest.mark.parametrize(
    ("overrides", "rows", "microbatches"),
    [
        ({}, 16, 1),
        ({"gradient_accumulation_steps": 3}, 48, 3),
        ({"global_batch_size": 32, "gradient_accumulation_steps": 2}, 32, 2),
        ({"per_device_batch_size": 0.5, "ici_tensor_parallelism": 2}, 4, 1),
    ],
)
def test_rows_of_a_step(overrides, rows, microbatches):
    made = plan(8, **overrides)
    assert (made.global_batch_size, made.microbatches) == (rows, microbatches)
    assert made.tokens_per_step == rows * TOY["max_target_length"]


def test_flops_by_hand():
    """Two layers, width 32, 4 heads of 8 (2 kv), mlp 48, 96 ids, length 16: 6 per weight, 6 S N H a layer."""
    layer = 32 * 8 * (4 + 4 + 2 + 2) + 3 * 32 * 48
    weights = 2 * layer + 32 * 96
    assert flops.weights_per_token(toy_config()) == weights
    assert flops.per_token(toy_config()) == 6 * weights + 2 * 6 * 16 * 4 * 8
    made = plan(8)
    assert made.flops_per_step_per_device == flops.per_token(toy_config()) * made.tokens_per_step / 8


# --- bytes


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"opt_type": "sgd"}, {"weight_dtype": "bfloat16", "mu_dtype": "float32", "logits_via_embedding": True}],
    ids=["adamw", "sgd", "bfloat16-tied"],
)
def test_planned_bytes_are_those_of_the_shards(mesh, overrides):
    made = toy(MESHES[mesh], **overrides)
    types = made.state_type
    assert made.plan.parameter_bytes == shard_bytes(types.params)
    assert made.plan.state_bytes == shard_bytes(types)
    assert made.plan.parameters == sum(leaf.size for leaf in jax.tree.leaves(types.params))


def shard_bytes(types) -> int:
    """Bytes of one device's piece of every array of a tree of types with shardings."""

    def one(leaf: jax.ShapeDtypeStruct) -> int:
        piece = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        return int(leaf.dtype.itemsize * math.prod(piece))

    return sum(map(one, jax.tree.leaves(types)))


def test_the_arrays_on_the_devices_have_the_planned_bytes():
    made = toy(MESHES["data2-fsdp2-tensor2"])
    leaves = jax.tree.leaves(made.state())
    for device in made.mesh.devices.flat:
        pieces = [s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device]
        assert sum(pieces) == made.plan.state_bytes


@pytest.mark.parametrize("mesh", ["one", "fsdp4-tensor2"])
def test_the_compiler_counts_the_same_arguments(mesh):
    """Argument bytes of the compiled step = planned state + one device's rows of five int32 arrays."""
    made = toy(MESHES[mesh])
    memory = made.compiled_step.memory_analysis()
    rows = made.plan.global_batch_size // made.layout.ways("activation_batch")
    batch = len(step.BATCH_KEYS) * 4 * rows * made.cfg.max_target_length
    assert memory.argument_size_in_bytes == made.plan.state_bytes + batch


def test_the_tree_of_the_plan_is_the_model():
    made = toy()
    assert dict(blueprint.leaves(made.plan.tree)) == dict(blueprint.leaves(decoder.declare(made.cfg)))
