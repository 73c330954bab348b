"""What the compiler made of a step: which collectives, over which axes, inside and outside the loops over layers.

More of them than the algebra demands is a failing test. Fewer is a finding: lower the number here and say why.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh

from MaxText.aot.hlo import computations
from tests.helpers import toy

ROOT = Path(__file__).parents[1]
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast"
CALL = re.compile(rf"= (?P<shape>\(.*?\)|\S+) (?P<kind>{KINDS})(-start)?\(")
Counts = dict[tuple[str, str], int]  # (kind, "axis+axis") -> arrays


def callees(line: str) -> list[str]:
    """The computations that an operation calls, runs as a loop, or chooses from."""
    several = ",".join(re.findall(r"branch_computations={(.*?)}", line))
    one = re.findall(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", line)
    return one + re.findall(r"[\w.\-]+", several)


def reached(everything: dict[str, list[str]], name: str, through_loops: bool) -> Iterator[str]:
    """Lines of a computation and of those it calls; the bodies of its loops only if asked for."""
    for line in everything[name]:
        yield line
        if through_loops or " while(" not in line:
            for callee in callees(line):
                yield from reached(everything, callee, through_loops)


def devices(shape: str, transposed: str | None = None) -> np.ndarray:
    """The device numbers 0, 1, ... in "2,4", transposed by "1,0" if given."""
    dims = [int(n) for n in shape.split(",")]
    order = [int(n) for n in transposed.split(",")] if transposed else range(len(dims))
    return np.arange(np.prod(dims)).reshape(dims).transpose(order)


def group(line: str) -> list[int]:
    """The devices of the first group of a collective, in any of XLA's notations:
    {{0,1},{2,3}}; [4,2]<=[2,4]T(1,0); mesh['a'=2,'b'=4] {'b'}, with device_ids=([4,2]T(1,0)) before the braces; or the
    first pair of a permutation."""
    ids = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if named := re.search(rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({ids}\))? \{{(.*?)\}}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        shape = ",".join(map(str, sizes.values()))
        inside = re.findall(r"'(\w+)'", named[4])
        table = devices(named[2] or shape, named[3]).reshape(list(sizes.values()))
        return table[tuple(slice(None) if name in inside else 0 for name in sizes)].reshape(-1).tolist()
    if iota := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={ids}", line):
        return devices(iota[3], iota[4]).reshape(-1)[: int(iota[2])].tolist()
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    assert listed, line
    return [int(n) for n in listed[1].split(",")]


@pytest.mark.parametrize(
    ("notation", "first"),
    [
        ("{{0,2},{1,3}}, x", [0, 2]),
        ("[4,2]<=[8], x", [0, 1]),
        ("[2,4]<=[4,2]T(1,0), x", [0, 2, 4, 6]),
        ("mesh['a'=4,'b'=2] {'a'}, x", [0, 2, 4, 6]),
        ("mesh['a'=4,'b'=2] {'a','b'}, x", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, x", [0, 1]),
    ],
)
def test_notations_of_groups(notation, first):
    assert group(f"replica_groups={notation}") == first


def axes(line: str, mesh: Mesh) -> str:
    """The mesh axes along which the devices of a group differ."""
    places = np.array(np.unravel_index(group(line), mesh.devices.shape))
    return "+".join(name for name, row in zip(mesh.axis_names, places, strict=True) if len(set(row)) > 1)


def count(lines: Iterator[str], mesh: Mesh) -> Counts:
    """Arrays that travel, by kind and axes. Scalars (norms, sums) are left out; a merged collective counts fully."""
    counts: Counts = collections.Counter()
    for line in lines:
        if call := CALL.search(line):
            arrays = [dims for dims in re.findall(r"\w+\[([\d,]*)\]", call["shape"]) if dims]
            if arrays:
                counts[call["kind"], axes(line, mesh)] += len(arrays)
    return dict(counts)


def by_place(program: str, mesh: Mesh) -> dict[str, Counts]:
    everything = computations(program)
    loops = [re.search(r"body=%?([\w.\-]+)", line)[1] for line in everything["ENTRY"] if " while(" in line]
    # XLA may write small loops of its own, such as one over the chunks of an array: they talk to nobody.
    loops = [loop for loop in loops if count(reached(everything, loop, True), mesh)] or loops
    assert len(loops) == 2, "a step has a loop forward and a loop backward over the layers"
    return {
        "forward": count(reached(everything, loops[0], True), mesh),
        "backward": count(reached(everything, loops[1], True), mesh),
        "outside": count(reached(everything, "ENTRY", False), mesh),
    }


# A layer has 7 kernels (query, key, value, out, wi_0, wi_1, wo) and 2 norms. ZeRO-3: each kernel is gathered where it
# is used, forward and backward; its gradient is summed over the batch axes where it is born. Tensor parallelism:
# `out` and `wo` sum their results forward; backward the kernels that read the same input (query, key, value; wi_0,
# wi_1) sum their parts of its gradient together.
# XLA on CPU has no reduce-scatter of a matmul's result: it sums whole (all-reduce) and slices. A TPU scatters.
# Outside: embedding and head are gathered once; over tensor the looked-up rows, the maximum, sum and pick of the
# vocabulary [B, S] and the head's input gradient are summed; over the batch the gradients of head, final norm and
# embedding.
FSDP4_TENSOR2 = {
    "forward": {("all-gather", "fsdp"): 7, ("all-reduce", "tensor"): 2},
    "backward": {("all-gather", "fsdp"): 7, ("all-reduce", "tensor"): 2, ("all-reduce", "fsdp"): 7 + 2},
    "outside": {
        ("all-gather", "fsdp"): 2,
        ("all-reduce", "tensor"): 1 + 3 + 1,
        ("all-reduce", "fsdp"): 2,
        ("reduce-scatter", "fsdp"): 1,
    },
}
# With a data axis every sum over fsdp that leaves a slice on each device is followed by a sum over data of the slice.
DATA2_FSDP2_TENSOR2 = {
    "forward": {("all-gather", "fsdp"): 7, ("all-reduce", "tensor"): 2},
    "backward": {
        ("all-gather", "fsdp"): 7,
        ("all-reduce", "tensor"): 2,
        ("all-reduce", "fsdp"): 7,
        ("all-reduce", "data"): 7,
        ("all-reduce", "data+fsdp"): 2,
    },
    "outside": {
        ("all-gather", "fsdp"): 2,
        ("all-reduce", "tensor"): 1 + 3 + 1,
        ("all-reduce", "fsdp"): 1,
        ("all-reduce", "data"): 2,
        ("all-reduce", "data+fsdp"): 1,
        ("reduce-scatter", "fsdp"): 1,
    },
}
# Without tensor parallelism nothing of the stream travels.
FSDP8 = {
    "forward": {("all-gather", "fsdp"): 7},
    "backward": {("all-gather", "fsdp"): 7, ("all-reduce", "fsdp"): 7 + 2},
    "outside": {("all-gather", "fsdp"): 2, ("all-reduce", "fsdp"): 2, ("reduce-scatter", "fsdp"): 1},
}


# Rows split in two. Outside the layers: the places of all keys (position and document) are gathered, and the gradients
# of embedding, final norm and head summed; in the layers those of every weight. Keys and values are gathered, forward
# and once more backward, and their gradients scattered ...
PLACES_AND_SUMS = {("all-gather", "context"): 2, ("all-reduce", "context"): 3}
GATHERED = {
    "forward": {("all-gather", "context"): 2},
    "backward": {("all-gather", "context"): 2, ("reduce-scatter", "context"): 2, ("all-reduce", "context"): 7 + 2},
    "outside": PLACES_AND_SUMS,
}
# ... or passed on c - 1 times, forward and backward, and their gradients c times (the loop and its last turn) ...
RING = {
    "forward": {("collective-permute", "context"): 2},
    "backward": {("collective-permute", "context"): 2 + 2 + 2, ("all-reduce", "context"): 7 + 2},
    "outside": PLACES_AND_SUMS,
}
# ... or queries, keys, values and the result change from rows to heads and back (XLA on CPU: an array for each shard).
EXCHANGED = {
    "forward": {("all-to-all", "context"): 4 * 2},
    "backward": {("all-to-all", "context"): 4 * 2, ("all-reduce", "context"): 7 + 2},
    "outside": PLACES_AND_SUMS,
}


@pytest.mark.parametrize(("strategy", "expected"), [("all_gather", GATHERED), ("ring", RING), ("ulysses", EXCHANGED)])
def test_collectives_of_split_rows(strategy, expected):
    made = toy({"context": 2}, context_parallel_strategy=strategy)
    assert by_place(made.compiled_step.as_text(), made.mesh) == expected


# Two stages. The loops are those over iterations: in each the stream goes on to the next stage, forward and backward,
# and weights are gathered within the stage. Outside, over the stages: the stream is gathered on its way in, scattered
# on its way out, and backward the other way round; positions and documents are gathered. Embedding and head are split
# over stages and fsdp together. Stages that own their layers move no weight ...
STAGES_OWN = {
    "forward": {("all-gather", "fsdp"): 7, ("collective-permute", "pipeline"): 1},
    "backward": {("all-gather", "fsdp"): 7, ("collective-permute", "pipeline"): 1, ("all-reduce", "fsdp"): 7 + 2},
    "outside": {
        ("all-gather", "pipeline"): 1 + 2 + 1,
        ("reduce-scatter", "pipeline"): 1 + 1,
        ("all-gather", "pipeline+fsdp"): 2,
        ("all-reduce", "pipeline+fsdp"): 2,
        ("reduce-scatter", "pipeline+fsdp"): 1,
    },
}
# ... and in a circular schedule each of the 7 kernels is exchanged, and its gradient back (XLA on CPU: an array for
# each stage); the 2 norms are whole on every stage, and their gradients summed.
EXCHANGED_AT_THE_DOOR = {
    **STAGES_OWN,
    "outside": {
        **STAGES_OWN["outside"],
        ("all-to-all", "pipeline"): (7 + 7) * 2,
        ("all-reduce", "pipeline"): 2,
    },
}


@pytest.mark.parametrize(("repeats", "expected"), [(1, STAGES_OWN), (2, EXCHANGED_AT_THE_DOOR)], ids=["once", "twice"])
def test_collectives_of_a_pipeline(repeats, expected):
    how = {"base_num_decoder_layers": 4, "remat_policy": "full", "num_pipeline_repeats": repeats}
    made = toy({"pipeline": 2, "fsdp": 2}, **how)
    assert by_place(made.compiled_step.as_text(), made.mesh) == expected


# Experts split in two, their weights also over fsdp; E integers say how many rows come. Forward: the attention's four
# kernels and the router's are gathered over both axes, as every dense weight is, but the experts' three over fsdp
# only: no device gets another shard's experts. Tokens go there and back (XLA on CPU: an array for each shard). How many
# tokens chose each expert is summed over the batch. Backward: weights are gathered once more, gradients of tokens go
# there and back; those of the experts' weights are scattered over fsdp, and need no sum over the experts' axis.
EXPERT2_FSDP2 = {
    "forward": {
        ("all-gather", "fsdp+expert"): 4 + 1,
        ("all-gather", "fsdp"): 3,
        ("all-gather", "expert"): 1,
        ("all-to-all", "expert"): 2 * 2,
        ("all-reduce", "fsdp+expert"): 1,
    },
    "backward": {
        ("all-gather", "fsdp+expert"): 4 + 1,
        ("all-gather", "fsdp"): 3,
        ("all-to-all", "expert"): 2 * 2,
        ("reduce-scatter", "fsdp"): 3,
        ("all-reduce", "fsdp+expert"): 4 + 1 + 2,
    },
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16}


def test_collectives_of_experts():
    made = toy({"expert": 2, "fsdp": 2}, **EXPERTS)
    found = by_place(made.compiled_step.as_text(), made.mesh)
    assert {place: found[place] for place in EXPERT2_FSDP2} == EXPERT2_FSDP2


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"fsdp": 4, "tensor": 2}, FSDP4_TENSOR2),
        ({"data": 2, "fsdp": 2, "tensor": 2}, DATA2_FSDP2_TENSOR2),
        ({"fsdp": 8}, FSDP8),
    ],
    ids=["fsdp4-tensor2", "data2-fsdp2-tensor2", "fsdp8"],
)
def test_collectives_of_a_step(mesh, expected):
    made = toy(mesh)
    assert by_place(made.compiled_step.as_text(), made.mesh) == expected


def test_one_device_talks_to_nobody():
    made = toy()
    assert by_place(made.compiled_step.as_text(), made.mesh) == {"forward": {}, "backward": {}, "outside": {}}


# The compiler complains on stderr, and only when it really compiles: a process of its own, without a cache.
COMPILES = """
import jax, numpy as np
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import PartitionSpec as P
from tests.helpers import toy

print("the step:", flush=True)
toy({"data": 2, "fsdp": 2, "tensor": 2}).compiled_step
toy({"fsdp": 2, "context": 2, "tensor": 2}, context_parallel_strategy="ring").compiled_step
toy({"pipeline": 2, "fsdp": 2}, base_num_decoder_layers=4).compiled_step
toy({"expert": 2, "fsdp": 2, "tensor": 2}, num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=16).compiled_step
print("a bad program:", flush=True)
with jax.set_mesh(jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)):
    bad = lambda x: constrain(constrain(x * 2, P(None, "a", None)) + 1, P("b", None, "c"))
    jax.jit(bad, in_shardings=P("a", "b", "c")).lower(np.ones((16, 16, 16), np.float32)).compile()
"""
COMPLAINT = "Involuntary full rematerialization"


def test_nothing_is_made_whole_for_want_of_a_way():
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "0", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    step, bad = done.stdout.split("a bad program:")
    assert COMPLAINT in bad, "this compiler does not complain any more, so its silence proves nothing"
    assert COMPLAINT not in step, step
