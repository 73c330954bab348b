"""The walk of one attempt: check everything, open the records, find the state, compile, loop, finish.

Every ending (steps done, a signal, data that end, a non-finite loss, storage that fails) goes through `finish`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from MaxText import decoder, goodput, report, runtime, screen, session
from MaxText.checkpoint import Store
from MaxText.convert import start
from MaxText.convert.source import Source
from MaxText.errors import ConfigError, MaxTextError, NonFiniteError, PlanError, StorageError
from MaxText.generate import generate
from MaxText.loop import Loop
from MaxText.records import Records
from MaxText.resume import check_continues
from MaxText.session import Session
from MaxText.state import TrainState


@dataclass(frozen=True)
class Beginning:
    """Where the state comes from: the checkpoint of `done` steps in `store`, the weights of `source`, or nothing."""

    done: int = 0
    resumed: bool = False
    source: Source | None = None
    notes: list[str] = field(default_factory=list)


def walk(cfg: Any) -> int:
    """One attempt, from a valid config to the exit code."""
    with runtime.Signals() as signals:
        made = session.prepare(cfg)
        cfg = made.cfg
        if cfg.plan_only:
            print(screen.plan_only(made))
            return 0
        store = Store(
            cfg.run_folder / "checkpoints", keep=cfg.max_num_checkpoints_to_keep, asynchronous=cfg.async_checkpointing
        )
        beginning = find_beginning(made, store) if cfg.enable_checkpointing else find_weights(made)
        if beginning.done >= cfg.steps:
            print(screen.complete(cfg, beginning.done))
            return 0
        if cfg.enable_checkpointing:
            store.prepare()
        with Records(cfg, store, signals, _meta(made)) as records:
            return _attempt(made, records, beginning)


def _meta(made: Session) -> dict[str, Any]:
    """What every checkpoint of this attempt says of itself."""
    return {"config": made.cfg.as_dict(), "data": made.train.fingerprint, "parameters": made.plan.parameters}


def find_beginning(made: Session, store: Store) -> Beginning:
    """1. this run's newest checkpoint, 2. load_parameters_path, 3. fresh; `start` may demand one. A checkpoint of other
    data is refused."""
    cfg, latest = made.cfg, store.latest()
    if cfg.start == "resume" and latest is None:
        raise ConfigError(
            f"start=resume, but {cfg.run_folder} holds no complete checkpoint. Check run_name, or set start=auto.",
            id="run.nothing-to-resume",
        )
    if cfg.start == "fresh" and latest is not None:
        raise ConfigError(
            f"start=fresh, but {cfg.run_folder} holds a checkpoint of {latest} steps. Choose another run_name, "
            "or set start=auto.",
            id="run.not-fresh",
        )
    notes = [f"warning: checkpoint {step} cannot be used: {why}" for step, why in store.incomplete().items()]
    if latest is None:
        return find_weights(made, notes)
    notes += check_continues(made, store.manifest(latest)["meta"], latest)
    with jax.set_mesh(made.mesh):
        store.require_fit(latest, made.stored_type)  # before anything is written
    return Beginning(latest, True, notes=notes)


def find_weights(made: Session, notes: Sequence[str] = ()) -> Beginning:
    """The beginning of a fresh run. Weights that do not fit are refused; a function that differs is announced."""
    if not made.cfg.load_parameters_path:
        return Beginning(notes=list(notes))
    source, said = start.open_for(made.cfg, decoder.declare(made.cfg))
    return Beginning(source=source, notes=[*notes, *said])


def _attempt(made: Session, records: Records, beginning: Beginning) -> int:
    loop: Loop | None = None
    ending: MaxTextError | None = None
    with jax.set_mesh(made.mesh), jax.default_matmul_precision(made.cfg.matmul_precision):
        try:
            if made.cfg.log_config:
                records.say(made.cfg.dump())
            records.say(screen.start(made, beginning.done, beginning.resumed, beginning.notes))
            state, done = _state(made, records, beginning)
            records.ledger.enter("compile")
            compiled = made.compile_step()
            records.say(screen.compiled(made.plan, compiled))
            loop = Loop(made, records, compiled, state, done, saved=done if beginning.resumed else -1)
            records.ledger.enter("step")
            records.open_console(done)
            loop.run()
            loop.settle()
        except MaxTextError as error:
            ending = error
        except jax.errors.JaxRuntimeError as error:
            ending = _device_error(error)
        return finish(made, records, loop, ending)


def _device_error(error: Exception) -> MaxTextError:
    text = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" not in text and "ut of memory" not in text:
        return MaxTextError(f"the compiled program failed on the device: {text}", id="run.device")
    return PlanError(
        f"the devices ran out of memory: {text}\nTry remat_policy=full, a smaller per_device_batch_size with more "
        "gradient_accumulation_steps, num_vocab_tiling, or more ici_fsdp_parallelism.",
        id="plan.out-of-memory",
    )


def _state(made: Session, records: Records, beginning: Beginning) -> tuple[TrainState, int]:
    """The state to start from, and its number of finished steps; metrics of steps to be done again are dropped."""
    if not beginning.resumed:
        records.metrics.rewind(0)
        if beginning.source is None:
            return made.fresh_state(), 0
        records.ledger.enter("restore")
        stored = start.load(beginning.source, decoder.declare(made.cfg), made.stored_type.params)
        return made.state_of(made.from_stored(stored, made.state_type.params)), 0
    records.ledger.enter("restore")
    done, stored, skipped = records.store.restore_newest(made.stored_type)
    state = made.from_stored(stored, made.state_type)
    for reason in skipped:
        records.say(f"warning: {reason}")
    if done != beginning.done:
        records.say(f"RESUMED after {done} steps instead of {beginning.done}")
    records.metrics.rewind(done)
    return state, done


def finish(made: Session, records: Records, loop: Loop | None, ending: MaxTextError | None) -> int:
    """The one door of every ending; returns the exit code. The first thing that went wrong names the ending.

    1. the last step is saved, 2. held-out loss and a sample where all steps are done, 3. saves become durable,
    4. the time is accounted for, 5. the reason and how to go on are said.
    """
    wanted = ending is not None or made.cfg.save_checkpoint_on_completion
    if loop is not None and loop.done and wanted and not isinstance(ending, NonFiniteError | StorageError):
        ending = _first(ending, loop.save)
    records.close_console()
    if loop is not None and ending is None:
        ending = _first(ending, lambda: farewell(made, records, loop))
    records.ledger.enter("save")
    ending = _first(ending, records.store.close)
    records.ledger.finish(ending.id if ending else "complete")
    records.say(report.summary(goodput.read(records.ledger.path), attempt=records.ledger.attempt))
    records.say(screen.end(made.cfg, loop.done if loop else 0, records.store.latest()))
    if ending is None:
        return 0
    records.log(f"exit code {ending.exit_code}: {ending}")
    print(ending, file=sys.stderr)
    return ending.exit_code


def _first(ending: MaxTextError | None, action: Any) -> MaxTextError | None:
    """Do `action`; what fails becomes the ending unless there is one already."""
    try:
        action()
    except MaxTextError as error:
        return ending or error
    except jax.errors.JaxRuntimeError as error:
        return ending or _device_error(error)
    return ending


def farewell(made: Session, records: Records, loop: Loop) -> None:
    """Held-out loss and a sample. A signal meanwhile skips the rest: the last step is saved already."""
    cfg = made.cfg
    loop.evaluate()
    if not cfg.sample_length or records.stop_requested():
        return
    with records.activity("sample"):
        temperatures = (0.0, cfg.decode_sampling_temperature)
        texts = generate(
            cfg,
            made.layout,
            loop.state.params,
            made.tokenizer,
            cfg.prompt,
            cfg.sample_length,
            temperatures,
            cfg.init_weights_seed,
        )
    for title, text in zip(("greedy", f"temperature {temperatures[1]:g}"), texts, strict=True):
        records.say(f"--- sample, {title} ---\n{text}")
