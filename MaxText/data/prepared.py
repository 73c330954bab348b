"""Prepared rows: a folder that `data prepare` made. Training on it gives the same batches, bit for bit, as training on
its sources, and no batch from bytes that have changed since.

<folder>/manifest.json             written last, with a checksum of itself: without it there is no prepared data
<folder>/<split>-<part>/tokens.bin   ids of all documents, one after the other
                       /blocks.npy   checksums of its blocks, compared as they are read
                       /starts.npy   first pair of each document; records.npy: its number in its file
                       /plan-*.npy   which pieces a row holds, unless rows follow from the starts (concat_then_split)

All but tokens.bin are read into memory when they are opened: 16 bytes a document, 24 a piece of a plan, 8 a row of it.
What is used are the bytes whose SHA-256 was compared with the manifest's, whatever becomes of the files.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from MaxText.data import blocks, opening, packing, sealed
from MaxText.data.corpus import Span
from MaxText.data.dataset import Dataset, Split
from MaxText.data.names import Names
from MaxText.errors import DataError
from MaxText.tokenizer import Tokenizer

if TYPE_CHECKING:
    from MaxText.config import Config

FORMAT = 2  # 1 had no blocks.npy, and no checksum in the manifest
MANIFEST, TOKENS, CHECKSUMS = "manifest.json", "tokens.bin", "blocks.npy"
RECIPE_KEYS = ("max_target_length", "packing", "add_bos", "add_eos", "tokenizer")


def manifest(folder: str) -> dict[str, Any]:
    """The manifest of a folder. DataError where there is none, a damaged one, or one of another format."""
    if "://" in folder:
        raise DataError(
            f"dataset_path={folder} is a URL, and prepared rows are read by path. Copy them, or mount it.",
            id="data.local",
        )
    path = Path(folder).expanduser() / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"dataset_path={folder} holds no prepared data: {MANIFEST} {error.strerror}. Make them with "
            f"`python -m MaxText data prepare CONFIG out={folder}` (again, if that was interrupted).",
            id="data.not-prepared",
        ) from error
    try:
        found = sealed.content(data)
    except sealed.Broken as error:
        if (older := _older_format(data)) is not None:
            raise _other_format(path, older) from error
        raise DataError(
            f"{path} is damaged: {error}. Copy it from where it is whole, or prepare the data again.",
            id="data.damaged",
        ) from error
    if found.get("format") != FORMAT:
        raise _other_format(path, found.get("format"))
    return found


def _older_format(data: bytes) -> int | None:
    """The format of a manifest from before it had a checksum; None if it is no such."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    bare = isinstance(found, dict) and "checksum" not in found
    return found["format"] if bare and isinstance(found.get("format"), int) and found["format"] < FORMAT else None


def _other_format(path: Path, format: object) -> DataError:
    return DataError(
        f"{path} has format {format}, and this version reads {FORMAT}. Prepare the data again.", id="data.format"
    )


def open_split(cfg: Config, tokenizer: Tokenizer, split: Split, global_batch: int) -> Dataset:
    """The prepared rows of one split. Raises DataError where they do not fit the configuration, or are damaged."""
    found = manifest(cfg.dataset_path)
    check_fits(cfg, tokenizer, found)
    entries = found["splits"].get(split)
    if not entries:
        raise DataError(f"dataset_path={cfg.dataset_path} holds no {split} split.", id="data.split")
    weights = _weights(cfg, split, entries)
    materials = [_material(cfg, entry, weight) for entry, weight in zip(entries, weights, strict=True)]
    dropped: dict[str, int] = {}
    for entry in entries:
        dropped |= {reason: dropped.get(reason, 0) + count for reason, count in entry["dropped"].items()}
    return Dataset(
        split=split,
        source=f"prepared: {cfg.dataset_path} ({found['source']})",
        documents=sum(entry["documents"] for entry in entries),
        tokens=sum(entry["tokens"] for entry in entries),
        bytes=sum(entry["bytes"] for entry in entries),
        length=cfg.max_target_length,
        global_batch=global_batch,
        dropped=dropped,
        # That of the sources: where their batches are the same, a run can go over from them to the prepared rows.
        fingerprint=opening.fingerprint_of(cfg, split, global_batch)
        | {"dataset_type": found["dataset_type"]}
        | found["recipe"][split]
        | opening.mixture_fingerprint(cfg, [entry["name"] for entry in entries], weights),
        parts=opening.parts_of(cfg, split, global_batch, materials),
        mixture=opening.mixture_of(cfg, weights, global_batch) if len(entries) > 1 else None,
        bad=tuple((name, fault) for entry in entries for name, fault in entry["bad"]),
    )


