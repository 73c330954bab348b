"""Where a value came from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Origin(str):
    """Ready to print: "default", "configs/base.yml:12", "command line", "environment M_STEPS", "derived from steps"."""

    __slots__ = ()

    @classmethod
    def file(cls, path: Path, line: int) -> Origin:
        return cls(f"{path}:{line}")

    @classmethod
    def recipe(cls, path: Path) -> Origin:
        return cls(f"{path} get_config()")

    @classmethod
    def environment(cls, variable: str) -> Origin:
        return cls(f"environment {variable}")

    @classmethod
    def derived(cls, *names: str) -> Origin:
        return cls(f"derived from {', '.join(names)}")


DEFAULT = Origin("default")
COMMAND_LINE = Origin("command line")


class Setting(NamedTuple):
    """One key as somebody wrote it: text (YAML, environment, command line), a list of texts, or a Python value."""

    key: str
    value: object
    origin: Origin
