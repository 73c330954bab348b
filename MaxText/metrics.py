"""What the numbers of a run mean, the file they go to, and what the console shows of them."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from MaxText.errors import StorageError

DEFINITIONS: dict[str, str] = {
    "step": "index of the optimizer step, from 0",
    "epoch": "passes over the training data completed when the step's rows were drawn",
    "loss": "the objective that was differentiated: the sum of the losses below [nats per target token]",
    "lm_loss": "cross-entropy, summed over the step's real target tokens and divided by their count [nats per token]",
    "z_loss": "z_loss_multiplier x mean over target tokens of log(sum of exp of the logits) squared",
    "mtp_loss": "mtp_loss_scaling_factor x mean over further predictions of their cross-entropy",
    "load_balance_loss": "load_balance_loss_weight x mean over layers of E x sum over experts of share x probability",
    "router_z_loss": "router_z_loss_weight x mean over tokens and layers of log(sum of exp of router logits) squared",
    "indexer_loss": "indexer_loss_scaling_factor x mean over tokens of the layers' summed KL(attention | indexer)",
    "expert_load_max": "tokens of the busiest expert / tokens of a mean expert, in the layer where that is largest",
    "dropped_choices": "part of the tokens' choices that an expert's capacity or its shard's buffer did not take",
    "total_weights": "real target tokens of the step: padding and first tokens of documents are not counted",
    "grad_norm": "global L2 norm of the gradient before clipping",
    "clipped_grad_norm": "global L2 norm of the gradient that the optimizer received",
    "learning_rate": "the schedule's value at this step",
    "seconds": "time from one step's end to the next's, without evaluation and saving [s]",
    "tokens_per_second_per_device": "token slots of the step, padding included, / seconds / devices",
    "tflops_per_device": "model FLOPs of the step, rematerialisation not counted, / seconds / devices / 10^12",
    "data_wait_seconds": "time that the loop waited for the step's batch [s]",
    "save_stall_seconds": "time that the loop waited for a checkpoint before this step [s]",
    "eval_loss": "lm_loss over the whole eval split, weighted by tokens [nats per token]",
    "eval_loss_per_byte": "the eval split's summed cross-entropy / bytes of its text [nats per byte]",
    "eval_total_weights": "real target tokens of the evaluation",
    "eval_seconds": "duration of the evaluation [s]",
}

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# --- the file --------------------------------------------------------------------------------------------------------


def encode(record: Mapping[str, Any]) -> str:
    """Return `record` as one line of JSON.

    Floats are written so that they read back to the same bits. JSON has no name for NaN and the infinities: they
    become the strings "NaN", "Infinity" and "-Infinity", which `float` accepts in most languages. Scalars of numpy
    and JAX become Python's.
    """
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file back, non-finite numbers included; a torn last line is left out."""
    return [_decode(line) for line in _whole_lines(path.read_bytes())]


def has_evaluation(path: Path, done: int) -> bool:
    """Whether the metrics file has the held-out loss after `done` steps, which is filed under the last of them."""
    return path.is_file() and any(one.get("step") == done - 1 and "eval_loss" in one for one in read(path))


