"""`configs/base.yml` and `docs/keys.md`, written from the schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pydantic.fields import FieldInfo

from MaxText.config import kinds
from MaxText.config.fields import Group
from MaxText.config.files import FILE_KEYS
from MaxText.config.names import NOT_OFFERED
from MaxText.config.resolved import DERIVED, Config, entry, scalar
from MaxText.config.rules import RULES
from MaxText.config.schema import GROUPS, Architecture

_LONG_LIST = 60
_BASE_INTRODUCTION = """\
# Every key with its default: the first run. Written by `python -m MaxText base` from MaxText/config/schema.py.
# A CONFIG file of your own needs only what differs; `base_config: PATH` starts from another file.
"""
_KEYS_INTRODUCTION = """\
# Every key

Written by `python -m MaxText keys` from `MaxText/config/schema.py`.

Later wins: default < `base_config` parents < CONFIG file < model file (`model_name`) < environment `M_KEY` < command
line. An architecture key that the model file sets can be changed by environment or command line only with
`override_model_config=true`. `python -m MaxText config CONFIG key=value ...` prints every value and where it came from.

Values are read by the type of their key: whole numbers as `1000`, `1e3` or `1_000`; numbers also as `1e-3`; true or
false also as yes/no, on/off or 1/0; lists as `[a,b]`, a single item also bare; `none` where the type allows it.
A name that is no key is an error, and so is an environment variable `M_...` that resembles one; other variables that
begin with `M_` are left alone.

A CONFIG file may also be Python: its `get_config()` returns an `ml_collections.ConfigDict` (or a dict) of these keys.
"""


def base_yml() -> str:
    """Every key with its default and meaning, in the order of the schema; itself a CONFIG file: the first run."""
    lines = [_BASE_INTRODUCTION.rstrip()]
    for group in GROUPS:
        lines += ["", f"# {group.title}"]
        for key, info in group.model_fields.items():
            lines += _entry(key, info)
    return "\n".join(lines) + "\n"


def keys_md() -> str:
    """The reference of all keys, in Markdown."""
    return "\n".join([_KEYS_INTRODUCTION, *map(_group, GROUPS), *_appendix()])


def _entry(key: str, info: FieldInfo) -> list[str]:
    comment = info.description or ""
    legal = kinds.choices(info.annotation)
    if legal:
        comment += " (" + "|".join(word or '""' for word in legal) + ")"
    if not isinstance(info.default, tuple) or len(scalar(info.default)) <= _LONG_LIST:
        return [entry(f"{key}: {scalar(info.default)}", comment)]
    return [entry(f"{key}:", comment), *(f"  - {scalar(item)}" for item in info.default)]


def _group(group: type[Group]) -> str:
    rows = [
        (f"`{key}`", _type(info), f"`{scalar(info.default)}`", info.description or "")
        for key, info in group.model_fields.items()
    ]
    note = (
        "A model file (`configs/models/NAME.yml`) holds only keys of this group.\n\n" if group is Architecture else ""
    )
    return f"## {group.title}\n\n{note}" + _table(("key", "type", "default", "meaning"), rows)


def _type(info: FieldInfo) -> str:
    legal = kinds.choices(info.annotation)
    words = kinds.describe(info.annotation).removeprefix("a ")
    if legal:
        words = ("list of " if words == "list" else "") + _code(word or '""' for word in legal)
    return ", ".join(filter(None, (words, kinds.bounds(info))))


def _appendix() -> Iterator[str]:
    rows = [(f"`{name}`", Config.model_fields[name].description or "", _code(keys)) for name, keys in DERIVED.items()]
    yield "## Derived\n\nComputed, never set.\n\n" + _table(("name", "meaning", "from"), rows)
    yield "## In a CONFIG file only\n\n" + _table(
        ("key", "meaning"), [(f"`{k}`", text) for k, text in FILE_KEYS.items()]
    )
    yield "## Rules between keys\n\n" + _table(("id", "rule"), [(f"`{rule.id}`", rule.meaning) for rule in RULES])
    by_sentence: dict[str, list[str]] = {}
    for name, text in NOT_OFFERED.items():
        by_sentence.setdefault(text, []).append(name)
    head = "## Known keys that are not offered\n\nEach is refused with the sentence on the right.\n\n"
    yield head + _table(("keys", "instead"), [(_code(names), text) for text, names in by_sentence.items()])


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
