"""Everything a run needs, made and checked before anything is written: plan, mesh, data, programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText import data, forecast, hardware, optimizer, planner, state, step, tokenizer
from MaxText.errors import DataError
from MaxText.layout import Layout
from MaxText.processes import Alone, Group
from MaxText.share import Part, Share
from MaxText.state import TrainState

BATCH_DIMS = ("activation_batch", "activation_length")


def put_microbatches(mesh: Mesh, plan: planner.Plan, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows [A * b, S] of one optimizer step to microbatches [A, B, S] on the devices of `mesh`."""
    return _part(mesh, plan, plan.microbatches, plan.global_batch_size, batch["inputs"].shape[-1]).put(batch)


def _part(mesh: Mesh, plan: planner.Plan, microbatches: int, rows: int, length: int) -> Part:
    sharding = NamedSharding(mesh, plan.layout.spec((None, *BATCH_DIMS)))
    return Part(sharding, plan.order, microbatches, rows // microbatches, length)


@dataclass(frozen=True)
class Session:
    """The parts of one run. Programs are compiled by `compile_step` and `compile_eval`, under the session's mesh."""

    cfg: Any
    hardware: hardware.Hardware
    dtype_reason: str
    plan: planner.Plan
    forecast: forecast.Forecast
    mesh: Mesh
    tokenizer: Any
    train: data.Train
    evaluation: data.Dataset | None
    tx: optax.GradientTransformation

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @functools.cached_property
    def train_share(self) -> Share:
        """This process's rows of the training data."""
        return self._share(self.train, self.plan.microbatches)

    @functools.cached_property
    def eval_share(self) -> Share | None:
        """This process's rows of the evaluation data."""
        return self._share(self.evaluation, 1) if self.evaluation else None

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that an id of the model stands for, [vocab_size]; 0 beyond the tokenizer and of random ids."""
        table = np.zeros(self.cfg.vocab_size, np.int32)
        if self.cfg.dataset_type != "synthetic":
            known = self.tokenizer.token_bytes
            table[: len(known)] = known
        return table

    def _share(self, dataset: data.Train, microbatches: int) -> Share:
        return Share(dataset, _part(self.mesh, self.plan, microbatches, dataset.global_batch, dataset.length))

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
        """Rows of `train_share` to microbatches [A, B, S] on the devices."""
        return put_microbatches(self.mesh, self.plan, batch)

    def put_eval(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Rows of `eval_share` to [1, B, S] on the devices."""
        assert self.eval_share is not None
        return self.eval_share.put(batch)

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
        shape = (1, self.plan.eval_batch_size, self.cfg.max_target_length)
        batch = self._batch_type(self.train, shape, (None, *BATCH_DIMS))
        eval_step = step.make_eval_step(self.cfg, self.layout)

        def evaluate(params: Any, batch: Any) -> step.Metrics:
            return eval_step(params, jax.tree.map(lambda x: x[0], batch))

        return jax.jit(evaluate).lower(self.state_type.params, batch).compile()

    def _batch_type(self, dataset: data.Train, shape: tuple[int, ...], dims: tuple[str | None, ...]) -> dict[str, Any]:
        one = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(self.mesh, self.layout.spec(dims)))
        return dict.fromkeys(step.BATCH_KEYS, one)


def prepare(cfg: Any, group: Group | None = None) -> Session:
    """Plan and open everything that `cfg` names. Raises before anything is written; the order is cheap checks first.

    All processes of `group` must have come to the same numbers and the same data, or DataError ("data.processes").
    """
    found = hardware.of(cfg)
    cfg, dtype_reason = hardware.resolve(cfg, found)
    foreseen = forecast.planned(cfg, found)
    cfg, plan = foreseen.cfg, foreseen.plan
    forecast.require_room(foreseen)
    words = tokenizer.make(cfg)
    train = data.open_train(cfg, words, plan.global_batch_size)
    data.check_enough(train, cfg.steps)
    evaluation = data.open_split(cfg, words, "eval", plan.eval_batch_size) if data.has_eval(cfg) else None
    if evaluation and cfg.eval_steps > 0:
        data.check_enough(evaluation, cfg.eval_steps)
    mesh = planner.build_mesh(plan, jax.devices())
    _require_same(group or Alone(), cfg, train, evaluation)
    return Session(
        cfg,
        found,
        dtype_reason,
        plan,
        foreseen,
        mesh,
        words,
        train,
        evaluation,
        optimizer.make(cfg, plan.tree, plan.layout),
    )


def _require_same(group: Group, cfg: Any, train: data.Train, evaluation: data.Dataset | None) -> None:
    """What each process found on its own host: the type of its arithmetic, and the text in its files."""
    found = {"dtype": cfg.dtype} | {f"train {key}": value for key, value in train.fingerprint.items()}
    if evaluation:
        found |= {f"eval {key}": value for key, value in evaluation.fingerprint.items()}

    def error(unlike: str) -> DataError:
        return DataError(
            f"the processes did not find the same:\n{unlike}\nGive every host the same files, and set dtype.",
            id="data.processes",
        )

    group.agree("data", found, error)
