"""Names of leaves, and the comparison of what a checkpoint holds with what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from MaxText.errors import StorageError


@dataclass(frozen=True)
class Leaf:
    """What the manifest says of one array: its logical shape, whatever mesh it lived on."""

    shape: tuple[int, ...]
    dtype: str
    crc: str
    """CRC-32 of the whole array's bytes in C order, little-endian, as 8 hexadecimal digits; "" where several processes
    wrote it: then the files, uncompressed pieces of it, have theirs in the manifest"""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of `tree` by their "/"-joined paths (keys, field names, indices), in tree order.

    The name is what a leaf is called on disk and in messages: it depends on keys and fields, not on class names.
    """
    import jax

    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        named[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
    count = len(jax.tree_util.tree_leaves(tree))
    folders = {folder_name(name) for name in named}
    if not len(named) == len(folders) == count:
        raise ValueError(f"{count} leaves share {len(folders)} names: keys must not contain '/' or '.'")
    return named


def folder_name(name: str) -> str:
    """Return the folder that holds the leaf `name` (Orbax joins keys with dots)."""
    return name.replace("/", ".")


def numpy_dtype(name: str) -> np.dtype:
    """The type that a manifest calls `name`."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def nest(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return `named` as nested dictionaries, the form that Orbax stores and other programs can read."""
    root: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = root
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return root


def unnest(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Invert `nest`."""
    named: dict[str, Any] = {}
    for key, node in tree.items():
        named |= unnest(node, f"{prefix}{key}/") if isinstance(node, Mapping) else {prefix + key: node}
    return named


def require_fit(saved: Mapping[str, Leaf], wanted: Mapping[str, Any], where: str, ignore: tuple[str, ...] = ()) -> None:
    """Raise StorageError with a table unless names, shapes and dtypes of `saved` and `wanted` are the same.

    Args:
      saved: leaves by name, from the manifest.
      wanted: anything with .shape and .dtype, by name.
      where: what is being restored, for the message.
      ignore: names in `saved` that begin so need not be in `wanted`.
    """
    saved = {name: leaf for name, leaf in saved.items() if name in wanted or not name.startswith(ignore)}
    rows = [row for name in sorted({*saved, *wanted}) if (row := _difference(name, saved.get(name), wanted.get(name)))]
    if not rows:
        return
    width = max(len(name) for name, _ in rows)
    shown = [f"  {name:<{width}}  {problem}" for name, problem in rows[:40]]
    if len(rows) > 40:
        shown.append(f"  … and {len(rows) - 40} more")
    raise StorageError(
        f"{where} does not fit this model: {len(rows)} of {len({*saved, *wanted})} arrays differ. Nothing was read.\n"
        + "\n".join(shown)
        + "\nUse the configuration that the checkpoint was saved with, or another run_name to start afresh.",
        id="checkpoint.unfit",
    )


def _difference(name: str, saved: Leaf | None, wanted: Any) -> tuple[str, str] | None:
    if saved is None:
        return name, f"missing in the checkpoint (the model has {_describe(wanted)})"
    if wanted is None:
        return name, f"not in the model (the checkpoint has {saved.dtype}{list(saved.shape)})"
    if (saved.shape, saved.dtype) != (tuple(wanted.shape), wanted.dtype.name):
        return name, f"saved {saved.dtype}{list(saved.shape)}, the model has {_describe(wanted)}"
    return None


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"
