"""Parquet through pyarrow: one unit for each row group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from MaxText.data.sources import open_binary
from MaxText.data.units import Item, Unit, content, missing_column, reading
from MaxText.tokenizer.library import need


def split(unit: Unit) -> list[Unit]:
    file = _open(unit)
    with reading(unit):
        names = file.schema_arrow.names
        if unit.column not in names:
            raise missing_column(unit, ", ".join(names) or "nothing")
        groups = range(file.metadata.num_row_groups)
        sizes = [file.metadata.row_group(i).total_byte_size for i in groups]
    return [replace(unit, start=i, stop=i + 1, size=size) for i, size in zip(groups, sizes, strict=True)]


def read(unit: Unit) -> Iterator[Item]:
    file = _open(unit)
    with reading(unit):
        for batch in file.iter_batches(row_groups=list(range(unit.start, unit.stop)), columns=[unit.column]):
            for value in batch.column(0).to_pylist():
                yield content(unit, value)


def _open(unit: Unit) -> Any:
    parquet = need("pyarrow.parquet", "pyarrow", f"{unit.name} (Parquet)")
    with reading(unit):
        file = unit.path if "://" not in unit.path else open_binary(unit.path)
        return parquet.ParquetFile(file, page_checksum_verification=True)  # of pages that have one
