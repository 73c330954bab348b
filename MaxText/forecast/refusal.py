"""What does not fit: the numbers, the rule, what to type."""

from __future__ import annotations

from typing import Any

from MaxText.cost import memory
from MaxText.errors import ConfigError, PlanError
from MaxText.forecast.record import Forecast, make
from MaxText.forecast.text import size, text


def require_room(one: Forecast) -> None:
    """Before anything is allocated. On a CPU all devices share the machine's memory, and only what is known exactly
    counts: parameters, optimizer state and gradients.

    Raises:
      PlanError: where the model cannot fit."""
    needs, capacity = one.memory, one.capacity
    if capacity is None:
        return
    certain = needs.parameters + needs.optimizer + needs.gradients
    if certain > capacity or (one.hardware.platform != "cpu" and not one.fits):
        raise refusal(one)


def fitting(found: Forecast) -> str:
    """The table of a forecast; where it does not fit a PlanError with the table and advice."""
    if not found.fits:
        raise refusal(found, text(found))
    return text(found)


def refusal(one: Forecast, before: str = "") -> PlanError:
    """What does not fit, by how much, and what to type."""
    classes = ", ".join(f"{name} {size(count)}" for name, count in one.memory.by_class().items() if count)
    said = (
        f"does not fit: {size(one.memory.total)} a device, of {size(one.capacity or 0)} ({classes}). At least "
        f"{size(one.memory.least)} are needed; the estimate errs by up to {memory.ERROR:.0%}.\n{advice(one)}"
    )
    return PlanError(f"{before}\n\n{said}" if before else said, id="plan.memory")


def advice(one: Forecast) -> str:
    """The first changes by which it fits with room to spare, as lines to type; what else there is where none does."""
    cfg, rows, count = one.cfg, one.plan.global_batch_size, one.plan.microbatches
    more = [n for n in range(2, 65) if rows % (count * n) == 0]
    ladder: list[dict[str, Any]] = [{"remat_policy": "full"}]
    ladder += [{"global_batch_size": rows, "gradient_accumulation_steps": count * n} for n in more]
    ladder += [{"remat_policy": "full"} | step for step in ladder[1:]]
    lean = {"mu_dtype": "bfloat16", "grad_dtype": "bfloat16"}
    for changes in [*ladder, *(lean | step for step in ladder)]:
        if _fits(one, changes):
            new = {key: value for key, value in changes.items() if getattr(cfg, key) != value}
            return "Try:\n" + "\n".join(f"  {key}={value}" for key, value in new.items())
    other = "" if cfg.auto_plan else "auto_plan=true, "
    return f"Try {other}more ways of ici_fsdp_parallelism, or more devices."


def _fits(one: Forecast, changes: dict[str, Any]) -> bool:
    """By the estimate, not by the least that could do."""
    try:
        other = make(one.cfg.replace(**changes), one.hardware)
    except (ConfigError, PlanError):
        return False
    return other.memory.total <= memory.ROOM * (other.capacity or 0)
