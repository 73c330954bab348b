"""The process around the program: environment before JAX starts, signals, the profiler's window.

Nothing here imports jax when the module is imported: `prepare` must run before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, Self

from MaxText.errors import PlanError

if TYPE_CHECKING:
    from MaxText.processes import Several

MOST_CPU_DEVICES = 1024  # each has a thread pool and memory of its own: 25 s to start so many, and 8,192 crash
_IMPORTED = time.monotonic()
_DEGREES = tuple(
    f"{link}_{axis}_parallelism"
    for link in ("ici", "dcn")
    for axis in ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
)
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_SHOW_CURSOR = b"\x1b[?25h\r\n"


class RuntimeConfig(Protocol):
    """The keys that `prepare` and `Profiler` read, besides the parallelism degrees."""

    @property
    def hardware(self) -> str: ...
    @property
    def num_cpu_devices(self) -> int: ...
    @property
    def jax_cache_dir(self) -> str: ...
    @property
    def profiler(self) -> str: ...
    @property
    def skip_first_n_steps_for_profiler(self) -> int: ...
    @property
    def profiler_steps(self) -> int: ...


# --- before JAX is imported ------------------------------------------------------------------------------------------


def prepare(cfg: RuntimeConfig, processes: int = 1) -> dict[str, str]:
    """Set the process environment that JAX reads when it is imported, and return what was set.

    Call it before jax is imported. Where jax is there already (a notebook, a test), only what JAX still
    accepts takes effect: the compile cache, and the device count if no backend has started.
    """
    settings = environment(cfg, os.environ, accelerator=_plugged_in(), processes=processes)
    os.environ.update(settings)
    if settings.get("JAX_PLATFORMS") == "cpu":
        keep_freed_memory()
    if "jax" in sys.modules and "JAX_COMPILATION_CACHE_DIR" in settings:
        import jax

        jax.config.update("jax_compilation_cache_dir", settings["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return settings


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to reuse memory instead of giving it back; False where there is no glibc.

    XLA's CPU backend allocates a step's temporaries anew each step. By default glibc maps and unmaps such blocks, and
    every page is faulted in again: 45,000 faults and a third of the time of a small model's step (docs/log.md).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # <malloc.h>: one arena for all threads; blocks of any size from the heap; the heap never shrinks.
    arena_max, mmap_max, trim_threshold, top_pad = -8, -4, -1, -2
    wanted = ((arena_max, 1), (mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 64 << 20))
    answers = [mallopt(option, value) for option, value in wanted]
    return all(answers)


def environment(
    cfg: RuntimeConfig, environ: Mapping[str, str], *, accelerator: str | None, processes: int = 1
) -> dict[str, str]:
    """Return the variables to set for this configuration; a pure function.

    1. Platform: `hardware` decides; for `auto`, JAX_PLATFORMS of the caller, else the accelerator found, else cpu.
    2. CPU devices: this process's part of `num_cpu_devices`; for 0, a count already in XLA_FLAGS, else its part of the
       product of the fixed degrees.
    3. Compile cache: `jax_cache_dir`; "" leaves the caller's environment alone.

    Args:
      environ: the environment before the change.
      accelerator: "gpu", "tpu" or None: what is plugged into this machine.
      processes: of this run.

    Raises:
      PlanError: "plan.devices-per-process": the devices cannot be dealt out equally.
    """
    platforms = _platforms(cfg.hardware, environ, accelerator)
    settings = {"JAX_PLATFORMS": platforms} if platforms else {}
    if platforms == "cpu":
        settings |= _cpu_devices(cfg, environ, processes)
    if cfg.jax_cache_dir:
        settings |= {
            "JAX_COMPILATION_CACHE_DIR": os.path.expanduser(cfg.jax_cache_dir),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return settings | _quiet(environ)


def _platforms(hardware: str, environ: Mapping[str, str], accelerator: str | None) -> str:
    """JAX_PLATFORMS, or "" to let JAX choose. Naming cpu saves JAX's search for accelerators (seconds)."""
    if hardware == "auto":
        return environ.get("JAX_PLATFORMS", "") or ("" if accelerator else "cpu")
    return {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(hardware, "")


def _cpu_devices(cfg: RuntimeConfig, environ: Mapping[str, str], processes: int) -> dict[str, str]:
    flags = environ.get("XLA_FLAGS", "").split()
    given = [_count(flag.partition("=")[2]) for flag in flags if flag.startswith(_COUNT_FLAG + "=")]
    devices = _dealt(cfg, processes) if cfg.num_cpu_devices or not given else given[-1]
    if devices <= 1 and not given:
        return {}
    kept = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)]
    settings = {"XLA_FLAGS": " ".join([*kept, f"{_COUNT_FLAG}={devices}"])}
    if devices > 1:
        # XLA's CPU thread pool has one thread per core unless NPROC says otherwise. With fewer threads than
        # collectives in flight, JAX 0.10 deadlocks; 32, and 4 per device, never did.
        settings["NPROC"] = str(max(32, 4 * devices, _count(environ.get("NPROC", ""))))
    return settings


