"""What a compiled program moves between devices: collectives by kind, mesh axes and depth of loops, from its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|send"
_CALL = re.compile(rf"= (?P<shape>\(.*?\)|\S+) (?P<kind>{_KINDS})(-start)?\(")
_ARRAY = re.compile(r"(pred|bf16|f16|f32|f64|f8\w+|[su](?:4|8|16|32|64))\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations={(.*?)}")
_BODY = re.compile(r"body=%?([\w.\-]+)")


@dataclass(frozen=True)
class Collective:
    """`count` collectives of one kind over the same axes, at the same depth of loops; bytes of their results together,
    each once (a loop repeats them)."""

    kind: str
    axes: str
    depth: int
    count: int
    bytes: int


def computations(program: str) -> dict[str, list[str]]:
    """The lines of each computation of an HLO module, by name; the entry is "ENTRY"."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = found.setdefault("ENTRY" if head[1] else head[2], [])
        else:
            lines.append(line)
    return found


def depths(everything: dict[str, list[str]]) -> dict[str, int]:
    """How many loops each computation that runs is inside of."""
    found: dict[str, int] = {}
    waiting = [("ENTRY", 0)]
    while waiting:
        name, depth = waiting.pop()
        if found.get(name, -1) >= depth or name not in everything:
            continue
        found[name] = depth
        for line in everything[name]:
            branches = re.findall(r"[\w.\-]+", ",".join(_BRANCHES.findall(line)))
            waiting += [(called, depth) for called in _CALLED.findall(line) + branches]
            waiting += [(body, depth + 1) for body in _BODY.findall(line)]
    return found


def size(shape: str) -> int:
    """Bytes of the largest array in a shape's text: of an asynchronous start, the result."""
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) * _width(kind) for kind, dims in _ARRAY.findall(shape)]
    return max(sizes, default=0)


def _width(kind: str) -> int:
    bits = re.search(r"\d+", kind)
    return 1 if kind == "pred" or bits is None else max(1, int(bits[0]) // 8)


def _devices(shape: str, transposed: str | None) -> np.ndarray:
    dims = [int(n) for n in shape.split(",")]
    order = [int(n) for n in transposed.split(",")] if transposed else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(list(order))


def group(line: str) -> list[int]:
    """The devices of a collective's first group, in any of XLA's notations: {{0,1},{2,3}}; [4,2]<=[2,4]T(1,0);
    mesh['a'=2,'b'=4] {'b'}, perhaps with device_ids=([4,2]T(1,0)); pairs of a permutation. Empty: all devices."""
    ids = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if named := re.search(rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({ids}\))? \{{(.*?)\}}", line):
        sizes = {name: int(count) for name, count in re.findall(r"'(\w+)'=(\d+)", named[1])}
        inside = re.findall(r"'(\w+)'", named[4])
        table = _devices(named[2] or ",".join(map(str, sizes.values())), named[3]).reshape(list(sizes.values()))
        return table[tuple(slice(None) if name in inside else 0 for name in sizes)].reshape(-1).tolist()
    if iota := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={ids}", line):
        return _devices(iota[3], iota[4]).reshape(-1)[: int(iota[2])].tolist()
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    return [int(n) for n in listed[1].split(",")] if listed else []


def axes(line: str, mesh: Mesh) -> str:
    """The mesh axes along which the devices of a group differ."""
    devices = group(line)
    if not devices:
        return "across slices" if " send" in line else "+".join(n for n, s in mesh.shape.items() if s > 1)
    places = np.array(np.unravel_index(devices, mesh.devices.shape))
    return "+".join(name for name, row in zip(mesh.axis_names, places, strict=True) if len(set(row.tolist())) > 1)


def _calls(program: str) -> Iterator[tuple[str, int, re.Match[str], str]]:
    """(identity, depth, match, line) of every collective that runs. The compiler may write one several times, as the
    parts of an asynchronous one, which share a channel."""
    everything = computations(program)
    for name, depth in depths(everything).items():
        for line in everything[name]:
            if call := _CALL.search(line):
                channel = re.search(r"channel_id=(\d+)", line)
                yield (f"{call['kind']} {channel[1]}" if channel else f"{name} {line[:60]}"), depth, call, line


def collectives(program: str, mesh: Mesh) -> list[Collective]:
    """Every collective of arrays (single numbers left out), the largest first."""
    seen: dict[str, tuple[str, str, int, int]] = {}
    for identity, depth, call, line in _calls(program):
        if (count := size(call["shape"])) > 64:
            seen.setdefault(identity, (call["kind"], axes(line, mesh), depth, count))
    found: dict[tuple[str, str, int], list[int]] = {}
    for kind, over, depth, count in seen.values():
        found.setdefault((kind, over, depth), []).append(count)
    listed = [Collective(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
    return sorted(listed, key=lambda one: -one.bytes)
