"""Every key does something: a setting that is accepted and ignored is a fault."""

from __future__ import annotations

import re
from pathlib import Path

from MaxText import config, remat
from MaxText.config.schema import Schema

PACKAGE = Path(config.__file__).parents[1]
DECLARING = {"schema.py", "data_keys.py", "names.py"}
# Read by the loader before there is a Config, or refused unless empty by a rule.
READ_BY_NAME = {"model_name", "override_model_config", "base_output_directory", "decoder_block", "tokenizer_path"}
READ_BY_NAME |= {*remat.NAMES, "context"}  # by `remat.places`, for its table of names


def unread(source: str) -> set[str]:
    """Keys that no attribute access in `source` reads and no derived name comes from."""
    read = set(re.findall(r"\.([a-z_0-9]+)\b", source)) | READ_BY_NAME
    read |= {key for keys in config.DERIVED.values() for key in keys}
    return {key for key in Schema.model_fields if key not in read and not re.fullmatch("(ici|dcn)_.*_parallelism", key)}


def test_every_key_is_read_somewhere():
    files = [path for path in PACKAGE.rglob("*.py") if path.name not in DECLARING]
    assert unread("\n".join(path.read_text() for path in files)) == set()


def test_the_check_can_fail():
    assert "log_period" in unread("cfg.steps, cfg.log_perio") and "steps" not in unread("cfg.steps")
