"""What is wrong with a configuration: collected, then raised together as one `InvalidConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from MaxText.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One line for a person. `subject` is what they wrote and where, `text` the rule and what to type."""

    id: str
    subject: str
    text: str

    def __str__(self) -> str:
        line = f"{self.subject}: {self.text} [{self.id}]"
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class InvalidConfig(ConfigError):
    """Every problem of a configuration at once. `id` is that of the first, `ids` are all of them."""

    def __init__(self, problems: Sequence[Problem]):
        assert problems
        self.problems = tuple(problems)
        head = "" if len(problems) == 1 else f"{len(problems)} problems in the configuration:\n  "
        super().__init__(head + "\n  ".join(map(str, problems)), id=problems[0].id)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(problem.id for problem in self.problems)

    def __reduce__(self) -> tuple[type[InvalidConfig], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def show(value: object, limit: int = 60) -> str:
    """A value as a person would type it after `key=`, cut to `limit` characters."""
    if isinstance(value, list | tuple):
        text = f"[{','.join(map(str, value))}]"
    elif isinstance(value, bool) or value is None:
        text = str(value).lower()
    else:
        text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
