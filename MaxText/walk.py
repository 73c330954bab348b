"""The walk of one attempt: check everything, open the records, find the state, compile, loop, finish.

Every ending (steps done, a signal, data that end, a non-finite loss, storage that fails) goes through `finish`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax

from MaxText import goodput, planner, report, runtime, screen, session
from MaxText.checkpoint import Store
from MaxText.errors import ConfigError, MaxTextError, NonFiniteError, StorageError
from MaxText.generate import generate
from MaxText.loop import Loop
from MaxText.records import Records
from MaxText.resume import check_continues
from MaxText.session import Session


@dataclass(frozen=True)
class Beginning:
    """Where the state comes from: a checkpoint of `done` steps, or nothing (done = 0)."""

    done: int
    resumed: bool
    text: str


def walk(cfg: Any) -> int:
    """One attempt, from a valid config to the exit code."""
    with runtime.Signals() as signals:
        made = session.prepare(cfg)
        if made.cfg.plan_only:
            print(screen.plan_only(made))
            return 0
        store = _open_store(made.cfg)
        beginning = _beginning(made, store)
        if beginning.done >= made.cfg.steps:
            print(_complete(made.cfg, beginning.done))
            return 0
        meta = {"config": made.cfg.as_dict(), "data": made.train.fingerprint, "parameters": made.plan.parameters}
        with Records(made.cfg, store, signals, meta) as records:
            return _attempt(made, records, beginning)


def _open_store(cfg: Any) -> Store | None:
    if not cfg.enable_checkpointing:
        return None
    folder = cfg.run_folder / "checkpoints"
    return Store(folder, keep=cfg.max_num_checkpoints_to_keep, asynchronous=cfg.async_checkpointing)


def _beginning(made: Session, store: Store | None) -> Beginning:
    """1. this run's newest checkpoint, 2. fresh; `start` may demand one. A checkpoint of another recipe is refused."""
    cfg = made.cfg
    latest = store.latest() if store else None
    if cfg.start == "resume" and latest is None:
        raise ConfigError(f"start=resume, but {cfg.run_folder} holds no checkpoint. Check run_name, or set start=auto.", id="run.nothing-to-resume")
    if cfg.start == "fresh" and latest is not None:
        raise ConfigError(
            f"start=fresh, but {cfg.run_folder} holds a checkpoint of {latest} steps. Choose another run_name, or set start=auto.",
            id="run.not-fresh",
        )
    if latest is None:
        return Beginning(0, False, f"FRESH, seed {cfg.init_weights_seed}")
    notes = check_continues(made, store.manifest(latest)["meta"], latest)
    return Beginning(latest, True, "\n".join([f"RESUMED after {latest} steps from {store.folder / str(latest)}", *notes]))


def _complete(cfg: Any, done: int) -> str:
    return f"run {cfg.run_name} is complete: {done} steps in {cfg.run_folder}. To continue: steps={2 * done}. To start another: run_name=NAME."


def _attempt(made: Session, records: Records, beginning: Beginning) -> int:
    cfg = made.cfg
    loop = None
    with jax.set_mesh(made.mesh):
        try:
            records.say(screen.start(made, beginning.text))
            records.metrics.rewind(beginning.done)
            state, done = _state(made, records, beginning)
            records.ledger.enter("compile")
            compiled = made.compile_step()
            records.say(screen.compiled(made.plan, compiled))
            loop = Loop(made, records, compiled, state, done, saved=done if beginning.resumed else -1)
            records.ledger.enter("step")
            records.open_console(done)
            loop.run()
            loop.settle()
            ending = None
        except MaxTextError as error:
            ending = error
        except jax.errors.JaxRuntimeError as error:
            ending = _device_error(error)
        return finish(made, records, loop, ending)


def _device_error(error: Exception) -> MaxTextError:
    text = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" not in text:
        raise error
    return planner.PlanError(
        f"the devices ran out of memory: {text}\nTry remat_policy=full, a smaller per_device_batch_size with more "
        "gradient_accumulation_steps, num_vocab_tiling, or more ici_fsdp_parallelism.",
        id="plan.out-of-memory",
    )


def _state(made: Session, records: Records, beginning: Beginning) -> tuple[Any, int]:
    if not beginning.resumed:
        return made.fresh_state(), 0
    records.ledger.enter("restore")
    done, state, skipped = records.store.restore_newest(made.state_type)
    for reason in skipped:
        records.say(f"warning: {reason}")
    if done != beginning.done:
        records.say(f"RESUMED after {done} steps instead")
        records.metrics.rewind(done)
    return state, done


def finish(made: Session, records: Records, loop: Loop | None, ending: MaxTextError | None) -> int:
    """The one door: last metrics read, last step saved, held-out loss and sample where the run is complete, reason and exit code."""
    ending = _last_save(made, records, loop, ending)
    records.close_console()
    if ending is None:
        ending = _farewell(made, records, loop)
    if records.store:
        ending = _wait(records, ending)
    records.ledger.finish(ending.id if ending else "complete")
    records.say(report.summary(goodput.read(records.ledger.path), attempt=records.ledger.attempt))
    records.say(screen.end(made.cfg, loop.done if loop else 0, loop.saved if loop else -1))
    if ending is None:
        return 0
    records.log(f"exit code {ending.exit_code}: {ending}")
    print(ending, file=sys.stderr)
    return ending.exit_code


def _last_save(made: Session, records: Records, loop: Loop | None, ending: MaxTextError | None) -> MaxTextError | None:
    """Save the last step unless the ending forbids it. The first failure stays the reason of the ending."""
    if loop is None or loop.done == 0 or isinstance(ending, NonFiniteError | StorageError):
        return ending
    if ending is None and not made.cfg.save_checkpoint_on_completion:
        return ending
    try:
        loop.save()
    except MaxTextError as error:
        return ending or error
    return ending


def _wait(records: Records, ending: MaxTextError | None) -> MaxTextError | None:
    records.ledger.enter("save")
    try:
        records.store.close()
    except MaxTextError as error:
        return ending or error
    return ending


def _farewell(made: Session, records: Records, loop: Loop) -> MaxTextError | None:
    """Held-out loss and a sample; a signal during them skips the rest (the last step is saved already)."""
    cfg = made.cfg
    try:
        loop.evaluate()
        if cfg.sample_length and not records.stop_requested():
            with records.activity("sample"):
                temperatures = (0.0, cfg.decode_sampling_temperature)
                texts = generate(
                    cfg, made.layout, loop.state.params, made.tokenizer, cfg.prompt, cfg.sample_length, temperatures, cfg.init_weights_seed
                )
            for name, text in zip(("greedy", f"sampled at temperature {cfg.decode_sampling_temperature:g}"), texts, strict=True):
                records.say(f"--- {name} ---\n{text}")
    except MaxTextError as error:
        return error
    return None
