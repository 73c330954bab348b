"""Environment before JAX, signals with real processes, the profiler's window."""

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from MaxText import runtime
from MaxText.errors import PlanError

ROOT = Path(__file__).parents[1]


def make(**keys):
    base = {"hardware": "auto", "num_cpu_devices": 0, "jax_cache_dir": "", "profiler": "", "profiler_steps": 2}
    base |= {"skip_first_n_steps_for_profiler": 1, "ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}
    return SimpleNamespace(**(base | keys))


def settings(environ=None, accelerator=None, **keys):
    return runtime.environment(make(**keys), environ or {}, accelerator=accelerator)


# --- environment


def test_module_imports_nothing_heavy():
    code = "import sys, MaxText.runtime; print(sorted({'jax', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


def test_one_cpu_device_needs_no_flags():
    found = settings()
    assert found["JAX_PLATFORMS"] == "cpu"
    assert "XLA_FLAGS" not in found and "NPROC" not in found


@pytest.mark.parametrize(
    ("keys", "devices"),
    [
        ({"num_cpu_devices": 8}, 8),
        ({"ici_fsdp_parallelism": 4}, 4),
        ({"ici_fsdp_parallelism": 4, "dcn_data_parallelism": 2, "ici_tensor_parallelism": 2}, 16),
        ({"num_cpu_devices": 2, "ici_fsdp_parallelism": 4}, 2),  # a contradiction: for the planner to refuse
    ],
)
def test_virtual_devices(keys, devices):
    assert settings(**keys)["XLA_FLAGS"] == f"--xla_force_host_platform_device_count={devices}"


@pytest.mark.parametrize(
    ("keys", "environ", "each"),
    [
        ({"num_cpu_devices": 8}, {}, 4),
        ({"ici_fsdp_parallelism": 4, "dcn_data_parallelism": 2}, {}, 4),
        ({"ici_fsdp_parallelism": 2, "num_slices": 2}, {}, 2),  # dcn_data_parallelism=-1 fills the slices
        ({}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, 3),
    ],
)
def test_devices_are_dealt_to_processes(keys, environ, each):
    found = runtime.environment(make(**keys), environ, accelerator=None, processes=2)
    assert found["XLA_FLAGS"] == f"--xla_force_host_platform_device_count={each}"


def test_devices_that_cannot_be_dealt_equally():
    with pytest.raises(PlanError) as caught:
        runtime.environment(make(num_cpu_devices=5), {}, accelerator=None, processes=2)
    assert caught.value.id == "plan.devices-per-process" and "5" in str(caught.value)
    assert "XLA_FLAGS" not in runtime.environment(make(), {}, accelerator=None, processes=4)


@pytest.mark.parametrize("keys", [{"num_cpu_devices": 1025}, {"ici_fsdp_parallelism": 100_000}])
def test_more_devices_than_a_cpu_can_play_are_refused(keys):
    with pytest.raises(PlanError, match="1,024"):
        settings(**keys)


@pytest.mark.parametrize(("devices", "threads"), [(2, 32), (8, 32), (16, 64)])
def test_thread_pool_outgrows_the_devices(devices, threads):
    assert settings(num_cpu_devices=devices)["NPROC"] == str(threads)


def test_larger_pool_of_the_caller_is_kept():
    assert settings({"NPROC": "100"}, num_cpu_devices=2)["NPROC"] == "100"


def test_flags_of_the_caller_are_kept():
    own = {"XLA_FLAGS": "--xla_foo=1 --xla_force_host_platform_device_count=4"}
    assert settings(own)["XLA_FLAGS"] == own["XLA_FLAGS"]
    assert settings(own)["NPROC"] == "32"
    wanted = settings(own, num_cpu_devices=8)["XLA_FLAGS"]
    assert wanted == "--xla_foo=1 --xla_force_host_platform_device_count=8"
    assert settings(own, num_cpu_devices=1)["XLA_FLAGS"].endswith("count=1")


@pytest.mark.parametrize(
    ("hardware", "environ", "accelerator", "platforms"),
    [
        ("auto", {}, None, "cpu"),
        ("auto", {}, "gpu", None),
        ("auto", {"JAX_PLATFORMS": "cpu"}, "gpu", "cpu"),
        ("cpu", {"JAX_PLATFORMS": "tpu"}, "tpu", "cpu"),
        ("tpu", {}, None, "tpu,cpu"),
        ("gpu", {}, None, "cuda,cpu"),
    ],
)
def test_platform(hardware, environ, accelerator, platforms):
    found = settings(environ, accelerator, hardware=hardware, ici_fsdp_parallelism=4)
    assert found.get("JAX_PLATFORMS") == platforms
    assert ("XLA_FLAGS" in found) == (platforms == "cpu")


def test_compile_cache(tmp_path):
    assert settings(jax_cache_dir="~/x")["JAX_COMPILATION_CACHE_DIR"] == os.path.expanduser("~/x")
    assert not any("CACHE" in key for key in settings())


def test_logs_are_quiet_unless_asked_for():
    assert settings()["TF_CPP_MIN_LOG_LEVEL"] == "2"
    assert settings({"TF_CPP_MIN_LOG_LEVEL": "0"})["TF_CPP_MIN_LOG_LEVEL"] == "0"


def test_prepare_sets_the_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": "--xla_foo=1"})
    done = runtime.prepare(make(hardware="cpu", num_cpu_devices=4))
    assert done.items() <= os.environ.items()
    assert os.environ["XLA_FLAGS"] == "--xla_foo=1 --xla_force_host_platform_device_count=4"


def test_process_age_counts_from_the_start_of_the_process():
    code = "import time; time.sleep(.3); from MaxText import runtime; print(runtime.process_age())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.29  # ticks of 10 ms


# --- signals


def start(body: str) -> subprocess.Popen:
    code = "import os, time, signal\nfrom MaxText.runtime import Signals\n" + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-uc", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen) -> str:
    return process.stdout.readline().strip()


WAITING = """
    with Signals() as signals:
        print("ready")
        while not signals.requested:
            time.sleep(.01)
        print(signals.requested.name)
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_a_request_second_ends(number):
    with start(WAITING) as process:
        assert line(process) == "ready"
        process.send_signal(number)
        assert line(process) == number.name
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(10) == 128 + number


def test_second_signal_ends_even_when_it_is_another_one():
    with start(WAITING) as process:
        assert line(process) == "ready"
        process.terminate()
        assert line(process) == "SIGTERM"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_warning_is_a_request_and_comes_beside_others(number):
    """A terminal that is gone sends several; systemd sends SIGHUP with its SIGTERM."""
    with start(WAITING) as process:
        assert line(process) == "ready"
        process.send_signal(number)
        assert line(process) == number.name
        for other in (number, signal.SIGTERM, number):
            process.send_signal(other)
            time.sleep(0.1)
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == 143


def test_under_nohup_a_terminal_that_goes_is_nothing():
    with start("signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + textwrap.dedent(WAITING)) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert line(process) == "SIGTERM"
        process.terminate()
        assert process.wait(10) == 143


def test_second_signal_ends_a_main_thread_stuck_in_c():
    """As in a compilation: no bytecode runs, so no Python handler would."""
    body = """
        import hashlib
        with Signals(notify=lambda number: print("asked")):
            print("ready")
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
    """
    with start(body) as process:
        assert line(process) == "ready"
        process.terminate()
        assert line(process) == "asked"
        process.terminate()
        assert process.wait(10) == 143


def test_second_signal_ends_when_an_event_loop_took_the_descriptor():
    with start(WAITING.replace('print("ready")', 'signal.set_wakeup_fd(-1); print("ready")')) as process:
        assert line(process) == "ready"
        process.terminate()
        assert line(process) == "SIGTERM"
        process.terminate()
        assert process.wait(10) == 143


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with runtime.Signals() as signals:
        assert signals.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested is signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_another_signal_is_not_a_request():
    hits = []
    before = signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))
    try:
        with runtime.Signals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert hits == [1, 1] and signals.requested is None
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- profiler


@pytest.fixture
def traced(monkeypatch):
    import jax

    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", None)))
    return calls


def walk(profiler, calls, steps):
    """Return the steps that run inside the window."""
    inside = []
    for step in steps:
        profiler.step(step)
        if len(calls) % 2:
            inside.append(step)
    return inside


def test_window_is_relative_to_the_first_step(traced, tmp_path):
    with runtime.Profiler(make(profiler="xplane"), tmp_path / "profile") as profiler:
        assert walk(profiler, traced, range(100, 110)) == [101, 102]
        assert profiler.window == range(101, 103)
    assert traced == [("start", str(tmp_path / "profile")), ("stop", None)]


def test_window_is_closed_when_the_run_ends_inside_it(traced, tmp_path):
    with runtime.Profiler(make(profiler="xplane", profiler_steps=50), tmp_path) as profiler:
        walk(profiler, traced, range(5))
    assert [name for name, _ in traced] == ["start", "stop"]


def test_no_profiler_no_trace(traced, tmp_path):
    with runtime.Profiler(make(), tmp_path / "profile") as profiler:
        walk(profiler, traced, range(5))
    assert not traced and not (tmp_path / "profile").exists()


def test_a_real_trace_is_written(tmp_path):
    import jax.numpy as jnp

    with runtime.Profiler(make(profiler="xplane", profiler_steps=1), tmp_path) as profiler:
        for step in range(3):
            profiler.step(step, pending=jnp.ones(3) + step)
    assert list(tmp_path.rglob("*.xplane.pb"))
