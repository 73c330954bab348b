"""Chips have a source for every field; slice names mean what people mean by them, and others are refused."""

from __future__ import annotations

import pytest

from MaxText import catalogue, hardware
from MaxText.catalogue.slices import legal_shapes
from MaxText.errors import PlanError
from tests.helpers import toy_config

NAMES = ("v4", "v5e", "v5p", "v6e", "tpu7x", "tpu8t", "tpu8i", "h100", "h200", "b200", "mi300x")


def test_every_chip_is_there_with_a_source_per_field():
    assert set(NAMES) == set(catalogue.chips())
    for chip in catalogue.chips().values():
        assert {"peak_bfloat16", "memory", "memory_bandwidth", "link_bandwidth", "devices_per_chip"} <= set(
            chip.sources
        )
        assert all(chip.sources.values()), chip.name
        assert min(chip.peak("bfloat16"), chip.memory, chip.memory_bandwidth, chip.link_bandwidth, chip.links) > 0


def test_announced_chips_say_so():
    assert {chip.name for chip in catalogue.chips().values() if chip.announced} == {"tpu8t", "tpu8i"}


@pytest.mark.parametrize(
    ("name", "chips", "devices", "shape", "slices", "hosts"),
    [
        ("v5p-512", 256, 256, (4, 8, 8), 1, 64),
        ("v5p-8", 4, 4, (1, 2, 2), 1, 1),
        ("v4-128", 64, 64, (4, 4, 4), 1, 16),
        ("v6e-256", 256, 256, (16, 16), 1, 64),
        ("v6e-8", 8, 8, (2, 4), 1, 1),
        ("trillium-32", 32, 32, (4, 8), 1, 8),
        ("v5litepod-16", 16, 16, (4, 4), 1, 4),
        ("tpu7x-4x4x8", 128, 256, (4, 4, 8), 1, 32),
        ("ironwood-4x8x8", 256, 512, (4, 8, 8), 1, 64),
        ("tpu7x-128", 64, 128, (4, 4, 4), 1, 16),
        ("v5p-8x8x8", 512, 512, (8, 8, 8), 1, 128),
        ("2xv6e-256", 512, 512, (16, 16), 2, 128),
        ("h100-8", 8, 8, (8,), 1, 1),
        ("h100-64", 64, 64, (8,), 8, 8),
    ],
)
def test_names_mean_what_people_mean(name, chips, devices, shape, slices, hosts):
    found = catalogue.slice_of(name)
    assert (found.chips, found.devices, found.shape, found.slices, found.hosts) == (
        chips,
        devices,
        shape,
        slices,
        hosts,
    )
    assert catalogue.slice_of(found.name) == found


def test_num_slices_multiplies():
    assert catalogue.slice_of("v6e-256", 2) == catalogue.slice_of("2xv6e-256") == catalogue.slice_of("2xv6e-16x16", 2)
    made = hardware.named("v6e-256", 4)
    assert (made.devices, made.slices, made.memory_bytes) == (1024, 4, 34_400_000_000)


def test_a_device_of_two_a_chip_has_half_of_its_memory():
    assert hardware.named("tpu7x-4x4x4").memory_bytes == 103_000_000_000


@pytest.mark.parametrize(
    ("name", "wraps", "not_wraps"),
    [
        ("v6e-16x16", (16,), (8,)),
        ("v6e-8x16", (16,), (8,)),
        ("v5p-4x4x8", (4, 8), (2,)),
        ("v5p-2x4x4", (), (2, 4)),
        ("h100-8", (), (8,)),
    ],
)
def test_tori_wrap_by_the_rule(name, wraps, not_wraps):
    found = catalogue.slice_of(name)
    assert all(found.wraps(size) for size in wraps) and not any(found.wraps(size) for size in not_wraps)


@pytest.mark.parametrize(
    ("name", "id", "words"),
    [
        ("v5q-512", "plan.unknown-chip", ("v5q", "v5p")),
        ("gpus", "plan.unknown-chip", ("gpu",)),
        ("v5p", "plan.slice-size", ("v5p-128",)),
        ("v5p-500", "plan.slice-size", ("500", "v5p-512")),
        ("0xv6e-16", "plan.slices", ("0 slices",)),
        ("v6e-300", "plan.slice-size", ("300", "v6e-256")),
        ("h100-12", "plan.slice-size", ("12", "h100-8", "multiple of 8")),
        ("v6e-3x3", "plan.slice-shape", ("3x3", "v6e-2x4")),
        ("tpu7x-4x4x6", "plan.slice-shape", ("4x4x6", "multiples of 4", "tpu7x-4x4x8")),
        ("100000xv6e-256", "plan.slices", ("25,600,000", "up to 3,906 slices")),
        ("h100-1600000", "plan.slices", ("1,600,000", "125,000")),
        ("v6e-" + "9" * 5000, "plan.unknown-chip", ("v6e",)),
        ("", "plan.unknown-chip", ("hardware is empty", "v5p-512")),
        ("v6e-4x4x4", "plan.slice-shape", ("4x4x4",)),
        ("v5p-32x32x32", "plan.slice-shape", ("32x32x32", "8960")),
    ],
)
def test_what_no_slice_is_called_is_refused(name, id, words):
    with pytest.raises(PlanError) as caught:
        catalogue.slice_of(name)
    assert caught.value.id == id and caught.value.exit_code == 3
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_largest_run_that_could_be():
    assert catalogue.slice_of("3906xv6e-256").chips == 999_936
    with pytest.raises(PlanError) as caught:
        catalogue.slice_of("v6e-256", 3907)
    assert caught.value.id == "plan.slices"


def test_both_ways_to_say_how_many_slices_must_agree():
    with pytest.raises(PlanError) as caught:
        catalogue.slice_of("2xv6e-256", 4)
    assert caught.value.id == "plan.slices"


def test_legal_shapes_are_legal():
    for chip in catalogue.chips().values():
        for shape in legal_shapes(chip):
            assert catalogue.slice_of(f"{chip.name}-{'x'.join(map(str, shape))}").shape == shape


def test_real_devices_are_recognised():
    assert catalogue.of_devices("tpu", "TPU7x", 256, 1) == catalogue.slice_of("tpu7x-4x4x8")
    assert catalogue.of_devices("tpu", "TPU v6 lite", 512, 2) == catalogue.slice_of("2xv6e-256")
    assert catalogue.of_devices("gpu", "NVIDIA H200", 1, 1) == catalogue.slice_of("h200-1")
    assert catalogue.of_devices("cpu", "cpu", 4, 1) is None


def test_a_run_on_other_hardware_than_named_is_refused():
    with pytest.raises(PlanError) as caught:
        hardware.of(toy_config(hardware="v5p-512"))
    assert caught.value.id == "plan.other-hardware" and "plan_only=true" in str(caught.value)
    with pytest.raises(PlanError) as caught:
        hardware.of(toy_config(hardware="gpu"))
    assert caught.value.id == "plan.other-hardware" and "cpu here" in str(caught.value)


def test_the_speed_of_a_cpu_is_measured():
    made = hardware.with_rates(hardware.Hardware("cpu", "cpu", 2, 1, 1, None))
    assert made.slice is not None and made.slice.devices == 2
    assert made.slice.chip.peak("float32") > 1e9 and made.slice.chip.memory_bandwidth > 1e8
