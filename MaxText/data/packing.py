"""First fit and best fit: which documents share a row. Planned once over all documents, then only looked up.

A document of more than a row is cut into whole rows and a rest; a shorter one is never cut. The pieces that are no
whole row are placed in the order of the documents:

- first fit: into the first row, by the order in which rows were opened, that has room;
- best fit: into the row that then has the least room left; of equal ones into the one that has had that room longest.

All rows stay open to the end: the plan depends on the documents and the row length alone, not on a window, a batch or a
number of workers. A piece of n tokens takes n-1 slots (pairs), as everywhere in `rows`.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.data import sealed

PLAN_VERSION = 1  # part of the cache's key and of the data fingerprint


class Plan(NamedTuple):
    """Pieces in the order of rows. All int64.

    document, offset, pairs [pieces]: piece = pairs `offset` .. `offset + pairs - 1` of the document.
    first [rows + 1]: row r holds the pieces first[r] .. first[r + 1] - 1.
    """

    document: np.ndarray
    offset: np.ndarray
    pairs: np.ndarray
    first: np.ndarray


def plan(lengths: np.ndarray, length: int, kind: str, cache: str = "") -> Plan:
    """The plan for documents of `lengths` tokens in rows of `length` slots; kind: first_fit or best_fit.

    cache: a folder where plans are kept by what they depend on; "" = none.
    """
    where = _cached(lengths, length, kind, cache)
    if where and (kept := _kept(*where)):
        return kept
    made = _plan(lengths.astype(np.int64) - 1, length, kind)
    if where:
        _keep(made, *where)
    return made


def alone(lengths: np.ndarray, length: int) -> Plan:
    """The plan of packing=false: each piece has a row of its own."""
    document, offset, size = _pieces(lengths.astype(np.int64) - 1, length)
    return Plan(document, offset, size, np.arange(len(size) + 1))


def _plan(pairs: np.ndarray, length: int, kind: str) -> Plan:
    document, offset, size = _pieces(pairs, length)
    part = np.flatnonzero(size < length)
    row = np.arange(len(size))
    place: Callable[[list[int], int], list[int]] = _first_fit if kind == "first_fit" else _best_fit
    shared = np.array(place(size[part].tolist(), length), np.int64)
    # A row is numbered by its first piece, so that the order of rows is that of the documents.
    opener = np.full(len(size), len(size), np.int64)
    np.minimum.at(opener, shared, part)
    row[part] = opener[shared]
    order = np.lexsort((np.arange(len(size)), row))
    _, first = np.unique(row[order], return_index=True)
    return Plan(document[order], offset[order], size[order], np.append(first, len(size)))


def _pieces(pairs: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents cut at the row length: document, first pair in it and pairs of each piece."""
    per_document = -(-pairs // length)
    document = np.repeat(np.arange(len(pairs)), per_document)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    offset = nth * length
    return document, offset, np.minimum(pairs[document] - offset, length)


def _first_fit(sizes: list[int], length: int) -> list[int]:
    """The row of each piece. A tree holds in each node the most room in a row below it, so a piece takes log(rows)."""
    leaves = 1 << max(len(sizes) - 1, 1).bit_length()
    room = [length] * (2 * leaves)  # node i has the children 2i and 2i + 1; row r is leaf `leaves + r`
    rows = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < size
        rows.append(node - leaves)
        room[node] -= size
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return rows


def _best_fit(sizes: list[int], length: int) -> list[int]:
    """The row of each piece. Rows by the room they have left; an integer has a bit set for each room that occurs."""
    with_room: list[deque[int]] = [deque() for _ in range(length + 1)]
    rooms = count = 0
    rows = []
    for size in sizes:
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            row = with_room[room].popleft()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = length, count
            count += 1
        rows.append(row)
        left = room - size
        if left:
            with_room[left].append(row)
            rooms |= 1 << left
    return rows


def _cached(lengths: np.ndarray, length: int, kind: str, cache: str) -> tuple[Path, str] | None:
    """The file of a plan, and its key: what the plan depends on."""
    if not cache:
        return None
    sha = hashlib.sha256(f"{PLAN_VERSION} {kind} {length} {len(lengths)} ".encode())
    sha.update(np.ascontiguousarray(lengths, np.int64).tobytes())
    key = sha.hexdigest()
    return Path(cache).expanduser() / f"plan-{key[:32]}.npz", key


def _kept(where: Path, key: str) -> Plan | None:
    """The plan of an earlier start; None where there is none, or a damaged one, which is then made again."""
    try:
        found = sealed.load(where)
        if str(found.get("key")) != key:
            raise sealed.Broken("it is of other data")
        return Plan(*(found[name] for name in Plan._fields))
    except FileNotFoundError:
        return None
    except (OSError, sealed.Broken) as error:
        print(f"warning: the packing plan {where} is damaged ({error}) and made again.", file=sys.stderr)
        return None


def _keep(made: Plan, where: Path, key: str) -> None:
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        sealed.save(where, **made._asdict(), key=np.array(key))
    except OSError as error:
        print(
            f"warning: the packing plan is not kept for the next start: {error}. See data_cache_dir.", file=sys.stderr
        )
