"""YAML, `key=value` and environment → one frozen, typed `Config` whose values know their origin, or a helpful error.

Nothing here imports JAX or NumPy: a mistake is answered before anything heavy is loaded.
"""

from MaxText.config.docs import base_yml, keys_md
from MaxText.config.load import USAGE, load, make, make_from, require_keys
from MaxText.config.origin import Origin
from MaxText.config.problem import InvalidConfig, Problem
from MaxText.config.resolved import DERIVED, Config
from MaxText.config.schema import ARCHITECTURE, TRAINING

__all__ = [
    "ARCHITECTURE",
    "DERIVED",
    "TRAINING",
    "USAGE",
    "Config",
    "InvalidConfig",
    "Origin",
    "Problem",
    "base_yml",
    "keys_md",
    "load",
    "make",
    "make_from",
    "require_keys",
]
