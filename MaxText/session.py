"""Everything a run needs, made and checked before anything is written: plan, mesh, data, programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText import data, decoder, hardware, optimizer, planner, sequence, state, step, tokenizer
from MaxText.layout import Layout
from MaxText.state import TrainState

BATCH_DIMS = ("activation_batch", "activation_length")


def put_microbatches(mesh: Mesh, plan: planner.Plan, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Rows [A * B, S] of one optimizer step to microbatches [A, B, S] on the devices of `mesh`."""
    sharding = NamedSharding(mesh, plan.layout.spec((None, *BATCH_DIMS)))
    batch = sequence.arrange(plan.order, batch)
    return {k: jax.device_put(v.reshape(plan.microbatches, -1, v.shape[-1]), sharding) for k, v in batch.items()}


@dataclass(frozen=True)
class Session:
    """The parts of one run. Programs are compiled by `compile_step` and `compile_eval`, under the session's mesh."""

    cfg: Any
    hardware: hardware.Hardware
    dtype_reason: str
    plan: planner.Plan
    mesh: Mesh
    tokenizer: Any
    train: data.Dataset
    evaluation: data.Dataset | None
    tx: optax.GradientTransformation

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def as_stored(self, now: TrainState) -> TrainState:
        """The state as a checkpoint holds it: without padding, so that any mesh can read it."""
        if not state.has_padding(self.plan.tree):
            return now
        return jax.jit(functools.partial(state.without_padding, self.plan.tree))(now)

    def from_stored(self, stored: Any, types: Any) -> Any:
        """The inverse, for a state or its parameters: in the shapes and layouts of `types`."""
        if not state.has_padding(self.plan.tree):
            return stored
        return jax.jit(lambda values: state.with_padding(self.plan.tree, values, types))(stored)

    @functools.cached_property
    def stored_type(self) -> TrainState:
        """The type of the state as a checkpoint holds it."""
        if not state.has_padding(self.plan.tree):
            return self.state_type
        cut = functools.partial(state.without_padding, self.plan.tree)
        return jax.tree.map(self._concrete, jax.eval_shape(cut, self.state_type))

    def fresh_state(self) -> TrainState:
        """A new state on the devices."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_type)
        return jax.jit(self._init, out_shardings=shardings)()

    def state_of(self, params: Any) -> TrainState:
        """A new state around `params`, which are on the devices as `state_type.params` says, and are donated."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_type)
        make = functools.partial(state.from_params, optimizer=self.tx)
        return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)

    def _init(self) -> TrainState:
        return state.init(self.cfg, self.layout, self.plan.tree, self.tx)

    @functools.cached_property
    def state_type(self) -> TrainState:
        """Shapes, dtypes and concrete shardings of the state; costs no memory."""
        return jax.tree.map(self._concrete, jax.eval_shape(self._init))

    def _concrete(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()  # JAX leaves it out where nothing is split
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

    def put_train(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Rows [A * B, S] of one optimizer step to microbatches [A, B, S] on the devices."""
        return put_microbatches(self.mesh, self.plan, batch)

    def put_eval(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Rows [B, S] to the devices."""
        sharding = NamedSharding(self.mesh, self.layout.spec(BATCH_DIMS))
        batch = sequence.arrange(self.plan.order, batch)
        return {k: jax.device_put(v, sharding) for k, v in batch.items()}

    def compile_step(self) -> jax.stages.Compiled:
        """The train step, ahead of time; the state is donated."""
        train_step = step.make_train_step(self.cfg, self.layout, self.tx)
        shape = (
            self.plan.microbatches,
            self.plan.global_batch_size // self.plan.microbatches,
            self.cfg.max_target_length,
        )
        batch = self._batch_type(self.train, shape, (None, *BATCH_DIMS))
        return jax.jit(train_step, donate_argnums=0).lower(self.state_type, batch).compile()

    def compile_eval(self) -> jax.stages.Compiled:
        """The evaluation step, ahead of time."""
        shape = (self.plan.eval_batch_size, self.cfg.max_target_length)
        batch = self._batch_type(self.train, shape, BATCH_DIMS)
        return jax.jit(step.make_eval_step(self.cfg, self.layout)).lower(self.state_type.params, batch).compile()

    def _batch_type(
        self, dataset: data.Dataset, shape: tuple[int, ...], dims: tuple[str | None, ...]
    ) -> dict[str, Any]:
        one = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(self.mesh, self.layout.spec(dims)))
        return dict.fromkeys(step.BATCH_KEYS, one)


def prepare(cfg: Any) -> Session:
    """Plan and open everything that `cfg` names. Raises before anything is written; the order is cheap checks first."""
    found = hardware.of(cfg)
    cfg, dtype_reason = hardware.resolve(cfg, found)
    tree = decoder.declare(cfg)
    plan = planner.make(cfg, tree, found)
    words = tokenizer.make(cfg)
    train = data.open_split(cfg, words, "train", plan.global_batch_size)
    data.check_enough(train, cfg.steps)
    evaluation = data.open_split(cfg, words, "eval", plan.eval_batch_size) if cfg.eval_files else None
    if evaluation and cfg.eval_steps > 0:
        data.check_enough(evaluation, cfg.eval_steps)
    mesh = planner.build_mesh(plan, jax.devices())
    return Session(
        cfg, found, dtype_reason, plan, mesh, words, train, evaluation, optimizer.make(cfg, plan.tree, plan.layout)
    )
