"""The memory of a host: by hand, beside what a store really holds, and said where it is short."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from MaxText import catalogue, config, forecast, session
from MaxText.checkpoint import Store
from MaxText.cost import host
from MaxText.errors import PlanError
from tests.helpers import cpu, toy_config

KEYS = {"model_name": "llama3.1-8b", "hardware": "v5p-32", "max_target_length": 4096, "remat_policy": "full"}
TIER = {"enable_emergency_checkpoint": True, "local_checkpoint_period": 10, "checkpoint_period": 100}
ON_DISK, IN_MEMORY = {"local_checkpoint_directory": "/local"}, {"local_checkpoint_directory": "/dev/shm/checkpoints"}


def of(**keys) -> forecast.Forecast:
    return forecast.of_config(config.make(**({"dtype": "bfloat16", "scan_layers": True} | KEYS | keys)))


@pytest.mark.parametrize(
    ("keys", "saves", "local"),
    [
        ({}, 1, 0),
        ({"async_checkpointing": False}, 1, 0),
        (TIER | ON_DISK, 2, 0),
        (TIER | ON_DISK | {"async_checkpointing": False}, 1, 0),
        (TIER | IN_MEMORY, 2, 4),
        (TIER | IN_MEMORY | {"hardware": "v6e-8", "model_name": "llama3.2-1b"}, 2, 2),
    ],
)
def test_copies_of_a_host_by_hand(keys, saves, local):
    """In pieces over all devices, of which a host has four: two steps of its own and of its neighbour's pieces in
    memory; of one host (v6e-8) all there is, without a neighbour."""
    one = of(**keys)
    pieces = one.checkpoint_bytes if one.hardware.processes == 1 else 4 * one.plan.state_bytes
    assert one.host.saves == pytest.approx(saves * pieces, rel=1e-6)
    assert (one.host.arriving, one.host.local) == pytest.approx((pieces, local * pieces), rel=1e-6)
    assert one.host.offloaded == 0 and one.host.total == pytest.approx((saves + 1 + local) * pieces, rel=1e-6)


def test_without_checkpoints_nothing_is_held():
    one = of(enable_checkpointing=False)
    assert one.host.total == 0 and "nothing" in forecast.text(one).partition("memory of a host")[2][:60]


def test_copies_of_one_parameter_are_saved_once():
    """Every device of four holds all: what is saved is one of them."""
    one = of(hardware="v5p-8", ici_data_parallelism=4, ici_fsdp_parallelism=1, model_name="llama3.2-1b")
    assert one.host.saves == one.checkpoint_bytes < 1.01 * one.plan.state_bytes


def test_a_store_holds_what_the_plan_says(tmp_path):
    """An asynchronous one keeps its copy after the save; all but the counters of a few bytes."""
    made = session.prepare(toy_config({"fsdp": 8}, base_output_directory=str(tmp_path), vocab_size=288))
    with jax.set_mesh(made.mesh), Store(tmp_path / "checkpoints", asynchronous=True) as store:
        store.save(1, made.fresh_state(), {})
        store.wait()
        held = sum(array.nbytes for array in store._buffers.values())
    assert held == pytest.approx(made.forecast.host.saves, abs=16) and held > 1 << 16


def test_a_host_that_is_too_small_is_told_with_its_cures():
    said = of(**TIER, **IN_MEMORY, model_name="llama3.1-70b", hardware="v5p-64").warnings
    (short,) = [line for line in said if line.startswith("a host needs")]
    assert "async_checkpointing=false" in short and "local_checkpoint_directory" in short and "offload" not in short
    assert any("/dev/shm" in line and "half" in line for line in said)
    assert not any("a host needs" in line or "/dev/shm" in line for line in of(**TIER, **IN_MEMORY).warnings)


def test_a_host_of_unknown_memory_has_bytes_and_no_verdict():
    one = of(hardware="v5e-64")
    told = forecast.as_dict(one)["host_memory_bytes_per_host"]
    assert told["capacity"] is None and told["total"] == round(one.host.total) > 0
    assert "not published" in forecast.text(one) and one.host.has_room


def test_a_part_of_a_host_has_a_part_of_its_memory():
    """v5p: 448 GB beside four chips; v6e-8: one host with twice what a host of four has. A CPU has what it has."""
    assert of().host.capacity == catalogue.chip("v5p").host_memory
    assert of(hardware="v6e-8").host.capacity == 2 * catalogue.chip("v6e").host_memory
    made = forecast.make(toy_config({"fsdp": 2}), cpu(2))
    whole = dataclasses.replace(made.hardware, processes=2)
    assert host.forecast(made.cfg, made.plan, whole, made.memory).capacity == pytest.approx(made.host.capacity / 2)


def test_an_automatic_choice_counts_saves_beside_what_it_offloads():
    """A mesh of which the host has no room for offloaded activations beside copies of the state is not lost for it."""
    keys = {"model_name": "llama3.1-70b", "hardware": "v5p-64", "auto_plan": True, "global_batch_size": 64}
    keys |= {"max_target_length": 8192, "remat_policy": config.Config.model_fields["remat_policy"].default}
    short = of(**keys, **TIER, **IN_MEMORY)
    assert short.fits and short.host.offloaded == 0 and not short.host.has_room
    fixed = {"remat_policy": "custom", "decoder_layer_input": "offload"}
    with pytest.raises(PlanError) as caught:
        of(**(keys | fixed), **TIER, **IN_MEMORY)
    assert caught.value.id == "plan.memory" and "memory of a host" in str(caught.value)
