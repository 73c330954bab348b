"""The schedule of a pipeline: pure arithmetic over the config and the number of stages.

The layers of one segment are dealt to the P stages in turn, `depth` repeats of its pattern at a time, until all are
dealt: repeat l lies on stage (l // depth) mod P and is used in round l // (depth P). With R = 1 round each stage holds
one run of layers; with more the schedule is circular (interleaved): a microbatch passes the ring of stages R times.

The rows are cut into M microbatches. Stage s works in iteration t on item t - s; item i is microbatch i mod M in round
i // M. That takes M R + P - 1 iterations, of which each stage idles P - 1: the bubble is (P - 1) / (M R + P - 1). An
item comes back to stage 0 P iterations after it left, so a circular schedule needs M >= P.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from MaxText import architecture
from MaxText.architecture import Segment

AXIS = "pipeline"


@dataclass(frozen=True)
class Schedule:
    """P = `stages`, R = `repeats`, M = `microbatches`; `depth` repeats of the pattern of `segment` lie on a stage in
    each round. The last `padding` of all of them are empty: they compute, and the stream passes them by."""

    segment: Segment
    stages: int
    repeats: int
    microbatches: int
    depth: int
    padding: int = 0

    @property
    def places(self) -> int:
        """Repeats of the pattern that the stages have room for."""
        return self.stages * self.repeats * self.depth

    @property
    def pipelined(self) -> int:
        """Repeats of the pattern that pass the pipeline, from the segment's first on."""
        return self.places - self.padding

    @property
    def owned(self) -> bool:
        """Whether each stage stores its own layers. Elsewhere (R > 1, layers left out or empty ones) every stage stores
        a piece of each layer, and they are exchanged at the door, so that stored arrays are in the order of layers."""
        return self.repeats == 1 and self.places == self.segment.repeats

    @property
    def share(self) -> int:
        """Microbatches for each stage: into so many parts the rows of a device are cut."""
        return self.microbatches // self.stages

    @property
    def iterations(self) -> int:
        return self.microbatches * self.repeats + self.stages - 1

    @property
    def bubble(self) -> float:
        """Part of the iterations in which a stage idles."""
        return (self.stages - 1) / self.iterations

    @property
    def waste(self) -> float:
        """Time of the pipeline beyond the work of its layers, as a part of that: the bubble, and empty layers."""
        return self.iterations / (self.microbatches * self.repeats) * self.places / self.pipelined - 1

    def fitting(self, rows: int, ways: int) -> Schedule:
        """The same with one microbatch a stage if its microbatches do not divide `rows`, split `ways` over the devices:
        rows of an evaluation need not divide as those of training must."""
        fits = rows % (self.share * ways) == 0
        return self if fits else dataclasses.replace(self, microbatches=self.stages)

    def describe(self) -> str:
        """For the start screen."""
        pattern = len(self.segment.pattern)
        outside = (self.segment.repeats - self.pipelined) * pattern
        return (
            f"{self.stages} stages x {_counted(self.repeats, 'repeat')} x {_counted(self.depth * pattern, 'layer')}; "
            f"{self.microbatches} microbatches in {self.iterations} iterations, bubble {100 * self.bubble:.1f} %"
            + (f"; {_counted(outside, 'layer')} of the segment outside" if outside else "")
            + (f"; {_counted(self.padding * pattern, 'empty layer')} at the end" if self.padding else "")
        )


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count > 1 else ''}"


def pipelined_segment(cfg: Any) -> Segment:
    """The segment that a pipeline runs: the one with most layers, the first of equals. All others run outside."""
    return max(architecture.segments(cfg), key=lambda segment: segment.repeats * len(segment.pattern))


