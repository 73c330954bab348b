"""What the tests of the core share: toy models, placed on any mesh of the eight virtual devices, and toy batches.

One toy for all, so that programs are few: width 32, 2 layers, 4 heads on 2 key/value heads, 96 ids, 16 rows of 16
tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from MaxText import blueprint, config, decoder, optimizer, planner, sequence, session, state, step
from MaxText.hardware import Hardware
from MaxText.layout import Layout

ROWS, LENGTH, VOCAB = 16, 16, 96
TOY: dict[str, Any] = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 2,
    "scan_layers": True,
    "vocab_size": VOCAB,
    "max_target_length": LENGTH,
    "global_batch_size": ROWS,
    "dtype": "float32",
    "steps": 10,
    "eval_files": [],
}
# Degrees of the meshes on which everything must come out the same.
MESHES: dict[str, dict[str, int]] = {
    "one": {"fsdp": 1},
    "fsdp8": {"fsdp": 8},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def toy_config(mesh: dict[str, int] | None = None, **overrides: Any) -> config.Config:
    """The toy model with the ici degrees of `mesh` (default: one device)."""
    degrees = {f"ici_{axis}_parallelism": size for axis, size in ({"fsdp": 1} | (mesh or {})).items()}
    return config.make(**(TOY | degrees | overrides))


def cpu(devices: int, slices: int = 1) -> Hardware:
    return Hardware("cpu", "cpu", devices, 1, slices, None)


@dataclasses.dataclass(frozen=True)
class Toy:
    """A model with a plan, on a mesh of the first devices."""

    cfg: config.Config
    plan: planner.Plan
    mesh: Mesh

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """Parameters with noise on every leaf (no norm is one, so no factor can hide), the same on every mesh."""
        return blueprint.map_params(self._parameter, self.plan.tree)

    def _parameter(self, path: str, param: blueprint.Param) -> jax.Array:
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        real = param.real_shape
        value = (param.init.law == "ones") + (param.init.std or 0.3) * rng.standard_normal(real, np.float32)
        value = np.pad(value, [(0, new - old) for new, old in zip(param.shape, real, strict=True)])
        spec = self.layout.spec(param.axes)
        return jax.device_put(value.astype(self.cfg.weight_dtype), NamedSharding(self.mesh, spec))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function compiled and called under the mesh."""
        with jax.set_mesh(self.mesh):
            return jax.jit(function)(*args)

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Rows [R, S] as microbatches [A, B, S] on the devices."""
        return session.put_microbatches(self.mesh, self.plan, batch)

    def put_rows(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Rows [R, S] on the devices."""
        sharding = NamedSharding(self.mesh, self.layout.spec(("activation_batch", "activation_length")))
        batch = sequence.arrange(self.plan.order, batch)
        return {k: jax.device_put(v, sharding) for k, v in batch.items()}

    def gradients(self, batch: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """(gradient of every parameter by path, metrics of the step) on the host."""
        grads, metrics = self.run(
            lambda p, b: step.gradients(self.cfg, self.layout, p, b), self.params, self.put(batch)
        )
        return by_path(grads), {name: float(value) for name, value in metrics.items()}

    @functools.cached_property
    def tx(self) -> optax.GradientTransformation:
        return optimizer.make(self.cfg, self.plan.tree, self.layout)

    @functools.cached_property
    def state_type(self) -> state.TrainState:
        """Shapes, dtypes and shardings of the state."""
        with jax.set_mesh(self.mesh):
            return jax.eval_shape(lambda: state.init(self.cfg, self.layout, self.plan.tree, self.tx))

    def state(self) -> state.TrainState:
        """A state before the first step, with the noisy parameters."""
        step_0, zeros = self.run(lambda params: (jax.numpy.zeros((), "int32"), self.tx.init(params)), self.params)
        return state.TrainState(step_0, self.params, zeros)

    @functools.cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """The train step as a run compiles it."""
        train_step = jax.jit(step.make_train_step(self.cfg, self.layout, self.tx), donate_argnums=0)
        with jax.set_mesh(self.mesh):
            return train_step.lower(self.state_type, self.put(toy_batch())).compile()


def place(cfg: config.Config) -> Toy:
    """Plan `cfg` on as many devices as its ici degrees and slices ask for."""
    slices = max(1, cfg.num_slices)
    devices = slices * int(np.prod([getattr(cfg, f"ici_{axis}_parallelism") for axis in planner.MESH_AXES]))
    plan = planner.make(cfg, decoder.declare(cfg), cpu(devices, slices))
    return Toy(cfg, plan, planner.build_mesh(plan, jax.devices()[:devices]))


def toy(mesh: dict[str, int] | None = None, **overrides: Any) -> Toy:
    """The toy model on a mesh; the same arguments give the same object, with what it has compiled."""
    return _toy(toy_config(mesh, **overrides))


@functools.cache
def _toy(cfg: config.Config) -> Toy:
    return place(cfg)


def toy_batch(seed: int = 0, rows: int = ROWS, length: int = LENGTH, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Rows of one to three documents, padding at the end of some; the counts of targets differ from row to row."""
    rng = np.random.default_rng(seed)
    batch = {key: np.zeros((rows, length), np.int32) for key in step.BATCH_KEYS}
    for row in range(rows):
        end = length if row % 3 else int(rng.integers(2, length))
        cuts = sorted({0, end, *rng.integers(1, end, size=row % 3)})
        for document, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False), start=1):
            batch["segments"][row, first:last] = document
            batch["positions"][row, first:last] = np.arange(last - first)
            batch["loss_mask"][row, first : last - 1] = 1
        batch["inputs"][row, :end] = rng.integers(0, vocab, end)
        batch["targets"][row, : end - 1] = batch["inputs"][row, 1:end]
    return batch


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """{"a/b/c": array on the host} of a nested dict."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in flat}


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Each array equal to within `tolerance` of its norm; a norm of zero would prove nothing."""
    assert found.keys() == wanted.keys()
    for path, want in wanted.items():
        norm = np.linalg.norm(want)
        assert norm > 0, f"{path} is zero"
        error = np.linalg.norm(found[path] - want) / norm
        assert error < tolerance, f"{path}: relative error {error:.2e}"
