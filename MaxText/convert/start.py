"""`load_parameters_path`: a run that begins with the weights of another model, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from MaxText import blueprint
from MaxText.checkpoint.tree import Leaf, require_fit
from MaxText.convert import hf_config, weights
from MaxText.convert.source import Source, open_source


def open_for(cfg: Any, tree: blueprint.Blueprint) -> tuple[Source, list[str]]:
    """The source that `cfg.load_parameters_path` names, and lines for the start screen; no weight is read yet.

    Raises:
      MaxTextError: as `open_source`; StorageError "checkpoint.unfit", with a table, where it is not the model `tree`.
    """
    path = Path(cfg.load_parameters_path).expanduser()
    source = open_source(path, {})
    types = {name: np.dtype(param.dtype(cfg.weight_dtype)) for name, param in blueprint.leaves(tree)}
    saved = {
        name: Leaf(param.shape, np.dtype(types.get(name, source.weights.dtype(name))).name, "")
        for name, param in blueprint.leaves(source.tree)
    }
    wanted = {name: Leaf(param.shape, types[name], "") for name, param in blueprint.leaves(tree)}
    require_fit(saved, wanted, f"load_parameters_path={path}")
    head = f"parameters of {source.kind} {path}, {source.dtype.name} there"
    return source, [head, *(f"warning: not as there: {text}" for text in hf_config.differences(cfg, source.cfg))]


def load(source: Source, tree: blueprint.Blueprint, types: Any) -> dict[str, Any]:
    """The parameters, in the dtypes and shardings of `types` (nested jax.ShapeDtypeStruct, as the run wants them)."""
    wanted = {"/".join(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(types)}

    def put(path: str, param: blueprint.Param) -> jax.Array:
        return weights.place(source.weights, path, param, wanted[path].dtype, wanted[path].sharding)

    return blueprint.map_params(put, tree)
