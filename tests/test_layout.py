"""The table of dims and axes: what it gives, what it refuses, and a projection that is an einsum with a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText import planner
from MaxText.errors import PlanError
from MaxText.layout import Layout, project
from tests.helpers import toy

RULES = (("rows", ("x", "y")), ("columns", ("z",)), ("also_columns", ("z",)), ("whole", ()))


def layout(x: int = 2, y: int = 2, z: int = 2) -> Layout:
    return Layout(RULES, (("x", x), ("y", y), ("z", z)), frozenset({"y"}))


def refused(id: str):
    return pytest.raises(PlanError, check=lambda error: error.id == id)


@pytest.mark.parametrize(
    ("sizes", "dims", "spec"),
    [
        ((2, 2, 2), ("rows", "columns"), PartitionSpec(("x", "y"), "z")),
        ((2, 2, 2), ("columns", None, "rows"), PartitionSpec("z", None, ("x", "y"))),
        ((2, 1, 1), ("rows", "columns"), PartitionSpec("x", None)),
        ((1, 1, 1), ("rows", "whole"), PartitionSpec(None, None)),
        ((2, 2, 2), (), PartitionSpec()),
    ],
)
def test_spec(sizes, dims, spec):
    assert layout(*sizes).spec(dims) == spec


def test_a_weight_in_use_is_whole_over_the_gathered_axes():
    assert layout().compute_spec(("rows", "columns")) == PartitionSpec("x", "z")


@pytest.mark.parametrize(("dim", "ways"), [("rows", 6), ("columns", 4), ("whole", 1), (None, 1)])
def test_ways(dim, ways):
    assert layout(2, 3, 4).ways(dim) == ways


def test_one_axis_cannot_split_two_dims():
    with refused("plan.collision") as caught:
        layout().spec(("columns", "also_columns"))
    assert all(word in str(caught.value) for word in ("'z'", "columns", "also_columns"))
    assert layout(z=1).spec(("columns", "also_columns")) == PartitionSpec(None, None)


def test_an_unknown_dim_is_refused():
    with refused("plan.no-rule") as caught:
        layout().spec(("row",))
    assert "'row'" in str(caught.value) and "rows" in str(caught.value)


def test_unsplit():
    assert layout().unsplit("rows").spec(("rows", "columns")) == PartitionSpec(None, "z")


def test_every_rule_of_the_project_names_axes_of_the_mesh():
    assert {axis for _, axes in planner.RULES for axis in axes} <= set(planner.MESH_AXES)
    assert len(dict(planner.RULES)) == len(planner.RULES)


# --- project

W_DIMS, OUT = ("embed", "mlp"), ("activation_batch", "activation_length", "activation_mlp")
X_DIMS = ("activation_batch", "activation_length", "activation_embed")


def projected(mesh, dtype="float32", weight_dtype="float32"):
    """(y, dx, dw) of x w under a loss with a random cotangent; dw's sharding and dtype are the stored ones."""
    made = toy(mesh)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in ((8, 4, 32), (32, 48), (8, 4, 48)))
    dims = {"x": X_DIMS, "w": W_DIMS, "dy": OUT}
    put = {
        name: jax.device_put(value.astype(kind), NamedSharding(made.mesh, made.layout.spec(dims[name])))
        for name, value, kind in (("x", x, dtype), ("w", w, weight_dtype), ("dy", dy, dtype))
    }

    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: project(made.layout, "BSD,DF->BSF", x, w, W_DIMS, OUT), x, w)
        return y, *pull(dy)

    return made, (x, w, dy), made.run(run, put["x"], put["w"], put["dy"])


@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_projection_is_an_einsum(mesh):
    made, (x, w, dy), (y, dx, dw) = projected(mesh)
    np.testing.assert_allclose(y, x @ w, atol=1e-4)
    np.testing.assert_allclose(dx, dy @ w.T, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("bsd,bsf->df", x, dy), atol=1e-4)
    wanted = [NamedSharding(made.mesh, made.layout.spec(dims)) for dims in (OUT, X_DIMS, W_DIMS)]
    for found, sharding in zip((y, dx, dw), wanted, strict=True):
        assert found.sharding.is_equivalent_to(sharding, found.ndim)


def test_a_projection_computes_in_the_dtype_of_x_and_keeps_the_gradient_in_that_of_w():
    _, (x, _, dy), (y, dx, dw) = projected({"fsdp": 2}, dtype="bfloat16")
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = np.einsum("bsd,bsf->df", *(np.asarray(v.astype(jnp.bfloat16)).astype(np.float32) for v in (x, dy)))
    np.testing.assert_allclose(dw, exact, atol=1e-3)  # accumulated in float32, not rounded to bfloat16


# --- the planner's table, and the user's rows


def test_the_users_rows_take_the_place_of_ours():
    rules = dict(planner.table(["embed=fsdp + expert", "mlp="]))
    assert rules["embed"] == ("fsdp", "expert") and rules["mlp"] == ()
    assert {dim: rules[dim] for dim in rules if dim not in ("embed", "mlp")} == {
        dim: axes for dim, axes in planner.RULES if dim not in ("embed", "mlp")
    }
    made = planner.make_layout(dict.fromkeys(planner.MESH_AXES, 2), ["embed=fsdp"])
    assert made.spec(("embed", "heads")) == PartitionSpec("fsdp", "tensor")


def test_wrong_rows_are_refused_all_at_once():
    rows = [
        "embed",
        "emed=fsdp",
        "embed=fdsp",
        "mlp=tensor+tensor",
        "vocab=",
        "vocab=tensor",
        "embed=tensor",
        "layers=",
    ]
    with refused("plan.rule") as caught:
        planner.table(rows)
    text = str(caught.value)
    assert len(text.splitlines()) == 7
    assert all(word in text for word in ("dim=axis+axis", "did you mean embed", "did you mean fsdp", "twice", "layers"))


@pytest.mark.parametrize(
    ("dims", "shape", "spec"),
    [
        (("rows", "columns"), (8, 8), PartitionSpec(("x", "y"), "z")),
        (("rows", "columns"), (2, 8), PartitionSpec("x", ("z", "y"))),
        (("whole", "rows"), (8, 8), PartitionSpec(None, ("x", "y"))),
        (("whole", "rows"), (8, 2), PartitionSpec("y", "x")),
        (("whole",), (3,), PartitionSpec(None)),
        ((), (), PartitionSpec()),
    ],
)
def test_one_more_axis_goes_to_the_first_dim_that_divides(dims, shape, spec):
    rules = (("rows", ("x",)), ("columns", ("z",)), ("whole", ()))
    assert Layout(rules, (("x", 2), ("y", 2), ("z", 2))).spread(dims, shape, "y") == spec
