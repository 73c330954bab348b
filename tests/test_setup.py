"""setup.sh in copies of the house, with a lock of one tiny local wheel that stands for JAX: no network, no waiting."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
READY = re.compile(r"^Ready: Python (3\.\d+\.\d+) \((.+)\), (\d+) packages, [\d.]+ GB in \.venv, JAX for cpu\.$", re.M)


def make_wheel(folder: Path, version: str = "1.0") -> None:
    """A wheel of a package `jax` whose `devices()` is empty."""
    info = f"jax-{version}.dist-info"
    with zipfile.ZipFile(folder / f"jax-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("jax/__init__.py", "def devices():\n    return []\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class House:
    """A copy of setup.sh in a folder whose name has a space, with its lock and a folder of wheels beside it."""

    def __init__(self, folder: Path):
        self.root, self.wheels = folder / "a house", folder / "wheels"
        self.root.mkdir()
        self.wheels.mkdir()
        shutil.copy(ROOT / "setup.sh", self.root)
        self.venv, self.lock = self.root / ".venv", self.root / "requirements.txt"
        make_wheel(self.wheels)
        self.lock.write_text("jax==1.0\n")

    def setup(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh from elsewhere, with a HOME that does not exist and an index that has nothing."""
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        plain = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PIP_NO_CACHE_DIR": "1", "PYTHON": PYTHON}
        command = ["bash", str(self.root / "setup.sh"), *arguments]
        return subprocess.run(command, cwd="/", env=plain | index | environ, capture_output=True, text=True)

    def made(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.name.startswith("."))

    def is_ready(self, kind: str = "cpu") -> bool:
        lock = "requirements.txt" if kind == "cpu" else f"requirements-{kind}.txt"
        return source(f"cd '{self.root}'; kind={kind} lock={lock}; is_ready").returncode == 0

    def version(self) -> str:
        code = "import importlib.metadata as m; print(m.version('jax'))"
        return subprocess.check_output([self.venv / "bin/python", "-c", code], text=True).strip()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It failed with `code` and one sentence of setup.sh, its last line, that holds `words`."""
    assert done.returncode == code, done.stderr
    assert done.stderr.count("setup.sh: ") == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("setup.sh: ") and all(word in last for word in words), done.stderr


def source(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a bash script that has the functions of setup.sh."""
    command = ["bash", "-c", f"source '{ROOT}/setup.sh'\n{script}"]
    return subprocess.run(command, env=dict(os.environ) | environ, capture_output=True, text=True)


def stub(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def python_that_says(path: Path, change: str) -> Path:
    """A Python whose `sys` was changed by the statements `change` before it runs what it is told."""
    return stub(path, f"exec '{PYTHON}' -c 'import sys; {change}; exec(sys.argv[-1])' \"$@\"")


@pytest.mark.slow
def test_it_makes_a_virtual_environment_and_keeps_it(house: House):
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", house.venv], check=True)  # somebody stopped half-way
    first = house.setup()
    found = READY.search(first.stdout)
    assert first.returncode == 0 and found, first.stdout + first.stderr
    assert found[1] == ".".join(map(str, sys.version_info[:3])) and found[2] == PYTHON
    assert "Next:  .venv/bin/python train.py configs/base.yml" in first.stdout
    assert house.version() == "1.0" and house.made() == [".venv"]

    (house.venv / "kept").touch()
    for again in (house.setup(), house.setup(PYTHON=""), house.setup("cpu", PATH="/nonexistent:/usr/bin:/bin")):
        assert again.returncode == 0 and READY.search(again.stdout) and "Installing" not in again.stdout
    assert (house.venv / "kept").exists() and house.is_ready()

    (house.root / "requirements-gpu.txt").write_text("jax==1.0\n")  # what else must lead to a new one
    assert not house.is_ready("gpu")
    installed = next(house.venv.glob("lib/*/site-packages/jax-1.0.dist-info"))
    installed.rename(house.root / "lost")
    assert not house.is_ready()
    (house.root / "lost").rename(installed)
    house.root.rename(moved := house.root.with_name("moved"))
    house.root, house.venv, house.lock = moved, moved / ".venv", moved / "requirements.txt"
    assert not house.is_ready()

    make_wheel(house.wheels, "2.0")
    house.lock.write_text("jax==2.0\n")
    assert not house.is_ready()
    refused(house.setup(PIP_FIND_LINKS=""), 1, "cannot install requirements.txt", "Nothing was changed")
    assert (house.venv / "kept").exists() and house.made() == [".venv"]
    assert house.setup().returncode == 0
    assert house.version() == "2.0" and not (house.venv / "kept").exists() and house.made() == [".venv"]


def test_a_failed_first_run_leaves_nothing(house: House):
    house.lock.write_text("jax==9.0\n")
    done = house.setup()
    refused(done, 1, "cannot install")
    assert "jax==9.0" in done.stderr and house.made() == []


def test_a_folder_of_that_name_that_is_something_else_is_not_touched(house: House):
    house.venv.mkdir()
    (house.venv / "letters").write_text("mine")
    refused(house.setup(), 1, ".venv")
    assert (house.venv / "letters").read_text() == "mine" and house.made() == [".venv"]


@pytest.mark.parametrize("arguments", [("gpus",), ("cpu", "gpu"), ("",)])
def test_wrong_use_is_refused(house: House, arguments: tuple[str, ...]):
    refused(house.setup(*arguments), 2, "cpu|gpu|tpu")
    assert house.made() == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("sys.version_info = (3, 9, 2)", "too old"),
        ("sys.version_info = (3, 15, 0)", "newer than the lock"),
        ("sys.maxsize = 2**31 - 1", "64-bit"),
        ('sys.modules["ensurepip"] = None', "ensurepip"),
        ('sys.modules["ssl"] = None', "ssl"),
        ('import sysconfig; sysconfig.get_config_var = "{0}".format', "free-threaded"),
    ],
)
def test_a_python_that_cannot_serve_is_refused_by_name(house: House, tmp_path: Path, change: str, why: str):
    python = python_that_says(tmp_path / "python", change)
    refused(house.setup(PYTHON=str(python)), 2, str(python), why)
    assert house.made() == []