def _dealt(cfg: RuntimeConfig, processes: int) -> int:
    """The devices of one process where the configuration says how many there are in all."""
    total = cfg.num_cpu_devices or max(mesh_product(cfg), processes)
    what = "num_cpu_devices" if cfg.num_cpu_devices else "the product of the mesh degrees"
    if total > MOST_CPU_DEVICES:
        raise PlanError(
            f"{what} is {total:,}; at most {MOST_CPU_DEVICES:,} virtual devices start on a CPU. For a plan of a larger "
            "mesh name the slice, such as hardware=v5p-4096 with plan_only=true: no device starts then.",
            id="plan.cpu-devices",
        )
    if total % processes:
        raise PlanError(
            f"{what} is {total}, which {processes} processes cannot share equally. "
            f"Set num_cpu_devices to a multiple of {processes}, or use another number of processes.",
            id="plan.devices-per-process",
        )
    return total // processes


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def mesh_product(cfg: RuntimeConfig) -> int:
    """Return the product of the mesh degrees that the configuration fixes ("fill", -1, counts as 1, except where
    `num_slices` says what a dcn degree fills up to)."""
    ici, dcn = (
        math.prod(max(1, getattr(cfg, key, 1)) for key in _DEGREES if key.startswith(link)) for link in ("ici", "dcn")
    )
    return ici * max(dcn, getattr(cfg, "num_slices", -1))


def _quiet(environ: Mapping[str, str]) -> dict[str, str]:
    """Hide XLA's INFO and WARNING lines (errors stay) unless the person asked for them."""
    return {"TF_CPP_MIN_LOG_LEVEL": environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}