def check_fits(cfg: Config, tokenizer: Tokenizer, found: dict[str, Any]) -> None:
    """DataError with every difference between how the rows were made and what the configuration says."""
    now = {
        "max_target_length": cfg.max_target_length,
        "packing": opening.packing_kind(cfg),
        "add_bos": cfg.add_bos,
        "add_eos": cfg.add_eos,
        "tokenizer": tokenizer.fingerprint,
    }
    different = [key for key in RECIPE_KEYS if found[key] != now[key]]
    if different:
        table = "\n".join(f"  {key}: {found[key]} in the rows, {now[key]} in the configuration" for key in different)
        raise DataError(
            f"the rows in dataset_path={cfg.dataset_path} were prepared otherwise:\n{table}\n"
            "Give these values, or prepare the data again.",
            id="data.prepared-otherwise",
        )
    if found["vocab_size"] > cfg.vocab_size:
        raise DataError(
            f"the rows in dataset_path={cfg.dataset_path} were made for vocab_size={found['vocab_size']}, and this is "
            f"vocab_size={cfg.vocab_size}. Set vocab_size={found['vocab_size']}.",
            id="data.vocabulary",
        )


def verify(folder: str) -> str:
    """Every file of a prepared folder against the checksums of its manifest. DataError names those that differ."""
    found, wrong, count = manifest(folder), [], 0
    for entries in found["splits"].values():
        for entry in entries:
            for name, known in entry["arrays"].items():
                path = Path(folder).expanduser() / entry["folder"] / name
                count += 1
                try:
                    whole = checksum(path) == known["sha256"]
                except OSError:  # gone, or its disk cannot read it: as bad as changed
                    whole = False
                wrong += [] if whole else [str(path)]
    if wrong:
        raise DataError(f"{len(wrong)} of {count} files are damaged: {', '.join(wrong)}.", id="data.truncated")
    return f"{folder}: {count} files are as they were written"


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights(cfg: Config, split: Split, entries: list[dict[str, Any]]) -> list[float]:
    """1. mixture_weights, 2. those with which the data were prepared."""
    if split == "eval" or not cfg.mixture_weights:
        return [entry["weight"] for entry in entries]
    if len(cfg.mixture_weights) != len(entries):
        raise DataError(
            f"mixture_weights has {len(cfg.mixture_weights)} weights, and dataset_path={cfg.dataset_path} has "
            f"{len(entries)} parts: {', '.join(entry['name'] for entry in entries)}.",
            id="data.mixture",
        )
    return list(cfg.mixture_weights)


def _material(cfg: Config, entry: dict[str, Any], weight: float) -> opening.Material:
    folder = Path(cfg.dataset_path).expanduser() / entry["folder"]
    known = entry["arrays"]
    size = (folder / TOKENS).stat().st_size if (folder / TOKENS).exists() else 0
    if size != known[TOKENS]["bytes"]:
        raise _cut(folder / TOKENS, size, known[TOKENS])
    tables = {name: _table(folder / name, known[name]) for name in known if name != TOKENS}
    plan = [tables[f"plan-{name}.npy"] for name in packing.Plan._fields if f"plan-{name}.npy" in tables]
    return opening.Material(
        name=entry["name"],
        weight=weight,
        stream=blocks.Checked(folder / TOKENS, np.dtype(entry["dtype"]), tables[CHECKSUMS]),
        starts=tables["starts.npy"],
        names=Names(tuple(Span(*span) for span in entry["files"]), tables["records.npy"]),
        plan=packing.Plan(*plan) if plan else None,
    )


def _table(path: Path, known: dict[str, Any]) -> np.ndarray:
    """A table from the very bytes that were compared with its checksum. A memory map would follow the file: when that
    is written over, to other rows; when it gets shorter, to the end of the process."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise _changed(path, f"cannot be read: {error.strerror}", "data.damaged") from error
    if len(data) != known["bytes"]:
        raise _cut(path, len(data), known)
    if hashlib.sha256(data).hexdigest() != known["sha256"]:
        raise _changed(path, "holds other bytes than were written", "data.damaged")
    table: np.ndarray = np.load(io.BytesIO(data))
    return table


def _cut(path: Path, size: int, known: dict[str, Any]) -> DataError:
    return _changed(path, f"has {size} bytes, and {known['bytes']} were written", "data.truncated")


def _changed(path: Path, problem: str, id: str) -> DataError:
    return DataError(f"{path} {problem}. Copy it from where it is whole, or prepare the data again.", id=id)
