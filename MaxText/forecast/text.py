"""A forecast as tables for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from MaxText import flops, remat
from MaxText.cost import torus
from MaxText.forecast.notes import axis_meaning, trust
from MaxText.forecast.record import Forecast, shardings


def size(count: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds, or milli- or microseconds below one."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Columns as wide as their longest word; the last one ragged."""
    listed = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))] if listed else []
    return "\n".join(
        (indent + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True))).rstrip()
        for row in listed
    )


def _heading(one: Forecast) -> list[tuple[str, str]]:
    cfg, plan, hw = one.cfg, one.plan, one.hardware
    active = flops.active_parameters(cfg, plan.tree)
    where = f"{hw.slice.name}: {hw.slice.chips} chips, " if hw.slice and hw.platform != "cpu" else ""
    per_device = plan.global_batch_size / plan.microbatches / plan.devices
    return [
        ("model", f"{plan.parameters:,} parameters, {active:,} active; {cfg.num_decoder_layers} layers"),
        ("hardware", f"{where}{hw.devices} devices x {hw.kind}, {hw.processes} hosts, {hw.slices} slices"),
        ("mesh", plan.describe_mesh()),
        *([("pipeline", plan.pipeline.describe())] if plan.pipeline else []),
        (
            "batch",
            f"{plan.global_batch_size} rows x {cfg.max_target_length} = {plan.tokens_per_step:,} tokens a step, in "
            f"{plan.microbatches} microbatches of {per_device:g} rows a device",
        ),
        ("compute", f"{cfg.dtype}, weights {cfg.weight_dtype}, gradients {cfg.grad_dtype}; remat {_remat(cfg)}"),
    ]


def _remat(cfg: Any) -> str:
    kept = defaultdict(list)
    for name, place in remat.places(cfg).items():
        kept[place].append(name)
    if cfg.remat_policy in ("none", "full") or not (kept["device"] or kept["offload"]):
        return cfg.remat_policy
    host = f"; on the host {', '.join(kept['offload'])}" if kept["offload"] else ""
    return f"{cfg.remat_policy} (kept {', '.join(kept['device']) or 'nothing'}{host})"


def _mesh(one: Forecast) -> str:
    plan, where = one.plan, one.hardware.slice
    placed = torus.place(where, plan.ici) if where else {}
    rows = [("axis", "in a slice", "across", "neighbours", "links at a device", "splits")]
    rows += [
        (
            axis,
            str(plan.ici[axis]),
            str(plan.dcn[axis]),
            torus.describe(where, placed[axis]) if where and axis in placed else "",
            _rate(one, placed, axis),
            axis_meaning(axis),
        )
        for axis, degree in plan.mesh_shape.items()
        if degree > 1
    ]
    return table(rows) if len(rows) > 1 else "  one device"


def _rate(one: Forecast, placed: torus.Placement, axis: str) -> str:
    """Bytes a second that reach a device along an axis: inside a slice, and across slices."""
    where, rates = one.hardware.slice, []
    if where and axis in placed:
        rates.append(torus.bandwidth(where, placed, [axis]))
    if where and one.plan.dcn[axis] > 1:
        rates.append(where.chip.network_bandwidth / where.chip.devices_per_chip)
    return " and ".join(f"{rate / 1e9:.3g} GB/s" for rate in rates)


