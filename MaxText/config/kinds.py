"""What a key accepts, in words: for messages and for the documentation."""

from __future__ import annotations

import difflib
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def describe(annotation: Any) -> str:
    """The type in words."""
    if NoneType in get_args(annotation):
        return f"{describe(optional(annotation))} or none"
    if get_origin(annotation) is tuple:
        return "a list"
    return "a word" if get_origin(annotation) is Literal else _WORDS[annotation]


def optional(annotation: Any) -> Any:
    """T of `T | None`."""
    (inner,) = (arg for arg in get_args(annotation) if arg is not NoneType)
    return inner


def choices(annotation: Any) -> tuple[str, ...]:
    """The legal words of a Literal or a list of them; empty for other types."""
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def bounds(info: FieldInfo) -> str:
    """The range of a key in words: "at least 1", "from 0 to 1", "1 to 2 items"; empty for none."""
    limits: dict[str, Any] = {}
    for item in info.metadata:
        if isinstance(item, AfterValidator):
            return item.func.__doc__ or ""
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length"):
            if hasattr(item, name):
                limits[name] = getattr(item, name)
    return _range_in_words(limits)


def _range_in_words(limits: dict[str, Any]) -> str:
    if "min_length" in limits:
        return f"{limits['min_length']} to {limits['max_length']} items"
    if "ge" in limits and "le" in limits:
        return f"from {limits['ge']} to {limits['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words[name]} {limit}" for name, limit in limits.items())


def range_fault(value: Any, info: FieldInfo) -> tuple[str, str]:
    """The id and sentence for a value of the right type that is outside the key's range or choices."""
    legal = choices(info.annotation)
    items = value if isinstance(value, tuple) else (value,)
    wrong = [item for item in items if legal and item not in legal]
    if not wrong:
        return "config.range", f"must be {bounds(info) or 'a finite number'}"
    near = difflib.get_close_matches(str(wrong[0]).lower(), [word for word in legal if word], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if "," in wrong[0]:
        hint = f"; write a list as [{wrong[0]}]"
    item = f"{wrong[0]} " if isinstance(value, tuple) else ""
    return "config.choice", f"{item}is none of {', '.join(word or repr('') for word in legal)}{hint}"
