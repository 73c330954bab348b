"""What local arrays need inside `jax.shard_map`: the marks of what differs between devices, and a way under `jax.vmap`
for what no batching rule covers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array

from MaxText import compat


def varying(x: Array, axes: Sequence[str]) -> Array:
    """`x` marked as different on the devices of `axes`; its gradient is summed over them here, once."""
    missing = tuple(axis for axis in axes if axis not in compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def zeros(shape: Sequence[int], dtype: Any, *like: Array) -> Array:
    """Zeros that differ wherever one of `like` does."""
    axes: set[str] = set().union(*map(compat.varying_axes, like))
    return varying(jnp.zeros(shape, dtype), sorted(axes))


def summed_like(gradient: Array, x: Array) -> Array:
    """`gradient` summed over the devices between which `x` does not differ."""
    axes = compat.varying_axes(gradient) - compat.varying_axes(x)
    return lax.psum(gradient, tuple(sorted(axes))) if axes else gradient


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, run element by element under `jax.vmap`. It must not be differentiated.

    Where the batch lies on a mesh axis each of its devices runs its own elements: in a pipeline, one stage each."""
    wrapped = custom_vmap(function)

    @wrapped.def_vmap
    def rule(size: int, is_batched: Any, *args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(args)
        moves = jax.tree.leaves(is_batched)

        def each(*leaves: Array) -> Any:
            def one(moving: Sequence[Array]) -> Any:
                rest = iter(moving)
                both = zip(leaves, moves, strict=True)
                return function(*jax.tree.unflatten(tree, [next(rest) if moved else x for x, moved in both]))

            batched = [x for x, moved in zip(leaves, moves, strict=True) if moved]
            if batched[0].shape[0] == 1:
                return jax.tree.map(lambda y: y[None], one([x[0] for x in batched]))
            return lax.map(one, batched)

        axis = next(jax.typeof(x).sharding.spec[0] for x, moved in zip(leaves, moves, strict=True) if moved)
        if axis is not None:
            specs = tuple(PartitionSpec(axis) if moved else PartitionSpec() for moved in moves)
            each = jax.shard_map(each, in_specs=specs, out_specs=PartitionSpec(axis), axis_names={axis})
        out = each(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    return wrapped
