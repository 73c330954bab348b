"""The one definition of the loss, for training and evaluation: sums over real target tokens, divided by one global
count.

The vocabulary is taken in chunks (`num_vocab_tiling`): a chunk's logits are used and dropped, and made again in the
backward pass, so that the [B, S, V] array never exists. The running maximum makes the log-sum-exp exact (Milakov &
Gimelshein, 2018, arXiv:1805.02867)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText import decoder, sequence
from MaxText.layers import dot_product
from MaxText.layers.router import Routing
from MaxText.layout import Axes, Layout, project

LOGITS: Axes = ("activation_batch", "activation_length", "activation_vocab")
TOKENS: Axes = ("activation_batch", "activation_length")
CHUNKED: Axes = ("embed", "vocab", None)


class TokenLoss(NamedTuple):
    """Per token, float32: -log p(target), and log Z (the log of the softmax's denominator)."""

    nll_BS: Float[Array, "B S"]
    log_z_BS: Float[Array, "B S"]


class LossSums(NamedTuple):
    """Sums over the real targets: of -log p, of (log Z)^2, and their number; of -log p for each further prediction. And
    from the layers: routing statistics by layer, and what the indexers have to learn, summed over tokens and layers."""

    nll: Float[Array, ""]
    log_z_squared: Float[Array, ""]
    weight: Float[Array, ""]
    further_nll: tuple[Float[Array, ""], ...]
    routing: dict[str, Routing]
    index_loss: Float[Array, ""] | float


def logits(cfg: Any, layout: Layout, params: Any, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
    """Whole logits in float32, capped as configured: for sampling and scoring."""
    kernel, dims, factor = decoder.output_kernel(cfg, params)
    return _finish(cfg, project(layout, "BSD,DV->BSV", x_BSD, kernel, dims, LOGITS), factor)


def _finish(cfg: Any, raw: Array, factor: float, chunk: Array | int = 0, chunks: int = 1) -> Array:
    """Capped float32 logits of the ids chunk, chunk + chunks, ...; those of the vocabulary's padding never win."""
    out = raw.astype(jnp.float32) * factor
    cap = cfg.final_logits_soft_cap
    out = cap * jnp.tanh(out / cap) if cap else out
    if out.shape[-1] * chunks == cfg.vocab_size:
        return out
    ids = jnp.arange(out.shape[-1]) * chunks + chunk
    return jnp.where((ids < cfg.vocab_size)[None, None], out, dot_product.MASKED)


def token_loss(
    cfg: Any, layout: Layout, params: Any, x_BSD: Float[Array, "B S D"], targets_BS: Int[Array, "B S"]
) -> TokenLoss:
    """-log p of each target. Chunk c holds the ids with id % chunks == c, so a split vocabulary stays split the same
    way."""
    kernel, dims, factor = decoder.output_kernel(cfg, params)
    chunks = cfg.num_vocab_tiling
    if chunks == 1:
        return _from_logits(
            _finish(cfg, project(layout, "BSD,DV->BSV", x_BSD, kernel, dims, LOGITS), factor), targets_BS
        )
    kernel_CDV = jnp.moveaxis(kernel.reshape(kernel.shape[0], -1, chunks), 2, 0)

    def one_chunk(carry: tuple[Array, Array, Array], chunk: tuple[Array, Array]):
        largest, total, at_target = carry
        kernel_DV, index = chunk
        z_BSV = _finish(cfg, project(layout, "BSD,DV->BSV", x_BSD, kernel_DV, dims, LOGITS), factor, index, chunks)
        new_largest = jnp.maximum(largest, jax.lax.stop_gradient(z_BSV.max(axis=-1)))
        total = total * jnp.exp(largest - new_largest) + jnp.exp(z_BSV - new_largest[..., None]).sum(axis=-1)
        own = jnp.where(targets_BS % chunks == index, targets_BS // chunks, -1)
        return (new_largest, total, at_target + _pick(z_BSV, own)), None

    zeros = jnp.zeros(targets_BS.shape, jnp.float32, out_sharding=layout.spec(TOKENS))
    start = (zeros - jnp.inf, zeros, zeros)
    (largest, total, at_target), _ = jax.lax.scan(jax.checkpoint(one_chunk), start, (kernel_CDV, jnp.arange(chunks)))
    log_z = largest + jnp.log(total)
    return TokenLoss(log_z - at_target, log_z)


def _pick(z_BSV: Array, ids_BS: Array) -> Array:
    """z at the id, zero for an id outside: a masked sum, which needs no communication but the sum over a split
    vocabulary."""
    hit = jnp.arange(z_BSV.shape[-1], dtype=ids_BS.dtype)[None, None, :] == ids_BS[..., None]
    return jnp.where(hit, z_BSV, 0.0).sum(axis=-1)


def _from_logits(z_BSV: Array, targets_BS: Array) -> TokenLoss:
    largest = jax.lax.stop_gradient(z_BSV.max(axis=-1))
    log_z = largest + jnp.log(jnp.exp(z_BSV - largest[..., None]).sum(axis=-1))
    return TokenLoss(log_z - _pick(z_BSV, targets_BS), log_z)


def sums(cfg: Any, layout: Layout, params: Any, batch: dict[str, Int[Array, "B S"]]) -> LossSums:
    """Forward pass and the sums over the batch's real targets."""
    out = decoder.run(cfg, layout, params, batch)
    per_token = token_loss(cfg, layout, params, out.hidden_BSD, batch["targets"])
    mask = batch["loss_mask"].astype(jnp.float32)
    further = [_further_nll(cfg, layout, params, x, batch, by) for by, x in enumerate(out.further_BSD, start=1)]
    return LossSums(
        (per_token.nll_BS * mask).sum(),
        (jnp.square(per_token.log_z_BS) * mask).sum(),
        mask.sum(),
        tuple(further),
        out.routing,
        out.index_loss,
    )


def _further_nll(cfg: Any, layout: Layout, params: Any, x_BSD: Array, batch: dict[str, Array], by: int) -> Array:
    targets = sequence.shift(cfg, layout, batch["targets"], by)
    nll_BS = token_loss(cfg, layout, params, x_BSD, targets).nll_BS
    return (nll_BS * further_mask(cfg, layout, batch, by)).sum()


def further_mask(
    cfg: Any, layout: Layout, batch: Mapping[str, Int[Array, "*batch S"]], by: int
) -> Float[Array, "*batch S"]:
    """1 where the target `by` places further on is real and of the same document."""
    document = batch["segments"]
    same = (sequence.shift(cfg, layout, document, by) == document) & (document != 0)
    return (same & (sequence.shift(cfg, layout, batch["loss_mask"], by) != 0)).astype(jnp.float32)
