"""The command line, environment and files → one `Config`, or every problem at once.

Later wins: schema default < base_config parents < CONFIG file < model file < environment `M_KEY` < command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.config import derive, files, names, parse
from MaxText.config.check import KEYS, require_fit, resolve
from MaxText.config.files import Layer
from MaxText.config.origin import COMMAND_LINE, Origin, Setting
from MaxText.config.problem import Problem, show
from MaxText.config.resolved import DERIVED, Config
from MaxText.config.schema import ARCHITECTURE
from MaxText.errors import ConfigError

USAGE = """usage: python train.py CONFIG [key=value ...]
  python train.py configs/base.yml                                  the first run, as shipped
  python train.py configs/base.yml run_name=mine steps=1000         with other values
  python -m MaxText config configs/base.yml steps=1000              every value and where it comes from"""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_CONFIGS = (Path(__file__).parents[2] / "configs", Path(__file__).parents[1] / "configs")


def load(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The configuration that `argv` = [CONFIG, "key=value", ...] and `environ` (default: the process's) ask for.

    Raises:
      ConfigError: with every problem found (`InvalidConfig.problems`), or how to call the program.
    """
    if not argv or argv[0].startswith("-") or _ASSIGNMENT.fullmatch(argv[0]):
        got = f"; got {argv[0]}" if argv else ""
        raise ConfigError(f"the first argument must be a CONFIG file{got} [config.usage]\n{USAGE}", id="config.usage")
    problems: list[Problem] = []
    layers = files.read_with_parents(Path(argv[0]), COMMAND_LINE, problems)
    overrides = _environment(os.environ if environ is None else environ, problems) + _arguments(argv[1:], problems)
    return _merge(layers, overrides, problems, stem=Path(argv[0]).stem)


def make(**overrides: Any) -> Config:
    """The schema's defaults with `overrides`, checked as in `load`; reads no environment and no file but a model file.

    Raises:
      ConfigError: with every problem found.
    """
    return _merge([], [Setting(key, value, Origin("make()")) for key, value in overrides.items()], [], stem="run")


def make_from(below: Mapping[str, Any], where: str, typed: Mapping[str, Any]) -> Config:
    """As `make`, from values that stand in the file `where` and those that a person typed over them.

    Raises:
      ConfigError: with every problem found.
    """
    settings = [Setting(key, value, Origin(where)) for key, value in below.items()]
    return _merge([], [*settings, *_typed(typed)], [], stem="run")


def require_keys(typed: Mapping[str, Any]) -> None:
    """Raise ConfigError unless all keys are known and their values of the right type, whatever else holds."""
    require_fit(_typed(typed))


def _typed(typed: Mapping[str, Any]) -> list[Setting]:
    return [Setting(key, value, COMMAND_LINE) for key, value in typed.items()]


def _arguments(arguments: Sequence[str], problems: list[Problem]) -> list[Setting]:
    settings = []
    for argument in arguments:
        match = _ASSIGNMENT.fullmatch(argument)
        if match:
            settings.append(Setting(match[1], match[2], COMMAND_LINE))
            continue
        bare = _ASSIGNMENT.fullmatch(argument.lstrip("-"))
        if bare:
            advice = f"write {bare[0]}"
        elif Path(argument).suffix in (".yml", ".yaml", ".py"):
            advice = "only one CONFIG file; a second can be its base_config"
        else:
            advice = "write key=value, without spaces around ="
        problems.append(Problem("config.not-key-value", f"{argument} ({COMMAND_LINE})", f"is not key=value; {advice}"))
    return settings


def _environment(environ: Mapping[str, str], problems: list[Problem]) -> list[Setting]:
    """`M_KEY` of every key. Another `M_` variable is kept, and so refused, if it looks meant for us."""
    settings = []
    for variable, value in environ.items():
        key = variable[2:].lower()
        if not variable.startswith("M_") or not key:
            continue
        ours = key in KEYS or key in DERIVED or key in files.FILE_KEYS or names.not_offered(key)
        if ours or names.nearest(key, KEYS, cutoff=0.8):
            settings.append(Setting(key, value, Origin.environment(variable)))
    return settings


def _merge(layers: Sequence[Layer], overrides: Sequence[Setting], problems: list[Problem], stem: str) -> Config:
    below = [setting for layer in layers for setting in layer.settings]
    everything = {setting.key: setting for setting in (*below, *overrides)}
    model = _model_layer(everything, layers, problems)
    ranks = [*(layer.settings for layer in layers), list(model.values()), list(overrides)]
    block = _block_settings(ranks, problems)
    merged = {setting.key: setting for rank in block for setting in rank}
    if "decoder_block" in model:  # then its bundle belongs to the model
        model = {setting.key: setting for rank in block[len(layers) : -1] for setting in rank}
    if not _true(everything.get("override_model_config")):
        for key in dict.fromkeys(setting.key for setting in overrides):
            if key in model and key not in names.OF_THE_RUN:
                problems.append(_model_conflict(merged[key], model[key]))
    return resolve(merged, problems, stem)


