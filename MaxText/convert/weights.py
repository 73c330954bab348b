"""Weights of one model wherever they lie, piece by piece under our paths."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from MaxText import blueprint
from MaxText.checkpoint.stream import Reader, numpy_dtype
from MaxText.checkpoint.tree import Leaf, require_fit
from MaxText.convert.mapping import Links

# Parts of multimodal models, and buffers of old files, that are no weights of the text model.
LEFT_OUT = re.compile(
    r"(^|\.)(vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.|\.inv_freq$"
)
_TEXT_PREFIX = re.compile(r"^(?:model\.)?language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.")


class Weights(Protocol):
    """Reads pieces: the array at `path`, or its slice at `index` of the first dim."""

    def read(self, path: str, index: int | None) -> np.ndarray:
        """The piece, in the type it is stored in."""

    def dtype(self, path: str) -> np.dtype:
        """The type of the array at `path`."""


class Stored:
    """Weights of a MaxText step."""

    def __init__(self, step: Path, tree: blueprint.Blueprint) -> None:
        """Raises StorageError as `Reader`, and "checkpoint.unfit" where the step does not hold the model `tree`."""
        self._reader = Reader(step, "params/")
        saved = {name: self._reader.leaf(name) for name in self._reader.names()}
        types = {path: leaf.dtype for path, leaf in saved.items()}  # any type will do
        wanted = {
            path: Leaf(param.shape, np.dtype(numpy_dtype(types.get(path, "float32"))), "")  # type: ignore[arg-type]
            for path, param in blueprint.leaves(tree)
        }
        require_fit(saved, wanted, f"checkpoint {step}")
        self._last = functools.lru_cache(maxsize=2)(self._reader.read)

    def read(self, path: str, index: int | None) -> np.ndarray:
        return self._last(path, index)

    def dtype(self, path: str) -> np.dtype:
        return numpy_dtype(self._reader.leaf(path).dtype)


class Foreign:
    """Weights under the names of another program. `read_tensor` gives one by name, of type `dtypes[name]`."""

    def __init__(self, links: Links, read_tensor: Callable[[str], np.ndarray], dtypes: Mapping[str, np.dtype]) -> None:
        self._links, self._read, self._dtypes = links, read_tensor, dtypes

    def read(self, path: str, index: int | None) -> np.ndarray:
        return self._links.assemble(self._read, path, index).astype(self.dtype(path), copy=False)

    @functools.cached_property
    def _types(self) -> dict[str, np.dtype]:
        found: dict[str, set[np.dtype]] = {}
        for (path, _), links in self._links.of_piece.items():
            found.setdefault(path, set()).update(self._dtypes[link.name] for link in links)
        return {path: types.pop() if len(types) == 1 else np.dtype(np.float32) for path, types in found.items()}

    def dtype(self, path: str) -> np.dtype:
        return self._types[path]


def text_names(tensors: Mapping[str, Any], layers: int) -> tuple[dict[str, Any], list[str]]:
    """(tensors of the text model under the names of the text-only type, names left out).

    Left out are vision and audio, buffers, and layers beyond the `layers` of the decoder (heads of multi-token
    prediction, which the reference leaves out too).
    """
    kept, left = {}, []
    for name, tensor in tensors.items():
        renamed = _TEXT_PREFIX.sub("", name)
        number = re.match(r"model\.layers\.(\d+)\.", renamed)
        if LEFT_OUT.search(name) or (number and int(number[1]) >= layers):
            left.append(name)
        else:
            kept[renamed] = tensor
    return kept, left


def pieces(tree: blueprint.Blueprint) -> dict[str, int | None]:
    """Paths of the model's arrays, and how many pieces each has (None: it is one piece)."""
    return {
        path: param.shape[0] if param.axes[:1] in blueprint.STACKED else None for path, param in blueprint.leaves(tree)
    }


def whole(weights: Weights, path: str, count: int | None, dtype: Any) -> np.ndarray:
    """The array at `path`, in `dtype`."""
    if count is None:
        return weights.read(path, None).astype(dtype)
    return np.stack([weights.read(path, i).astype(dtype) for i in range(count)])