@pytest.mark.parametrize("body", ["echo 'pyenv: python3.13: command not found' >&2; exit 127", "exit 0", "echo hello"])
def test_what_is_no_python_is_refused(house: House, tmp_path: Path, body: str):
    refused(house.setup(PYTHON=str(stub(tmp_path / "python3.13", body))), 2, "python3.13")
    refused(house.setup(PYTHON=str(tmp_path / "none")), 2, "none")
    assert house.made() == []


def test_the_newest_is_found_among_stubs_and_old_ones(tmp_path: Path):
    shim = stub(tmp_path / "python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")
    old = python_that_says(tmp_path / "python3", "sys.version_info = (3, 10, 1)")
    newer = [python_that_says(tmp_path / f"new{n}", f"sys.version_info = (3, 12, {n})") for n in (2, 10, 9)]
    listed = "\n".join(map(str, [shim, old, *newer]))
    done = source(f"candidates() {{ echo '{listed}'; }}; find_python; echo $version")
    assert (done.returncode, done.stdout.strip()) == (0, "3.12.10"), done.stderr


def test_version_managers_are_looked_through(tmp_path: Path):
    folders = [".pyenv/versions/3.13.1/bin", ".asdf/installs/python/3.12/bin", "miniforge3/bin"]
    folders += [".local/share/uv/python/cpython-3.12.1/bin", ".local/share/mise/installs/python/3.13/bin"]
    folders += ["miniconda3/envs/train/bin"]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        stub(tmp_path / folder / "python3.12", "exit 1")
    unset = "unset PYENV_ROOT UV_PYTHON_INSTALL_DIR XDG_DATA_HOME ASDF_DATA_DIR MISE_DATA_DIR MAMBA_ROOT_PREFIX"
    found = source(f"{unset}; candidates", HOME=str(tmp_path)).stdout.splitlines()
    assert {str(tmp_path / folder / "python3.12") for folder in folders} <= set(found)


def test_no_usable_python_is_one_sentence(tmp_path: Path):
    old = python_that_says(tmp_path / "python3", "sys.version_info = (3, 10, 1)")
    refused(source(f"candidates() {{ echo {old}; }}; find_python"), 2, "3.11", str(old), "3.10.1", "too old")
    refused(source("candidates() { :; }; find_python"), 2, "found none")


def test_the_lock_pins_everything_for_both_versions_of_jax():
    pin = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; [a-z_]+ (<|>=|==) '[^']+')?(  # via .+)?")
    for path in ROOT.glob("requirements*.txt"):
        lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
        lines = [line for line in lines if line != "-r requirements.txt"]
        assert lines and [line for line in lines if not pin.fullmatch(line)] == []
    lock = (ROOT / "requirements.txt").read_text()
    assert "\njax==0.10.2 ; python_full_version < '3.12'" in lock
    assert "\njax==0.12.0.1 ; python_full_version >= '3.12'" in lock
