"""Why an array is split as it is: dim by dim, from its record to the mesh."""

from __future__ import annotations

import difflib
import math

from MaxText import blueprint
from MaxText.errors import ConfigError
from MaxText.forecast.record import Forecast
from MaxText.forecast.text import size, table

# What people call parts of a feed-forward, in the words of the blueprint.
ALSO = {"gate": "wi_0", "up": "wi_1", "down": "wo", "q": "query", "k": "key", "v": "value", "o": "out", "mlp": "mlp"}


def find(one: Forecast, name: str) -> list[tuple[str, blueprint.Param]]:
    """The parameters that a dotted name means: its words in order, others between them left out.

    Raises:
      ConfigError: if there is none; with the nearest names."""
    words = [ALSO.get(word, word) for word in name.replace("/", ".").split(".") if word and word != "params"]
    every = list(blueprint.leaves(one.plan.tree))
    found = [(path, param) for path, param in every if _in_order(words, path.split("/"))]
    if not found:
        paths = [path.replace("/", ".") for path, _ in every]
        near = difflib.get_close_matches(".".join(words), paths, n=4, cutoff=0.3) or paths[:4]
        raise ConfigError(
            f"explain={name}: no parameter is called that. Nearest: {', '.join(near)}.", id="plan.unknown-array"
        )
    return found


def _in_order(words: list[str], parts: list[str]) -> bool:
    rest = iter(parts)
    return all(word in rest for word in words)


def explain(one: Forecast, name: str) -> str:
    """In words, for every parameter that the name means."""
    return "\n\n".join(_explained(one, path, param) for path, param in find(one, name))


def _explained(one: Forecast, path: str, param: blueprint.Param) -> str:
    layout, cfg = one.plan.layout, one.cfg
    rules = dict(layout.rules)
    rows = [("dim", "size", "rule", "here", "pieces")]
    for dim, length in zip(param.axes, param.shape, strict=True):
        rule = " + ".join(rules.get(dim, ())) if dim else ""
        here = " x ".join(f"{axis}={dict(layout.sizes)[axis]}" for axis in layout.axes(dim))
        rows.append((dim or "-", str(length), rule or "never split", here or "whole", str(layout.ways(dim))))
    whole = param.size * param.dtype(cfg.weight_dtype).itemsize
    ways = math.prod(layout.ways(dim) for dim in param.axes)
    gathered = sorted({axis for dim in param.axes for axis in layout.axes(dim) if axis in layout.gathered})
    kept = sorted({axis for dim in param.axes for axis in layout.axes(dim) if axis not in layout.gathered})
    use = f"gathered over {', '.join(gathered)} for each use" if gathered else "used as it lies"
    use += f"; stays split over {', '.join(kept)}" if kept else ""
    copies = one.plan.devices // ways
    return "\n".join(
        [
            f"{path.replace('/', '.')}: a {param.kind}, {size(whole)} in {cfg.weight_dtype}",
            table(rows),
            f"  {size(whole / ways)} on each of {one.plan.devices} devices, {copies} copies of every piece; {use}.",
            "  Change a rule with logical_axis_rules, a degree with ici_..._parallelism.",
        ]
    )
