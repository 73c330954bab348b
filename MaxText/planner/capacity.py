"""How many rows experts take: the capacity of one, and the buffer of a shard of them. Pure arithmetic.

With T tokens on each of P devices that share the experts, k experts a token and e = E/P experts a shard, a device can
send at most T min(k, e) rows to one shard, and a shard can get P times that. A balanced router sends it T k. With a
capacity of C choices a row, the first number is at most (rows) e min(C, tokens of a row) as well."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Those of one device: rows, tokens in its part of a row, tokens of a whole row."""

    rows: int
    length: int
    row_length: int


class Limits(NamedTuple):
    """Choices of one row that an expert takes; rows that a device sends to one shard of experts at most; rows of a
    shard's buffer; whether a row can have too many choices for an expert, and whether any choice can be dropped."""

    of_row: int
    pair: int
    buffer: int
    capped: bool
    can_drop: bool


def limits(cfg: Any, tokens: Tokens, shards: int, drop: bool = True) -> Limits:
    """The limits where `tokens` lie on each device that has a shard; without `drop` those of a pass that drops nothing.

    capacity_factor is over a row's even share for an expert, ragged_buffer_factor over a shard's even share of the rows
    that its peers send."""
    experts, k = cfg.num_experts // shards, cfg.num_experts_per_tok
    of_row = tokens.row_length
    if drop and cfg.capacity_factor > 0:
        even = tokens.row_length * k / cfg.num_experts
        of_row = min(of_row, max(1, math.ceil(even * cfg.capacity_factor)))
    pair = tokens.rows * min(tokens.length * min(k, experts), experts * min(of_row, tokens.length))
    buffer = shards * pair
    if drop and shards > 1 and cfg.ragged_buffer_factor > 0:
        buffer = min(buffer, math.ceil(tokens.rows * tokens.length * k * cfg.ragged_buffer_factor))
    capped = of_row < tokens.row_length
    return Limits(of_row, min(pair, buffer), buffer, capped, capped or buffer < shards * pair)
