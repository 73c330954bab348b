"""`Config` as a value: derived names, equality, pickling, printing and reading back."""

import contextlib
import copy
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText import config
from MaxText.config import kinds
from MaxText.config.resolved import scalar
from MaxText.config.schema import Schema

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "configs" / "base.yml")


@pytest.mark.parametrize(
    ("scale", "sizes"),
    [
        (1, (2048, 16, 8, 7168, 16)),
        (2, (2048, 32, 16, 14336, 16)),
        (4, (4096, 32, 16, 14336, 16)),
        (8, (4096, 32, 16, 14336, 32)),
        (16, (4096, 64, 32, 28672, 32)),
        (64, (8192, 64, 32, 28672, 64)),
    ],
)
def test_scale(scale, sizes):
    cfg = config.make(
        global_parameter_scale=scale,
        base_emb_dim=2048,
        base_num_query_heads=16,
        base_num_kv_heads=8,
        base_mlp_dim=7168,
        base_num_decoder_layers=16,
    )
    assert (cfg.emb_dim, cfg.num_query_heads, cfg.num_kv_heads, cfg.mlp_dim, cfg.num_decoder_layers) == sizes


def test_values_that_stand_for_others():
    cfg = config.make(steps=7, weight_dtype="bfloat16")
    assert (cfg.learning_rate_schedule_steps, cfg.mu_dtype) == (7, "bfloat16")
    assert cfg.origin("mu_dtype") == "derived from weight_dtype"
    assert config.make(steps=-1, learning_rate_schedule_steps=9).steps == 9
    set_ones = config.make(steps=7, learning_rate_schedule_steps=9, mu_dtype="float32")
    assert (set_ones.learning_rate_schedule_steps, set_ones.mu_dtype) == (9, "float32")
    assert set_ones.origin("mu_dtype") == "make()"


def test_run_folder(monkeypatch):
    assert config.load([BASE], {}).run_folder == Path("runs/base")
    assert config.load([BASE, "model_name=llama3-8b"], {}).run_folder == Path("runs/llama3-8b")
    monkeypatch.setenv("HOME", "/home/someone")
    assert config.make(run_name="x", base_output_directory="~/out").run_folder == Path("/home/someone/out/x")


def test_a_config_file_whose_name_is_no_folder_name(tmp_path):
    path = tmp_path / "a:b.yml"
    path.write_text("steps: 5\n")
    with pytest.raises(config.InvalidConfig) as caught:
        config.load([str(path)], {})
    assert caught.value.ids == ("config.run-name",)


def test_frozen():
    cfg = config.make()
    with pytest.raises(pydantic.ValidationError):
        cfg.steps = 5
    with pytest.raises(pydantic.ValidationError):
        del cfg.steps
    with pytest.raises(AttributeError):
        cfg.stps  # noqa: B018


def test_equality_is_by_value_not_by_origin():
    one, two = config.load([BASE, "steps=5"], {}), config.load([BASE], {"M_STEPS": "5"})
    assert one == two and hash(one) == hash(two) and one.fingerprint() == two.fingerprint()
    other = config.load([BASE, "steps=6"], {})
    assert one != other and one.fingerprint() != other.fingerprint()
    assert one != "steps"


def test_pickle_and_copy():
    cfg = config.load([BASE, "steps=5"], {})
    for twin in (pickle.loads(pickle.dumps(cfg)), copy.copy(cfg), copy.deepcopy(cfg)):
        assert twin == cfg and hash(twin) == hash(cfg)
        assert twin.origin("steps") == "command line"
        assert twin.replace(head_dim=16).steps == 5


def test_an_error_can_be_pickled():
    with pytest.raises(config.InvalidConfig) as caught:
        config.make(steps=0, head_dim=3)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (twin.ids, str(twin)) == (caught.value.ids, str(caught.value))


def test_fingerprint_is_the_same_in_every_process():
    code = "from MaxText import config; print(config.make(steps=5).fingerprint())"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] == f"{config.make(steps=5).fingerprint()}\n".encode()


def test_replace_derives_anew_and_checks():
    cfg = config.make(steps=5)
    other = cfg.replace(steps=8, global_parameter_scale=4)
    assert (other.learning_rate_schedule_steps, other.emb_dim) == (8, 256)
    assert other.origin("steps") == "replace()"
    assert cfg.steps == 5
    assert cfg.replace() == cfg
    with pytest.raises(config.InvalidConfig):
        cfg.replace(stps=5)


