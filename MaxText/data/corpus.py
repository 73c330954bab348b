"""Units to token ids: every document of a source, tokenized, with its name; what could not be used, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from MaxText.data import units
from MaxText.data.formats.tokens import Stored
from MaxText.data.units import Fault, Unit
from MaxText.errors import DataError
from MaxText.tokenizer import Tokenizer

_SHOWN = 5  # bad documents in one message


class Stream(Protocol):
    """Token ids in a line: an array in memory, a file, or a Chain of them."""

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> np.ndarray:
        """ids at `index`, of its shape."""


@dataclass(frozen=True)
class Words:
    """How a document becomes ids. vocabulary: of the model; refuse: a bad document is an error."""

    tokenizer: Tokenizer
    vocabulary: int
    add_bos: bool
    add_eos: bool
    refuse: bool = True

    @property
    def dtype(self) -> type[np.integer]:
        """The narrowest type that holds every id of the model."""
        return np.uint16 if self.vocabulary <= 1 << 16 else np.int32


class Part(NamedTuple):
    """The documents of one unit. records: numbers in the unit; seen: how many numbers it has, unused ones included.

    tokens: ids of all used documents, one after the other, [tokens]; lengths: tokens of each, [D], at least 2.
    """

    tokens: np.ndarray | Stored
    lengths: np.ndarray
    records: np.ndarray
    text_bytes: np.ndarray  # of each, [D]
    seen: int
    dropped: dict[str, int]
    bad: list[tuple[int, Fault]]


class Span(NamedTuple):
    """A file of a corpus: its documents begin with document `first`; their numbers are `records` of it."""

    name: str
    reader: str
    first: int


@dataclass(frozen=True)
class Corpus:
    """All used documents of a source, [D]. bad: the name and fault of each document that could not be read."""

    tokens: Stream
    lengths: np.ndarray
    records: np.ndarray
    files: tuple[Span, ...]
    text_bytes: int
    dropped: dict[str, int]
    bad: tuple[tuple[str, str], ...] = field(default=())


class Chain:
    """Arrays and files of token ids, read as one without copying them."""

    def __init__(self, arrays: Sequence[Stream]):
        self.arrays = list(arrays)
        self.starts = np.cumsum([0, *(len(a) for a in self.arrays)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, index: np.ndarray) -> np.ndarray:
        which = np.searchsorted(self.starts, index, "right") - 1
        out = np.empty(index.shape, np.int64)
        for i in np.unique(which):
            here = which == i
            out[here] = self.arrays[i].take(index[here] - self.starts[i])
        return out


def tokenize(unit: Unit, words: Words, enough: int = 0) -> Part:
    """The documents of `unit` as ids; with enough=n only the first ones, until they give n pairs.

    Raises DataError for a damaged file, an id beyond the model's vocabulary and, if words.refuse, a bad document.
    """
    if unit.reader == "tokens":
        return _ready_made(unit, words)
    ids: list[np.ndarray] = []
    records: list[int] = []
    sizes: list[int] = []
    dropped: Counter[str] = Counter()
    bad: list[tuple[int, Fault]] = []
    seen = pairs = 0
    for seen, item in enumerate(units.read(unit), 1):
        if item.content is None and item.fault is None:
            continue
        found = item.fault or encode(item.content, words, unit.name)
        if isinstance(found, Fault):
            bad.append((seen - 1, found))
        elif item.content is None or not len(item.content):
            dropped["empty"] += 1
        elif len(found) < 2:
            dropped["single token"] += 1
        else:
            ids.append(found)
            records.append(seen - 1)
            sizes.append(len(item.content) if isinstance(item.content, bytes) else 0)
            pairs += len(found) - 1
            if enough and pairs >= enough:
                break
    if bad and words.refuse:
        raise refusal(unit, bad)
    return Part(*join(ids, words.dtype), _int64(records), _int64(sizes), seen, dict(dropped), bad)


def build(
    parts: Iterable[tuple[Unit, Part]],
    dtype: type[np.integer],
    held_out_every: int = 0,
    held_out: bool = False,
    sink: Callable[[np.ndarray], object] | None = None,
) -> Corpus:
    """The corpus of all parts, in order. With held_out_every=n, of every n-th document only (held_out), or of the rest.

    The n-th documents are counted over everything that the source holds, used or not. Tokens go to `sink` if there is
    one, and then the corpus has none.
    """
    kept: list[tuple[np.ndarray | Stored, np.ndarray, np.ndarray, int]] = []
    spans: list[Span] = []
    dropped: Counter[str] = Counter()
    bad: list[tuple[str, str]] = []
    documents = before = base = 0  # used so far; seen in all earlier units; seen in earlier units of this file
    for unit, part in parts:
        if not spans or unit.name != spans[-1].name:
            spans.append(Span(unit.name, unit.reader, documents))
            base = 0
        base = unit.start if unit.reader in units.COUNTED else base
        chosen = _chosen(before + part.records, held_out_every, held_out)
        tokens = part.tokens if chosen.all() else _only(part.tokens, np.repeat(chosen, part.lengths))
        lengths = part.lengths[chosen]
        if sink:
            sink(np.asarray(tokens))
            tokens = np.zeros(0, dtype)
        kept.append((tokens, lengths, base + part.records[chosen], int(part.text_bytes[chosen].sum())))
        documents += len(lengths)
        if not held_out:
            dropped.update(part.dropped | ({"unreadable": len(part.bad)} if part.bad else {}))
            bad += [(units.document_name(unit, base + record), fault.text) for record, fault in part.bad]
        base, before = base + part.seen, before + part.seen
    return Corpus(
        tokens=_whole([tokens for tokens, *_ in kept if len(tokens)], dtype),
        lengths=_joined([lengths for _, lengths, _, _ in kept]),
        records=_joined([records for _, _, records, _ in kept]),
        files=tuple(spans),
        text_bytes=sum(size for *_, size in kept),
        dropped=dict(dropped),
        bad=tuple(bad),
    )


def join(documents: Sequence[np.ndarray], dtype: type[np.integer]) -> tuple[np.ndarray, np.ndarray]:
    """One stream [tokens] of `dtype` and the length of each document [D]."""
    parts = [d.astype(dtype, copy=False) for d in documents]
    return np.concatenate(parts) if parts else np.zeros(0, dtype), _int64([len(p) for p in parts])


def refusal(unit: Unit, bad: list[tuple[int, Fault]]) -> DataError:
    """One error for all bad documents of a unit."""
    # In the middle of a file that is not counted, the number is not known yet; the byte offset is.
    exact = unit.reader in units.COUNTED or unit.start == 0
    base = unit.start if unit.reader in units.COUNTED else 0
    names = [units.document_name(unit, base + record) if exact else unit.name for record, _ in bad]
    shown = "; ".join(f"{name} {fault.text}" for name, (_, fault) in list(zip(names, bad, strict=True))[:_SHOWN])
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    cure = "Mend it, or set bad_documents=drop: what cannot be read is then left out and counted."
    return DataError(f"{shown}{more}. {cure}", id=bad[0][1].id)


def encode(content: bytes | np.ndarray | None, words: Words, name: str) -> np.ndarray | Fault:
    """The ids of a document, special tokens placed; or why it has none. DataError for ids beyond the vocabulary."""
    if isinstance(content, bytes):
        return _encoded(content, words, name)
    assert content is not None
    if len(content) and not 0 <= content.min() <= content.max() < words.vocabulary:
        return Fault("data.token-range", _out_of_range(content, words))
    return content


def _encoded(text: bytes, words: Words, name: str) -> np.ndarray | Fault:
    if fault := not_text(text):
        return fault
    bos = [words.tokenizer.bos_id] if words.add_bos else []
    eos = [words.tokenizer.eos_id] if words.add_eos else []
    ids = np.concatenate([np.array(bos, np.int32), words.tokenizer.encode(text), np.array(eos, np.int32)])
    _check_range(ids, words, name)
    return ids


def not_text(content: bytes) -> Fault | None:
    """Why these bytes are no text; None if they are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return Fault("data.encoding", _not_utf8(content, error))
    return None


