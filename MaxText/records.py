"""The run folder of one attempt: log, metrics, goodput ledger, checkpoints, profile; and the console.

<run>/config.yml        every value and where it came from (of the latest attempt)
<run>/log.txt           everything the console said, all attempts
<run>/metrics.jsonl     one line a step, each step once
<run>/goodput.jsonl     where every second went, all attempts
<run>/plan.json         the forecast, and what compiler and clock said (of the latest attempt)
<run>/checkpoints/N/    the state after N steps
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from MaxText import goodput, metrics, runtime
from MaxText.checkpoint import Tiers
from MaxText.errors import PeerLost, StorageError
from MaxText.processes import Alone, Group


class Records:
    """Opened once everything is checked; from here on the run writes. Close it through `walk.finish` only."""

    def __init__(
        self, cfg: Any, store: Tiers, signals: runtime.Signals, meta: dict[str, Any], group: Group | None = None
    ) -> None:
        """Of several processes only the primary one writes; what the others say is lost, but for a trace."""
        folder = cfg.run_folder
        self.store, self.cfg, self.group = store, cfg, group or Alone()
        self._signals, self._meta = signals, meta
        self._stack = contextlib.ExitStack()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file("config.yml").write_text(cfg.dump(), encoding="utf-8")
            self._log = self._stack.enter_context(self._file("log.txt").open("a", encoding="utf-8"))
        except OSError as error:
            raise StorageError(
                f"the run folder {folder} cannot be written: {error.strerror or error}. "
                "Set base_output_directory to a place that can.",
                id="run.folder",
            ) from error
        self.ledger = goodput.Ledger(self._file("goodput.jsonl"), age=runtime.process_age(), warn=self.say)
        also = Path(cfg.metrics_file).expanduser() if cfg.metrics_file and self.group.primary else None
        self.metrics = self._stack.enter_context(metrics.Writer(self._file("metrics.jsonl"), also))
        self.profiler = self._stack.enter_context(runtime.Profiler(cfg, folder / "profile"))
        self._console: metrics.Console | None = None
        self.group.on_lost(self._lost)

    def _file(self, name: str) -> Path:
        return self.cfg.run_folder / name if self.group.primary else Path(os.devnull)

    @property
    def plan_file(self) -> Path:
        """Where the forecast goes, with what came of it."""
        return self._file("plan.json")

    def _lost(self, text: str) -> None:
        """The last words of this process when another is gone; the next attempt's ledger goes on from them."""
        self.log(f"exit code {PeerLost.exit_code}: {text}")
        self.ledger.finish("processes.lost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_console()
        self._stack.close()

    def open_console(self, first_step: int) -> None:
        """From now on a progress bar, or plain lines on a pipe."""
        if not self.group.primary:
            return
        self._console = metrics.Console(sys.stdout, first_step, self.cfg.steps, self.cfg.log_period)

    def close_console(self) -> None:
        if self._console:
            self._console.close()
            self._console = None

    def say(self, text: str) -> None:
        """A message for the person, also kept in the log."""
        if self._console:
            self._console.say(text)
        elif self.group.primary:
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
        over = f", over {result['eval_total_weights']:,.0f} tokens"
        self.say(f"held-out loss after {done} steps: {result['eval_loss']:.4f} nats/token{per_byte}{over}")

    def evaluated(self, done: int) -> bool:
        """Whether the held-out loss after `done` steps is in the metrics; all processes ask."""
        return bool(self.group.gather("evaluated", metrics.has_evaluation(self._file("metrics.jsonl"), done))[0])

    @contextlib.contextmanager
    def activity(self, kind: str) -> Iterator[None]:
        """Charge the time inside to `kind`, then go back to "step"."""
        self.ledger.enter(kind)
        try:
            yield
        finally:
            self.ledger.enter("step")

    def stop_requested(self) -> str | None:
        """The name of the signal that stops the run, at the same point in all processes; call it in all of them."""
        own = self._signals.requested
        return self.group.poll(own.name if own else None)

    def checkpoint_meta(self, done: int, data_state: dict[str, Any] | None) -> dict[str, Any]:
        """What a checkpoint says of itself beside its arrays. data_state: where a stream stands."""
        place = {} if data_state is None else {"data_state": data_state}
        return {**self._meta, "steps_done": done, **place}
