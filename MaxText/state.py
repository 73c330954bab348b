"""What training carries from step to step, and what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
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
