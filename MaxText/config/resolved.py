"""`Config`: every key resolved and every derived value, frozen, each with its origin."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, PrivateAttr

from MaxText.config.files import RESOLVED
from MaxText.config.origin import Origin, Setting
from MaxText.config.problem import InvalidConfig, Problem
from MaxText.config.schema import GROUPS, Schema

_COMMENT_COLUMN = 40
_PLAIN = re.compile(r"(?:~/|[A-Za-z_])[A-Za-z0-9_./:-]*(?<!:)")  # needs no quotes in YAML


def derived(meaning: str, *sources: str) -> Any:
    """A value that is computed from other keys (`sources`) and cannot be set."""
    return Field(description=meaning, json_schema_extra={"sources": list(sources)})


class Config(Schema):
    """The configuration of one run. Compares, hashes and pickles by value; origins do not count.

    Keys that stand for another value (`steps=-1`, `mu_dtype=""`, an empty `run_name`, ...) hold the resolved one.
    Made by `load` and `make`.
    """

    title = "derived"

    emb_dim: int = derived("model width", "base_emb_dim", "global_parameter_scale")
    num_query_heads: int = derived("query heads", "base_num_query_heads", "global_parameter_scale")
    num_kv_heads: int = derived("key/value heads", "base_num_kv_heads", "global_parameter_scale")
    mlp_dim: int = derived("width of the feed-forward layer", "base_mlp_dim", "global_parameter_scale")
    moe_mlp_dim: int = derived("width of an expert", "base_moe_mlp_dim", "base_mlp_dim", "global_parameter_scale")
    num_decoder_layers: int = derived(
        "decoder layers", "base_num_decoder_layers", "layers_per_decoder_layer", "global_parameter_scale"
    )
    run_folder: Path = derived("where everything of this run is written", "base_output_directory", "run_name")

    _origins: dict[str, Origin] = PrivateAttr()
    _written: dict[str, Setting] = PrivateAttr()
    _stem: str = PrivateAttr()
    _identity: str = PrivateAttr()

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], origins: dict[str, Origin], written: dict[str, Setting], stem: str
    ) -> Config:
        """From values that are already checked and complete; `written` and `stem` are what `replace` starts from."""
        config = cls.model_construct(**values)
        config._origins, config._written, config._stem = origins, written, stem
        config._identity = config.canonical_json()
        return config

    def origin(self, name: str) -> Origin:
        """Where the value of a key or derived name came from. KeyError for another name."""
        return self._origins[name]

    def as_dict(self) -> dict[str, Any]:
        """Every key with its resolved value, in the order of the schema, of JSON types; without the derived names."""
        values = ((name, getattr(self, name)) for name in Schema.model_fields)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    def canonical_json(self) -> str:
        """The same text for equal configurations, in every process and version of Python."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 of `canonical_json`."""
        return hashlib.sha256(self._identity.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> Config:
        """A copy with other values, checked and derived anew from what was written. No model file is read again."""
        from MaxText.config.check import resolve  # it makes Configs

        for key in ("model_name", "decoder_block"):
            if str(changes.get(key, getattr(self, key))) != getattr(self, key):
                text = f"replace() reads no file; use make({key}=...)"
                raise InvalidConfig([Problem("config.replace-model", f"{key}={changes[key]}", text)])
        origin = Origin("replace()")
        changed = {key: Setting(key, value, origin) for key, value in changes.items()}
        return resolve(self._written | changed, stem=self._stem)

    def dump(self) -> str:
        """YAML that is itself a CONFIG file giving equal values; each line ends with the origin of its value."""
        lines = ["# Every value of this run and where it came from. Usable as a CONFIG file.", f"{RESOLVED}: true"]
        for group in GROUPS:
            lines += ["", f"# {group.title}"]
            lines += [self._line(name) for name in group.model_fields]
        lines += ["", "# derived"]
        lines += [f"# {self._line(name)}" for name in DERIVED]
        return "\n".join(lines) + "\n"

    def _line(self, name: str) -> str:
        return entry(f"{name}: {scalar(getattr(self, name))}", self._origins[name])

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, Config) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Config({self.run_name!r}, {self.fingerprint()})"

    __str__ = __repr__

    def __copy__(self) -> Self:
        return self  # frozen

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self


DERIVED: dict[str, tuple[str, ...]] = {
    name: tuple(info.json_schema_extra["sources"])  # type: ignore[index, arg-type]
    for name, info in Config.model_fields.items()
    if name not in Schema.model_fields
}
"""Derived name → the keys that it is computed from."""


def entry(text: str, comment: str) -> str:
    """One line of a CONFIG file with its comment, which stands in a column of its own where there is room."""
    return f"{text:<{_COMMENT_COLUMN}}  # {''.join(c if c.isprintable() else '?' for c in comment)}"


def scalar(value: object) -> str:
    """A value in YAML so that reading it by its declared type gives it back exactly."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(scalar, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value).replace("e-0", "e-")
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() != "null":
        return text
    return str(yaml.safe_dump(text, default_style='"', allow_unicode=True, width=float("inf"))).rstrip("\n")