def test_replace_does_not_read_another_model():
    with pytest.raises(config.InvalidConfig) as caught:
        config.make().replace(model_name="llama3-8b")
    assert caught.value.ids == ("config.replace-model",)
    cfg = config.make(model_name="llama3-8b")
    assert cfg.replace(base_emb_dim=64, model_name="llama3-8b").emb_dim == 64


# fmt: off
TEXTS = ["", "x", "a b", "null", "none", "~", "yes", "1e3", "-", "- a", "a: b", "a #b", "#", "'", '"', "\\", "\n", "\t",
         "é", "日本", "\u2028", "\x7f", "😀", " lead",
         "trail ", "[a]", "{a}", "*a", "&a", "!a", "%", "@", "a,b", "~/x"]
# fmt: on
FREE_TEXT = ("prompt", "jax_cache_dir")


def random_value(key: str, rng: random.Random) -> Any:
    """Some value that the key might take; not necessarily together with the others."""
    info = Schema.model_fields[key]
    legal = kinds.choices(info.annotation)
    if get_origin(info.annotation) is tuple:
        pool = list(legal) or [text for text in TEXTS if text.strip()]
        return [rng.choice(pool) for _ in range(rng.randint(1, 2))]
    if legal:
        return rng.choice(legal)
    if info.annotation is bool:
        return rng.random() < 0.5
    if info.annotation is float:
        return rng.choice([rng.random(), rng.random() * 10 ** rng.randint(-20, -1), 0.5])
    if info.annotation is int or int in get_args(info.annotation):
        return rng.choice([None, 1, 2, 4]) if int in get_args(info.annotation) else rng.choice([1, 2, 4, 1024])
    return rng.choice(TEXTS) if key in FREE_TEXT else rng.choice(["x", "a-b.c", "é 1", "1e3", "null"])


@pytest.mark.parametrize("seed", range(40))
def test_what_is_printed_reads_back_equal(seed, tmp_path):
    rng = random.Random(seed)
    skipped = {"model_name", "decoder_block", "tokenizer_path", "override_model_config"}
    keys = rng.sample(sorted(Schema.model_fields.keys() - skipped), 30)
    settings: dict[str, Any] = {}
    for key in keys:  # keep what is legal together
        attempt = settings | {key: random_value(key, rng)}
        with contextlib.suppress(config.InvalidConfig):
            config.make(**attempt)
            settings = attempt
    cfg = config.make(**settings)
    assert len(settings) > 8
    path = tmp_path / "printed.yml"
    path.write_text(cfg.dump(), encoding="utf-8")
    again = config.load([str(path)], {})
    assert again.as_dict() == cfg.as_dict()
    assert again == cfg
    assert {key: getattr(again, key) for key in config.DERIVED} == {key: getattr(cfg, key) for key in config.DERIVED}
    assert again.dump().count("\n") == cfg.dump().count("\n")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_printed_on_one_line(text):
    assert len(scalar(text).splitlines()) == 1


@pytest.mark.parametrize("overrides", [[], ["base_emb_dim=64", "override_model_config=true"]])
def test_a_printed_configuration_holds_its_model(overrides, tmp_path):
    cfg = config.load([BASE, "model_name=llama3-8b", *overrides], {})
    path = tmp_path / "printed.yml"
    path.write_text(cfg.dump())
    assert config.load([str(path)], {}) == cfg
    other = config.load([str(path), "model_name=llama3-8b", "run_name=other"], {})
    assert other.base_emb_dim == cfg.base_emb_dim
    if not overrides:
        with pytest.raises(config.InvalidConfig) as caught:
            config.load([str(path), "base_emb_dim=32"], {})
        assert caught.value.ids == ("config.model-override",)


def test_every_printed_line_has_its_origin():
    lines = config.load([BASE, "steps=5"], {}).dump().splitlines()
    assert "steps: 5" in {line.split("#")[0].strip() for line in lines}
    assert next(line for line in lines if line.startswith("steps:")).endswith("# command line")
    assert all("  # " in line for line in lines if line.split(":")[0] in Schema.model_fields)


def test_as_dict_is_json():
    import json

    assert json.loads(json.dumps(config.make().as_dict())) == config.make().as_dict()
