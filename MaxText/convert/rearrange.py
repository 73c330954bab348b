"""One notation for every difference of shape: "d n h -> (n h) d".

On the left the dims of our array, on the right those of the other side's tensor, which letters in brackets make up
together, the first slowest. `p` counts our arrays that one tensor holds (query, key, value; gate and up): they are
stacked, p first. `t` has size 2; "1" on the right is a dim of size 1."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

KNOWN_SIZES = {"t": 2, "1": 1}


@dataclass(frozen=True)
class Pattern:
    """A parsed notation. It moves values and never changes them, so norms of gradients survive it."""

    text: str

    @cached_property
    def _sides(self) -> tuple[list[list[str]], list[list[str]]]:
        ours, theirs = self.text.split("->")
        return _groups(ours), _groups(theirs)

    @property
    def ndim(self) -> int:
        """Dims of our array (with `p`, if it is there)."""
        return len(self._sides[0])

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor, where our array has shape `ours`."""
        sizes = self._sizes(ours)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self._sides[1])

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """The tensor that `array` is on the other side."""
        left, right = (_flat(side) for side in self._sides)
        sizes = self._sizes(array.shape)
        pieces = array.reshape([sizes[letter] for letter in left])
        order = [left.index(letter) for letter in right if letter != "1"]
        return pieces.transpose(order).reshape(self.shape(array.shape))

    def to_ours(self, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Our array, of shape `shape`, that `tensor` is on this side."""
        left, right = (_flat(side) for side in self._sides)
        right = [letter for letter in right if letter != "1"]
        sizes = self._sizes(shape)
        pieces = tensor.reshape([sizes[letter] for letter in right])
        return pieces.transpose([right.index(letter) for letter in left]).reshape(tuple(shape))

    def _sizes(self, ours: Sequence[int]) -> dict[str, int]:
        sizes = dict(KNOWN_SIZES)
        groups = self._sides[0]
        assert len(groups) == len(ours), f"{self.text} for an array of shape {tuple(ours)}"
        for group, size in zip(groups, ours, strict=True):
            known = math.prod(sizes[letter] for letter in group if letter in KNOWN_SIZES)
            (free,) = [letter for letter in group if letter not in KNOWN_SIZES]
            assert size % known == 0, f"{self.text}: {size} is no multiple of {known}"
            sizes[free] = size // known
        return sizes


def _groups(side: str) -> list[list[str]]:
    return [found.strip("()").split() for found in re.findall(r"\([^)]*\)|\S+", side)]


def _flat(groups: Sequence[Sequence[str]]) -> list[str]:
    return [letter for group in groups for letter in group]
