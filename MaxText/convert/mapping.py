"""A table of rows unrolled for one model: every tensor of the other side ↔ every piece of our arrays, one to one.

Our arrays are stacked over the repeats of a segment; a *piece* is one layer's slice of such an array, or the whole of
an array that belongs to no layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from MaxText import architecture, blueprint
from MaxText.convert.rearrange import Pattern
from MaxText.convert.rows import Row
from MaxText.errors import StorageError

SHOWN = 40


@dataclass(frozen=True)
class Piece:
    """The slice `index` (None: all) of the array at `path`; of it, the slice of one `expert` (None: of all)."""

    path: str
    index: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Link:
    """One tensor of the other side, and the pieces that it holds, each of shape `each`."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    each: tuple[int, ...]
    pattern: Pattern

    def to_theirs(self, read: Callable[[str, int | None, int | None], np.ndarray]) -> np.ndarray:
        """The tensor, from our pieces as `read(path, index, expert)` gives them."""
        arrays = [read(piece.path, piece.index, piece.expert) for piece in self.pieces]
        return self.pattern.to_theirs(arrays[0] if len(arrays) == 1 else np.stack(arrays))

    def to_ours(self, tensor: np.ndarray, piece: Piece) -> np.ndarray:
        """One of our pieces, from the tensor."""
        if len(self.pieces) == 1:
            return self.pattern.to_ours(tensor, self.each)
        return self.pattern.to_ours(tensor, (len(self.pieces), *self.each))[self.pieces.index(piece)]


@dataclass(frozen=True)
class Links:
    """All links of a model, and the links by our pieces."""

    links: tuple[Link, ...]
    of_piece: Mapping[tuple[str, int | None], tuple[Link, ...]]

    def names(self) -> dict[str, Link]:
        """Links by the name of the tensor."""
        return {link.name: link for link in self.links}

    def assemble(
        self, read: Callable[[str], np.ndarray], path: str, index: int | None, expert: int | None = None
    ) -> np.ndarray:
        """Our piece at `path` and `index` (of it, the slice of one expert), from tensors as `read(name)` gives them."""
        found = [
            (link, piece)
            for link in self.of_piece[path, index]
            for piece in link.pieces
            if (piece.path, piece.index) == (path, index) and (expert is None or piece.expert in (None, expert))
        ]
        apart = found[0][1].expert is not None
        if apart and expert is None:
            return self._stacked(read, found)
        (link, piece), *_ = found
        array = link.to_ours(read(link.name), piece)
        return array if apart or expert is None else array[expert]

    @staticmethod
    def _stacked(read: Callable[[str], np.ndarray], found: Sequence[tuple[Link, Piece]]) -> np.ndarray:
        """All experts of a piece, one tensor in memory beside them."""
        first = found[0][0].to_ours(read(found[0][0].name), found[0][1])
        out = np.empty((len(found), *first.shape), first.dtype)
        out[0] = first
        for row, (link, piece) in zip(out[1:], found[1:], strict=True):
            row[...] = link.to_ours(read(link.name), piece)
        return out


def make(cfg: Any, tree: blueprint.Blueprint, rows: Sequence[Row], family: str) -> Links:
    """The links of the model `tree` of `cfg` by the table `rows`.

    Raises:
      StorageError: "convert.no-name" if a parameter has no name in this table. (That no two have the same, and that
        nothing has two names, is asserted: it would be a mistake in the table.)
    """
    shapes = {path: param.shape for path, param in blueprint.leaves(tree)}
    links = [link for part in _parts(cfg, shapes) for link in _unrolled(part, rows)]
    found: dict[tuple[str, int | None], list[Link]] = {}
    for link in links:
        for piece in link.pieces:
            found.setdefault((piece.path, piece.index), []).append(link)
    nameless = sorted(
        {path for part in _parts(cfg, shapes) for path, index, _ in part.leaves.values() if (path, index) not in found}
    )
    if nameless:
        raise StorageError(
            f"{len(nameless)} parameters have no name in the Hugging Face family {family}:\n"
            + "\n".join(f"  {path} {list(shapes[path])}" for path in nameless[:SHOWN])
            + "\nNothing was written. [convert.no-name]",
            id="convert.no-name",
        )
    assert len({link.name for link in links}) == len(links), "two rows give one name"
    pieces = [piece for link in links for piece in link.pieces]
    assert len(set(pieces)) == len(pieces), "two rows name one parameter"
    return Links(tuple(links), {key: tuple(of) for key, of in found.items()})


@dataclass(frozen=True)
class _Part:
    """A layer (`number`), or what belongs to none: its paths as rows name them → (whole path, index, shape of it)."""

    number: int | None
    leaves: dict[str, tuple[str, int | None, tuple[int, ...]]]


def _parts(cfg: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Part]:
    yield _Part(None, {path: (path, None, shape) for path, shape in shapes.items() if not path.startswith("decoder/")})
    for segment in architecture.segments(cfg):
        for repeat in range(segment.repeats):
            for position in range(len(segment.pattern)):
                prefix = f"decoder/{segment.name}/{position}/"
                number = segment.first + repeat * len(segment.pattern) + position
                own = {path: shape[1:] for path, shape in shapes.items() if path.startswith(prefix)}
                yield _Part(number, {path[len(prefix) :]: (path, repeat, shape) for path, shape in own.items()})


def _unrolled(part: _Part, rows: Sequence[Row]) -> Iterator[Link]:
    for row in rows:
        if row.per_layer == (part.number is None) or not set(row.ours) <= set(part.leaves):
            continue
        places = [part.leaves[path] for path in row.ours]
        shape = places[0][2]
        experts: Sequence[int | None] = range(shape[0]) if row.per_expert else (None,)
        each = shape[1:] if row.per_expert else shape
        stacked = each if len(places) == 1 else (len(places), *each)
        if row.pattern.ndim != len(stacked):
            continue
        for expert in experts:
            pieces = tuple(Piece(path, index, expert) for path, index, _ in places)
            name = row.theirs.replace("{i}", str(part.number)).replace("{e}", str(expert))
            yield Link(name, row.pattern.shape(stacked), pieces, each, row.pattern)


def require_fit(mapping: Links, found: Mapping[str, Sequence[int]], where: str) -> None:
    """Raise StorageError ("convert.unfit") with a table unless `found` (shapes by name) is what `mapping` wants."""
    wanted = {link.name: link.shape for link in mapping.links}
    problems = []
    for name in sorted({*wanted, *found}):
        if name not in found:
            problems.append((name, f"missing (the model needs {list(wanted[name])})"))
        elif name not in wanted:
            problems.append((name, f"{list(found[name])} has no place in the model"))
        elif tuple(found[name]) != wanted[name]:
            problems.append((name, f"is {list(found[name])}, the model needs {list(wanted[name])}"))
    if not problems:
        return
    width = max(len(name) for name, _ in problems[:SHOWN])
    shown = [f"  {name:<{width}}  {problem}" for name, problem in problems[:SHOWN]]
    shown += [f"  ... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise StorageError(
        f"{where} does not fit its configuration: {len(problems)} of {len({*wanted, *found})} tensors.\n"
        + "\n".join(shown)
        + "\nNothing was written. Check that config.json belongs to these weights. [convert.unfit]",
        id="convert.unfit",
    )
