"""`python -m MaxText plan CONFIG [key=value ...] [json=FILE] [explain=ARRAY]`, and `plan_only=true`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from MaxText import catalogue, config
from MaxText import hardware as hardware_room
from MaxText.errors import ConfigError, StorageError
from MaxText.forecast import record
from MaxText.forecast.explain import explain
from MaxText.forecast.record import Forecast
from MaxText.forecast.refusal import refusal
from MaxText.forecast.text import text

OWN = ("json", "explain")


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(what config.load takes, the verb's own options)."""
    given, own = [], {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in OWN:
            own[name] = value
        else:
            given.append(argument)
    if empty := [name for name, value in own.items() if not value]:
        raise ConfigError(f"{empty[0]}= needs a value, such as json=plan.json [cli.usage]", id="cli.usage")
    return given, own


def of_config(cfg: Any) -> Forecast:
    """The forecast of a configuration on the slice it names, or on what is plugged in here."""
    found = _hardware(cfg)
    cfg, _ = hardware_room.resolve(cfg, found)
    return record.make(cfg, found)


def _hardware(cfg: Any) -> hardware_room.Hardware:
    if catalogue.is_slice(cfg.hardware):
        return hardware_room.named(cfg.hardware, cfg.num_slices)
    return hardware_room.of(cfg)


def plan(arguments: Sequence[str]) -> str:
    """The verb: a table, or the explanation of an array; with json=FILE also a file for programs.

    Raises:
      PlanError: where it does not fit; the file is written first."""
    given, own = split(arguments)
    cfg = config.load(given)
    if not catalogue.is_slice(cfg.hardware):
        from MaxText import runtime

        runtime.prepare(cfg)
    found = of_config(cfg)
    if "json" in own:
        _write(Path(own["json"]), record.as_dict(found))
    return explain(found, own["explain"]) if "explain" in own else fitting(found)


def fitting(found: Forecast) -> str:
    """The table of a forecast; where it does not fit a PlanError with the table and advice."""
    if not found.fits:
        raise refusal(found, text(found))
    return text(found)


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"json={path}: {error.strerror}", id="plan.json") from error