def _plugged_in() -> str | None:
    """Which accelerator has both its device files and its JAX plugin here; looks at files only, in microseconds."""
    if importlib.util.find_spec("libtpu") and (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        return "tpu"
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
    if any(map(importlib.util.find_spec, plugins)) and (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/kfd")):
        return "gpu"
    return None


def process_age() -> float:
    """Return the seconds since this process started (elsewhere than on Linux: since this module was imported)."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError):
        return time.monotonic() - _IMPORTED


def connect(cfg: Any, group: Several) -> None:
    """Join JAX's own coordination service, on a port that process 0 chose. Call it before JAX has a backend.

    Its handling of a lost process is only a second line: it knows no names, and ends the process with SIGABRT. So it is
    slower than ours, and leaves SIGTERM to us.
    """
    import jax

    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        group.jax_address,
        group.count,
        group.id,
        cluster_detection_method="deactivate",
        initialization_timeout=cfg.jax_distributed_initialization_timeout,
        heartbeat_timeout_seconds=2 * cfg.jax_distributed_heartbeat_timeout_seconds + 30,
        shutdown_timeout_seconds=60,
    )


# --- signals ---------------------------------------------------------------------------------------------------------


_ENDING = (signal.SIGTERM, signal.SIGINT)
_WARNING = (signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """While open, the first SIGTERM or SIGINT only sets `requested`; the second ends the process at once.

    SIGHUP (the terminal is gone) and SIGUSR1 (a batch system's warning) set it as well, and end nothing: they come
    beside others. Where the process ignores one of these two, as under nohup, or has its own answer, that stays.

    The second one exits with 128 + its number, without clean-up: what is durable stays so. A thread reads the
    signals from a pipe, because Python runs its own handlers only between bytecodes: the second signal works even
    while the main thread is inside a compilation of minutes.

    `requested` is None, or the first signal received. Open it from the main thread.
    """

    def __init__(self, notify: Callable[[signal.Signals], None] | None = None) -> None:
        """`notify` is called once, from another thread, when the first signal arrives."""
        self.requested: signal.Signals | None = None
        self._notify = notify
        self._handled = 0
        self._taken: set[int] = set()
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> Self:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._terminal = _terminal_state()
        thread = threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True)
        thread.start()
        self._restore.callback(thread.join)
        self._restore.callback(os.close, writer)  # ends the thread
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._restore.callback(signal.set_wakeup_fd, before)
        for number in (*_ENDING, *_WARNING):
            if number in _WARNING and signal.getsignal(number) is not signal.SIG_DFL:
                continue
            self._taken.add(number)
            self._restore.callback(signal.signal, number, signal.signal(number, self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()

    def _watch(self, reader: int) -> None:
        """Count signals as they arrive, whatever the main thread does."""
        seen = 0
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                if byte[0] not in self._taken:
                    continue
                number = signal.Signals(byte[0])
                seen += number in _ENDING
                if seen == 2:
                    self._end(number)
                self.requested = self.requested or number
                if self._notify:
                    self._notify(number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Python's own handler: the flag is up when the interrupted bytecode goes on.

        It counts by itself, for a library that has taken the wake-up descriptor (an event loop) away.
        """
        self._handled += number in _ENDING
        self.requested = self.requested or signal.Signals(number)
        if self._handled == 2:
            self._end(signal.Signals(number))

    def _end(self, number: signal.Signals) -> None:
        self._terminal()
        os._exit(128 + number)


def _terminal_state() -> Callable[[], None]:
    """Remember the terminal's settings; the returned function restores them and shows the cursor again."""
    terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()]
    if not terminals:
        return lambda: None
    import termios

    saved = termios.tcgetattr(terminals[0])

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone: the reason to end, often
            termios.tcsetattr(terminals[0], termios.TCSANOW, saved)
            os.write(terminals[0], _SHOW_CURSOR)

    return restore


# --- profiler --------------------------------------------------------------------------------------------------------


class Profiler:
    """Traces a window of steps with `jax.profiler` when `profiler` is "xplane"; otherwise does nothing.

    The window opens `skip_first_n_steps_for_profiler` steps after the first step of this attempt (so it leaves out
    compilation and warm-up after a resume as well) and is `profiler_steps` long.
    """

    def __init__(self, cfg: RuntimeConfig, folder: Path) -> None:
        """`folder` receives the trace: TensorBoard's and XProf's log folder, by custom RUN/profile."""
        self.folder = folder
        self._wanted = cfg.profiler == "xplane"
        self._skip = cfg.skip_first_n_steps_for_profiler
        self._length = cfg.profiler_steps
        self._window: range | None = None
        self._open = False

    @property
    def window(self) -> range | None:
        """The steps traced, known once the first step is; None when there is no trace."""
        return self._window

    def step(self, step: int, pending: Any = None) -> None:
        """Call before `step` is dispatched. `pending` (a tree of arrays) is waited for before the window closes."""
        if not self._wanted:
            return
        if self._window is None:
            self._window = range(step + self._skip, step + self._skip + self._length)
        if step in self._window and not self._open:
            import jax

            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.folder))
            self._open = True
        elif step >= self._window.stop:
            self.close(pending)

    def close(self, pending: Any = None) -> None:
        """End the trace if it is open; safe to call again."""
        if not self._open:
            return
        import jax

        jax.block_until_ready(pending)
        self._open = False
        jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
