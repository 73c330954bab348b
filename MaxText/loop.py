"""The training loop and what it calls: draw, dispatch, report yesterday's metrics, then the rare things."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from MaxText import faults
from MaxText.data import Feeder
from MaxText.errors import NonFiniteError, Preempted
from MaxText.evaluate import evaluate
from MaxText.records import Records
from MaxText.session import Session
from MaxText.state import TrainState

_global_norm = jax.jit(optax.tree.norm)


@dataclass
class Pending:
    """A dispatched step whose metrics are still on the device."""

    step: int
    metrics: dict[str, jax.Array]
    data_wait_seconds: float


@dataclass
class Loop:
    """Owns the state while it trains. `done` counts finished optimizer steps."""

    session: Session
    records: Records
    compiled: jax.stages.Compiled
    state: TrainState
    done: int
    saved: int = -1
    healthy: bool = True
    _pending: Pending | None = None
    _mark: float = 0.0
    _eval_program: Any = None
    _extra: dict[str, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Train from `done` to `steps`. Raises Preempted after a signal, and whatever ends the run early."""
        cfg, records = self.session.cfg, self.records
        self._mark = time.perf_counter()
        with Feeder(self.session.train_share, self.done, cfg.steps, self.session.put_train) as feeder:
            while self.done < cfg.steps:
                records.ledger.enter("data_wait")
                step, batch = next(feeder)
                records.ledger.enter("step")
                records.profiler.step(step, self.state)
                self.state, values = self.compiled(self.state, batch)
                self.done = step + 1
                faults.point("step.dispatched")
                self._read_pending()
                self._pending = Pending(step, values, feeder.wait_seconds)
                self._rare_things()

    def _rare_things(self) -> None:
        cfg = self.session.cfg
        self.records.store.check()
        if self.done % cfg.checkpoint_period == 0 and self.done < cfg.steps:
            self.save()
        elif cfg.enable_emergency_checkpoint and self.done % cfg.local_checkpoint_period == 0 and self.done < cfg.steps:
            self.save(local=True)
        if self._evaluation_is_due():
            self.evaluate()
        self._stop_if_asked()

    def _evaluation_is_due(self) -> bool:
        cfg = self.session.cfg
        return cfg.eval_interval > 0 and self.done % cfg.eval_interval == 0 and self.done < cfg.steps

    def _stop_if_asked(self) -> None:
        if signal := self.records.stop_requested():
            raise Preempted(f"stopped by {signal} after {self.done} steps.", id="run.preempted")

    def catch_up(self) -> None:
        """After a resume: do the evaluation of `done` steps that a kill or a signal has kept from its line."""
        if self._evaluation_is_due() and self.session.evaluation and not self.records.evaluated(self.done):
            self.evaluate()
            self._stop_if_asked()

    def settle(self) -> None:
        """Read what is still on the device; afterwards the state is known to be finite up to `done`."""
        self._read_pending()
        self._mark = time.perf_counter()

    def save(self, *, local: bool = False) -> None:
        """Write a durable or a `local` checkpoint of `done` steps, unless it is there already or the state is not
        finite."""
        self.settle()
        if self.saved == self.done or not self.session.cfg.enable_checkpointing or not self.healthy:
            return
        begun = time.perf_counter()
        with self.records.activity("save"):
            if not self._parameters_are_finite():
                return
            if not local:
                self.records.metrics.sync()  # the lines of these steps are not written again
            meta = self.records.checkpoint_meta(self.done, self.session.train.state_at(self.done))
            self.records.store.save(self.done, self.session.as_stored(self.state), meta, local=local)
        self._extra["save_stall_seconds"] = time.perf_counter() - begun
        self.saved = self.saved if local else self.done
        self._mark = time.perf_counter()

    def _parameters_are_finite(self) -> bool:
        """The last update is in no loss yet: a checkpoint of parameters that it blew up would never train again."""
        norm = float(_global_norm(self.state.params))
        self.healthy &= math.isfinite(norm)
        if self._aborts(norm):
            raise NonFiniteError(
                f"the norm of the parameters is {norm} after {self.done} steps. They were not saved. "
                f"Try a smaller learning_rate (now {self.session.cfg.learning_rate:g}).",
                id="run.non-finite",
            )
        return self.healthy

    def _aborts(self, value: float) -> bool:
        """Whether this value ends the run, by the configuration."""
        cfg = self.session.cfg
        return (math.isnan(value) and cfg.abort_on_nan_loss) or (math.isinf(value) and cfg.abort_on_inf_loss)

    def evaluate(self) -> dict[str, float]:
        """Held-out loss of the current parameters: written to the metrics, said on the console."""
        session, cfg = self.session, self.session.cfg
        if session.evaluation is None or session.eval_share is None:
            return {}
        self.settle()
        if self._eval_program is None:
            with self.records.activity("compile"):
                self._eval_program = session.compile_eval()
                self.records.group.gather("evaluation compiled")  # as for the step: see `walk`
        with self.records.activity("eval"):
            result = evaluate(
                self._eval_program,
                self.state.params,
                session.eval_share,
                session.put_eval,
                session.token_bytes,
                cfg.eval_steps if cfg.eval_steps > 0 else session.evaluation.batches or 0,
                stop=lambda: self.records.stop_requested() is not None,
                counted=session.eval_share.part.counted,
                total=lambda own: sum(self.records.group.gather("bytes of an evaluation", own)),
            )
        if result:
            self.records.evaluation(self.done, result)
        self._mark = time.perf_counter()
        return result

    def _read_pending(self) -> None:
        """Fetch the metrics of the step before this one: the device is busy with the next, so nothing waits."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
        now = time.perf_counter()
        record = self._record(pending, values, now - self._mark)
        self._mark = now
        self.records.step(record)
        faults.point("metrics.written")
        self._check_finite(record)

    def _record(self, pending: Pending, values: dict[str, float], seconds: float) -> dict[str, Any]:
        plan, train = self.session.plan, self.session.train
        extra, self._extra = self._extra, {}
        self.step_seconds.append(seconds)
        return {
            "step": pending.step,
            **({"epoch": pending.step * train.global_batch // train.rows} if train.rows else {}),
            **values,
            "seconds": seconds,
            "tokens_per_second_per_device": plan.tokens_per_step / seconds / plan.devices,
            "tflops_per_device": plan.flops_per_step_per_device / seconds / 1e12,
            "data_wait_seconds": pending.data_wait_seconds,
            **extra,
        }

    def _check_finite(self, record: dict[str, Any]) -> None:
        cfg = self.session.cfg
        for name in ("loss", "grad_norm"):
            value = record[name]
            self.healthy &= math.isfinite(value)
            if self._aborts(value):
                raise NonFiniteError(
                    f"{name} is {value} at step {record['step']}, the first bad one. Nothing of it was saved. "
                    f"Try a smaller learning_rate (now {cfg.learning_rate:g}), more warm-up "
                    f"(warmup_steps_fraction={cfg.warmup_steps_fraction:g}), or look at the data of this step; "
                    "abort_on_nan_loss=false and abort_on_inf_loss=false go on regardless.",
                    id="run.non-finite",
                )
