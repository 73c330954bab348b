"""Dropout (Srivastava et al., 2014) of the embedding and of what each sublayer adds to the stream, as in Vaswani et
al., 2017, arXiv:1706.03762, section 5.4.

What is dropped is a pure function of (seed, step, place of the token in the global batch, layer, sublayer): each token
has a key of its own, which travels with it. So it does not depend on the mesh, on microbatches, on the order of the
tokens of a split row, or on how often a run was resumed; there is no state to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from MaxText import sequence
from MaxText.layout import Axes, Layout

KEYS = ("noise_high", "noise_low")
"""Entries of a batch, uint32 [A, B, S]: the two halves of each token's key. Without them nothing is dropped."""

STREAM: Axes = ("activation_batch", "activation_length", "activation_embed")
ATTENTION, FEED_FORWARD, SUBLAYERS = 0, 1, 2
EMBEDDING = 0xFFFFFFFF
_STREAM_OF_SEEDS = 0xD209  # other random numbers than those of the initial weights, from the same seed


class Noise(NamedTuple):
    """The keys of a call's tokens, and the number of the layer that is at work."""

    high_BS: UInt32[Array, "B S"]
    low_BS: UInt32[Array, "B S"]
    layer: Int[Array, ""] | int = 0

    def of_layer(self, layer: Int[Array, ""] | int) -> Noise:
        """The same for layer number `layer`, counted over the whole model."""
        return self._replace(layer=layer)


def with_keys(cfg: Any, layout: Layout, batch: Mapping[str, Array], step: Int[Array, ""]) -> dict[str, Array]:
    """The batch [A, B, S] of a training step and its tokens' keys, if the configuration drops anything."""
    if not cfg.dropout_rate:
        return dict(batch)
    like = batch["inputs"]
    microbatches, rows, length = like.shape
    spec = jax.typeof(like).sharding.spec
    row = jnp.arange(microbatches * rows, dtype=jnp.uint32).reshape(microbatches, rows, 1)
    place = jnp.asarray(sequence.permutation(sequence.order(cfg, layout), length), jnp.uint32)
    number = jnp.broadcast_to(row * jnp.uint32(length), like.shape, out_sharding=spec) + jnp.broadcast_to(
        place, like.shape, out_sharding=spec
    )
    of_seed = jax.random.fold_in(jax.random.key(cfg.init_weights_seed), _STREAM_OF_SEEDS)
    of_step = jax.random.fold_in(of_seed, step)
    of_token = jax.vmap(jax.vmap(jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(of_step, n)))))(number)
    return {**batch, KEYS[0]: of_token[..., 0], KEYS[1]: of_token[..., 1]}


def noise(rows: Mapping[str, Array]) -> Noise | None:
    """Of rows [B, S] that have keys; None for others."""
    return Noise(*(rows[name] for name in KEYS)) if KEYS[0] in rows else None


def dropout(
    cfg: Any, layout: Layout, noise: Noise | None, x_BSD: Float[Array, "B S D"], sublayer: int
) -> Float[Array, "B S D"]:
    """x with each element zero at probability dropout_rate, and the others larger for it; x itself without noise."""
    if noise is None:
        return x_BSD
    number = sublayer if sublayer == EMBEDDING else jnp.asarray(noise.layer, jnp.uint32) * SUBLAYERS + sublayer

    def kept(high: Array, low: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(jnp.stack([high, low])), number)
        return jax.random.bernoulli(key, 1 - cfg.dropout_rate, x_BSD.shape[-1:])

    kept_BSD = layout.constrain(jax.vmap(jax.vmap(kept))(noise.high_BS, noise.low_BS), *STREAM)
    x_BSD = layout.constrain(x_BSD, *STREAM)
    return jnp.where(kept_BSD, x_BSD / jnp.asarray(1 - cfg.dropout_rate, x_BSD.dtype), jnp.zeros_like(x_BSD))
