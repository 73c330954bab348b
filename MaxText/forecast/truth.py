"""The forecast held to account: what the compiler and the clock said, beside it, in the log and in the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from MaxText import compat
from MaxText.errors import StorageError
from MaxText.forecast.record import Forecast, as_dict
from MaxText.forecast.text import duration, size

WARM_UP = 2  # first steps, which are slower


def at_start(one: Forecast, program: Any, path: Path) -> str:
    """Write plan.json with the compiled program's memory; a line that compares both.

    Args:
      program: a `jax.stages.Compiled`."""
    found = program.memory_analysis()
    values = as_dict(one)
    if found is None:
        _write(path, values)
        return "compiled"
    arguments, total = found.argument_size_in_bytes, compat.allocated_bytes(found)
    _write(path, values | {"compiled": {"argument_bytes": arguments, "total_bytes": total}})
    planned = one.memory.total - one.plan.state_bytes - one.memory.batch
    return (
        f"compiled: arguments {size(arguments)} (planned state {size(one.plan.state_bytes)}), all else "
        f"{size(total - arguments)} (planned {size(planned)}) per device"
    )


def at_end(one: Forecast, seconds: Sequence[float], path: Path) -> str:
    """Add the median step time to plan.json; a line that compares both, empty where too few steps were run."""
    steady = seconds[WARM_UP:]
    if not steady or one.seconds is None:
        return ""
    took = median(steady)
    try:
        before = json.loads(path.read_text(encoding="utf-8") or "{}")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", id="plan.json") from error
    _write(path, before | {"measured": {"step_seconds": took, "steps": len(steady)}})
    return f"step time: planned {duration(one.seconds.total)}, median of {len(steady)} steps {duration(took)}"


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", id="plan.json") from error
