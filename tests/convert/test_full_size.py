"""Every recipe at full size, without a weight: its tensors are those of the reference model, by name and shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from MaxText import blueprint, config, decoder
from MaxText.convert import hf_config, mapping
from MaxText.convert.families import FAMILIES
from MaxText.errors import ConfigError
from tests.convert.helpers import GOLDENS
from tests.goldens.full_size import TABLE, config_hash, summary

RECIPES = sorted(file.stem for file in (Path(__file__).parents[2] / "configs" / "models").glob("*.yml"))
REFERENCE = json.loads(TABLE.read_text())
HAVE_NO_FAMILY = {"mistral-large-3": "transformers has no type with its router and its growing queries"}


@pytest.mark.parametrize("model", [name for name in RECIPES if name not in HAVE_NO_FAMILY])
def test_names_and_shapes_are_those_of_the_reference(model: str):
    """Also: `write` reads its config.json back and compares layer by layer, and every parameter has exactly one place,
    which `mapping.make` asserts."""
    cfg, expected = config.make(model_name=model), REFERENCE[model]
    family, theirs = hf_config.write(cfg)
    assert (theirs["architectures"], config_hash(theirs)) == ([expected["class"]], expected["config"])
    tree = decoder.declare(cfg)
    found = summary({link.name: link.shape for link in mapping.make(cfg, tree, family.rows, family.name).links})
    assert found["shapes"] == expected["shapes"]
    assert found["sha256"] == expected["sha256"]
    assert found["numbers"] == expected["numbers"] == blueprint.count(tree)


@pytest.mark.parametrize("model", HAVE_NO_FAMILY)
def test_a_recipe_without_a_family_says_what_the_nearest_lacks(model: str):
    with pytest.raises(ConfigError) as caught:
        hf_config.write(config.make(model_name=model))
    assert caught.value.id == "convert.no-family" and "here" in str(caught.value)
    assert model not in REFERENCE


def test_the_table_is_of_these_recipes_and_every_family_has_a_golden():
    assert set(REFERENCE) == set(RECIPES) - set(HAVE_NO_FAMILY)
    configs = [json.loads(path.read_text()) for path in GOLDENS.glob("*/config.json")]
    assert {theirs["architectures"][0] for theirs in configs} == {family.architecture for family in FAMILIES}
