"""Weights of one model wherever they lie, piece by piece under our paths."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
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

    def read(self, path: str, index: int | None, expert: int | None = None) -> np.ndarray:
        """The piece, or of it the slice of one expert, in the type it is stored in."""

    def dtype(self, path: str) -> np.dtype:
        """The type of the array at `path`."""


class Stored:
    """Weights of a MaxText step."""

    def __init__(self, step: Path, tree: blueprint.Blueprint) -> None:
        """Raises StorageError as `Reader`, and "checkpoint.unfit" where the step does not hold the model `tree`."""
        self._reader = Reader(step, "params/")
        self._reader.verify()  # changed bytes would be seen by nobody else
        saved = {name: self._reader.leaf(name) for name in self._reader.names()}
        types = {path: leaf.dtype for path, leaf in saved.items()}  # any type will do
        wanted = {
            path: Leaf(param.shape, np.dtype(numpy_dtype(types.get(path, "float32"))), "")  # type: ignore[arg-type]
            for path, param in blueprint.leaves(tree)
        }
        require_fit(saved, wanted, f"checkpoint {step}")

    def read(self, path: str, index: int | None, expert: int | None = None) -> np.ndarray:
        return self._reader.read(path, *(part for part in (index, expert) if part is not None))

    def dtype(self, path: str) -> np.dtype:
        return numpy_dtype(self._reader.leaf(path).dtype)


class Foreign:
    """Weights under the names of another program. `read_tensor` gives one by name, of type `dtypes[name]`."""

    def __init__(self, links: Links, read_tensor: Callable[[str], np.ndarray], dtypes: Mapping[str, np.dtype]) -> None:
        self._links, self._read, self._dtypes = links, read_tensor, dtypes
        # Expert by expert out of tensors that hold all of them: the two of a layer stay in memory meanwhile.
        self._read_again = functools.lru_cache(maxsize=2)(read_tensor)

    def read(self, path: str, index: int | None, expert: int | None = None) -> np.ndarray:
        fused = expert is not None and self._links.of_piece[path, index][0].pieces[0].expert is None
        read = self._read_again if fused else self._read
        return self._links.assemble(read, path, index, expert).astype(self.dtype(path), copy=False)

    @functools.cached_property
    def _types(self) -> dict[str, np.dtype]:
        found: dict[str, set[np.dtype]] = {}
        for (path, _), links in self._links.of_piece.items():
            found.setdefault(path, set()).update(self._dtypes[link.name] for link in links)
        return {path: types.pop() if len(types) == 1 else np.dtype(np.float32) for path, types in found.items()}

    def dtype(self, path: str) -> np.dtype:
        return self._types[path]


def text_names(tensors: Mapping[str, Any], layers: int, heads: int) -> tuple[dict[str, Any], list[str]]:
    """(tensors of the text model under the names of the text-only type, names left out).

    Left out are vision and audio, buffers, and the `heads` of multi-token prediction that follow the `layers` of the
    decoder, which the reference leaves out too. Further layers are kept, and so found to have no place.
    """
    kept, left = {}, []
    for name, tensor in tensors.items():
        renamed = _TEXT_PREFIX.sub("", name)
        number = re.match(r"model\.layers\.(\d+)\.", renamed)
        if LEFT_OUT.search(name) or (number and layers <= int(number[1]) < layers + heads):
            left.append(name)
        else:
            kept[renamed] = tensor
    return kept, left


def pieces(param: blueprint.Param) -> list[int | None]:
    """The indices of a parameter's pieces: one for each layer that its array stacks, or [None]: it is one piece."""
    return [*range(param.shape[0])] if param.axes[:1] in blueprint.STACKED else [None]


def place(
    weights: Weights, path: str, param: blueprint.Param, dtype: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """The array at `path`, in `dtype`, on the devices. Every piece is read once; host memory holds this process's part
    of the array, and one piece."""
    where = {device: _bounds(index, param.shape) for device, index in _local(sharding, param.shape).items()}
    parts = {bounds: np.empty([stop - start for start, stop in bounds], dtype) for bounds in where.values()}
    for index in pieces(param):
        needed = [bounds for bounds in parts if index is None or bounds[0][0] <= index < bounds[0][1]]
        piece = weights.read(path, index) if needed else None
        for bounds in needed:
            inner = tuple(slice(*pair) for pair in (bounds if index is None else bounds[1:]))
            row = parts[bounds] if index is None else parts[bounds][index - bounds[0][0], ...]
            row[...] = piece[inner]  # type: ignore[index]
    on_devices = [jax.device_put(parts[bounds], device) for device, bounds in where.items()]
    return jax.make_array_from_single_device_arrays(param.shape, sharding, on_devices)


def _local(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Mapping[jax.Device, tuple[slice, ...]]:
    return sharding.addressable_devices_indices_map(shape)  # type: ignore[return-value]


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every dim."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
