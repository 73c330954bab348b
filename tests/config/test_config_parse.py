"""Text is read by the declared type, never by what it looks like."""

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.config import parse
from MaxText.config.fields import INT_LIMIT

TEXTS = tuple[str, ...]


@pytest.mark.parametrize(
    ("raw", "kind", "expected"),
    [
        ("600", int, 600),
        ("1e3", int, 1000),
        ("1E3", int, 1000),
        ("1_000", int, 1000),
        ("1000.0", int, 1000),
        ("1.5e1", int, 15),
        (" -1 ", int, -1),
        ("+2", int, 2),
        ("010", int, 10),
        ("0e5", int, 0),
        (7, int, 7),
        (7.0, int, 7),
        (np.int64(7), int, 7),
        ("1e-3", float, 1e-3),
        ("1E-3", float, 1e-3),
        ("3", float, 3.0),
        (".5", float, 0.5),
        ("5.", float, 5.0),
        ("1_000.5", float, 1000.5),
        (2, float, 2.0),
        (np.float64(0.25), float, 0.25),
        ("none", int | None, None),
        ("None", int | None, None),
        ("", int | None, None),
        (None, int | None, None),
        ("3", int | None, 3),
        ("none", str, "none"),
        ("1e3", str, "1e3"),
        ("", str, ""),
        ("yes", str, "yes"),
        ("float32", Literal["float32"], "float32"),
        ("[gelu,linear]", TEXTS, ("gelu", "linear")),
        ("[ gelu , linear, ]", TEXTS, ("gelu", "linear")),
        ("messages", TEXTS, ("messages",)),
        ("a,b", TEXTS, ("a,b",)),
        ("", TEXTS, ()),
        ("[]", TEXTS, ()),
        ("['a,b', \"c d\", e]", TEXTS, ("a,b", "c d", "e")),
        ("[it's.txt, *.txt, c:d]", TEXTS, ("it's.txt", "*.txt", "c:d")),
        (["a", "b"], TEXTS, ("a", "b")),
        (("1", 2), tuple[int, ...], (1, 2)),
    ],
)
def test_value(raw, kind, expected):
    found = parse.value(raw, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("word", ["yes", "true", "on", "1", "True", "YES", "y"])
def test_true(word):
    assert parse.value(word, bool) is True


@pytest.mark.parametrize("word", ["no", "false", "off", "0", "False", "NO", "n"])
def test_false(word):
    assert parse.value(word, bool) is False


@pytest.mark.parametrize(
    ("raw", "kind", "id"),
    [
        ("abc", int, "config.type"),
        ("", int, "config.type"),
        ("none", int, "config.type"),
        (None, int, "config.type"),
        ("1__0", int, "config.type"),
        ("_1", int, "config.type"),
        ("1_", int, "config.type"),
        ("1 000", int, "config.type"),
        ("0x10", int, "config.type"),
        ("٣", int, "config.type"),
        (True, int, "config.type"),
        ([1], int, "config.type"),
        ("1.5", int, "config.fraction"),
        ("1e-3", int, "config.fraction"),
        ("1.00000000000000000001", int, "config.fraction"),
        ("1e-999999999", int, "config.fraction"),
        (1.5, int, "config.fraction"),
        (str(INT_LIMIT + 1), int, "config.range"),
        ("-1e30", int, "config.range"),
        ("1e999999999", int, "config.range"),
        ("9" * 5000, int, "config.range"),
        ("1e99999999999999999999", int, "config.type"),
        ("nan", float, "config.type"),
        ("inf", float, "config.type"),
        (math.nan, float, "config.type"),
        ("1e400", float, "config.range"),
        ("1,5", float, "config.type"),
        (True, float, "config.type"),
        ("maybe", bool, "config.type"),
        ("2", bool, "config.type"),
        (1, bool, "config.type"),
        (None, bool, "config.type"),
        (5, str, "config.type"),
        (None, str, "config.type"),
        (["a"], str, "config.type"),
        ("\udcff", str, "config.type"),
        (5, TEXTS, "config.type"),
        (None, TEXTS, "config.type"),
        ([1], TEXTS, "config.type"),
        ("[a", TEXTS, "config.type"),
        ("a]", TEXTS, "config.type"),
        ("[a,,b]", TEXTS, "config.type"),
        ("[[a],b]", tuple[int, ...], "config.type"),
    ],
)
def test_unfit(raw, kind, id):
    with pytest.raises(parse.Unfit) as caught:
        parse.value(raw, kind)
    assert caught.value.id == id


def test_fraction_names_both_neighbours():
    with pytest.raises(parse.Unfit, match="5 and 6"):
        parse.value("5.5", int)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_text_is_exact(number):
    assert parse.value(repr(number), float) == number


@given(st.integers(-INT_LIMIT, INT_LIMIT))
def test_int_text_is_exact(number):
    assert parse.value(str(number), int) == number
    assert parse.value(f"{number:_}", int) == number
    assert parse.value(f"{number}000e-3", int) == number


@given(st.text(), st.sampled_from([int, float, bool, int | None, TEXTS, tuple[int, ...]]))
def test_any_text_is_read_or_unfit(text, kind):
    try:
        parse.value(text, kind)
    except parse.Unfit as fault:
        assert fault.id in ("config.type", "config.fraction", "config.range")