def _dealt(cfg: Any, stages: int) -> tuple[int, int, int] | str:
    """(rounds, repeats of the pattern on a stage in a round, empty ones at the end), or why there is no such deal."""
    segment = pipelined_segment(cfg)
    pattern = len(segment.pattern)
    held = segment.repeats * pattern
    layers = held if cfg.pipeline_parallel_layers == -1 else cfg.pipeline_parallel_layers
    unit = stages * pattern
    what = f"pipeline_parallel_layers={layers}" if cfg.pipeline_parallel_layers != -1 else f"{layers} layers"
    of = f" in repeats of {pattern}" if pattern > 1 else ""
    legal = ", ".join(str(n) for n in range(unit, held + 1, unit)) or "none"
    padding = _padding(cfg, layers, unit) if cfg.pipeline_pad_layers and layers <= held else 0
    if layers > held or (layers + padding) % unit:
        degrees = ", ".join(str(p) for p in range(1, segment.repeats + 1) if segment.repeats % p == 0)
        return (
            f"{what}{of} cannot be dealt evenly to {stages} pipeline stages. Legal pipeline_parallel_layers here (the "
            f"rest run outside the pipeline): {legal}. Legal pipeline degrees for all {held}: {degrees}. Or "
            "pipeline_pad_layers=true, with empty layers at the end."
        )
    groups = (layers + padding) // unit  # repeats of the pattern that each stage gets in all
    depth, rounds = cfg.num_layers_per_pipeline_stage, cfg.num_pipeline_repeats
    if depth == rounds == -1:
        return (1, groups, padding // pattern) if cfg.dcn_pipeline_parallelism != 1 else (groups, 1, padding // pattern)
    if depth == -1:
        depth = groups // rounds * pattern
    if rounds == -1:
        rounds = groups * pattern // depth
    if rounds * depth == groups * pattern and depth % pattern == 0:
        return rounds, depth // pattern, padding // pattern
    pairs = ", ".join(f"{groups // r * pattern} x {r}" for r in range(1, groups + 1) if groups % r == 0)
    return (
        f"num_layers_per_pipeline_stage={cfg.num_layers_per_pipeline_stage} x "
        f"num_pipeline_repeats={cfg.num_pipeline_repeats} must make the {groups * pattern} layers of each of "
        f"{stages} stages{of}. Legal here: {pairs}."
    )


def _padding(cfg: Any, layers: int, unit: int) -> int:
    """Fewest empty layers with which `layers` fill all stages in every round; `unit` is a pattern on each stage. Layers
    that end within a pattern have no such number: 0."""
    pattern = len(pipelined_segment(cfg).pattern)
    rounds, depth = max(cfg.num_pipeline_repeats, 1), max(cfg.num_layers_per_pipeline_stage, pattern)
    return -layers % (unit * rounds * depth // pattern) if layers % pattern == 0 else 0


def microbatches(cfg: Any, stages: int) -> int:
    """Pieces of the rows that pass the pipeline one after another; by default as many as there are stages."""
    return stages if cfg.num_pipeline_microbatches == -1 else cfg.num_pipeline_microbatches


def problems(cfg: Any, stages: int) -> list[str]:
    """Why the model cannot run in so many stages, with the numbers and the legal values."""
    found = []
    dealt = _dealt(cfg, stages)
    if isinstance(dealt, str):
        found.append(dealt)
    pieces = microbatches(cfg, stages)
    if pieces % stages:
        found.append(
            f"num_pipeline_microbatches={pieces} must be a multiple of the {stages} pipeline stages: fewer would leave "
            f"stages without work in every round, and each stage embeds an equal share. Nearest: "
            f"{max(pieces // stages, 1) * stages}."
        )
    if any(spec.keys == "borrowed" for spec in pipelined_segment(cfg).pattern):
        found.append(
            f"num_kv_shared_layers={cfg.num_kv_shared_layers}: layers that use the keys and values of an earlier layer "
            f"would lie on another stage than that layer. Legal pipeline degree here: 1."
        )
    return found


def make(cfg: Any, stages: int) -> Schedule | None:
    """The schedule for a config without `problems`; None where there is one stage."""
    if stages == 1:
        return None
    dealt = _dealt(cfg, stages)
    assert not isinstance(dealt, str), dealt
    rounds, depth, padding = dealt
    return Schedule(pipelined_segment(cfg), stages, rounds, microbatches(cfg, stages), depth, padding)
