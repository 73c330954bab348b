"""The launcher, with programs of one line in the place of training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from MaxText import launch
from MaxText.errors import ConfigError

ROOT = Path(__file__).parents[1]
WAITING = "import time; print('ready', flush=True); time.sleep(60)"


def start(*own: str, code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "MaxText", "launch", *own, "--", "-c", code]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process: subprocess.Popen[str], limit: float = 40) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        process.kill()
    return process.returncode, out, err


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_process_has_its_place_and_its_line():
    code = """
import os, sys
print(*(os.environ[f"JAX_{name}"] for name in ("PROCESS_ID", "NUM_PROCESSES")), os.environ["XLA_FLAGS"].split("=")[1])
print("error", os.environ["JAX_COORDINATOR_ADDRESS"].partition(":")[0], file=sys.stderr)
"""
    code, out, err = end(start("processes=3", "devices_per_process=4", code=code))
    assert code == 0
    assert sorted(out.splitlines()) == ["0 3 4", "[1] 1 3 4", "[2] 2 3 4"]
    assert sorted(err.splitlines()) == ["[1] error 127.0.0.1", "[2] error 127.0.0.1", "error 127.0.0.1"]


def test_the_first_failure_is_the_exit_code_and_ends_the_others():
    code = "import os, sys, time; id = int(os.environ['JAX_PROCESS_ID']); id == 1 and sys.exit(5); time.sleep(60)"
    impatient = "import sys; from MaxText import launch; launch.GRACE_SECONDS = 0.5; sys.exit(launch.run(sys.argv[1:]))"
    command = [sys.executable, "-c", impatient, "processes=3", "--", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert done.returncode == 5
    err = done.stderr
    assert "launch: process 1 ended with exit code 5" in err and "process 0, 2 did not follow: killed" in err


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(asked):
    code = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: sys.exit(60 + number))
print("ready", flush=True)
time.sleep(60)
"""
    process = start("processes=2", code=code)
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(asked)
    code, _, err = end(process)
    assert code == 60 + asked
    assert err.count(f"ended with exit code {60 + asked}") == 1, "both ended so: said once"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_nothing_outlives_a_killed_launcher():
    process = start("processes=2", code=f"import os; print(os.getpid(), flush=True); {WAITING}")
    lines = [process.stdout.readline() for _ in range(4)]
    children = [int(line.split()[-1]) for line in lines if line.split()[-1].isdecimal()]
    assert len(children) == 2 and all(alive(child) for child in children)
    process.kill()
    process.communicate()
    until = time.monotonic() + 5
    while any(alive(child) for child in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(child) for child in children)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["processes=2"],
        ["processes=2", "--"],
        ["processes=2", "--", "configs/base.yml"],
        ["processes=0", "--", "train.py"],
        ["processes=two", "--", "train.py"],
        ["proceses=2", "--", "train.py"],
        ["target=moon", "processes=2", "--", "train.py"],
    ],
)
def test_what_is_no_order(wrong):
    with pytest.raises(ConfigError) as caught:
        launch.parse(wrong)
    assert caught.value.id == "launch.usage"


def test_a_mistake_in_the_configuration_is_told_once_and_starts_nothing():
    command = [
        sys.executable,
        "-m",
        "MaxText",
        "launch",
        "processes=4",
        "--",
        "train.py",
        "configs/base.yml",
        "steps=no",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr.count("steps") <= 3 and "launch:" not in done.stderr


def test_slices_are_a_setting_of_the_run():
    order = launch.parse(["processes=2", "slices=2", "--", "train.py", "a.yml"])
    assert order.command == ("train.py", "a.yml", "num_slices=2")
    env = launch.environment(order, 1, 99, {"XLA_FLAGS": "--xla_x=1"} | dict(os.environ, XLA_FLAGS="--xla_x=1"))
    assert env["XLA_FLAGS"] == "--xla_x=1" and env["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:99"
