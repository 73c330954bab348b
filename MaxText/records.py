"""The run folder of one attempt: log, metrics, goodput ledger, checkpoints, profile; and the console.

<run>/config.yml        every value and where it came from (of the latest attempt)
<run>/log.txt           everything the console said, all attempts
<run>/metrics.jsonl     one line a step, each step once
<run>/goodput.jsonl     where every second went, all attempts
<run>/checkpoints/N/    the state after N steps
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from MaxText import goodput, metrics, runtime
from MaxText.checkpoint import Store
from MaxText.errors import StorageError


class Records:
    """Opened once everything is checked; from here on the run writes. Close it through `walk.finish` only."""

    def __init__(self, cfg: Any, store: Store, signals: runtime.Signals, meta: dict[str, Any]) -> None:
        folder = cfg.run_folder
        self.store, self.cfg = store, cfg
        self._signals, self._meta = signals, meta
        self._stack = contextlib.ExitStack()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yml").write_text(cfg.dump(), encoding="utf-8")
            self._log = self._stack.enter_context((folder / "log.txt").open("a", encoding="utf-8"))
        except OSError as error:
            raise StorageError(
                f"the run folder {folder} cannot be written: {error.strerror or error}. "
                "Set base_output_directory to a place that can.",
                id="run.folder",
            ) from error
        self.ledger = goodput.Ledger(folder / "goodput.jsonl", age=runtime.process_age(), warn=self.say)
        also = Path(cfg.metrics_file).expanduser() if cfg.metrics_file else None
        self.metrics = self._stack.enter_context(metrics.Writer(folder / "metrics.jsonl", also))
        self.profiler = self._stack.enter_context(runtime.Profiler(cfg, folder / "profile"))
        self._console: metrics.Console | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_console()
        self._stack.close()

    def open_console(self, first_step: int) -> None:
        """From now on a progress bar, or plain lines on a pipe."""
        self._console = metrics.Console(sys.stdout, first_step, self.cfg.steps, self.cfg.log_period)

    def close_console(self) -> None:
        if self._console:
            self._console.close()
            self._console = None

    def say(self, text: str) -> None:
        """A message for the person, also kept in the log."""
        if self._console:
            self._console.say(text)
        else:
            print(text, flush=True)
        self.log(text)

    def log(self, text: str) -> None:
        """Into log.txt only."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.writelines(f"{stamp} {line}\n" for line in text.splitlines())
        self._log.flush()

    def step(self, record: dict[str, Any]) -> None:
        """One finished step: to the metrics, the ledger, the console."""
        self.metrics.write(record)
        self.ledger.step(record["step"])
        self.log(metrics.plain_line(record))
        if self._console:
            self._console.report(record)

    def evaluation(self, done: int, result: dict[str, float]) -> None:
        """A held-out loss after `done` steps; filed under the last finished step."""
        self.metrics.write({"step": done - 1, **result})
        per_byte = f", {result['eval_loss_per_byte']:.4f} nats/byte" if "eval_loss_per_byte" in result else ""
        self.say(f"held-out loss after {done} steps: {result['eval_loss']:.4f} nats/token{per_byte}")

    @contextlib.contextmanager
    def activity(self, kind: str) -> Iterator[None]:
        """Charge the time inside to `kind`, then go back to "step"."""
        self.ledger.enter(kind)
        try:
            yield
        finally:
            self.ledger.enter("step")

    def stop_requested(self) -> signal.Signals | None:
        return self._signals.requested

    def checkpoint_meta(self, done: int, data_state: dict[str, Any] | None) -> dict[str, Any]:
        """What a checkpoint says of itself beside its arrays. data_state: where a stream stands."""
        place = {} if data_state is None else {"data_state": data_state}
        return {**self._meta, "steps_done": done, **place}