def _decode(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    return {key: _NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def _whole_lines(content: bytes) -> Iterator[bytes]:
    """Lines that end in a newline: what a kill in mid-write leaves behind them is no record."""
    yield from content[: content.rfind(b"\n") + 1].splitlines()


class Writer:
    """Appends records to `path`, and to `also`, one JSON object a line; each line is handed to the system at once.

    So a kill -9 loses no record that `write` has returned from; call `sync` before something durable relies on them.
    Every method raises StorageError ("metrics.not-written") where the file system refuses.
    """

    def __init__(self, path: Path, also: Path | None = None) -> None:
        self._paths = [path] if also is None or also.absolute() == path.absolute() else [path, also]
        self._files: list[io.FileIO] = []
        with _storage(path):
            for each in self._paths:
                each.parent.mkdir(parents=True, exist_ok=True)
                _drop_torn_line(each)
        self._open()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`: keys of DEFINITIONS, scalar values."""
        line = f"{encode(record)}\n".encode()
        for path, file in zip(self._paths, self._files, strict=True):
            with _storage(path):
                if (written := file.write(line)) < len(line):
                    raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were taken")

    def rewind(self, step: int) -> int:
        """Drop the records of `step` and later, which will be done again; return how many were dropped from `path`.

        Atomic: after a kill at any moment each file is the old one or the new one.
        """
        self.close()
        dropped = [_rewind(path, step) for path in self._paths]
        self._open()
        return dropped[0]

    def sync(self) -> None:
        """Return once everything written is on the disk itself (power may fail). Pipes and /dev/null have none."""
        for path, file in zip(self._paths, self._files, strict=True):
            with _storage(path):
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files; safe to call again."""
        while self._files:
            self._files.pop().close()

    def _open(self) -> None:
        for path in self._paths:
            with _storage(path):
                self._files.append(io.FileIO(path, "a"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _storage:
    """Turns an OSError into a StorageError that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise StorageError(
                f"the metrics file {self.path} cannot be written: {error.strerror or error}. "
                "Make room or permission there, or set metrics_file to another place.",
                id="metrics.not-written",
            ) from error


def _drop_torn_line(path: Path) -> None:
    if not path.exists() or not path.is_file():  # a pipe or /dev/stdout may be given
        return
    with open(path, "r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)


def _rewind(path: Path, step: int) -> int:
    if not path.is_file():
        return 0
    with _storage(path):
        lines = list(_whole_lines(path.read_bytes()))
        kept = [line for line in lines if json.loads(line).get("step", -1) < step]
        if len(kept) < len(lines):
            _replace(path, kept)
        return len(lines) - len(kept)


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# --- the console -----------------------------------------------------------------------------------------------------


def plain_line(record: Mapping[str, Any]) -> str:
    """Return the line that people's scripts parse. Its form does not change."""
    return (
        f"completed step: {record['step']}, seconds: {record['seconds']:.3f}, "
        f"TFLOP/s/device: {record['tflops_per_device']:.3f}, "
        f"Tokens/s/device: {record['tokens_per_second_per_device']:.1f}, "
        f"total_weights: {record['total_weights']:.0f}, loss: {record['loss']:.3f}"
    )


class Console:
    """Shows the progress of steps `first_step` to `total_steps` - 1: a bar on a terminal, plain lines on a pipe.

    On a pipe, the first step, the last, and every `log_period`-th are printed.
    """

    def __init__(self, stream: TextIO, first_step: int, total_steps: int, log_period: int) -> None:
        self._stream = stream
        self._first = first_step
        self._total = total_steps
        self._period = max(1, log_period)
        bar = stream.isatty() and os.environ.get("TERM") != "dumb" and first_step < total_steps
        self._bar: _Bar | None = _Bar(stream, first_step, total_steps) if bar else None

    def report(self, record: Mapping[str, Any]) -> None:
        """Show one step's record."""
        step = record["step"]
        if self._bar:
            self._bar.show(record)
        elif step in (self._first, self._total - 1) or (step + 1) % self._period == 0:
            self.say(plain_line(record))

    def say(self, text: str) -> None:
        """Print `text`, above the bar if there is one."""
        if self._bar:
            self._bar.say(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Stop the bar and leave its last state on the screen; safe to call again."""
        if self._bar:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bar:
    """rich's progress bar, imported only here."""

    def __init__(self, stream: TextIO, first_step: int, total_steps: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = RichConsole(file=stream, highlight=False)
        columns = [
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        ]
        if console.width < 100:  # the numbers are worth more than the picture
            del columns[1]
        self._progress = Progress(*columns, console=console, refresh_per_second=4)
        self._task = self._progress.add_task("", total=total_steps, completed=first_step, numbers="compiling")
        self._progress.start()
        self.close: Callable[[], None] = self._progress.stop

    def show(self, record: Mapping[str, Any]) -> None:
        numbers = (
            f"loss {record['loss']:.3f}  {record['tokens_per_second_per_device']:,.0f} tokens/s/device  "
            f"{record['tflops_per_device']:.3f} TFLOP/s/device"
        )
        self._progress.update(self._task, completed=record["step"] + 1, numbers=numbers)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
