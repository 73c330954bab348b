"""Fits the shares of `configs/efficiency.yml` to published step times, and says how far off the result is.

    python -m benchmarks.calibrate            print errors: fitted, each model left out, each chip left out
    python -m benchmarks.calibrate write      the same, and write configs/efficiency.yml

Fitted are the logarithms of eight shares and of one factor per chip, by least squares on the logarithm of modelled over
published seconds. Rows of one model on one chip weigh together as one. A weak pull toward the values of `PRIOR` (its
spread is the third column) keeps what the rows do not show where it was; it weighs a twentieth of a row. Beside each
error stands that of the simplest model there is: the mean MFU of the training rows on that chip (of all chips, for one
that was left out). Prints one JSON line last.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published import Row, rows
from MaxText.cost import Efficiency, timing

FILE = Path(__file__).parents[1] / "configs/efficiency.yml"
# name: start, greatest value, spread of its logarithm
PRIOR = {
    "matmul": (0.95, 1.0, 0.1),
    "grouped": (0.6, 1.0, 0.3),
    "attention": (0.5, 1.0, 0.4),
    "intensity": (1000.0, 1e4, 0.6),
    "stream": (0.8, 1.0, 0.2),
    "exposed": (0.15, 1.0, 0.7),
    "host": (0.8, 1.0, 0.3),
    "straggler": (0.022, 1.0, 0.5),
    "straggler_power": (0.47, 1.0, 0.3),
}
CHIP_SPREAD, PULL = 0.08, 0.05
# Measured by microbenchmarks (179 of 200 GB/s in an all-gather on TPU7x 2x2x1), and not by these rows.
FIXED = {"links": 0.85, "network": 0.7}


def efficiency(logarithms: np.ndarray, chips: Sequence[str]) -> Efficiency:
    """The point of the search as shares: one logarithm per entry of PRIOR, then one per chip."""
    shares = {
        name: min(start * float(np.exp(u)), most)
        for (name, (start, most, _)), u in zip(PRIOR.items(), logarithms[: len(PRIOR)], strict=True)
    }
    factors = np.exp(logarithms[len(PRIOR) :])
    return Efficiency(**shares, **FIXED, chips=dict(zip(chips, map(float, factors), strict=True)))


def busiest(train: Sequence[Row]) -> float:
    """The most that a published step made of the rate that its chip's own matmuls reach; fact, not fit."""
    return max(row.ideal.fed / row.seconds for row in train)


def fit(train: Sequence[Row]) -> Efficiency:
    """The shares that fit these rows best."""
    chips = sorted({row.chip for row in train})
    alike = Counter((row.chip, row.model) for row in train)
    weights = np.array([alike[row.chip, row.model] ** -0.5 for row in train])
    spreads = np.array([spread for *_, spread in PRIOR.values()] + [CHIP_SPREAD] * len(chips))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        found = efficiency(logarithms, chips)
        errors = [np.log(timing.seconds(row.ideal, found).total / row.seconds) for row in train]
        return np.concatenate([weights * errors, PULL * logarithms / spreads])

    found = efficiency(least_squares(residuals, np.zeros(len(spreads))).x, chips)
    seen = {"rows": dict(Counter(row.chip for row in train)), "most_slices": max(row.ideal.slices for row in train)}
    return replace(found, busiest=busiest(train), **seen)


def errors(test: Sequence[Row], found: Efficiency) -> list[float]:
    """Modelled over published seconds, minus one."""
    return [timing.seconds(row.ideal, found).total / row.seconds - 1 for row in test]


def mfu(row: Row) -> float:
    assert row.hardware.slice is not None
    chip = row.hardware.slice.chip
    return row.plan.flops_per_step_per_device / row.seconds / (chip.peak("bfloat16") / chip.devices_per_chip)


def errors_of_mean(test: Sequence[Row], train: Sequence[Row]) -> list[float]:
    """The same for a table of the mean MFU of each chip."""
    found = []
    for row in test:
        like = [mfu(other) for other in train if other.chip == row.chip] or [mfu(other) for other in train]
        found.append(mfu(row) / float(np.mean(like)) - 1)
    return found


def median(values: Sequence[float]) -> float:
    return round(float(np.median(np.abs(values))), 4)


def left_out(every: Sequence[Row], field: str) -> dict[str, tuple[list[float], list[float]]]:
    """For every value of `field`: errors of its rows by a fit to all others, and by the mean MFU of the others."""
    found = {}
    for value in sorted({getattr(row, field) for row in every}):
        train = [row for row in every if getattr(row, field) != value]
        test = [row for row in every if getattr(row, field) == value]
        found[value] = (errors(test, fit(train)), errors_of_mean(test, train))
    return found


def overall(found: dict[str, tuple[list[float], list[float]]]) -> tuple[float, float]:
    """(median, worst) error of all rows that were left out."""
    ours = [e for pair in found.values() for e in pair[0]]
    return median(ours), round(max(map(abs, ours)), 4)


def table(title: str, found: dict[str, tuple[list[float], list[float]]]) -> list[str]:
    lines = [f"\n| {title} | rows | median error | worst | mean MFU instead |", "| --- | --- | --- | --- | --- |"]
    for value, (ours, mean) in found.items():
        worst = max(ours, key=abs)
        lines.append(f"| {value} | {len(ours)} | {median(ours):.1%} | {worst:+.1%} | {median(mean):.1%} |")
    ours, mean = ([e for pair in found.values() for e in pair[i]] for i in (0, 1))
    worst = max(ours, key=abs)
    return [*lines, f"| **all** | {len(ours)} | **{median(ours):.1%}** | {worst:+.1%} | {median(mean):.1%} |"]


def written(found: Efficiency) -> str:
    """The file that the planner reads."""
    lines = [
        "# Written by `python -m benchmarks.calibrate write` from benchmarks/published/; do not edit.",
        "# What each number means: MaxText/cost/efficiency.py.",
    ]
    lines += [f"{name}: {getattr(found, name):.4g}" for name in (*PRIOR, *FIXED, "busiest", "most_slices")]
    lines += ["chips:", *[f"  {chip}: {value:.4g}" for chip, value in found.chips.items()]]
    lines += ["rows:", *[f"  {chip}: {found.rows[chip]}" for chip in found.chips]]
    lines += [f"{name}: [{', '.join(map(str, getattr(found, name)))}]" for name in ("model_left_out", "chip_left_out")]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    every = rows()
    found = fit(every)
    fitted = dict(zip((row.id for row in every), errors(every, found), strict=True))
    print("| row | model | chip | published s | modelled | \n| --- | --- | --- | --- | --- |")
    for row in every:
        print(f"| {row.id} | {row.model} | {row.hardware.slice.name} | {row.seconds:.3f} | {fitted[row.id]:+.1%} |")
    by_model, by_chip = left_out(every, "model"), left_out(every, "chip")
    print("\n".join(table("model left out", by_model) + table("chip left out", by_chip)))
    found = replace(found, model_left_out=overall(by_model), chip_left_out=overall(by_chip))
    print("\n" + written(found))
    if "write" in arguments:
        FILE.write_text(written(found), encoding="utf-8")
    result = {"rows": len(every), "fitted": median(list(fitted.values()))}
    result |= {"model_left_out": found.model_left_out[0], "chip_left_out": found.chip_left_out[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
