"""`import` and `export`: weights from a source to a checkpoint, and to a Hugging Face folder, a piece at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import blueprint
from MaxText.checkpoint import Store
from MaxText.checkpoint.stream import Stream, numpy_dtype, save
from MaxText.convert import hf_config, mapping, safetensors, words
from MaxText.convert.folder import new_folder
from MaxText.convert.source import IMPORTED, Source, open_source
from MaxText.convert.weights import pieces
from MaxText.errors import StorageError

RECIPE = "model.yml"
STEP = 0


def import_model(src: Path, out: Path, overrides: Mapping[str, Any]) -> str:
    """Write the weights of `src` as the checkpoint `out`/checkpoints/0, which holds parameters alone, and the recipe as
    `out`/model.yml. Stored types are kept, unless `overrides` has weight_dtype. Returns what was done.

    Raises:
      ConfigError, StorageError: as `open_source`; "convert.not-empty". Nothing is left behind.
    """
    source = open_source(src, overrides)
    stored = {path: _stored_dtype(source, path, param, overrides) for path, param in blueprint.leaves(source.tree)}
    streams = {
        f"params/{path}": Stream(param.shape, stored[path], _pieces(source, path, param, stored[path]))
        for path, param in blueprint.leaves(source.tree)
    }
    cfg = source.cfg.replace(weight_dtype=_weight_dtype(stored, source))
    parameters = blueprint.count(source.tree)
    meta = {"config": cfg.as_dict(), "parameters": parameters, "data": {IMPORTED: str(src)}}
    with new_folder(out) as folder, Store(folder / "checkpoints", asynchronous=False) as store:
        save(store, STEP, streams, meta)
        comment = f"{out.name}: {parameters:,} parameters, imported from {src.name}."
        (folder / RECIPE).write_text(hf_config.to_yaml(source.recipe, comment))
        carried = words.carry(source, folder)
    lines = [f"imported {source.kind} {src}: {parameters:,} parameters, mostly {source.dtype.name}"]
    lines += [f"  {note}" for note in source.notes]
    lines += [f"weights: {out}/checkpoints/{STEP}", f"recipe:  {out}/{RECIPE}"]
    return "\n".join([*lines, f"words:   {', '.join(carried)}"] if carried else lines)


def _stored_dtype(source: Source, path: str, param: blueprint.Param, overrides: Mapping[str, Any]) -> np.dtype:
    own = source.weights.dtype(path)
    if "weight_dtype" in overrides:
        return np.dtype(param.dtype(source.cfg.weight_dtype))
    return own if own.name in ("float32", "bfloat16") else np.dtype(np.float32)


def _weight_dtype(stored: Mapping[str, np.dtype], source: Source) -> str:
    names = {stored[path].name for path, param in blueprint.leaves(source.tree) if param.kind != "router"}
    return "bfloat16" if names == {"bfloat16"} else "float32"


def _pieces(source: Source, path: str, param: blueprint.Param, dtype: np.dtype) -> Iterator[np.ndarray]:
    for index in pieces(param):
        piece = source.weights.read(path, index)
        if not np.isfinite(piece).all():
            place = path if index is None else f"{path}, layer {index} of its segment"
            raise StorageError(
                f"{source.path}: the weights for {place} are not all finite. [convert.not-finite]",
                id="convert.not-finite",
            )
        yield piece.astype(dtype, copy=False)


def export_model(
    src: Path,
    out: Path,
    overrides: Mapping[str, Any],
    dtype: str = "",
    shard_bytes: int = 0,
    reference: Mapping[str, Any] | None = None,
) -> tuple[Source, list[str]]:
    """Write the weights of `src` as a Hugging Face folder `out`: config.json and safetensors, in the stored types or in
    `dtype`. With `reference`, the configuration to compute with, what was written is read back and must give the logits
    of `src`. Returns the source, and what `verify` says.

    Raises:
      MaxTextError: as `open_source`, `new_folder`, `verify`; ConfigError "convert.no-family". Nothing is left behind.
    """
    source = open_source(src, overrides)
    family, theirs = hf_config.write(source.cfg)
    links = mapping.make(source.cfg, source.tree, family.rows, family.name)
    by_name = links.names()
    wanted = [
        safetensors.Wanted(link.name, _exported_dtype(source, link, dtype), link.shape) for link in _in_order(links)
    ]
    types = {tensor.name: tensor.dtype for tensor in wanted}

    def produce(name: str) -> np.ndarray:
        return by_name[name].to_theirs(source.weights.read).astype(types[name], copy=False)

    theirs |= {"torch_dtype": dtype or source.dtype.name, "transformers_version": "4.56.0"}
    with new_folder(out) as folder:
        (folder / "config.json").write_text(json.dumps(dict(sorted(theirs.items())), indent=2) + "\n")
        safetensors.write_folder(folder, wanted, produce, shard_bytes or safetensors.SHARD_BYTES)
        words.carry(source, folder)
        if reference is None:
            return source, []
        rounded = {**reference, "weight_dtype": dtype} if dtype else reference
        return source, [f"verified: {verify(src, folder, out, rounded)}"]


def _exported_dtype(source: Source, link: mapping.Link, dtype: str) -> np.dtype:
    stored = source.weights.dtype(link.pieces[0].path)
    router = link.name.endswith("correction_bias")
    return numpy_dtype(dtype) if dtype and not router else stored


def _in_order(links: mapping.Links) -> list[mapping.Link]:
    """Links in the model's order: embedding, layers, and what stands behind them."""
    last = ("final_norm", "logits")
    return sorted(links.links, key=lambda link: (link.pieces[0].path.split("/")[0] in last, _layer(link), link.name))


def _layer(link: mapping.Link) -> int:
    numbers = [int(part) for part in link.name.split(".") if part.isdecimal()]
    return numbers[0] if numbers else -1


def verify(src: Path, folder: Path, out: Path, reference: Mapping[str, Any]) -> str:
    """Compare the logits of `src` and of `folder`, the future `out`, on the same random ids, both with their weights in
    `reference`'s weight_dtype; return how far they are apart, as a line.

    Raises:
      StorageError: "convert.not-equal" beyond 1e-5 of the largest logit.
    """
    from MaxText.convert.score import logits_of

    before, after = open_source(src, reference), open_source(folder, reference)
    ids = np.random.default_rng(0).integers(0, before.cfg.vocab_size, (2, 32), np.int32)
    left, right = (logits_of(source, ids) for source in (before, after))
    size, apart = float(np.abs(left).max()), float(np.abs(left - right).max())
    line = f"logits of both on 64 random ids: largest {size:.4g}, largest difference {apart:.3g}"
    if not apart <= 1e-5 * size:
        raise StorageError(
            f"{out} would not compute what {src} does: {line}. Nothing was left. [convert.not-equal]",
            id="convert.not-equal",
        )
    return line
