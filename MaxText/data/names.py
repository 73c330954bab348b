"""The names of documents: file and number in it, for `data show` and for the quarantine."""

from __future__ import annotations

import difflib
import posixpath
from dataclasses import dataclass

import numpy as np

from MaxText.data.corpus import Span
from MaxText.data.units import name_of
from MaxText.errors import DataError


@dataclass(frozen=True)
class Names:
    """Document → name and back. records: the number of each document in its file, [D]."""

    files: tuple[Span, ...]
    records: np.ndarray

    def name(self, document: int) -> str:
        span = self.files[int(np.searchsorted([f.first for f in self.files], document, "right")) - 1]
        return name_of(span.name, span.reader, int(self.records[document]))

    def find(self, name: str) -> int | None:
        """The document of that name, whose file may be given by the last parts of its path; None if there is none."""
        for number, span in enumerate(self.files):
            stop = self.files[number + 1].first if number + 1 < len(self.files) else len(self.records)
            record = _record(name, span)
            if record is None:
                continue
            found = np.flatnonzero(self.records[span.first : stop] == record)
            if len(found):
                return span.first + int(found[0])
        return None


def _record(name: str, span: Span) -> int | None:
    """The number in the file of `span` that `name` means; None if it is of another file."""
    if span.reader == "text":
        return 0 if _same_file(name, span.name) else None
    file, mark, number = name.rpartition(":" if span.reader == "jsonl" else "#")
    if not mark or not number.isdecimal() or not _same_file(file, span.name):
        return None
    return int(number) - (span.reader == "jsonl")


def _same_file(given: str, name: str) -> bool:
    given, name = canonical(given), canonical(name)
    return name == given or name.endswith("/" + given)


def canonical(name: str) -> str:
    """One spelling for `./web.jsonl:3`, `sub/../web.jsonl:3` and `web.jsonl:3`: what a fingerprint has of a name."""
    return name if "://" in name else posixpath.normpath(name)


def quarantined(names: list[Names], wanted: tuple[str, ...]) -> list[np.ndarray]:
    """The documents that are to train nothing, sorted, for each part. DataError for a name of which there is none."""
    found: list[list[int]] = [[] for _ in names]
    unknown = []
    for name in wanted:
        hits = [(part, document) for part, one in enumerate(names) if (document := one.find(name)) is not None]
        for part, document in hits:
            found[part].append(document)
        if not hits:
            unknown.append(name)
    if unknown:
        files = [span.name for one in names for span in one.files]
        near = difflib.get_close_matches(unknown[0], files, n=1, cutoff=0.3) or files[:1]
        raise DataError(
            f"quarantine names {', '.join(unknown)}, and there is no such document; a name is a file and a number, "
            f"such as {near[0]}:17 or {near[0]}#17, as `python -m MaxText data show CONFIG step=N` prints it.",
            id="data.quarantine",
        )
    return [np.array(sorted(set(documents)), np.int64) for documents in found]
