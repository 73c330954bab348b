"""The compiler's answer beside the forecast's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from MaxText.aot import hlo
from MaxText.aot.compile import Compiled, compile_step, store
from MaxText.errors import PlanError, StorageError
from MaxText.forecast import Forecast
from MaxText.forecast.text import size, table


def ask(one: Forecast) -> Compiled:
    """Compile the step of a forecast for its slice."""
    if one.hardware.slice is None or one.hardware.platform != "tpu":
        raise PlanError(
            f"compile=true compiles for TPU slices, and this is {one.hardware.kind}. Name one: hardware=v5e-16.",
            id="plan.no-compiler",
        )
    return compile_step(one.cfg, one.plan, one.hardware.slice)


def as_dict(one: Forecast, answer: Compiled) -> dict[str, Any]:
    """For programs."""
    return {
        "argument_bytes": answer.arguments,
        "temporary_bytes": answer.temporary,
        "packed_bytes": answer.total - answer.arguments,
        "total_bytes": answer.total,
        "error_of_forecast": one.memory.total / answer.total - 1,
        "collectives": [vars(found) for found in hlo.collectives(answer.text, answer.mesh)],
    }


def text(one: Forecast, answer: Compiled) -> str:
    """For people: memory beside ours, collectives by kind, axes and depth of loops."""
    plan, needs = one.plan, one.memory
    ours, packed = needs.total - plan.state_bytes - needs.batch, answer.total - answer.arguments
    rows = [
        ("", "compiler", "forecast", ""),
        ("arguments", size(answer.arguments), size(plan.state_bytes + needs.batch), "state and batch"),
        ("all else", size(packed), size(ours), f"{ours / max(packed, 1) - 1:+.1%}"),
        ("total", size(answer.total), size(needs.total), f"{needs.total / answer.total - 1:+.1%}"),
    ]
    moved = [("collective", "axes", "in loops", "count", "bytes, each once")]
    moved += [
        (found.kind, found.axes, str(found.depth), str(found.count), size(found.bytes))
        for found in hlo.collectives(answer.text, answer.mesh)
    ]
    return f"compiled for {one.hardware.slice.name if one.hardware.slice else ''}\n{table(rows)}\n\n{table(moved)}"


def keep(answer: Compiled, path: Path) -> str:
    """Store the compiled program; a line that says where."""
    try:
        return f"stored in {path}: {size(store(answer, path))}; it loads where the devices are"
    except OSError as error:
        raise StorageError(f"compiled={path}: {error.strerror}", id="plan.json") from error
