"""Parquet through pyarrow: one unit for each row group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from MaxText.data.sources import open_binary, unreadable
from MaxText.data.units import Item, Unit, content, damaged, missing_column
from MaxText.tokenizer.library import need


def split(unit: Unit) -> list[Unit]:
    file = _open(unit)
    names = file.schema_arrow.names
    if unit.column not in names:
        raise missing_column(unit, ", ".join(names) or "nothing")
    groups = range(file.metadata.num_row_groups)
    sizes = [file.metadata.row_group(i).total_byte_size for i in groups]
    return [replace(unit, start=i, stop=i + 1, size=size) for i, size in zip(groups, sizes, strict=True)]


def read(unit: Unit) -> Iterator[Item]:
    file = _open(unit)
    try:
        for batch in file.iter_batches(row_groups=list(range(unit.start, unit.stop)), columns=[unit.column]):
            for value in batch.column(0).to_pylist():
                yield content(unit, value)
    except (_arrow().ArrowException, OSError) as error:
        raise damaged(unit, error) from error


def _arrow() -> Any:
    return need("pyarrow", "pyarrow", "Parquet")


def _open(unit: Unit) -> Any:
    parquet = need("pyarrow.parquet", "pyarrow", f"{unit.name} (Parquet)")
    try:
        return parquet.ParquetFile(unit.path if "://" not in unit.path else open_binary(unit.path))
    except _arrow().ArrowException as error:
        raise damaged(unit, error) from error
    except OSError as error:
        raise (damaged(unit, error) if error.errno is None else unreadable(unit.name, error)) from error
