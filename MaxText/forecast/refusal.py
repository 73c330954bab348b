"""What does not fit: the numbers, the rule, what to type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from MaxText.cost import memory
from MaxText.errors import ConfigError, PlanError
from MaxText.forecast.record import Forecast, make
from MaxText.forecast.text import size, text

NOTHING: Mapping[str, Any] = MappingProxyType({})
LEAN = MappingProxyType(
    {"mu_dtype": "bfloat16", "grad_dtype": "bfloat16"}
)  # another result, so only where all else fails


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
    if found := first_cure(one) or first_cure(one, LEAN):
        return "Try:\n" + "\n".join(f"  {key}={value}" for key, value in found[0].items())
    other = "" if one.cfg.auto_plan else "auto_plan=true, "
    return f"Try {other}more ways of ici_fsdp_parallelism, or more devices."


def first_cure(one: Forecast, beside: Mapping[str, Any] = NOTHING) -> tuple[dict[str, Any], Forecast] | None:
    """(the first changes of the ladder, each with those `beside` it, that leave room; the forecast with them)."""
    for step in ladder(one):
        changes = {key: value for key, value in {**step, **beside}.items() if getattr(one.cfg, key) != value}
        other = changed(one, changes)
        if other is not None and other.has_room:
            return changes, other
    return None


def ladder(one: Forecast) -> Iterator[dict[str, Any]]:
    """What may make a plan smaller without another result, by what it costs: recomputation, more microbatches, both;
    then the same with the head in pieces."""
    rows, count = one.plan.global_batch_size, one.plan.microbatches
    more = [n for n in range(2, 65) if rows % (count * n) == 0]
    pieces = [{"global_batch_size": rows, "gradient_accumulation_steps": count * n} for n in more]
    full = {"remat_policy": "full"}
    steps: list[dict[str, Any]] = [full, *pieces, *(full | piece for piece in pieces)]
    yield from steps
    yield from (step | {"num_vocab_tiling": 8} for step in steps)


def changed(one: Forecast, changes: Mapping[str, Any]) -> Forecast | None:
    """The forecast with other values; None where the rules or the planner refuse them."""
    try:
        return make(one.cfg.replace(**changes), one.hardware)
    except (ConfigError, PlanError):
        return None
