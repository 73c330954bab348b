"""SRC of every verb: a Hugging Face folder, a GGUF file, a run folder, or the folder of a checkpoint step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import blueprint, config, decoder
from MaxText.checkpoint import Store, manifest
from MaxText.config.schema import ARCHITECTURE
from MaxText.convert import gguf, hf_config, mapping, rows, safetensors
from MaxText.convert.families import Family
from MaxText.convert.weights import Foreign, Stored, Weights, text_names
from MaxText.errors import DataError, StorageError

# What a run's configuration says of its words; the rest (mesh, steps, ...) belongs to the run alone.
WORDS = ("tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "max_target_length")
IMPORTED = "imported from"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Source:
    """A model and its weights; nothing but descriptions has been read yet."""

    path: Path
    kind: str
    cfg: Any
    recipe: dict[str, Any]
    tree: blueprint.Blueprint
    weights: Weights
    notes: list[str] = field(default_factory=list)
    words: Any = None

    @property
    def dtype(self) -> np.dtype:
        """The type of most parameters."""
        sizes: Counter[np.dtype] = Counter()
        for path, param in blueprint.leaves(self.tree):
            sizes[self.weights.dtype(path)] += param.size
        return sizes.most_common(1)[0][0]


def find(path: Path) -> tuple[str, Path]:
    """(kind of source, where exactly: of a run folder its newest complete step).

    Raises:
      DataError: "convert.no-source" if there is nothing at `path`; "convert.unknown-source" if it is none.
    """
    if not path.exists():
        raise DataError(f"{path} is not there. Check the path. [convert.no-source]", id="convert.no-source")
    if path.is_file() and gguf.is_gguf(path):
        return "GGUF", path
    if (path / manifest.NAME).is_file() and path.name.isdecimal():
        return "checkpoint step", path
    if (path / "checkpoints").is_dir():
        store = Store(path / "checkpoints")
        if (latest := store.latest()) is not None:
            return "run", store.folder / str(latest)
    if (path / hf_config.NAME).is_file():
        return "Hugging Face", path
    raise DataError(
        f"{path} is none of: a Hugging Face folder ({hf_config.NAME} and *.safetensors), a GGUF file, a run folder "
        "with a complete checkpoint, the folder of a checkpoint step. [convert.unknown-source]",
        id="convert.unknown-source",
    )


def open_source(path: Path, overrides: Mapping[str, Any]) -> Source:
    """The model at `path`, its configuration changed by `overrides`, checked tensor by tensor against its weights.

    Raises:
      DataError: as `find`; "convert.no-weights".
      ConfigError: as `hf_config.read`, `gguf.recipe`, `config.make_from`.
      StorageError: as `safetensors.read_folder`, `gguf.read_file`, `mapping.require_fit`, `checkpoint.Reader`.
    """
    kind, place = find(path)
    match kind:
        case "GGUF":
            return _gguf(place, overrides)
        case "Hugging Face":
            return _hugging_face(place, overrides)
    return _step(place, kind, overrides)


def read_recipe(path: Path) -> tuple[str, dict[str, Any]]:
    """(kind of source, the keys of its architecture), checked; no weights are needed. Raises as `open_source`."""
    kind, place = find(path)
    match kind:
        case "GGUF":
            recipe = gguf.recipe(gguf.read_file(place))
        case "Hugging Face":
            recipe = hf_config.read(hf_config.load(place))[1]
        case _:
            recipe = {key: value for key, value in _saved(place).items() if key in ARCHITECTURE}
    config.make_from(recipe, str(path), {})  # the rules between keys
    return kind, recipe


def _hugging_face(path: Path, overrides: Mapping[str, Any]) -> Source:
    theirs = hf_config.load(path)
    family, recipe = hf_config.read(theirs)
    cfg = config.make_from(recipe, str(path / hf_config.NAME), overrides)
    tree = decoder.declare(cfg)
    heads = hf_config.text_part(theirs).get("num_nextn_predict_layers") or 0
    tensors, left = text_names(safetensors.read_folder(path), cfg.num_decoder_layers, heads)
    links = _links(cfg, tree, family, tensors)
    if cfg.logits_via_embedding and HEAD in tensors:
        left.append(_copy_of_embedding(path, tensors))
    mapping.require_fit(links, {name: tensor.shape for name, tensor in tensors.items()}, str(path))
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    _require_numbers(path, dtypes)
    notes = [f"left out: {', '.join(left[:6])}{' ...' if len(left) > 6 else ''} ({len(left)} tensors)"] if left else []
    weights = Foreign(links, lambda name: tensors[name].read(), dtypes)
    return Source(path, "Hugging Face", cfg, recipe, tree, weights, notes)


def _require_numbers(path: Path, dtypes: Mapping[str, np.dtype]) -> None:
    """Integers are quantised weights whose scale is elsewhere, or damage: StorageError("convert.integers")."""
    if wrong := [f"{name} ({dtype.name})" for name, dtype in dtypes.items() if dtype.kind in "iub"]:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise StorageError(
            f"{path}: {', '.join(wrong[:3])}{more}: whole numbers instead of weights. Quantised models are not read; "
            "take the folder with float32, bfloat16 or float16 weights. [convert.integers]",
            id="convert.integers",
        )


def _copy_of_embedding(path: Path, tensors: dict[str, safetensors.Tensor]) -> str:
    """Take out the head that some programs save beside the tied embedding; the name. It must be equal."""
    head = tensors.pop(HEAD)
    if EMBEDDING in tensors and not head.equals(tensors[EMBEDDING]):
        raise StorageError(
            f"{path}: {HEAD} is not {EMBEDDING}, although tie_word_embeddings says that they are one. "
            "Set it to false in config.json if the head has weights of its own. [convert.unfit]",
            id="convert.unfit",
        )
    return HEAD


def _links(cfg: Any, tree: blueprint.Blueprint, family: Family, found: Mapping[str, Any]) -> mapping.Links:
    """By the first of the family's tables whose names are all there; by the first of all where none is."""
    tables = (family.rows, *family.other_rows)
    each = (mapping.make(cfg, tree, table, family.name) for table in tables)
    first = next(each)
    return next((links for links in (first, *each) if links.names().keys() <= found.keys()), first)


