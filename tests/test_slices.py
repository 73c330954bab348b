"""Slices: where their devices stand in the mesh, that the numbers stay, and what a compiled step sends between them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import pytest

from MaxText import blueprint, decoder, hardware, planner
from MaxText.errors import PlanError
from tests.helpers import Toy, assert_close, cpu, toy, toy_batch, toy_config
from tests.test_collectives import CALL, EXPERTS, callees, computations, group

BYTES = {"f32": 4, "s32": 4, "bf16": 2, "pred": 1}


def sliced_mesh(slices: int, devices: int = 8, **degrees: int) -> np.ndarray:
    """The ids of the devices on the mesh, axes of size 1 left out."""
    keys = {f"{axis}_parallelism": size for axis, size in degrees.items()}
    cfg = toy_config(None, num_slices=slices, **keys)
    plan = planner.make(cfg, decoder.declare(cfg), cpu(devices, slices))
    ids = np.vectorize(lambda device: device.id)(planner.build_mesh(plan, jax.devices()[:devices]).devices)
    return ids.reshape([size for size in ids.shape if size > 1])


def test_the_axes_between_slices_are_the_outer_ones():
    eight = np.arange(8)
    assert (sliced_mesh(2, ici_fsdp=4, dcn_data=2) == eight.reshape(2, 4)).all()
    assert (sliced_mesh(2, ici_fsdp=2, ici_tensor=2, dcn_data=2) == eight.reshape(2, 2, 2)).all()
    assert (sliced_mesh(4, ici_fsdp=2, dcn_data=2, dcn_fsdp=2) == eight.reshape(2, 4)).all()
    within = sliced_mesh(2, ici_data=2, ici_fsdp=2, dcn_fsdp=2)  # data inside, fsdp across: both outer halves of fsdp
    assert set(within[:, :2].flat) == {0, 1, 2, 3} and set(within[:, 2:].flat) == {4, 5, 6, 7}


def test_slices_of_unequal_size_are_refused():
    with pytest.raises(PlanError) as caught:
        hardware.detect(num_slices=3)
    assert caught.value.id == "plan.slices" and "3" in str(caught.value) and "8" in str(caught.value)
    assert hardware.detect(num_slices=4).slices == 4 and hardware.detect().slices == 1


# --- what crosses


class Crossing(NamedTuple):
    """A collective between slices: kind, the shapes that it carries, bytes of all of them, how often in a step."""

    kind: str
    shapes: tuple[str, ...]
    nbytes: int
    times: int


def crossings(program: str, per_slice: int) -> list[Crossing]:
    """Every collective of a compiled step in which devices of several slices take part."""
    everything = computations(program)
    return list(_crossings(everything, "ENTRY", per_slice, 1))


def _crossings(everything: dict[str, list[str]], name: str, per_slice: int, times: int) -> Iterator[Crossing]:
    for line in everything[name]:
        call = CALL.search(line)
        if call and len({device // per_slice for device in group(line)}) > 1:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", call["shape"])
            sizes = [BYTES[kind] * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in shapes]
            yield Crossing(call["kind"], tuple(f"{k}[{d}]" for k, d in shapes), sum(sizes), times)
        loop = re.search(r'known_trip_count":\{"n":"(\d+)"', line) if " while(" in line else None
        for callee in callees(line):
            yield from _crossings(everything, callee, per_slice, times * (int(loop[1]) if loop else 1))


SLICED = {"num_slices": 2, "dcn_data_parallelism": 2}


@pytest.fixture(scope="module")
def sliced():
    """Two slices of four devices: parameters are sharded within a slice, copied between them."""
    return toy({"fsdp": 4}, **SLICED)


def test_two_slices_compute_what_one_device_computes(sliced):
    batch = toy_batch()
    assert_close(sliced.gradients(batch)[0], toy().gradients(batch)[0])


def test_only_gradients_cross_slices(sliced):
    """A step sends each device's part of each gradient once: all of it is summed, nothing is gathered. Besides,
    scalars: the loss, its counts, the squares of the gradient's norm."""
    found = crossings(sliced.compiled_step.as_text(), per_slice=4)
    large = [one for one in found if any("[]" not in shape for shape in one.shapes)]
    assert {one.kind for one in large} == {"all-reduce"}
    assert carried(found) == own_part(sliced)
    per_layer = [one for one in large if one.times == sliced.cfg.num_decoder_layers]
    assert sum(len(one.shapes) for one in per_layer) == 7 + 2  # kernels and norms of a layer


def own_part(made: Toy) -> int:
    """Bytes of one device's part of all gradients."""
    leaves = blueprint.leaves(made.plan.tree)
    return sum(4 * p.size // math.prod(made.layout.ways(dim) for dim in p.axes) for _, p in leaves)


def carried(found: list[Crossing]) -> int:
    """Bytes that cross in a step, less a few scalars."""
    scalars = sum(4 * one.times * sum("[]" in shape for shape in one.shapes) for one in found)
    assert scalars < 4 * 64
    return sum(one.nbytes * one.times for one in found) - scalars


def test_experts_and_their_tokens_stay_in_their_slice():
    """Tokens are exchanged within a slice; across slices go gradients, once, and each expert's share of the tokens,
    from which the balance loss of the whole batch is made."""
    made = toy({"expert": 2, "fsdp": 2}, **SLICED, **EXPERTS, load_balance_loss_weight=0.1)
    found = crossings(made.compiled_step.as_text(), per_slice=4)
    assert {one.kind for one in found} == {"all-reduce"}
    statistics = carried(found) - own_part(made)
    assert 0 < statistics <= 4 * 3 * made.cfg.num_experts * made.cfg.num_decoder_layers


def test_what_crosses_is_seen(sliced):
    """Parameters that are sharded across slices as well are gathered across them: the reader must see that."""
    whole = toy({"fsdp": 4}, num_slices=2, dcn_data_parallelism=1, dcn_fsdp_parallelism=2)
    kinds = {one.kind for one in crossings(whole.compiled_step.as_text(), per_slice=4)}
    assert "all-gather" in kinds
