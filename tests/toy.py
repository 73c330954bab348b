"""A toy world for tests of the model: meshes of virtual devices, shrunk recipes, hot weights, packed rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from MaxText import architecture, blueprint, compat, config, decoder, planner, sequence
from MaxText.layout import Layout

LENGTH = 32
DOCUMENTS = (19, 10)  # the rest of the row is padding


def mesh(**degrees: int) -> tuple[Mesh, Layout]:
    """A mesh of the first virtual devices and its layout: `mesh(fsdp=2, tensor=2)`."""
    shape = dict.fromkeys(planner.MESH_AXES, 1) | degrees
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))]).reshape(tuple(shape.values()))
    return compat.explicit_mesh(devices, planner.MESH_AXES), planner.make_layout(shape)


def small(model_name: str, **changes: Any) -> Any:
    """The recipe, shrunk, in float32."""
    cfg = architecture.scale_down(config.make(model_name=model_name, dtype="float32", max_target_length=LENGTH))
    return cfg.replace(**changes) if changes else cfg


def batch(cfg: Any, rows: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows of random tokens: int32 [rows, LENGTH]."""
    lengths = [*DOCUMENTS, LENGTH - sum(DOCUMENTS)]
    ids = np.random.default_rng(seed).integers(0, min(cfg.vocab_size, 288), (rows, LENGTH + 1))
    segments = np.repeat([1, 2, 0], lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    mask = (segments == np.append(segments[1:], -1)) & (segments != 0)
    one_row = {"positions": positions, "segments": segments, "loss_mask": mask}
    arrays = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    arrays |= {name: np.broadcast_to(row, (rows, LENGTH)) for name, row in one_row.items()}
    return {name: np.ascontiguousarray(x, np.int32) for name, x in arrays.items()}


def put(
    arrays: dict[str, np.ndarray], world: Mesh, layout: Layout, order: sequence.Order | None = None
) -> dict[str, jax.Array]:
    """Rows [..., B, S] on the devices of the mesh, in this order."""
    arrays = arrays if order is None else sequence.arrange(order, arrays)

    def one(x: np.ndarray) -> jax.Array:
        dims = (*[None] * (x.ndim - 2), "activation_batch", "activation_length")
        return jax.device_put(x, NamedSharding(world, layout.spec(dims)))

    return {name: one(x) for name, x in arrays.items()}


def hot(cfg: Any, seed: int = 0) -> dict[str, Any]:
    """Parameters as NumPy arrays with nothing left at its gentle start: norms, biases, sinks and scales random."""
    rng = np.random.default_rng(seed)

    def draw(path: str, param: blueprint.Param) -> np.ndarray:
        match param.init.law:
            case "zeros":
                value = rng.normal(0.0, 0.3, param.shape)
            case "ones":
                value = rng.normal(1.0, 0.3, param.shape)
            case _:
                value = rng.normal(0.0, param.init.std * (3.0 if path.endswith("router/kernel") else 1.0), param.shape)
        return value.astype(np.float32)

    return blueprint.map_params(draw, decoder.declare(cfg))


def fresh(cfg: Any, seed: int = 0) -> dict[str, Any]:
    """Parameters as NumPy arrays, drawn as those of a new run are."""
    rng = np.random.default_rng(seed)
    fixed = {"zeros": 0.0, "ones": 1.0}

    def draw(_: str, param: blueprint.Param) -> np.ndarray:
        law = param.init.law
        value = np.full(param.shape, fixed[law]) if law in fixed else rng.normal(0.0, param.init.std, param.shape)
        return value.astype(np.float32)

    return blueprint.map_params(draw, decoder.declare(cfg))


def place(cfg: Any, params: dict[str, Any], world: Mesh, layout: Layout) -> dict[str, Any]:
    """The parameters on the devices, sharded as planned."""
    specs = blueprint.map_params(lambda _, p: NamedSharding(world, layout.spec(p.axes)), decoder.declare(cfg))
    return jax.tree.map(jax.device_put, params, specs)
