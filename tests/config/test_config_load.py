"""Merge order, origins, and every way in which files, environment and arguments can be wrong."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from MaxText import config
from MaxText.config import names
from MaxText.config.schema import Schema
from MaxText.errors import ConfigError

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "configs" / "base.yml")


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str | bytes) -> str:
        data = textwrap.dedent(text).encode() if isinstance(text, str) else text
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return write


def ids(*argv: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(config.InvalidConfig) as caught:
        config.load(argv, environ)
    assert len(str(caught.value).splitlines()) == len(caught.value.problems) + (len(caught.value.problems) > 1)
    return caught.value.ids


# merge order and origins


def test_later_wins(write):
    write("parent.yml", "steps: 1\nbase_emb_dim: 10\nlog_period: 1\nhead_dim: 2\neval_steps: 4\nmax_target_length: 9\n")
    model = write("model.yml", "base_emb_dim: 30\nhead_dim: 6\n")
    child = write(
        "child.yml",
        f"base_config: parent.yml\nmodel_name: {model}\nsteps: 2\nbase_emb_dim: 20\nlog_period: 2\neval_steps: 5\n",
    )
    argv = [child, "steps=3", "steps=4"]
    cfg = config.load(argv, {"M_STEPS": "99", "M_LOG_PERIOD": "3"})
    found = {key: (getattr(cfg, key), cfg.origin(key)) for key in Schema.model_fields}
    assert found["steps"] == (4, "command line")
    assert found["log_period"] == (3, "environment M_LOG_PERIOD")
    assert found["base_emb_dim"] == (30, f"{model}:1")
    assert found["head_dim"] == (6, f"{model}:2")
    assert found["eval_steps"] == (5, f"{child}:6")
    assert found["max_target_length"] == (9, f"{Path(child).parent / 'parent.yml'}:6")
    assert found["num_epoch"] == (4, "default")


def test_base_yml_is_the_defaults():
    cfg = config.load([BASE], {})
    assert cfg.as_dict() == config.make(run_name="base").as_dict()
    assert cfg.origin("steps").startswith(f"{BASE}:")


def test_an_exponent_without_a_dot_in_yaml(write):
    cfg = config.load([write("c.yml", "learning_rate: 1e-3\nsteps: 1e3\nrun_name: 1e3\nadam_eps: '1e-6'\n")], {})
    assert (cfg.learning_rate, cfg.steps, cfg.run_name, cfg.adam_eps) == (1e-3, 1000, "1e3", 1e-6)


def test_yaml_values_are_read_by_type(write):
    text = """\
        # comment
        packing: off
        mlp_activations: [gelu]
        train_files:
          - a b.txt
          - "c, d.txt"   # comment
        eval_files:
        max_num_checkpoints_to_keep: ~
        prompt: |
          two
          lines
        tokenizer_type: &t byte
        run_name: *t
    """
    cfg = config.load([write("c.yml", text)], {})
    assert cfg.packing is False
    assert cfg.mlp_activations == ("gelu",)
    assert cfg.train_files == ("a b.txt", "c, d.txt")
    assert cfg.eval_files == ()
    assert cfg.max_num_checkpoints_to_keep is None
    assert cfg.prompt == "two\nlines\n"
    assert cfg.run_name == "byte"


def test_byte_order_mark_and_windows_lines(write):
    assert config.load([write("c.yml", b"\xef\xbb\xbfsteps: 7\r\nlog_period: 3\r\n")], {}).log_period == 3


def test_values_may_hold_equals_signs_and_be_empty():
    cfg = config.load([BASE, "prompt=a=b", "metrics_file="], {})
    assert (cfg.prompt, cfg.metrics_file) == ("a=b", "")


def test_a_shipped_model():
    cfg = config.load([BASE, "model_name=llama3-8b"], {})
    assert (cfg.emb_dim, cfg.num_kv_heads, cfg.vocab_size, cfg.run_name) == (4096, 8, 128256, "llama3-8b")


@pytest.mark.parametrize("model", sorted((ROOT / "configs" / "models").glob("*.yml")), ids=lambda path: path.stem)
def test_every_shipped_model_loads(model):
    config.load([BASE, f"model_name={model.stem}"], {})


# the model file


def test_overriding_the_model_needs_a_word(write):
    model = write("m.yml", "base_emb_dim: 64\n")
    assert ids(BASE, f"model_name={model}", "base_emb_dim=32") == ("config.model-override",)
    assert ids(BASE, f"model_name={model}", M_BASE_EMB_DIM="32") == ("config.model-override",)
    cfg = config.load([BASE, f"model_name={model}", "base_emb_dim=32", "override_model_config=yes"], {})
    assert cfg.base_emb_dim == 32
    assert config.load([BASE, f"model_name={model}", "base_mlp_dim=32"], {}).base_mlp_dim == 32  # not in the file
    with pytest.raises(ConfigError):
        config.make(model_name=model, base_emb_dim=32)


def test_a_model_file_holds_architecture_only(write):
    model = write("m.yml", "base_emb_dim: 64\nsteps: 5\nbase_config: c.yml\n")
    assert ids(BASE, f"model_name={model}") == ("config.model-file",) * 2


def test_a_model_file_is_checked_like_others(write):
    model = write("m.yml", "base_emb_dims: 64\nhead_dim: 33\n")
    assert ids(BASE, f"model_name={model}") == ("config.unknown-key", "config.head-dim")


def test_unknown_model():
    assert ids(BASE, "model_name=llama3-9b") == ("config.unknown-model",)
    assert ids(BASE, "model_name=nowhere/m.yml") == ("config.file-missing",)
    assert ids(BASE, "model_name=") == ("config.unknown-model",)


# names


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("stps", "steps"), ("base_emb_dims", "base_emb_dim"), ("Steps", "steps"), ("lr", "learning_rate"),
     ("batch_size", "per_device_batch_size"), ("num_layers", "base_num_decoder_layers")],
)  # fmt: skip
def test_unknown_key_names_the_nearest(typo, meant):
    with pytest.raises(config.InvalidConfig, match=meant) as caught:
        config.load([BASE, f"{typo}=5"], {})
    assert caught.value.id == "config.unknown-key"


def test_unknown_key_in_a_file_has_its_line(write):
    path = write("c.yml", "steps: 5\n\nstps: 5\n")
    with pytest.raises(config.InvalidConfig, match=f"{path}:3"):
        config.load([path], {})


def test_names_that_are_not_offered():
    assert ids(BASE, "moba=true") == ("config.not-offered",)
    assert ids(BASE, "sa_block_q=512", "hf_access_token=x") == ("config.not-offered",) * 2
    assert ids(BASE, M_QUANTIZATION="int8") == ("config.not-offered",)
    offered = Schema.model_fields.keys() | config.DERIVED.keys()
    assert [name for name in offered if names.not_offered(name)] == []
    assert set(names.SYNONYMS.values()) <= Schema.model_fields.keys()
    assert not names.SYNONYMS.keys() & offered


@pytest.mark.parametrize("name", config.DERIVED)
def test_derived_names_cannot_be_set(name):
    assert ids(BASE, f"{name}=5") == ("config.derived",)
    assert ids(BASE, **{f"M_{name.upper()}": "5"}) == ("config.derived",)


def test_file_keys_stand_in_files_only():
    assert ids(BASE, "base_config=a.yml", "resolved=true") == ("config.key-place",) * 2


def test_environment():
    assert config.load([BASE], {"M_STEPS": "5", "M_": "x", "M_UNRELATED_THING": "1", "STEPS": "9"}).steps == 5
    assert ids(BASE, M_STEP="5") == ("config.unknown-key",)
    assert ids(BASE, M_STEPS="5.5") == ("config.fraction",)


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("M_STEPS", "17")
    assert config.load([BASE]).steps == 17
    assert config.make().steps == Schema.model_fields["steps"].default


# arguments


@pytest.mark.parametrize("argv", [[], ["steps=5"], ["--help"], ["--config=x.yml"]])
def test_without_a_config_file_usage_is_shown(argv):
    with pytest.raises(ConfigError, match="python train.py configs/base.yml") as caught:
        config.load(argv, {})
    assert (caught.value.id, caught.value.exit_code) == ("config.usage", 2)


@pytest.mark.parametrize("argument", ["--steps=5", "steps", "other.yml", "=5", "a b=5", "", "-v"])
def test_not_key_value(argument):
    assert ids(BASE, argument) == ("config.not-key-value",)


def test_all_problems_at_once(write):
    path = write("c.yml", "stps: 5\nsteps: many\nsteps: 6\nhead_dim: 33\n")
    found = ids(path, "dtype=fp16", "checkpoint_period=0", "--x", M_LOG_PERIOD="1.5")
    assert sorted(found) == sorted(
        ["config.unknown-key", "config.type", "config.duplicate-key", "config.head-dim", "config.choice",
         "config.range", "config.not-key-value", "config.fraction"]
    )  # fmt: skip


# files


@pytest.mark.parametrize(
    ("data", "id"),
    [
        (b"", "config.file-empty"),
        (b" \n\n", "config.file-empty"),
        (b"# nothing\n", "config.file-empty"),
        (b"\xff\xfe\x00", "config.file-encoding"),
        (b"steps: [1\nb: 2\n", "config.file-yaml"),
        (b"steps:\t- 5", "config.file-yaml"),
        (b"steps: \x07", "config.file-yaml"),
        (b"steps: *x", "config.file-yaml"),
        (b"steps: 5\n---\nsteps: 6\n", "config.file-yaml"),
        (b"a: " + b"[" * 5000, "config.file-yaml"),
        (b"- steps\n", "config.file-not-mapping"),
        (b"steps\n", "config.file-not-mapping"),
        (b"? [steps]\n: 5\n", "config.file-not-mapping"),
        (b"steps: 5\nsteps: 5\n", "config.duplicate-key"),
        (b"steps: {a: 5}\n", "config.nested"),
        (b"train_files: [[a], b]\n", "config.nested"),
        (b"<<: {steps: 5}\n", "config.nested"),
        (b"steps:\n", "config.type"),
        (b"run_name: null\n", "config.type"),
        (b"steps: [1]\n", "config.type"),
        (b"prompt: !!python/object:os.system x\n", None),
        (b"prompt: " + b"x" * (1 << 20), "config.file-size"),
    ],
)
def test_yaml_files(write, data, id):
    path = write("c.yml", data)
    if id is None:
        assert config.load([path], {}).prompt == "x"
    else:
        assert ids(path) == (id,)


def test_malformed_yaml_has_its_line(write):
    path = write("c.yml", "steps: 5\nlog_period: 'x\n")
    with pytest.raises(config.InvalidConfig, match=f"{path}:[23]"):
        config.load([path], {})


def test_other_files(tmp_path, write):
    assert ids(str(tmp_path)) == ("config.file-directory",)
    assert ids(str(tmp_path / "no.yml")) == ("config.file-missing",)
    assert ids(str(tmp_path / "no" / "no.yml")) == ("config.file-missing",)
    assert ids("a\0b") == ("config.file-unreadable",)
    assert ids("x" * 5000) == ("config.file-unreadable",)
    write("basis.yml", "steps: 5\n")
    with pytest.raises(config.InvalidConfig, match="nearest: .*basis.yml"):
        config.load([str(tmp_path / "bsis.yml")], {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(write):
    path = write("c.yml", "steps: 5\n")
    Path(path).chmod(0)
    assert ids(path) == ("config.file-unreadable",)


def test_base_config(tmp_path, write):
    write("deep/a.yml", "base_config: ../b.yml\nsteps: 3\n")
    write("b.yml", "steps: 2\nlog_period: 2\n")
    assert config.load([str(tmp_path / "deep" / "a.yml")], {}).log_period == 2
    assert ids(write("a.yml", "base_config: missing.yml\n")) == ("config.file-missing",)
    assert ids(write("a.yml", "base_config: [b.yml]\n")) == ("config.type",)
    assert ids(write("a.yml", "base_config: a.yml\n")) == ("config.base-cycle",)
    write("c.yml", "base_config: deep/../a.yml\n")
    assert ids(write("a.yml", "base_config: c.yml\n")) == ("config.base-cycle",)


# Python recipes

RECIPE = """\
    from ml_collections import config_dict

    def get_config():
        config = config_dict.ConfigDict()
        config.base_config = "base.yml"
        config.steps = 7
        config.learning_rate = 1e-3
        config.per_device_batch_size = 4
        config.mlp_activations = ("gelu", "linear")
        config.train_files = ["a.txt"]
        config.max_num_checkpoints_to_keep = None
        config.log_period = "1e2"
        return config
