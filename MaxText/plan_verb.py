"""`python -m MaxText plan CONFIG [key=value ...] [json=FILE] [explain=ARRAY] [compile=true] [compiled=FILE]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from MaxText import aot, catalogue, config, forecast
from MaxText.errors import ConfigError, PlanError, StorageError
from MaxText.forecast import explain

OWN = ("json", "explain", "compile", "compiled")
OPTIONS = {"plan": " [json=FILE] [explain=ARRAY] [compile=true [compiled=FILE]]", "doctor": " [--apply]"}


def require_config(verb: str, arguments: Sequence[str]) -> None:
    """Raises:
    ConfigError: where the first argument is no CONFIG file; with the usage of this verb."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        got = f", and got {arguments[0]}" if arguments else ""
        raise ConfigError(
            f"{verb} takes a CONFIG file first{got} [cli.usage]\n"
            f"usage: python -m MaxText {verb} CONFIG [key=value ...]{OPTIONS[verb]}\n"
            f"  python -m MaxText {verb} configs/base.yml model_name=llama3.1-8b hardware=v5p-128 remat_policy=full",
            id="cli.usage",
        )


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(what config.load takes, the verb's own options)."""
    require_config("plan", arguments)
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
      PlanError: where it does not fit, or cannot be; the file is written all the same, with `fits` false and `refused`
        (id, problem)."""
    given, own = split(arguments)
    cfg = config.load(given)
    values: dict[str, Any] = {"fits": False}  # until a forecast says otherwise
    try:
        return _planned(cfg, own, values)
    except PlanError as refused:
        values["refused"] = {"id": refused.id, "problem": str(refused)}
        raise
    finally:
        if "json" in own:
            _write(Path(own["json"]), values)


def _planned(cfg: Any, own: dict[str, str], values: dict[str, Any]) -> str:
    """The verb's text; what a program wants to know goes into `values`, as far as it is known."""
    _prepare(cfg, own)
    found = forecast.of_config(cfg)
    values |= forecast.as_dict(found)
    if "explain" in own:
        return explain.explain(found, own["explain"])
    if own.get("compile") != "true":
        return forecast.fitting(found)
    answer = aot.ask(found)  # the compiler's verdict counts, not the estimate's
    values["compiled"] = aot.as_dict(found, answer)
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
