"""`score`: what a model computes on given tokens, in float32: logits, losses, and the norm of every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from MaxText import blueprint, compat, decoder, hardware, loss, planner
from MaxText.convert import hf_config, mapping, weights
from MaxText.convert.source import Source
from MaxText.errors import ConfigError, DataError
from MaxText.layout import Layout

ROWS = ("activation_batch", "activation_length")


@dataclass(frozen=True)
class Placed:
    """A model on the devices; use it under `jax.set_mesh(mesh)`."""

    cfg: Any
    layout: Layout
    mesh: Mesh
    params: Any


def place(source: Source, devices: Sequence[jax.Device] | None = None) -> Placed:
    """The weights on the mesh that the source's configuration makes of `devices` (default: all), in its weight_dtype;
    one array in host memory at a time."""
    devices = jax.devices() if devices is None else devices
    found = dataclasses.replace(hardware.detect(), devices=len(devices), slices=1)
    cfg, _ = hardware.resolve(source.cfg, found)
    ici, dcn = planner.mesh_degrees(cfg, found)
    sizes = {axis: ici[axis] * dcn[axis] for axis in planner.MESH_AXES}
    layout = planner.make_layout(sizes).unsplit("activation_length")  # rows may have any length
    if cfg.vocab_size % layout.ways("vocab"):  # few rows: whole is cheaper than padding
        layout = layout.unsplit("vocab").unsplit("activation_vocab")
    mesh = compat.explicit_mesh(np.asarray(devices).reshape(tuple(sizes.values())), planner.MESH_AXES)

    def put(path: str, param: blueprint.Param) -> jax.Array:
        dtype, sharding = np.dtype(param.dtype(cfg.weight_dtype)), NamedSharding(mesh, layout.spec(param.axes))
        return weights.place(source.weights, path, param, dtype, sharding)

    with jax.set_mesh(mesh):
        return Placed(cfg, layout, mesh, blueprint.map_params(put, source.tree))


def make_batch(
    tokens: np.ndarray,
    segments: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    loss_mask: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """A batch from ids [B, S] (or [S]). The target of a token is the next one of its segment; what is not given
    follows: one segment a row, positions from 0 in every segment, a loss wherever there is a target."""
    tokens = np.atleast_2d(tokens)
    given = {"segments": segments, "positions": positions, "loss_mask": loss_mask}
    for name, array in given.items():
        if array is not None and np.atleast_2d(array).shape != tokens.shape:
            text = f"{name} has shape {list(array.shape)}, tokens {list(tokens.shape)} [score.shape]"
            raise DataError(text, id="score.shape")
    segments = np.ones_like(tokens) if segments is None else np.atleast_2d(segments)
    has_target = np.zeros(tokens.shape, bool)
    has_target[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    if positions is None:
        begins = np.ones(tokens.shape, bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        index = np.arange(tokens.shape[1])
        positions = index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    mask = has_target if loss_mask is None else has_target & (np.atleast_2d(loss_mask) != 0)
    batch = {
        "inputs": tokens,
        "targets": np.where(has_target, np.roll(tokens, -1, axis=1), 0),
        "positions": np.atleast_2d(positions),
        "segments": segments,
        "loss_mask": mask,
    }
    return {name: np.ascontiguousarray(array, np.int32) for name, array in batch.items()}


def score(
    source: Source,
    batch: Mapping[str, np.ndarray],
    gradients: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, np.ndarray]:
    """logits [B, S, V], token_loss [B, S] (0 where the mask is), loss_mask [B, S], loss; with `gradients` also
    gradient/NAME, the L2 norm of the loss's gradient by each tensor of the exported model.

    Raises:
      DataError: "score.ids" if an id is outside the vocabulary.
    """
    _check(source.cfg, batch)
    placed = place(source, devices)
    cfg, layout = placed.cfg, placed.layout
    rows = len(batch["inputs"])

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        hidden = decoder.forward(cfg, layout, params, batch)
        mask = batch["loss_mask"].astype(jnp.float32)
        nll = loss.token_loss(cfg, layout, params, hidden, batch["targets"]).nll_BS * mask
        return nll.sum() / jnp.maximum(mask.sum(), 1.0), (loss.logits(cfg, layout, params, hidden), nll)

    with jax.set_mesh(placed.mesh), jax.default_matmul_precision("highest"):
        sharding = NamedSharding(placed.mesh, layout.spec(ROWS))
        padded = _padded(batch, layout.ways("activation_batch"))
        on_device = {name: jax.device_put(array, sharding) for name, array in padded.items()}
        if gradients:
            both = jax.jit(jax.value_and_grad(evaluate, has_aux=True))
            (total, (logits, nll)), found = both(placed.params, on_device)
        else:
            total, (logits, nll) = jax.jit(evaluate)(placed.params, on_device)
        out = {
            "logits": np.asarray(logits)[:rows],
            "token_loss": np.asarray(nll)[:rows],
            "loss_mask": batch["loss_mask"],
            "loss": total,
        }
        out = {name: np.asarray(array, np.float32) for name, array in out.items()}
        return out | (_norms(source, found) if gradients else {})


def _check(cfg: Any, batch: Mapping[str, np.ndarray]) -> None:
    low, high = int(batch["inputs"].min()), int(batch["inputs"].max())
    if low < 0 or high >= cfg.vocab_size:
        raise DataError(
            f"tokens lie between {low} and {high}; the model knows 0 to {cfg.vocab_size - 1}. [score.ids]",
            id="score.ids",
        )
    longest = cfg.trainable_position_size
    if longest != -1 and batch["positions"].max() >= longest:
        raise DataError(f"position {batch['positions'].max()} of {longest} learned ones. [score.ids]", id="score.ids")


def _padded(batch: Mapping[str, np.ndarray], ways: int) -> dict[str, np.ndarray]:
    """The batch with rows of padding, so that it can be split `ways` ways."""
    more = -len(batch["inputs"]) % ways
    return {name: np.pad(array, ((0, more), (0, 0))) for name, array in batch.items()}


def _norms(source: Source, gradients: Any) -> dict[str, np.ndarray]:
    """Norms by the names of the exported tensors; by our paths where no family has this architecture."""
    arrays = {"/".join(key.key for key in path): np.asarray(g) for path, g in jax.tree.leaves_with_path(gradients)}
    try:
        family, _ = hf_config.write(source.cfg)
    except ConfigError:
        return {f"gradient/{path}": _norm(array) for path, array in arrays.items()}
    links = mapping.make(source.cfg, source.tree, family.rows, family.name).links

    def read(path: str, *index: int | None) -> np.ndarray:
        return arrays[path][tuple(part for part in index if part is not None)]

    return {f"gradient/{link.name}": _norm(link.to_theirs(read)) for link in links}


def _norm(array: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.norm(array.astype(np.float64)), np.float32)


def logits_of(source: Source, ids: np.ndarray) -> np.ndarray:
    """Logits [B, S, V] of one document a row."""
    return score(source, make_batch(ids))["logits"]
