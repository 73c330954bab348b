"""The walk of one attempt: check everything, open the records, find the state, compile, loop, finish.

Every ending (steps done, a signal, data that end, a non-finite loss, storage that fails) goes through `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from MaxText import catalogue, config, decoder, faults, forecast, goodput, metrics, report, runtime, screen, session
from MaxText.checkpoint import LOCAL_NOT_SAVED, Local, Store, Tiers
from MaxText.convert import hf_config, start
from MaxText.convert.source import Source
from MaxText.convert.source import find as find_source
from MaxText.data import differences
from MaxText.errors import ConfigError, MaxTextError, NonFiniteError, PlanError, Preempted, StorageError
from MaxText.forecast import truth
from MaxText.generate import generate
from MaxText.loop import Loop
from MaxText.processes import Alone, Group
from MaxText.records import Records
from MaxText.resume import changes, check_continues, held_out
from MaxText.session import Session
from MaxText.state import TrainState


@dataclass(frozen=True)
class Beginning:
    """Where the state comes from: the run's checkpoint of `done` steps, which lies at `resumed`, that of `other`, the
    weights of `source`, or nothing."""

    done: int = 0
    resumed: str = ""
    source: Source | None = None
    other: Store | None = None
    notes: list[str] = field(default_factory=list)


def walk(cfg: Any, group: Group | None = None) -> None:
    """One attempt, from a valid config to its end in all processes of `group`. Raises what ended it before its last
    step, after everything is written."""
    group = group or Alone()
    if cfg.plan_only and catalogue.is_slice(cfg.hardware):
        _print(group, forecast.fitting(forecast.of_config(cfg)))
        return
    with runtime.Signals() as signals:
        made = session.prepare(cfg, group)
        cfg = made.cfg
        if cfg.plan_only:
            _print(group, forecast.fitting(forecast.of_plan(cfg, made.hardware, made.plan)))
            return
        store = open_tiers(cfg, group)
        beginning = find_beginning(made, store) if cfg.enable_checkpointing else _without_checkpoints(made, store)
        _require_one_folder(cfg, group, beginning)
        if _is_complete(made, group, beginning.done):
            _print(group, screen.complete(cfg, beginning.done))
            return
        if cfg.enable_checkpointing:
            store.prepare()
        with Records(cfg, store, signals, _meta(made), group) as records:
            ending = _attempt(made, records, beginning)
    if ending is not None:
        raise ending


def open_tiers(cfg: Any, group: Group) -> Tiers:
    """The checkpoints of a run; nothing is read or created yet."""
    asynchronous = cfg.async_checkpointing
    durable = Store(
        cfg.run_folder / "checkpoints",
        keep=cfg.max_num_checkpoints_to_keep,
        keep_period=cfg.checkpoint_keep_period or None,
        asynchronous=asynchronous,
        group=group,
    )
    if not cfg.enable_emergency_checkpoint:
        return Tiers(durable)
    place, seconds = Path(cfg.local_checkpoint_directory), cfg.process_wait_timeout
    return Tiers(durable, Local(place, cfg.run_folder, group, asynchronous=asynchronous, seconds=seconds))


def _print(group: Group, text: str) -> None:
    if group.primary:
        print(text)


def _require_one_folder(cfg: Any, group: Group, beginning: Beginning) -> None:
    """All processes must see the same checkpoints."""

    def error(unlike: str) -> StorageError:
        return StorageError(
            f"the processes see different checkpoints in {cfg.run_folder}:\n{unlike}\n"
            "Set base_output_directory to a folder that all hosts share.",
            id="run.not-shared",
        )

    group.agree("beginning", {"steps done": beginning.done, "resumed": bool(beginning.resumed)}, error)


def _is_complete(made: Session, group: Group, done: int) -> bool:
    """Whether nothing is left to do: all steps are done, and the held-out loss at the end is in the metrics."""
    cfg = made.cfg
    if done < cfg.steps or made.evaluation is None:
        return bool(done >= cfg.steps)
    return done > cfg.steps or bool(
        group.gather("complete", metrics.has_evaluation(cfg.run_folder / "metrics.jsonl", done))[0]
    )


def _meta(made: Session) -> dict[str, Any]:
    """What every checkpoint of this attempt says of itself."""
    plan = made.plan
    cut = {"mesh": plan.describe_mesh(), "devices": plan.devices, "microbatches": plan.microbatches}
    return {
        "config": made.cfg.as_dict(),
        "data": made.train.fingerprint,
        "held_out": held_out(made),
        "parameters": plan.parameters,
        "plan": cut | {"processes": jax.process_count(), "hardware": made.hardware.kind},
    }


def find_beginning(made: Session, store: Tiers) -> Beginning:
    """1. this run's newest checkpoint, 2. load_full_state_path, 3. load_parameters_path, 4. fresh; `start` may demand
    one. A checkpoint of other data is refused."""
    cfg = made.cfg
    newest, problems = store.newest()
    if cfg.start == "resume" and newest is None:
        raise ConfigError(
            f"start=resume, but {cfg.run_folder} holds no complete checkpoint. Check run_name, or set start=auto.",
            id="run.nothing-to-resume",
        )
    if cfg.start == "fresh" and newest is not None:
        raise ConfigError(
            f"start=fresh, but there is a checkpoint of {newest.step} steps: {newest.where}. Choose another run_name, "
            "or set start=auto.",
            id="run.not-fresh",
        )
    notes = [f"warning: {problem}" for problem in problems]
    if newest is None:
        return find_elsewhere(made, store, notes)
    notes += check_continues(made, newest.meta, newest.step)
    with jax.set_mesh(made.mesh):
        store.require_fit(newest.step, made.stored_type)  # before anything is written
    _require_same_model(made, newest.meta["config"])
    return Beginning(newest.step, newest.where, notes=notes)


def _without_checkpoints(made: Session, store: Tiers) -> Beginning:
    """The beginning of a run that saves none. In the folder of one that does it would begin its metrics anew."""
    if store.durable.folder.is_dir():
        raise ConfigError(
            f"enable_checkpointing=false, but {made.cfg.run_folder} is the folder of a run with checkpoints (newest: "
            f"{store.latest()}), whose metrics would be begun anew. Choose another run_name.",
            id="run.has-checkpoints",
        )
    return find_elsewhere(made, store)


def _other_function(cfg: Any, before: Mapping[str, Any]) -> list[str]:
    """In what the model computes another function than that of the configuration `before`, a line each."""
    there = cfg.replace(**{key: value for key, value in before.items() if key in config.ARCHITECTURE})
    return hf_config.differences(cfg, there)


def _require_same_model(made: Session, before: Mapping[str, Any]) -> None:
    """The same parameters in another function would train on, worse, and without a word."""
    if different := _other_function(made.cfg, before):
        table = "\n".join(f"  {line}" for line in different)
        raise ConfigError(
            f"{made.cfg.run_folder} was trained as another model:\n{table}\nGive the old values; or begin a run of its "
            "own from it, with another run_name and load_full_state_path or load_parameters_path.",
            id="run.other-model",
        )


def find_elsewhere(made: Session, store: Tiers, notes: Sequence[str] = ()) -> Beginning:
    """The beginning of a run without a checkpoint of its own. What does not fit is refused; a function, schedule or
    data that differ are announced."""
    if made.cfg.load_full_state_path:
        return _full_state(made, store, notes)
    if not made.cfg.load_parameters_path:
        return Beginning(notes=list(notes))
    source, said = start.open_for(made.cfg, decoder.declare(made.cfg))
    return Beginning(source=source, notes=[*notes, *said])


def _full_state(made: Session, store: Tiers, notes: Sequence[str]) -> Beginning:
    """Everything of a step of another run: its parameters, optimizer state and number of steps."""
    cfg = made.cfg
    kind, folder = find_source(Path(cfg.load_full_state_path).expanduser())
    if kind not in ("run", "checkpoint step"):
        raise ConfigError(
            f"load_full_state_path={cfg.load_full_state_path} is a {kind} source: it has weights only. Give a run "
            "folder or the folder of one of its steps, or set load_parameters_path.",
            id="run.no-full-state",
        )
    other, step = store.durable.elsewhere(folder.absolute().parent), int(folder.name)
    if step >= cfg.steps:
        raise ConfigError(
            f"load_full_state_path={cfg.load_full_state_path} has done {step} steps already, and steps={cfg.steps}. "
            f"Set steps to more than {step}.",
            id="run.full-state-done",
        )
    with jax.set_mesh(made.mesh):
        other.require_fit(step, made.stored_type)
    meta = other.manifest(step)["meta"]
    said = [f"everything of {folder}, after {step} steps", *changes(made, meta, step)]
    said += [f"warning: not as there: {text}" for text in _other_function(cfg, meta["config"])]
    return Beginning(step, other=other, notes=[*notes, *said])


def _attempt(made: Session, records: Records, beginning: Beginning) -> MaxTextError | None:
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
            # The first collective gives the others 30 s, whatever is configured; a compilation may differ by more.
            records.group.gather("step compiled")
            records.say(truth.at_start(made.forecast, compiled, records.plan_file))
            loop = Loop(made, records, compiled, state, done, saved=done if records.store.latest() == done else -1)
            records.ledger.enter("step")
            records.open_console(done)
            if beginning.resumed:
                loop.catch_up()
            loop.run()
            loop.settle()
        except MaxTextError as error:
            ending = error
        except jax.errors.JaxRuntimeError as error:
            ending = _device_error(records.group, error)
        return finish(made, records, loop, ending)


def _device_error(group: Group, error: Exception) -> MaxTextError:
    group.verdict()  # a collective fails here when another process is lost: then that is the reason
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
        if beginning.other is not None:
            records.ledger.enter("restore")
            stored = beginning.other.restore(beginning.done, made.stored_type)
            _seek(made, beginning.other.manifest(beginning.done)["meta"])
            return made.from_stored(stored, made.state_type), beginning.done
        if beginning.source is None:
            return made.fresh_state(), 0
        records.ledger.enter("restore")
        stored = start.load(beginning.source, decoder.declare(made.cfg), made.stored_type.params)
        return made.state_of(made.from_stored(stored, made.state_type.params)), 0
    records.ledger.enter("restore")
    found = records.store.restore_newest(made.stored_type)
    state = made.from_stored(found.state, made.state_type)
    faults.point("restore.done")
    for reason in found.notes:
        records.say(f"warning: {reason}")
    if (found.step, found.where) != (beginning.done, beginning.resumed):
        records.say(f"RESUMED after {found.step} steps instead of {beginning.done}, from {found.where}")
    records.metrics.rewind(found.step)
    _seek(made, found.meta)
    return state, found.step


def _seek(made: Session, meta: Mapping[str, Any]) -> None:
    """Streams go to where they were, or to their beginning after other data; those with random access need no place."""
    if differences(meta["data"], made.train.fingerprint):
        made.train.begin(meta["steps_done"])
    elif (place := meta.get("data_state")) is not None:
        made.train.seek(place)


def finish(made: Session, records: Records, loop: Loop | None, ending: MaxTextError | None) -> MaxTextError | None:
    """The one door of every ending; returns why the run ended early. The first thing that went wrong names it.

    1. the last step is saved, 2. held-out loss and a sample where all steps are done, 3. saves become durable,
    4. the time is accounted for, 5. the reason and how to go on are said.
    """
    faults.point("finish.begun")
    wanted = ending is not None or made.cfg.save_checkpoint_on_completion
    together = ending is None or isinstance(ending, Preempted) or records.group.count == 1
    saves = wanted and together and not _saving_is_vain(ending)
    if loop is not None and loop.done and saves:
        ending = _first(records, ending, loop.save)
    records.close_console()
    if loop is not None and ending is None:
        ending = _first(records, ending, lambda: farewell(made, records, loop))
    records.ledger.enter("save")
    ending = _first(records, ending, records.store.close)
    faults.point("finish.saved")
    records.ledger.finish(ending.id if ending else "complete")
    if loop is not None and loop.done:
        records.say(report.data(made.train.summary(loop.done), made.train.bad))
        if compared := truth.at_end(made.forecast, loop.step_seconds, records.plan_file):
            records.say(compared)
    records.say(report.summary(goodput.read(records.ledger.path), attempt=records.ledger.attempt))
    records.say(screen.end(made.cfg, loop.done if loop else 0, records.store.latest()))
    if ending is not None:
        records.log(f"exit code {ending.exit_code}: {ending}")
    return ending


def _saving_is_vain(ending: MaxTextError | None) -> bool:
    """Whether the state is not worth saving, or the durable checkpoints' disk has refused just now."""
    if isinstance(ending, StorageError):
        return ending.id.startswith("checkpoint.") and ending.id != LOCAL_NOT_SAVED
    return isinstance(ending, NonFiniteError)


def _first(records: Records, ending: MaxTextError | None, action: Any) -> MaxTextError | None:
    """Do `action`; what fails becomes the ending unless there is one already."""
    try:
        action()
    except MaxTextError as error:
        return ending or error
    except jax.errors.JaxRuntimeError as error:
        return ending or _device_error(records.group, error)
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
