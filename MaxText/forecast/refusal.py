"""What does not fit: the numbers, the rule, what to type."""

from __future__ import annotations

from MaxText.cost import memory
from MaxText.errors import PlanError
from MaxText.forecast.record import Forecast
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
    """Lines to type, the likeliest first."""
    cfg, plan, needs = one.cfg, one.plan, one.memory
    lines = []
    if plan.state_bytes > 0.5 * (one.capacity or 0):
        lines.append("more devices, or more ways of ici_fsdp_parallelism: the state alone is more than half")
        lines.append("mu_dtype=bfloat16, grad_dtype=bfloat16: less state")
    if cfg.remat_policy != "full" and needs.activations > 0.1 * needs.total:
        lines.append("remat_policy=full")
    rows = plan.global_batch_size / plan.microbatches / plan.devices
    if rows > 1:
        lines.append(f"per_device_batch_size={rows / 2:g} gradient_accumulation_steps={plan.microbatches * 2}")
    if needs.logits > 0.1 * needs.total and cfg.num_vocab_tiling == 1:
        lines.append("num_vocab_tiling=8")
    return "Try:\n" + "\n".join(f"  {line}" for line in lines or ["a smaller model, or more devices"])