def _not_utf8(text: bytes, error: UnicodeDecodeError) -> str:
    return (
        f"is not UTF-8: {error.reason} at byte offset {error.start} "
        f"(0x{text[error.start]:02x}, line {text.count(10, 0, error.start) + 1}); "
        "convert it, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW"
    )


def _out_of_range(ids: np.ndarray, words: Words) -> str:
    low, high = ids.min(), ids.max()
    return f"holds ids {low}..{high}, not all within 0..{words.vocabulary - 1} (vocab_size={words.vocabulary})"


def _check_range(ids: np.ndarray, words: Words, name: str) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < words.vocabulary:
        says = f"; the tokenizer says it has {words.tokenizer.vocab_size}"
        raise DataError(f"{name} {_out_of_range(ids, words)}{says}.", id="data.token-range")


def _ready_made(unit: Unit, words: Words) -> Part:
    """A file of ids: a document ends with an eos id, or with the file."""
    ids = Stored(unit, words.vocabulary)
    if not len(ids):
        raise DataError(f"{unit.name} holds no token ids.", id="data.empty-file")
    ends = _ends(ids, words, unit.name)
    if not len(ends) or ends[-1] != len(ids):
        ends = np.append(ends, len(ids))
    lengths = np.diff(ends, prepend=0)
    single = lengths < 2
    used = ids.only(np.repeat(~single, lengths)) if single.any() else ids  # only then is it copied
    records = np.flatnonzero(~single)
    dropped = {"single token": int(single.sum())} if single.any() else {}
    return Part(used, lengths[~single], records, np.zeros(len(records), np.int64), len(lengths), dropped, [])


def _ends(ids: Stored, words: Words, name: str) -> np.ndarray:
    """One past each eos id; all ids are checked on the way."""
    found = [_int64([])]
    for first, some in ids.scan():
        _check_range(some, words, name)
        if words.tokenizer.eos_id is not None:
            found.append(first + 1 + np.flatnonzero(some == words.tokenizer.eos_id))
    return np.concatenate(found)


def _chosen(numbers: np.ndarray, every: int, held_out: bool) -> np.ndarray:
    if not every:
        return np.ones(len(numbers), bool)
    return (numbers % every == every - 1) == held_out


def _whole(parts: list[np.ndarray | Stored], dtype: type[np.integer]) -> Stream:
    """One array where they are in memory and of one type; what is stored stays where it is."""
    arrays = [part for part in parts if isinstance(part, np.ndarray) and part.dtype == dtype]
    if len(arrays) == len(parts):
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return parts[0] if len(parts) == 1 else Chain(parts)


def _only(tokens: np.ndarray | Stored, mask: np.ndarray) -> np.ndarray:
    return tokens[mask] if isinstance(tokens, np.ndarray) else tokens.only(mask)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else _int64([])


def _int64(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)
