"""`python -m MaxText plan CONFIG [key=value ...] [json=FILE] [explain=ARRAY] [compile=true] [compiled=FILE]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from MaxText import aot, catalogue, config, forecast
from MaxText.errors import ConfigError, StorageError
from MaxText.forecast import explain

OWN = ("json", "explain", "compile", "compiled")


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
    if own.get("compile", "false") not in ("true", "false"):
        raise ConfigError(f"compile={own['compile']}: true or false [cli.usage]", id="cli.usage")
    if "compiled" in own and own.get("compile") != "true":
        raise ConfigError("compiled=FILE stores what compile=true makes; add it [cli.usage]", id="cli.usage")
    return given, own


def plan(arguments: Sequence[str]) -> str:
    """The verb: a table, or the explanation of an array; with json=FILE also a file for programs, with compile=true
    also what the TPU compiler says.

    Raises:
      PlanError: where it does not fit; the file is written first."""
    given, own = split(arguments)
    cfg = config.load(given)
    _prepare(cfg, own)
    found = forecast.of_config(cfg)
    values = forecast.as_dict(found)
    if "json" in own:
        _write(Path(own["json"]), values)
    if "explain" in own:
        return explain.explain(found, own["explain"])
    if own.get("compile") != "true":
        return forecast.fitting(found)
    answer = aot.ask(found)  # the compiler's verdict counts, not the estimate's
    if "json" in own:
        _write(Path(own["json"]), values | {"compiled": aot.as_dict(found, answer)})
    stored = "\n\n" + aot.keep(answer, Path(own["compiled"])) if "compiled" in own else ""
    return f"{forecast.text(found)}\n\n{aot.text(found, answer)}{stored}"


def _prepare(cfg: Any, own: dict[str, str]) -> None:
    """The environment of what follows: of a compiler, of the devices that are here, or of none."""
    if own.get("compile") == "true":
        aot.prepare()
    elif not catalogue.is_slice(cfg.hardware):
        from MaxText import runtime

        runtime.prepare(cfg)


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"json={path}: {error.strerror}", id="plan.json") from error
