"""The verbs, as a person calls them."""

import subprocess
import sys
from pathlib import Path

import pytest

from MaxText import cli, config

ROOT = Path(__file__).parents[1]
BASE = str(ROOT / "configs" / "base.yml")


def test_config_prints_what_can_be_read_back(capsys, tmp_path):
    assert cli.main(["config", BASE, "steps=5"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "c.yml").write_text(printed)
    assert config.load([str(tmp_path / "c.yml")]).steps == 5


def test_base_and_keys_print_the_written_files(capsys):
    assert cli.main(["base"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "base.yml").read_text()
    assert cli.main(["keys"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "keys.md").read_text()


@pytest.mark.parametrize("argv", [["help"], [], ["-h"], ["--help"]])
def test_help(argv, capsys):
    assert cli.main(argv) == 0
    assert "python -m MaxText" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["explode"], ["base", "x"], ["keys", "x"], ["goodput"], ["goodput", "a", "b"]])
def test_wrong_usage(argv, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "[cli.usage]" in err


@pytest.mark.parametrize(("rest", "id"), [([], "config.usage"), ([BASE, "x=1"], "config.unknown-key")])
def test_an_error_is_one_message_and_exit_code_2(rest, id, capsys):
    assert cli.main(["config", *rest]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"[{id}]" in err and "Traceback" not in err


def test_as_a_module_into_a_closed_pipe():
    command = f"{sys.executable} -m MaxText keys | head -1; test ${{PIPESTATUS[0]}} = 0"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "# Every key\n", "")
