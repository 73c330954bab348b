"""A layer of experts on meshes against a dense loop over experts on one device: output, statistics, every gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import NamedSharding

from MaxText import blueprint, sequence
from MaxText.layers import mlp, moe, router

ROWS, LENGTH = 8, 32
KINDS = {
    "dropless": ("deepseek-v3-671b", {}),  # groups, shared experts, correction bias
    "biased": ("gpt-oss-20b", {}),
    "capacity": ("gpt-oss-20b", {"capacity_factor": 0.75}),
    "scaled": ("llama4-scout-17b-16e", {}),  # the weight multiplies the input
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow, id="-".join(map(str, values)))


CELLS = [
    ("dropless", {"expert": 4}),
    ("dropless", {"expert": 2, "tensor": 2}),
    ("capacity", {"expert": 2, "context": 2}),
    *[
        slow(kind, mesh)
        for kind in KINDS
        for mesh in (
            {"expert": 2},
            {"expert": 8},
            {"expert": 2, "fsdp": 2},
            {"expert": 2, "fsdp_transpose": 2},
            {"expert": 2, "data": 2},
            {"expert": 2, "context": 2},
            {"expert": 2, "fsdp": 2, "tensor": 2},
            {"context": 2, "tensor": 2},
        )
    ],
]


def draw(path, param, rng):
    std = 0.3 if param.init.law != "normal" else param.init.std * (3 if "router" in path else 1)
    return (rng.normal(float(param.init.law == "ones"), std, param.shape)).astype(np.float32)


@functools.cache
def given(kind):
    """(config, parameters, x, what the output is multiplied by, which tokens are real)."""
    name, changes = KINDS[kind]
    cfg, rng = toy.small(name, **changes), np.random.default_rng(0)
    params = blueprint.map_params(lambda path, p: draw(path, p, rng), moe.declare(cfg, shared=True))
    x, weight = rng.normal(size=(2, ROWS, LENGTH, cfg.emb_dim)).astype(np.float32)
    return cfg, params, x, weight, np.arange(LENGTH)[None] < rng.integers(LENGTH // 2, LENGTH + 1, (ROWS, 1))


def kept(cfg, expert, real):
    """Which choices an expert takes, counted by hand."""
    taken = np.zeros(expert.shape, bool)
    limit = LENGTH
    if cfg.capacity_factor > 0:
        limit = int(np.ceil(LENGTH * cfg.num_experts_per_tok / cfg.num_experts * cfg.capacity_factor))
    for row in range(ROWS):
        count = np.zeros(cfg.num_experts, int)
        for token in np.flatnonzero(real[row]):
            for i, e in enumerate(expert[row, token]):
                taken[row, token, i] = count[e] < limit
                count[e] += 1
    return taken


def dense(cfg, layout, params, x, taken, real):
    """Every token through every expert, weighted by what was chosen."""
    choice = router.choose(cfg, layout, params["router"], router.logits(cfg, layout, params["router"], x))
    chosen = choice.expert_BSk[..., None] == jnp.arange(cfg.num_experts)[None, None, None]
    weight_BSE = (choice.weight_BSk * taken)[..., None] * chosen
    weight_BSE = weight_BSE.sum(axis=2)
    y = jnp.zeros_like(x)
    for e in range(cfg.num_experts):
        weight = weight_BSE[:, :, e, None]
        own = {name: w[e] for name, w in params.items() if name.startswith("w")}
        into = x * weight if cfg.scale_expert_input else x
        out = plain(cfg, own, into)
        y = y + (out * (weight != 0) if cfg.scale_expert_input else out * weight)
    return y + (mlp.mlp(cfg, layout, params["shared"], x) if "shared" in params else 0.0)


def plain(cfg, w, x):
    def linear(x, name):
        return x @ w[name] + (w[f"{name}_bias"][None, None] if cfg.mlp_bias else 0.0)

    return linear(mlp.combine(cfg, [linear(x, f"wi_{i}") for i in range(2)]), "wo")


@functools.cache
def expected(kind):
    cfg, params, x, weight, real = given(kind)
    world, layout = toy.mesh()
    with jax.set_mesh(world):

        def experts_of(params, x):
            return router.choose(cfg, layout, params["router"], router.logits(cfg, layout, params["router"], x))

        taken = kept(cfg, np.asarray(jax.jit(experts_of)(params, x).expert_BSk), real)

        def value(params, x):
            y = dense(cfg, layout, params, x, taken, real)
            return (y * weight * real[..., None]).sum(), y * real[..., None]

        (_, y), grads = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(params, x)
    return jax.tree.map(np.asarray, (y, grads)), int((real[..., None] & ~taken).sum())


def computed(kind, mesh, **changes):
    cfg, params, x, weight, real = given(kind)
    cfg = cfg.replace(**changes) if changes else cfg
    world, layout = toy.mesh(**mesh)
    order = sequence.permutation(sequence.order(cfg, layout), LENGTH)
    specs = blueprint.map_params(lambda _, p: NamedSharding(world, layout.spec(p.axes)), moe.declare(cfg, shared=True))
    with jax.set_mesh(world):
        placed = jax.tree.map(jax.device_put, params, specs)
        here = [
            jax.device_put(a[:, order], NamedSharding(world, layout.spec(dims)))
            for a, dims in ((x, moe.STREAM), (weight, moe.STREAM), (real, moe.TOKENS))
        ]

        def value(params, x):
            y, routing = moe.moe(cfg, layout, params, x, x, here[2])
            y = y * here[2][..., None]
            return (y * here[1]).sum(), (y, routing)

        (_, (y, routing)), grads = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(placed, here[0])
    back = np.argsort(order)
    return (np.asarray(y)[:, back], (jax.tree.map(np.asarray, grads[0]), np.asarray(grads[1])[:, back])), routing


def assert_same(found, wanted, but=()):
    for (path, a), (_, b) in zip(*(jax.tree.leaves_with_path(tree) for tree in (found, wanted)), strict=True):
        name, norm = jax.tree_util.keystr(path), np.linalg.norm(b)
        if "correction_bias" in name:
            assert norm == 0 and not a.any(), "no gradient reaches the bias of the choice"
        else:
            assert norm > 0, name
            assert np.linalg.norm(a - b) < 1e-5 * norm, name


@pytest.mark.parametrize(("kind", "mesh"), CELLS)
def test_experts_equal_a_dense_loop(kind, mesh):
    (wanted, dropped), (found, routing) = expected(kind), computed(kind, mesh)
    assert_same(found, wanted)
    assert int(routing.dropped) == dropped and (dropped > 0) == (kind == "capacity")
    real = given(kind)[-1]
    assert int(routing.load_E.sum()) == real.sum() * given(kind)[0].num_experts_per_tok, "over the whole batch"


def test_a_small_buffer_drops_and_counts():
    """Half of an even share: at least half of the choices find no room, and the metrics say how many."""
    cfg, *_, real = given("dropless")
    (y, _), routing = computed("dropless", {"expert": 4}, ragged_buffer_factor=0.5)
    choices = real.sum() * cfg.num_experts_per_tok
    room = 0.5 * ROWS * LENGTH * cfg.num_experts_per_tok
    assert choices - room <= int(routing.dropped) < choices
    assert np.isfinite(y).all()
    (wanted, _), _ = expected("dropless")
    with pytest.raises(AssertionError):  # so the comparison can fail
        assert_same(y, wanted)


def test_shards_with_the_same_tokens_add_up():
    """As in generation: no token travels, nothing is dropped, and each shard makes what its experts make."""
    cfg, params, x, *_ = given("biased")
    outputs = []
    for mesh in ({}, {"expert": 2, "fsdp": 2, "tensor": 2}):
        world, layout = toy.mesh(**mesh)
        layout = layout.unsplit("activation_batch", "activation_length")
        specs = blueprint.map_params(
            lambda _, p, world=world, layout=layout: NamedSharding(world, layout.spec(p.axes)),
            moe.declare(cfg, shared=True),
        )
        with jax.set_mesh(world):
            placed = jax.tree.map(jax.device_put, params, specs)
            run = jax.jit(lambda p, x, layout=layout: moe.moe(cfg, layout, p, x, x, None)[0])
            outputs.append(np.asarray(run(placed, jax.device_put(x, NamedSharding(world, jax.P())))))
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
