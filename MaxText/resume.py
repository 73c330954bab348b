"""May this config continue that checkpoint? Refused where the data would not continue exactly; announced where a
schedule changes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from MaxText import config, data, optimizer
from MaxText.errors import ConfigError
from MaxText.session import Session

SCHEDULE_KEYS = (
    "learning_rate",
    "lr_schedule_type",
    "warmup_steps_fraction",
    "learning_rate_final_fraction",
    "learning_rate_schedule_steps",
    "wsd_decay_steps_fraction",
    "wsd_decay_style",
)
# What steps do with the same model and data, beside their learning rate. A person may change it on purpose.
TRAINING_KEYS = tuple(
    key
    for key in (
        *config.TRAINING, "init_weights_seed", "load_balance_loss_weight",
        "load_balance_loss_type", "router_z_loss_weight", "routed_bias_update_rate", "capacity_factor",
        "mtp_loss_scaling_factor", "indexer_loss_scaling_factor",
    )
    if key not in SCHEDULE_KEYS
)  # fmt: skip


def check_continues(made: Session, meta: dict[str, Any], done: int) -> list[str]:
    """Lines for the start screen about what changed. Raises ConfigError("run.other-data") with the differences.

    What the arrays look like is compared by the store itself, leaf by leaf, when it restores.
    """
    _same_data(made, meta["data"])
    now = held_out(made)
    return (
        data.notes(meta["data"], made.train.fingerprint)
        + _held_out_notes(meta.get("held_out", now), now)
        + _schedule_notes(made.cfg, meta["config"], done)
        + _training_notes(made.cfg, meta["config"])
    )


def held_out(made: Session) -> dict[str, Any] | None:
    """What the held-out loss is measured on: it changes no step, but a curve of two sets is none."""
    if made.evaluation is None:
        return None
    found = dict(made.evaluation.fingerprint)
    batch, steps = found.pop("global_batch"), made.cfg.eval_steps  # all of the set is all, in any batches
    return found | ({"rows": batch * steps} if steps > 0 else {})


def _held_out_notes(before: dict[str, Any] | None, now: dict[str, Any] | None) -> list[str]:
    if not before or not now:
        return []
    lines = data.differences(before, now)
    return [f"warning: the held-out loss is measured on another set from here on: {'; '.join(lines)}"] if lines else []


def changes(made: Session, meta: dict[str, Any], done: int) -> list[str]:
    """The same for a state of another run, which may go on with other data: that is announced too."""
    now, before = made.train.fingerprint, meta["data"]
    different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    notes = [f"warning: other data than there: {', '.join(different)}"] if different else []
    return notes + _schedule_notes(made.cfg, meta["config"], done) + _training_notes(made.cfg, meta["config"])


def _same_data(made: Session, before: dict[str, Any]) -> None:
    different = data.differences(before, made.train.fingerprint)
    if different:
        rows = "\n".join(f"  {line}" for line in different)
        raise ConfigError(
            f"{made.cfg.run_folder} was trained on other data, so its data order cannot be continued exactly:\n{rows}\n"
            "Choose another run_name to start afresh, or give the old values.",
            id="run.other-data",
        )


def _training_notes(cfg: Any, before: dict[str, Any]) -> list[str]:
    now = cfg.as_dict()
    changed = [key for key in TRAINING_KEYS if key in before and before[key] != now[key]]
    if "init_weights_seed" in changed and not cfg.dropout_rate:
        changed.remove("init_weights_seed")
    table = ", ".join(f"{key} {before[key]} -> {now[key]}" for key in changed)
    return [f"warning: trained otherwise from here on: {table}"] if changed else []


def _schedule_notes(cfg: Any, before: dict[str, Any], done: int) -> list[str]:
    changed = [key for key in SCHEDULE_KEYS if key in before and before[key] != getattr(cfg, key)]
    if not changed:
        return []
    old = cfg.replace(**{key: before[key] for key in SCHEDULE_KEYS if key in before})
    rates = [float(optimizer.schedule(c)(jnp.asarray(done, jnp.int32))) for c in (old, cfg)]
    changes = ", ".join(f"{key} {before[key]} -> {getattr(cfg, key)}" for key in changed)
    return [
        f"schedule changed: {changes}; learning rate at step {done}: {rates[0]:.3g} by the old one, {rates[1]:.3g} now"
    ]
