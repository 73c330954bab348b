"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), stretched in four ways; angles in float32."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from MaxText.architecture import Rope

Rotation = tuple[Float[Array, "B S H/2"], Float[Array, "B S H/2"]]


def frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each of the dim/2 pairs, float32; zero for pairs that stand still."""
    exponent = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    turn = 1.0 / (rope.min_timescale * (rope.theta / rope.min_timescale) ** exponent)
    if rope.turning >= 0:
        turn[rope.turning :] = 0.0
    match rope.scaling:
        case "linear":
            turn = turn / rope.factor
        case "llama3.1":
            turn = _by_wavelength(turn, rope)
        case "yarn":
            turn = _by_part(turn, rope)
    return turn.astype(np.float32)


def _by_wavelength(turn: np.ndarray, rope: Rope) -> np.ndarray:
    """Llama 3.1: frequencies with fewer than `low` turns in the original length are divided by the factor, those with
    more than `high` are kept, and between them the share of each grows linearly with the turns."""
    turns = rope.original_length * turn / (2 * math.pi)
    kept = np.clip((turns - rope.low) / max(rope.high - rope.low, 1e-9), 0.0, 1.0)
    return turn * (kept + (1.0 - kept) / rope.factor)


def _by_part(turn: np.ndarray, rope: Rope) -> np.ndarray:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): the share of stretched frequency grows linearly over the pairs, from
    the one with `beta_fast` turns in the original length to the one with `beta_slow`."""

    def pair_with(turns: float) -> float:
        return rope.dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    stretched = np.clip((np.arange(rope.dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return turn * (1.0 - stretched) + turn / rope.factor * stretched


def rotation(positions: Int[Array, "B S"], rope: Rope) -> Rotation:
    """(sin, cos) of every position and pair, times the amplitude."""
    angle_BSH = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies(rope))[None, None, :]
    sin, cos = jnp.sin(angle_BSH), jnp.cos(angle_BSH)
    return (sin, cos) if rope.amplitude == 1.0 else (sin * rope.amplitude, cos * rope.amplitude)


def rotate(x_BSNH: Float[Array, "B S N H"], rotation: Rotation, interleave: bool = False) -> Float[Array, "B S N H"]:
    """Each pair turned by its angle; the result has x's dtype. Channels beyond the rotation's pairs are left alone.

    Pairs are (i, i + half), or (2i, 2i + 1) with `interleave`.
    """
    sin, cos = (r[:, :, None, :] for r in rotation)
    dim = 2 * sin.shape[-1]
    x, rest = x_BSNH[..., :dim].astype(jnp.float32), x_BSNH[..., dim:]
    if interleave:
        first, second = x[..., 0::2], x[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
    else:
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x_BSNH.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