"""


def test_recipe(write):
    write("base.yml", "steps: 1\neval_steps: 3\n")
    path = write("recipe.py", RECIPE)
    cfg = config.load([path, "head_dim=16"], {})
    assert (cfg.steps, cfg.eval_steps, cfg.head_dim, cfg.log_period) == (7, 3, 16, 100)
    assert cfg.per_device_batch_size == 4.0 and type(cfg.per_device_batch_size) is float
    assert cfg.mlp_activations == ("gelu", "linear")
    assert cfg.max_num_checkpoints_to_keep is None
    assert cfg.origin("steps") == f"{path} get_config()"
    assert cfg.run_name == "recipe"
    assert sorted(entry.name for entry in Path(path).parent.iterdir()) == ["base.yml", "recipe.py"]


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("x = 1\n", "config.recipe-shape"),
        ("get_config = 5\n", "config.recipe-shape"),
        ("def get_config(): return 5\n", "config.recipe-shape"),
        ("def get_config(:\n", "config.recipe-failed"),
        ("import nothing_like_this\n", "config.recipe-failed"),
        ("def get_config(): raise SystemExit(3)\n", "config.recipe-failed"),
        ("def get_config(): return {'steps': 5.5}\n", "config.fraction"),
        ("def get_config(): return {'packing': 1}\n", "config.type"),
        ("def get_config(): return {'run_name': 5}\n", "config.type"),
        ("def get_config(): return {'steps': {'a': 5}}\n", "config.type"),
        ("def get_config(): return {5: 5}\n", "config.unknown-key"),
        ("def get_config(): return {'emb_dim': 5}\n", "config.derived"),
    ],
)
def test_wrong_recipes(write, text, id):
    assert ids(write("recipe.py", text)) == (id,)


def test_a_failing_recipe_has_its_line(write):
    path = write("recipe.py", "import json\n\ndef get_config():\n    return json.loads('{')\n")
    with pytest.raises(config.InvalidConfig, match=f"{path}:4.*JSONDecodeError"):
        config.load([path], {})


# speed and side effects


def test_nothing_heavy_is_imported():
    code = "import sys, MaxText.cli, MaxText.config as c; c.load(['configs/base.yml'], {}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    heavy = {"numpy", "jax", "jaxlib", "flax", "optax", "orbax", "grain", "ml_collections", "rich", "tensorflow"}
    assert heavy & set(loaded.split()) == set()
