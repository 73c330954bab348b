"""`configs/base.yml` and `docs/keys.md` are what the schema says."""

from pathlib import Path

import pytest

from MaxText import config
from MaxText.config.schema import GROUPS, Schema

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("path", "text"), [("configs/base.yml", config.base_yml), ("docs/keys.md", config.keys_md)])
def test_written_files_are_up_to_date(path, text):
    verb = "base" if path.endswith("yml") else "keys"
    assert (ROOT / path).read_text() == text(), f"run: python -m MaxText {verb} > {path}"


def test_every_key_has_a_group_and_one_line_of_meaning():
    grouped = [key for group in GROUPS for key in group.model_fields]
    assert grouped == list(Schema.model_fields)
    for key, info in Schema.model_fields.items():
        meaning = info.description or ""
        assert meaning and "\n" not in meaning and "|" not in meaning and len(meaning) < 90, key


def test_defaults_are_legal_values_of_their_type():
    Schema.model_validate({key: info.default for key, info in Schema.model_fields.items()}, strict=True)
    config.make()


def test_architecture_is_one_group():
    assert config.ARCHITECTURE in [set(group.model_fields) for group in GROUPS]
