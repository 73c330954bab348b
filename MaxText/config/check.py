"""One setting per key → the checked `Config`: names, types, ranges, rules, then the derived values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from MaxText.config import data_rules as _registers_data_rules  # noqa: F401
from MaxText.config import derive, files, kinds, names, parse, rules
from MaxText.config import model_rules as _registers_its_rules  # noqa: F401
from MaxText.config.origin import DEFAULT, Origin, Setting
from MaxText.config.problem import InvalidConfig, Problem, show
from MaxText.config.resolved import DERIVED, Config
from MaxText.config.schema import Schema

KEYS = Schema.model_fields
_UNREAD = (
    "config.file-",
    "config.recipe-",
    "config.unknown-model",
    "config.unknown-block",
    "config.base-cycle",
)  # ids of files not read


def resolve(written: Mapping[str, Setting], problems: Sequence[Problem] = (), stem: str = "run") -> Config:
    """One setting per key → the checked Config; `problems` are those found before.

    Raises:
      InvalidConfig: with `problems` and all that is found here.
    """
    found = [*problems, *(problem for setting in written.values() if (problem := _name_problem(setting)))]
    values, unfit = _typed(written, found)
    origins = dict.fromkeys(KEYS, DEFAULT) | {key: s.origin for key, s in written.items() if key in KEYS}
    if not values["run_name"]:
        values["run_name"], source = derive.run_name(values["model_name"], stem)
        origins["run_name"] = Origin.derived(source)
    if not any(problem.id.startswith(_UNREAD) for problem in problems):  # else rules would judge defaults instead
        found += rules.check(values, origins, skip=unfit)
    if found:
        raise InvalidConfig(found)
    complete, sources = derive.complete(values)
    origins |= {name: Origin.derived(*keys) for name, keys in sources.items()}
    return Config.from_values(complete, origins, dict(written), stem)


def require_fit(settings: Sequence[Setting]) -> None:
    """Raise InvalidConfig unless every key is known, and its value of its type and range; rules are not asked."""
    written = {setting.key: setting for setting in settings}
    found = [problem for setting in settings if (problem := _name_problem(setting))]
    _typed(written, found)
    if found:
        raise InvalidConfig(found)


def _name_problem(setting: Setting) -> Problem | None:
    """What is wrong with the name of a key, if anything."""
    key, subject = setting.key, f"{setting.key}={show(setting.value)} ({setting.origin})"
    if key in KEYS:
        return None
    if key in DERIVED:
        sources = " and ".join(DERIVED[key])
        return Problem("config.derived", subject, f"cannot be set: it is computed from {sources}")
    if key in files.FILE_KEYS:
        return Problem("config.key-place", subject, "can stand only in a CONFIG file")
    sentence = names.not_offered(key)
    if sentence:
        return Problem("config.not-offered", subject, f"is not offered: {sentence}")
    near = names.nearest(key, KEYS)
    advice = f"did you mean {' or '.join(near)}?" if near else "`python -m MaxText keys` lists all keys"
    return Problem("config.unknown-key", subject, f"no such key; {advice}")


def _typed(written: Mapping[str, Setting], problems: list[Problem]) -> tuple[dict[str, Any], frozenset[str]]:
    """Every key's value, of its type and range; and the keys whose written value is not (they have the default)."""
    values: dict[str, Any] = {}
    unfit: dict[str, Problem] = {}
    for key, setting in written.items():
        if key in KEYS:
            try:
                values[key] = parse.value(setting.value, KEYS[key].annotation)
            except parse.Unfit as fault:
                unfit[key] = Problem(fault.id, f"{key}={show(setting.value)} ({setting.origin})", fault.text)
    try:
        Schema.model_validate(values)
    except ValidationError as error:
        for key in dict.fromkeys(str(details["loc"][0]) for details in error.errors(include_url=False)):
            id, text = kinds.range_fault(values[key], KEYS[key])
            unfit[key] = Problem(id, f"{key}={show(written[key].value)} ({written[key].origin})", text)
    problems += unfit.values()
    defaults = {key: info.default for key, info in KEYS.items()}
    return defaults | {key: value for key, value in values.items() if key not in unfit}, frozenset(unfit)
