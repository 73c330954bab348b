"""Parameters as data: counting, stacking, and initial values that depend on nothing but seed and path."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from MaxText import blueprint, decoder
from MaxText.blueprint import ONES, ZEROS, Param, fan_in, normal
from tests.helpers import MESHES, by_path, toy, toy_config

TREE = {"a": {"b": Param((3, 4), ("embed", "mlp"), normal(1.0)), "c": Param((5,), ("norm",), ONES, "norm")}}


def test_leaves_count_and_map():
    assert [path for path, _ in blueprint.leaves(TREE)] == ["a/b", "a/c"]
    assert blueprint.count(TREE) == 17
    assert blueprint.map_params(lambda path, p: (path, p.size), TREE) == {"a": {"b": ("a/b", 12), "c": ("a/c", 5)}}


def test_stack_puts_layers_in_front():
    stacked = dict(blueprint.leaves(blueprint.stack(TREE, 6)))
    assert (stacked["a/b"].shape, stacked["a/b"].axes) == ((6, 3, 4), ("layers", "embed", "mlp"))
    assert stacked["a/c"].kind == "norm" and blueprint.count(blueprint.stack(TREE, 6)) == 6 * 17


def test_a_dim_without_a_name_is_a_mistake():
    with pytest.raises(AssertionError):
        Param((3, 4), ("embed",), ZEROS)


def test_the_number_of_parameters_is_that_of_the_formula():
    cfg = toy_config()
    d, h, f, v = cfg.emb_dim, cfg.head_dim, cfg.mlp_dim, cfg.vocab_size
    layer = 2 * d * h * (cfg.num_query_heads + cfg.num_kv_heads) + 3 * d * f + 2 * d
    assert blueprint.count(decoder.declare(cfg)) == cfg.num_decoder_layers * layer + 2 * v * d + d
    tied = decoder.declare(toy_config(logits_via_embedding=True))
    assert blueprint.count(tied) == cfg.num_decoder_layers * layer + v * d + d


@functools.cache
def initial(mesh="one", seed=0):
    made = toy(MESHES[mesh])
    draw = functools.partial(blueprint.initialise, made.plan.tree, dtype="float32", layout=made.layout)
    return by_path(made.run(draw, jax.random.key(seed)))


@pytest.mark.parametrize("mesh", ["fsdp8", "data2-fsdp2-tensor2"])
def test_initial_values_do_not_depend_on_the_mesh(mesh):
    """Up to the last bit: the inverse error function is compiled anew for each shape of a piece."""
    for path, value in initial().items():
        np.testing.assert_allclose(initial(mesh)[path], value, rtol=1e-6, atol=1e-7, err_msg=path)


def test_initial_values_depend_on_seed_and_path_only():
    made = toy()
    alone = {"decoder": {"other": TREE["a"]["b"]}, "embedding": made.plan.tree["embedding"]}
    found = made.run(lambda key: blueprint.initialise(alone, key, "float32", made.layout), jax.random.key(0))
    np.testing.assert_array_equal(found["embedding"], initial()["embedding"])
    drawn = [path for path, p in blueprint.leaves(made.plan.tree) if p.kind != "norm"]
    assert all((initial()[path] != initial(seed=1)[path]).any() for path in drawn)


@pytest.mark.parametrize("size", [64, 1024])
def test_laws(size):
    laws = {"fan": fan_in(size, 2.0), "normal": normal(0.5), "ones": ONES, "zeros": ZEROS}
    tree = {name: Param((size, 1024), (None, None), law) for name, law in laws.items()}
    made = toy()
    drawn = made.run(lambda: blueprint.initialise(tree, jax.random.key(0), "float32", made.layout))
    fan = np.asarray(drawn["fan"])
    assert fan.std() == pytest.approx((2.0 / size) ** 0.5, rel=0.02) and abs(fan.mean()) < 0.02 * fan.std() * 5
    assert np.abs(fan).max() <= 2 * laws["fan"].std * 1.0001
    assert np.asarray(drawn["normal"]).std() == pytest.approx(0.5, rel=0.02)
    assert (np.asarray(drawn["ones"]) == 1).all() and (np.asarray(drawn["zeros"]) == 0).all()


def test_layers_of_a_stack_differ():
    query = initial()["decoder/layers/0/attention/query"]
    assert not np.array_equal(query[0], query[1])


def test_values_have_the_dtype_asked_for():
    made = toy(weight_dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(made.state_type.params)} == {"bfloat16"}
