"""What training carries from step to step, and what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, KeyPath
from jaxtyping import Array, Int

from MaxText import blueprint
from MaxText.layout import Layout


@struct.dataclass
class TrainState:
    """`step` counts finished optimizer steps. Randomness is folded from (seed, step), so there is none to store."""

    step: Int[Array, ""]
    params: Any
    opt_state: Any


def from_params(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state around parameters that are there already; run under `jax.jit` and `jax.set_mesh`."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def init(cfg: Any, layout: Layout, tree: blueprint.Blueprint, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state, born sharded; run under `jax.jit` and `jax.set_mesh`. Its type alone: `jax.eval_shape` of the same
    call."""
    params = blueprint.initialise(tree, jax.random.key(cfg.init_weights_seed), cfg.weight_dtype, layout)
    return from_params(params, optimizer)


def has_padding(tree: blueprint.Blueprint) -> bool:
    return any(param.real for _, param in blueprint.leaves(tree))


def without_padding(tree: blueprint.Blueprint, values: Any) -> Any:
    """A state, or parameters, as they are saved: every padded dim cut to its real size, and not split."""

    def cut(param: blueprint.Param, x: Array) -> Array:
        spec = jax.typeof(x).sharding.spec
        whole = [None if new != real else axes for new, real, axes in zip(param.shape, param.real, spec, strict=True)]
        return jax.reshard(x, PartitionSpec(*whole))[tuple(slice(size) for size in param.real)]

    return _at_padded(tree, cut, values)


def with_padding(tree: blueprint.Blueprint, values: Any, types: Any) -> Any:
    """The inverse: `values` as saved, in the shapes and layouts of `types`."""
    return _at_padded(tree, lambda _, x, to: blueprint.padded(x, to.shape, to.sharding.spec), values, types)


def _at_padded(tree: blueprint.Blueprint, function: Any, *values: Any) -> Any:
    """function(param, *leaves) at the padded parameters and at what the optimizer keeps for each; else the first."""
    found = {path: param for path, param in blueprint.leaves(tree) if param.real}

    def one(path: KeyPath, x: Array, *more: Any) -> Array:
        param = found.get("/".join(key.key for key in path if isinstance(key, DictKey)))
        return function(param, x, *more) if param and x.ndim == len(param.shape) else x

    return jax.tree.map_with_path(one, *values)
