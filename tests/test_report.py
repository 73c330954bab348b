"""The end-of-run block adds up and says where things are."""

import re
from pathlib import Path

import pytest

from MaxText import goodput, report


def attempt(number=1, unaccounted=0, **us):
    return goodput.Attempt(number, 0, us, unaccounted, 0, 0, (0, 9), "done")


def table(text):
    return {name: float(value) for name, value in re.findall(r"^(\S[\w -]*?) +([\d.]+) s +[\d.]+ %$", text, re.M)}


def test_rows_add_up_to_the_wall_clock():
    rows = table(report.wall_clock(attempt(startup=1_500_000, step=8_250_000, save=250_000, unaccounted=1_000_000)))
    assert rows.pop("wall clock") == pytest.approx(11.0) == sum(rows.values())
    assert rows == {"start-up": 1.5, "step": 8.25, "save stall": 0.25, "unaccounted": 1.0}


def test_every_kind_has_a_label():
    assert set(report.LABELS) == set(goodput.KINDS)


def test_one_attempt_is_chosen_and_goodput_covers_all():
    whole = goodput.Report((attempt(1, step=1_000_000), attempt(2, step=2_000_000, eval=1_000_000)))
    first, last = (table(report.summary(whole, attempt=number)) for number in (1, 2))
    assert first["wall clock"] == 1.0 and last["wall clock"] == 3.0
    text = report.summary(whole, files={"metrics": Path("runs/x/metrics.jsonl"), "log": "runs/x/log.txt"})
    assert table(text) == last
    assert "goodput 75.0 % of 4.0 s in 2 attempts" in text
    assert "metrics  runs/x/metrics.jsonl" in text and "log      runs/x/log.txt" in text


def test_nothing_recorded():
    assert report.summary(goodput.Report(()))
    assert "-" not in report.wall_clock(attempt())


def test_the_account_of_the_data():
    summary = {
        "rows": 12, "rows_repeated": 2, "rows_unseen": 0, "epochs": 1.2, "tokens": 1000, "padding": 24,
        "dropped": {"empty": 3}, "parts": {"web": (8, 0.8), "books": (4, 2.0)},
    }  # fmt: skip
    said = report.data(summary, [(f"web:{n}", "is not JSON") for n in range(30)])
    for word in ("12 rows", "1,000 tokens", "24 slots", "1.20 epochs", "2 rows repeated", "3 empty", "web: 8 rows",
                 "books: 4 rows, 2.00 epochs", "left out: web:0 is not JSON", "and 10 more"):  # fmt: skip
        assert word in said
    assert "none" in report.data(summary | {"dropped": {}})
