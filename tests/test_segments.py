"""Layers folded into segments: unrolled they are the same list, patterns are found, and a kind of layer that does not
exist yet folds like the others."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText import architecture, config
from MaxText.architecture import LayerSpec, fold


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_unrolled_it_is_the_same_list(layers):
    assert [kind for repeats, pattern in fold(layers) for kind in pattern * repeats] == layers


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [
        ("llama2-7b", [(32, 1)]),
        ("gemma2-9b", [(21, 2)]),
        ("gemma3-4b", [(5, 6), (4, 1)]),
        ("gemma4-26b-a4b", [(5, 6)]),
        ("deepseek-v3-671b", [(3, 1), (58, 1)]),
        ("llama4-scout-17b-16e", [(12, 4)]),
        ("llama4-maverick-17b-128e", [(12, 4)]),
        ("gpt-oss-20b", [(12, 2)]),
    ],
)
def test_the_families_fold_into_their_patterns(model_name, expected):
    found = architecture.segments(config.make(model_name=model_name))
    assert [(segment.repeats, len(segment.pattern)) for segment in found] == expected
    first = [segment.first for segment in found]
    assert first == [sum(r * p for r, p in expected[:i]) for i in range(len(expected))]


def test_layers_that_lend_keys_stand_alone():
    """E2B: the last own layer of each kind lends, all later ones borrow and are wider."""
    segments = architecture.segments(config.make(model_name="gemma4-e2b"))
    lending = [segment for segment in segments for spec in segment.pattern if spec.keys == "lent"]
    assert [(segment.repeats, len(segment.pattern)) for segment in lending] == [(1, 1), (1, 1)]
    layers = architecture.layers(config.make(model_name="gemma4-e2b"))
    assert [i for i, spec in enumerate(layers) if spec.keys == "lent"] == [13, 14]
    assert {spec.mlp_dim for spec in layers[15:]} == {2 * 6144} and {spec.keys for spec in layers[15:]} == {"borrowed"}
    assert {spec.mlp_dim for spec in layers[:15]} == {6144}


@pytest.mark.parametrize("model_name", ["gemma4-31b", "gemma4-26b-a4b", "gemma4-e2b", "gemma4-e4b"])
def test_the_last_layer_of_gemma_4_is_global(model_name):
    assert architecture.layers(config.make(model_name=model_name))[-1].reach.kind == "global"


# --- mixers that are not there yet


@dataclasses.dataclass(frozen=True)
class Delta:
    """A gated delta rule, as far as its shape goes."""

    key_heads: int
    value_heads: int
    convolution: int


@dataclasses.dataclass(frozen=True)
class Mixed(LayerSpec):
    """A layer with one more field, as latent attention has `latent`."""

    mixer: Delta | int | None = None
    hashed: bool = False


def plain(model_name="llama2-7b"):
    spec = architecture.layers(config.make(model_name=model_name))[0]
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def test_three_delta_layers_and_an_attention_layer_are_one_pattern():
    """Qwen3-Next: 48 layers."""
    delta, attention = Mixed(**plain(), mixer=Delta(16, 32, 4)), Mixed(**plain())
    assert fold(([delta] * 3 + [attention]) * 12) == [(12, (delta, delta, delta, attention))]


def test_compression_that_differs_by_layer_folds():
    """DeepSeek-V4: ratios 0, 0, 4, 128, 4, 128, ..., the first three layers routed by hash."""
    ratios = [0, 0, 4, *[128, 4] * 20]
    layers = [Mixed(**plain(), mixer=ratio, hashed=i < 3) for i, ratio in enumerate(ratios)]
    folded = fold(layers)
    assert [(repeats, [(spec.mixer, spec.hashed) for spec in pattern]) for repeats, pattern in folded] == [
        (2, [(0, True)]),
        (1, [(4, True)]),
        (20, [(128, False), (4, False)]),
    ]
