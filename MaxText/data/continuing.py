"""May data of one fingerprint go on where those of another stopped?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN = 6  # differing entries of one list


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "in the checkpoint") -> list[str]:
    """A line for each part of the recipe that makes other batches; of lists, the entries that differ.

    Documents may be added to the quarantine: they keep their place and only train nothing from then on.
    """
    lines = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new or (key == "quarantine" and set(old or ()) <= set(new or ())):
            continue
        if isinstance(old, list) and isinstance(new, list):
            old, new = _only(old, new), _only(new, old)
        lines.append(f"{key}: {_show(old)} {where}, {_show(new)} now")
    return lines


def notes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines about what has changed and may."""
    added = sorted(set(now.get("quarantine") or ()) - set(before.get("quarantine") or ()))
    return [f"quarantine: {len(added)} documents train nothing from here on: {', '.join(added)}"] if added else []


def _only(mine: list[Any], other: list[Any]) -> list[Any]:
    """The entries that the other list lacks; all of them where only the order differs."""
    if sorted(map(str, mine)) == sorted(map(str, other)):
        return mine
    return [entry for entry in mine if entry not in other]


def _show(value: Any) -> str:
    if not isinstance(value, list):
        return "nothing" if value is None else str(value)
    shown = ", ".join(map(str, value[:_SHOWN])) or "nothing else"
    return shown + (f" and {len(value) - _SHOWN} more" if len(value) > _SHOWN else "")
