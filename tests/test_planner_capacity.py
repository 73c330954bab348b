"""Limits of experts by hand."""

from __future__ import annotations

import pytest

from MaxText.planner.capacity import Limits, Tokens, limits
from tests.helpers import toy_config

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "tokens", "shards", "expected"),
    [
        ({}, Tokens(2, 16, 16), 1, Limits(16, 64, 64, False, False)),
        ({}, Tokens(2, 16, 16), 4, Limits(16, 64, 256, False, False)),  # two experts a shard: both of a token's
        ({}, Tokens(2, 16, 16), 8, Limits(16, 32, 256, False, False)),  # one expert a shard: one of a token's
        ({"capacity_factor": 1.0}, Tokens(2, 16, 16), 4, Limits(4, 16, 64, True, True)),
        ({"capacity_factor": 1.0}, Tokens(2, 8, 16), 4, Limits(4, 16, 64, True, True)),  # half a row on each device
        ({"capacity_factor": 1.0}, Tokens(2, 2, 16), 4, Limits(4, 8, 32, True, True)),
        ({"ragged_buffer_factor": 1.25}, Tokens(2, 16, 16), 4, Limits(16, 64, 80, False, True)),
        ({"ragged_buffer_factor": 0.5}, Tokens(2, 16, 16), 4, Limits(16, 32, 32, False, True)),
        ({"ragged_buffer_factor": 9.0}, Tokens(2, 16, 16), 4, Limits(16, 64, 256, False, False)),
    ],
)
def test_limits_by_hand(changes, tokens, shards, expected):
    assert limits(toy_config(**EXPERTS, **changes), tokens, shards) == expected


def test_generation_drops_nothing():
    cfg = toy_config(**EXPERTS, capacity_factor=0.5, ragged_buffer_factor=0.5)
    assert not limits(cfg, Tokens(2, 16, 16), 4, drop=False).can_drop