def _gguf(path: Path, overrides: Mapping[str, Any]) -> Source:
    file = gguf.read_file(path)
    recipe = gguf.recipe(file)
    cfg = config.make_from(recipe, str(path), overrides)
    tree = decoder.declare(cfg)
    links = mapping.make(cfg, tree, rows.GGUF, "gguf")
    mapping.require_fit(links, {name: tensor.shape for name, tensor in file.tensors.items()}, str(path))
    dtypes = {name: tensor.dtype for name, tensor in file.tensors.items()}
    weights = Foreign(links, lambda name: file.tensors[name].read(), dtypes)
    return Source(path, "GGUF", cfg, recipe, tree, weights, gguf.notes(file), gguf.words(file))


def _step(path: Path, kind: str, overrides: Mapping[str, Any]) -> Source:
    kept = _saved(path)
    cfg = config.make_from(kept, str(path / manifest.NAME), overrides)
    tree = decoder.declare(cfg)
    recipe = {key: value for key, value in kept.items() if key in ARCHITECTURE}
    return Source(path, kind, cfg, recipe, tree, Stored(path, tree))


def _saved(step: Path) -> dict[str, Any]:
    """What a step says of its model, and, unless it was imported, of its words."""
    meta = Store(step.absolute().parent).manifest(int(step.name))["meta"]
    words = () if IMPORTED in meta.get("data", {}) else WORDS
    return {key: value for key, value in meta["config"].items() if key in ARCHITECTURE or key in words}
