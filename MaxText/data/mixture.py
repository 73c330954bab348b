"""Which part of a mixture gives each row: arithmetic on (seed, row), with no state, like `order`.

The rows of a run are dealt in periods of 4,096. In a period every part gives its share, a whole number of rows, in an
order that is a permutation keyed by (seed, stage, period). So after whole periods the shares are exact, in between they
stray like cards dealt from a deck, and the n-th row that a part gives is known for every n without counting. A share
is rounded to 1/4,096. A schedule is a list of stages; a new one begins with its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from MaxText.data.order import fold, permute

PERIOD = 4096
MIXTURE_VERSION = "deck-4096"  # part of the data fingerprint: change it whenever the parts of a step change


@dataclass(frozen=True)
class Stage:
    """From global row `first` on, each period has `counts` rows of the parts; `before` [K] were given by then."""

    first: int
    counts: tuple[int, ...]
    before: tuple[int, ...]


@dataclass(frozen=True)
class Mixture:
    """The parts of every global row. Made by `make`."""

    stages: tuple[Stage, ...]
    seed: int

    def at(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """For the global rows first .. stop-1: the part of each, and how many rows that part gave before it. int64."""
        part, nth = np.empty(stop - first, np.int64), np.empty(stop - first, np.int64)
        at = first
        while at < stop:
            number, stage = self._stage(at)
            period, within = divmod(at - stage.first, PERIOD)
            end = min(stop, at + PERIOD - within, self._end(number))
            parts, ranks = _deck(stage.counts, self.seed, number, period)
            chosen = parts[within : within + end - at]
            given = np.array(stage.before) + period * np.array(stage.counts)
            part[at - first : end - first] = chosen
            nth[at - first : end - first] = given[chosen] + ranks[within : within + end - at]
            at = end
        return part, nth

    def given(self, rows: int) -> np.ndarray:
        """How many of the first `rows` global rows each part gives, int64 [K]."""
        number, stage = self._stage(max(rows - 1, 0))
        period, within = divmod(rows - stage.first, PERIOD)
        parts, _ = _deck(stage.counts, self.seed, number, period)
        counts = np.array(stage.counts, np.int64)
        return np.array(stage.before) + period * counts + np.bincount(parts[:within], minlength=len(counts))

    def _stage(self, row: int) -> tuple[int, Stage]:
        number = sum(stage.first <= row for stage in self.stages) - 1
        return number, self.stages[number]

    def _end(self, number: int) -> int:
        return self.stages[number + 1].first if number + 1 < len(self.stages) else 1 << 62


def make(weights: Sequence[tuple[int, Sequence[float]]], seed: int) -> Mixture:
    """weights: (first global row, shares of the parts, summing to 1) of each stage; the first begins with row 0."""
    stages: list[Stage] = []
    for first, shares in weights:
        counts = shares_of_period(shares)
        before = tuple(Mixture(tuple(stages), seed).given(first).tolist()) if stages else (0,) * len(counts)
        stages.append(Stage(first, counts, before))
    return Mixture(tuple(stages), seed)


def shares_of_period(shares: Sequence[float]) -> tuple[int, ...]:
    """Whole rows of a period: rounded down, then one more for those that lost most, until the sum is right."""
    exact = np.array(shares, np.float64) * PERIOD / sum(shares)
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")[: PERIOD - int(counts.sum())]
    counts[most] += 1
    return tuple(counts.tolist())


@lru_cache(maxsize=16)
def _deck(counts: tuple[int, ...], seed: int, stage: int, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each place in a period: its part, and the rank among the places of that part."""
    key = fold(seed, np.full(1, (stage + 1 << 48) + period))
    places = permute(np.arange(PERIOD), PERIOD, np.repeat(key, PERIOD))
    parts = np.searchsorted(np.cumsum(counts), places, "right")
    ranks = np.empty(PERIOD, np.int64)
    for part, count in enumerate(counts):
        ranks[parts == part] = np.arange(count)
    return parts, ranks