def _block_settings(ranks: Sequence[Sequence[Setting]], problems: list[Problem]) -> list[Sequence[Setting]]:
    """The ranks with the bundle of the decoder block below the one that chose it, which may so change its features."""
    choosers = [i for i, rank in enumerate(ranks) if any(setting.key == "decoder_block" for setting in rank)]
    if not choosers or {setting.key for setting in ranks[choosers[-1]]} >= ARCHITECTURE:  # nothing left for a bundle
        return list(ranks)
    chosen = [setting for setting in ranks[choosers[-1]] if setting.key == "decoder_block"][-1]
    path = _named_path(chosen, "decoder_blocks", problems)
    bundle = [] if path is None else _architecture_file(path, chosen, problems)
    return [*ranks[: choosers[-1]], bundle, *ranks[choosers[-1] :]]


def _true(setting: Setting | None) -> bool:
    try:
        return setting is not None and bool(parse.value(setting.value, bool))
    except parse.Unfit:
        return False


def _model_layer(
    settings: Mapping[str, Setting], layers: Sequence[Layer], problems: list[Problem]
) -> dict[str, Setting]:
    """The model file's settings by key; those of a printed configuration that has already taken them in."""
    chosen = settings.get("model_name")
    if chosen is None or not isinstance(chosen.value, str | Path) or str(chosen.value) == "default":
        return {}
    for layer in layers:
        own = {setting.key: setting for setting in layer.settings}
        if layer.resolved and "model_name" in own and own["model_name"].value == chosen.value:
            return {key: setting for key, setting in own.items() if key in ARCHITECTURE}
    path = _named_path(chosen, "models", problems)
    if path is None:
        return {}
    written = _architecture_file(path, chosen, problems)
    return {setting.key: setting for setting in (*_said_by_the_name(path, written, problems), *written)}


def _said_by_the_name(path: Path, own: Sequence[Setting], problems: list[Problem]) -> list[Setting]:
    """What MaxText decides by the name of a model and its file leaves out: configs/by_name, below the file itself.

    A file that asks for another decoder block than the one there only has the same name."""
    found = [file for folder in _CONFIGS if (file := folder / "by_name" / path.name).is_file()]
    if not found:
        return []
    said = files.read(found[0], Origin.file(path, 1), problems).settings
    block = {setting.value for settings in (said, own) for setting in settings if setting.key == "decoder_block"}
    return said if len(block) == 1 else []


def _architecture_file(path: Path, chosen: Setting, problems: list[Problem]) -> list[Setting]:
    """The settings of a model file or a bundle: architecture keys, the few of a run that MaxText's files hold, which
    anything above may change, and names that `check` will refuse."""
    layer = files.read(path, chosen.origin, problems)
    if layer.parent is not None:
        text = "a model file stands by itself; remove base_config"
        problems.append(Problem("config.model-file", f"base_config ({layer.parent_origin})", text))
    kept = []
    for setting in layer.settings:
        if names.beside_the_model(setting.key):
            continue
        if setting.key in names.OF_THE_RUN:
            kept.append(Setting(setting.key, names.SAME_VALUE.get(str(setting.value), setting.value), setting.origin))
        elif setting.key in KEYS and setting.key not in ARCHITECTURE:
            text = "a model file holds architecture keys only; move it to the CONFIG file"
            problems.append(Problem("config.model-file", f"{setting.key} ({setting.origin})", text))
        else:
            kept.append(setting)
    return kept


def _named_path(chosen: Setting, kind: str, problems: list[Problem]) -> Path | None:
    """The file that a setting names: NAME in configs/`kind`, or a path."""
    name = str(chosen.value)
    if derive.is_path(name):
        return Path(name).expanduser()
    folders = [folder / kind for folder in _CONFIGS]
    for folder in folders:
        file = folder / f"{name}.yml"
        if file.is_file():
            return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    known = {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.yml"))}
    near = names.nearest(name, known, cutoff=0.5) or list(known)[:8]
    text = f"no such file in configs/{kind}; nearest: {', '.join(near)}. Or give a path to a .yml"
    id = {"models": "config.unknown-model", "decoder_blocks": "config.unknown-block"}[kind]
    problems.append(Problem(id, f"{chosen.key}={show(name)} ({chosen.origin})", text))
    return None


def _model_conflict(setting: Setting, model: Setting) -> Problem:
    text = f"the model file sets {show(model.value)} ({model.origin}); add override_model_config=true to change it"
    return Problem("config.model-override", f"{setting.key}={show(setting.value)} ({setting.origin})", text)
