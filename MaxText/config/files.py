"""CONFIG files → settings. YAML scalars stay text with their line; a `.py` recipe gives what `get_config()` returns.

Every mistake becomes a `Problem` in the list that the caller passes, so that one answer can name all of them.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import yaml

from MaxText.config.origin import Origin, Setting
from MaxText.config.problem import Problem, show

BASE_CONFIG = "base_config"
RESOLVED = "resolved"
FILE_KEYS = {
    BASE_CONFIG: "path of a CONFIG file to start from, relative to this one; later files win",
    RESOLVED: "true in a printed configuration: its values are final, so its model file is not read again",
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SIZE_LIMIT = 1 << 20


@dataclass
class Layer:
    """What one file says. `parent` is its `base_config`; `resolved` marks a printed configuration."""

    path: Path
    settings: list[Setting] = field(default_factory=list)
    parent: Path | None = None
    parent_origin: Origin | None = None
    resolved: bool = False


def read(path: Path, asked_by: Origin, problems: list[Problem]) -> Layer:
    """The layer of one YAML or Python file; empty where the file cannot be read (then `problems` says why)."""
    layer = Layer(path)
    text = _text(path, asked_by, problems)
    if text is None:
        return layer
    found = _python(path, text, problems) if path.suffix == ".py" else _yaml(path, text, problems)
    for setting in found:
        if setting.key == BASE_CONFIG:
            layer.parent, layer.parent_origin = _parent(path, setting, problems), setting.origin
        elif setting.key == RESOLVED:
            layer.resolved = str(setting.value).lower() == "true"
        else:
            layer.settings.append(setting)
    return layer


def read_with_parents(path: Path, asked_by: Origin, problems: list[Problem]) -> list[Layer]:
    """The layers of `path` and its chain of `base_config`, the furthest ancestor first."""
    layers: list[Layer] = []
    seen: list[Path] = []
    following: Path | None = path
    while following is not None:
        real = _real(following)
        if real in seen:
            ring = " -> ".join(str(layer.path) for layer in layers[seen.index(real) :])
            text = f"starts from itself ({ring} -> {following}); remove one base_config"
            problems.append(Problem("config.base-cycle", str(asked_by), text))
            break
        seen.append(real)
        layers.append(read(following, asked_by, problems))
        following, asked_by = layers[-1].parent, layers[-1].parent_origin or asked_by
    return layers[::-1]


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):  # a NUL, a ring of links: reading will say so
        return path.absolute()


def _parent(path: Path, setting: Setting, problems: list[Problem]) -> Path | None:
    if setting.value in (None, ""):
        return None
    if isinstance(setting.value, str | Path):
        return path.parent / Path(setting.value).expanduser()
    subject = f"{BASE_CONFIG}={show(setting.value)} ({setting.origin})"
    problems.append(Problem("config.type", subject, "takes one path"))
    return None


def _text(path: Path, asked_by: Origin, problems: list[Problem]) -> str | None:
    """The file's text; None where there is none that could be a configuration (then `problems` says why)."""
    try:
        with path.open("rb") as file:  # not necessarily a regular file: a shell's <(...) is welcome
            data = file.read(_SIZE_LIMIT + 1)
        text = data.decode("utf-8-sig")
        if len(data) <= _SIZE_LIMIT and text.strip():
            return text
        fault = ("config.file-empty", "is empty; `python -m MaxText base` prints a complete one")
        if text.strip():
            fault = ("config.file-size", f"has more than the {_SIZE_LIMIT} bytes that a CONFIG file may have")
    except IsADirectoryError:
        fault = ("config.file-directory", "is a folder; give a .yml or .py file")
    except (FileNotFoundError, NotADirectoryError):
        fault = ("config.file-missing", f"no such file{_nearest_file(path)}")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        fault = ("config.file-encoding", f"is not UTF-8: byte {error.object[error.start]:#04x} in line {line}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        fault = ("config.file-unreadable", f"cannot be read: {getattr(error, 'strerror', None) or error}")
    problems.append(Problem(fault[0], f"{path} ({asked_by})", fault[1]))
    return None


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yml", ".yaml", ".py")]
    except OSError:
        return f", nor a folder {path.parent}"
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"; nearest: {', '.join(str(path.parent / name) for name in near)}" if near else ""


def _yaml(path: Path, text: str, problems: list[Problem]) -> list[Setting]:
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        reason = " ".join(str(part) for part in (error.context, error.problem) if part)
        problems.append(Problem("config.file-yaml", f"{path}:{line}", f"is not YAML: {' '.join(reason.split())}"))
        return []
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.append(Problem("config.file-yaml", f"{path}:{line}", f"is not YAML: {error.reason}"))
        return []
    if root is None:
        problems.append(Problem("config.file-empty", str(path), "holds only comments; write at least one `key: value`"))
        return []
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        problems.append(Problem("config.file-not-mapping", f"{path}:{line}", "must be lines of `key: value`"))
        return []
    return list(_settings(path, root, problems))


def _settings(path: Path, root: yaml.MappingNode, problems: list[Problem]) -> Iterable[Setting]:
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        origin = Origin.file(path, line)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem("config.file-not-mapping", origin, "the name of a key must be one word"))
            continue
        key = key_node.value
        if key in lines:
            text = f"the same key again, first in line {lines[key]}; keep one"
            problems.append(Problem("config.duplicate-key", f"{key} ({origin})", text))
            continue
        lines[key] = line
        try:
            value = _node(value_node)
        except TypeError as error:
            problems.append(Problem("config.nested", f"{key} ({origin})", str(error)))
            continue
        yield Setting(key, value, origin)


def _node(node: yaml.Node) -> str | list[str] | None:
    """Text, a list of texts, or None for a plain `null`."""
    if isinstance(node, yaml.ScalarNode):
        null = not node.style and node.value.lower() in ("null", "~")
        return None if null else node.value
    if isinstance(node, yaml.SequenceNode):
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return [item.value for item in node.value]
        raise TypeError("a list here holds plain values only")
    raise TypeError("keys are not nested here; write each as its own line `key: value`")


def _python(path: Path, text: str, problems: list[Problem]) -> list[Setting]:
    """Runs the recipe and reads the mapping that `get_config()` returns (`ml_collections.ConfigDict` or a dict)."""
    module = ModuleType("_maxtext_recipe")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)  # not imported: that would write __pycache__
        get_config = module.__dict__.get("get_config")
        if not callable(get_config):
            problems.append(Problem("config.recipe-shape", str(path), "defines no function get_config()"))
            return []
        items = getattr(get_config(), "items", None)
        if items is None:
            problems.append(
                Problem("config.recipe-shape", str(path), "get_config() must return a ConfigDict or a dict")
            )
            return []
        return [Setting(str(key), value, Origin.recipe(path)) for key, value in items()]
    except (Exception, SystemExit) as error:
        problems.append(Problem("config.recipe-failed", _where(path, error), f"{type(error).__name__}: {error}"))
        return []
    finally:
        del sys.modules[module.__name__]


def _where(path: Path, error: BaseException) -> str:
    """The innermost line of the recipe itself that `error` came through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