def _shardings(one: Forecast) -> str:
    """By kind of array: layers of one kind are one row."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for found in shardings(one):
        name = ".".join(part for part in found["name"].split("/") if not part.isdigit() and part[:6] != "layers")
        axes = " ".join("+".join(axes) or "-" for axes in found["axes"])
        shape = "x".join(map(str, found["shape"]))
        kinds.setdefault((name, shape, axes), []).append(found["bytes_per_device"])
    rows: list[tuple[str, ...]] = [("array", "shape", "split over (a dim each)", "per device")]
    ranked = sorted(kinds.items(), key=lambda item: -sum(item[1]))
    rows += [(*key, size(sum(counts))) for key, counts in ranked[:16]]
    rest = sum(sum(counts) for _, counts in ranked[16:])
    return table([*rows, (f"{len(ranked) - 16} more", "", "", size(rest))] if rest else rows)


def _memory(one: Forecast) -> str:
    rows = []
    for name, count in _by_class(one):
        rows.append((name, size(count), "exact" if name in ("parameters", "optimizer") else ""))
        if name == "activations":
            rows += [(f"  saved by {path}", size(kept), "") for path, kept in one.memory.saved_by_layer.items()]
    capacity = f"of {size(one.capacity)}" if one.capacity else ""
    rows.append(("total", size(one.memory.total), capacity))
    return table(rows)


_OF_HOST = {
    "offloaded": ("offloaded", "activations"),
    "saves": ("saves", "copies of the state, from which checkpoints are written"),
    "arriving": ("arriving", "the state once more, while it is copied"),
    "local": ("local checkpoints", "in /dev/shm: two steps, its own and a neighbour's pieces"),
}


def _host(one: Forecast) -> str:
    found = one.host
    rows = [(word, size(getattr(found, name)), why) for name, (word, why) in _OF_HOST.items() if getattr(found, name)]
    if not rows:
        return "  nothing"
    capacity = f"of {size(found.capacity)}" if found.capacity else "of what a host has, which is not published"
    return table([*rows, ("total", size(found.total), capacity)])


def _by_class(one: Forecast) -> list[tuple[str, int]]:
    return [(name, count) for name, count in one.memory.by_class().items() if count]


def _communication(one: Forecast) -> str:
    rows = [("traffic a step", "axes", "kind", "times", "bytes", "in a slice", "across", "")]
    rows += [
        (
            found["name"],
            "+".join(found["axes"]),
            found["kind"],
            f"{found['times']:.0f}",
            size(found["bytes"]),
            duration(found["seconds_ici"]),
            duration(found["seconds_dcn"]),
            "beside the arithmetic" if found["hidden"] else "waited for",
        )
        for found in one.collectives
    ]
    return table(rows) if len(rows) > 1 else "  none"


def _time(one: Forecast) -> str:
    if one.seconds is None:
        return "  nothing is known of these devices"
    rows = [(name, duration(value)) for name, value in vars(one.seconds).items() if value and name != "total"]
    rows.append(("step, with what overlaps", duration(one.seconds.total)))
    if one.hardware.slice is not None and one.hardware.platform != "cpu":
        rows.append(("calibrated by", trust(one.hardware.slice.chip.name)))
    rows.append(("FLOPs a step and device", f"{one.plan.flops_per_step_per_device / 1e12:.2f} TFLOP"))
    rows.append(("tokens a second and chip", f"{one.tokens_per_second_per_chip:,.0f}"))
    rows.append(("MFU", f"{one.mfu:.1%}"))
    rows.append(("checkpoint", f"{size(one.checkpoint_bytes)}, {duration(one.checkpoint_seconds)} at 1 GB/s a host"))
    return table(rows)


def text(one: Forecast) -> str:
    """The whole forecast."""
    width = max(len(name) for name, _ in _heading(one))
    parts = ["\n".join(f"{name:<{width}}  {value}" for name, value in _heading(one))]
    parts += [f"mesh\n{_mesh(one)}", f"shardings\n{_shardings(one)}"]
    parts += [f"memory of a device\n{_memory(one)}", f"memory of a host, data and program aside\n{_host(one)}"]
    parts += [f"communication\n{_communication(one)}", f"time\n{_time(one)}"]
    parts.append("chosen\n" + table((key, why) for key, why in one.reasons.items()))
    if one.rejected:
        rows = [(found["what"], found["why"]) for found in one.rejected]
        parts.append("rejected\n" + table(rows))
    if one.warnings:
        parts.append("\n".join(f"warning: {warning}" for warning in one.warnings))
    return "\n\n".join(parts)
