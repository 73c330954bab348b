"""Hugging Face data sets read by index: local files, saved folders, the hub. A unit's path holds how to load one."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from MaxText.data.units import Item, Unit, field, reading
from MaxText.errors import DataError
from MaxText.tokenizer.library import need

UNIT_RECORDS = 8192


def split(unit: Unit) -> list[Unit]:
    if _streamed(unit):
        return [replace(unit, start=0, stop=sys.maxsize)]
    table = load(unit.path)
    edges = [*range(0, len(table), UNIT_RECORDS), len(table)]
    size = unit.size * UNIT_RECORDS // max(len(table), UNIT_RECORDS)
    return [replace(unit, start=a, stop=b, size=size) for a, b in zip(edges, edges[1:], strict=False)]


def read(unit: Unit) -> Iterator[Item]:
    if _streamed(unit):
        records = iter(stream(unit.path))
    else:
        table = load(unit.path)
        records = (table[i] for i in range(unit.start, unit.stop))
    with reading(unit):
        for i, record in enumerate(records, unit.start):
            yield field(unit, record, first=i == 0)


def _streamed(unit: Unit) -> bool:
    return bool(json.loads(unit.path).get("streaming"))


def stream(how: str) -> Any:
    """The data set that `how` describes, at its beginning. It remembers where it is, so each reader has its own."""
    return load.__wrapped__(how)


@lru_cache(maxsize=4)
def load(how: str) -> Any:
    """The data set that `how` describes: JSON of the arguments of `datasets.load_dataset`. DataError where it fails."""
    datasets = need("datasets", "datasets", "dataset_type=hf")
    arguments = json.loads(how)
    datasets.disable_progress_bars()
    try:
        if arguments.get("saved"):
            return _saved(datasets, arguments)
        return datasets.load_dataset(**arguments)
    except DataError:
        raise
    except Exception as error:  # of the library, of those that it reads with, of those that it asks the hub with
        raise _refusal(arguments, error) from error


def versions(how: str) -> list[str]:
    """What identifies the files of a data set of the hub: a hash of their names, each with its version in it."""
    arguments = json.loads(how)
    part = arguments.pop("split")
    arguments.pop("streaming", None)
    datasets = need("datasets", "datasets", "dataset_type=hf")
    try:
        files = getattr(datasets.load_dataset_builder(**arguments).config, "data_files", None) or {}
    except Exception as error:  # as in `load`
        raise _refusal(arguments, error) from error
    names = "\n".join(map(str, files.get(part, ())))
    return [f"files sha256:{hashlib.sha256(names.encode()).hexdigest()}"] if names else []


def _saved(datasets: Any, arguments: dict[str, Any]) -> Any:
    """A folder that `save_to_disk` made, of one split or of several."""
    found = datasets.load_from_disk(arguments["saved"])
    if not isinstance(found, dict):
        return found
    if arguments["split"] not in found:
        raise ValueError(f"Unknown split {arguments['split']}; there are {', '.join(found)}")
    return found[arguments["split"]]


def _refusal(arguments: dict[str, Any], error: Exception) -> DataError:
    """One sentence for whatever the library said."""
    name = arguments.get("saved") or arguments["path"]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "plit" in lines[0]:  # Unknown split, Bad split
        return DataError(f"hf_path={name}: {lines[0]}. Set train_split or hf_eval_split.", id="data.split")
    cause = f" ({str(error.__cause__).splitlines()[0]})" if error.__cause__ and str(error.__cause__) else ""
    return DataError(
        f"hf_path={name} cannot be loaded: {lines[0]}{cause}. Check hf_path, hf_name, hf_data_dir and the files; "
        "a data set of the hub needs a network.",
        id="data.hub",
    )
