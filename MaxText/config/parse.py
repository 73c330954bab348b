"""A written value → a value of the declared type.

Text is read by the type of its key, never by what it looks like: for an int `1e3`, `1_000` and `1000.0` are 1000; for a
float `1e-3` needs no dot; a bool is yes/no, true/false, on/off or 1/0; a list is `[a,b]`, and a bare `a` is a list of
one. Values from Python must have the type already, or be text.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Callable
from decimal import Decimal
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from MaxText.config.fields import INT_LIMIT
from MaxText.config.kinds import describe, optional
from MaxText.config.problem import show

NONE_WORDS = frozenset({"none", "null", "~", ""})
_TRUE = frozenset({"true", "yes", "on", "1", "t", "y"})
_FALSE = frozenset({"false", "no", "off", "0", "f", "n"})
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_EXPONENT = "[eE][+-]?[0-9]{1,9}"
_NUMBER = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:{_EXPONENT})?")
_ITEM = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|$)""")


class Unfit(Exception):
    """A value that does not fit the type of its key; `id` and a sentence with what would."""

    def __init__(self, id: str, text: str):
        super().__init__(text)
        self.id = id
        self.text = text


def value(raw: object, annotation: Any) -> Any:
    """`raw` (text, list of texts, or a Python value) as the declared type `annotation`.

    Types: bool, int, float, str, Literal of str, tuple[T, ...] of these, and T | None. Ranges are not checked here.

    Raises:
      Unfit: `raw` is no such value.
    """
    if NoneType in get_args(annotation):
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in NONE_WORDS):
            return None
        annotation = optional(annotation)
    if raw is None:
        raise Unfit("config.type", f"takes {describe(annotation)}, not none")
    if isinstance(raw, os.PathLike):
        raw = os.fspath(raw)
    if get_origin(annotation) is tuple:
        return tuple(value(item, get_args(annotation)[0]) for item in _items(raw))
    return _SCALARS[str if get_origin(annotation) is Literal else annotation](raw)


def _items(raw: object) -> list[object]:
    """The items of a list: a Python list or tuple, `[a, "b, c"]`, or a bare item."""
    if isinstance(raw, list | tuple):
        return list(raw)
    if not isinstance(raw, str):
        raise Unfit("config.type", f"takes a list, not {show(raw)} ({type(raw).__name__})")
    text = raw.strip()
    if text.startswith("[") != text.endswith("]"):
        raise Unfit("config.type", "has a bracket without its partner; write a list as [a,b]")
    if not text.startswith("["):
        return [text] if text else []
    inner = text[1:-1].strip().removesuffix(",")
    return list(_split(inner)) if inner else []


def _split(inner: str) -> list[str]:
    """Split at commas outside quotes."""
    items, position = [], 0
    while position <= len(inner):
        match = _ITEM.match(inner, position)
        if match is None:
            raise Unfit("config.type", f"has a stray quote at {show(inner[position:], 20)}; write a list as [a,b]")
        items.append(next(group for group in match.groups() if group is not None))
        if not items[-1]:
            raise Unfit("config.type", "has an empty item in its list")
        position = match.end() if match.end() < len(inner) else len(inner) + 1
    return items


def _bool(raw: object) -> bool:
    word = raw.strip().lower() if isinstance(raw, str) else raw
    if isinstance(word, str) and word in _TRUE | _FALSE:
        return word in _TRUE
    if isinstance(raw, bool):
        return raw
    raise Unfit("config.type", "takes true or false (also yes/no, on/off, 1/0)")


def _number(raw: object, what: str) -> Decimal:
    """The exact number that was written: a float would round 1.00000000000000001 to a whole number."""
    if isinstance(raw, str) and _NUMBER.fullmatch(raw.strip()):
        return Decimal(raw.strip().replace("_", ""))
    if isinstance(raw, numbers.Integral) and not isinstance(raw, bool):
        return Decimal(int(raw))
    if isinstance(raw, numbers.Real) and not isinstance(raw, bool) and math.isfinite(raw):
        return Decimal(float(raw))
    example = "8, 1e3 or 1_000" if what == "a whole number" else "0.5, 3e-4 or 1_000"
    raise Unfit("config.type", f"takes {what}, such as {example}")


def _int(raw: object) -> int:
    number = _number(raw, "a whole number")
    if number.adjusted() > 10 or abs(number) > INT_LIMIT:  # first the exponent: int(Decimal("1e999999999")) never ends
        raise Unfit("config.range", f"is beyond the largest whole number here, {INT_LIMIT}")
    floor = math.floor(number) if number.adjusted() > -10 else (-1 if number < 0 else 0)
    if number != floor:
        raise Unfit("config.fraction", f"takes a whole number; the nearest are {floor} and {floor + 1}")
    return floor


def _float(raw: object) -> float:
    if isinstance(raw, numbers.Real) and not isinstance(raw, bool | numbers.Integral) and math.isfinite(raw):
        return float(raw)
    result = float(_number(raw, "a number"))
    if math.isinf(result):
        raise Unfit("config.range", "is beyond the largest float")
    return result


def _str(raw: object) -> str:
    if not isinstance(raw, str):
        raise Unfit("config.type", f"takes text, not {show(raw)} ({type(raw).__name__})")
    try:
        raw.encode()
    except UnicodeEncodeError:
        raise Unfit("config.type", "takes text in UTF-8, and this is not") from None
    return raw


_SCALARS: dict[Any, Callable[[object], Any]] = {bool: _bool, int: _int, float: _float, str: _str}
