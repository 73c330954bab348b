"""Text from a model: token by token over a KV cache, greedy and sampled side by side in one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from MaxText import decoder, loss
from MaxText.layout import Layout


def _choose(logits_BV: Array, temperature_B: Array, key: Array) -> Int[Array, " B"]:
    """The likeliest token where the temperature is 0, else a draw from softmax(logits / temperature)."""
    greedy = jnp.argmax(logits_BV, axis=-1)
    divisor = jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    drawn = jax.random.categorical(key, logits_BV / divisor, axis=-1)
    return jnp.where(temperature_B > 0, drawn, greedy).astype(jnp.int32)


def make_sampler(cfg: Any, layout: Layout, length: int) -> Callable[..., Int[Array, "B T"]]:
    """A function (params, prompt [B, length], prompt_length, temperature [B], key) -> ids [B, length].

    Slots before prompt_length hold the prompt; the rest are filled in. One token a step through the same cached forward
    pass, so a prompt of any length is one program."""

    def sample(
        params: Any, prompt_BT: Array, prompt_length: Array, temperature_B: Array, key: Array
    ) -> Int[Array, "B T"]:
        batch = prompt_BT.shape[0]

        def one(carry: tuple[Array, Any], slot: Array):
            ids_BT, cache = carry
            ids_B1 = jax.lax.dynamic_slice_in_dim(ids_BT, slot, 1, axis=1)
            hidden, cache = decoder.decode(cfg, layout, params, ids_B1, slot, cache)
            scores = loss.logits(cfg, layout, params, hidden)[:, 0, :]
            chosen = _choose(scores, temperature_B, jax.random.fold_in(key, slot))
            given = jax.lax.dynamic_slice_in_dim(ids_BT, slot + 1, 1, axis=1)[:, 0]
            following = jnp.where(slot + 1 < prompt_length, given, chosen)
            return (jax.lax.dynamic_update_slice_in_dim(ids_BT, following[:, None], slot + 1, axis=1), cache), None

        start = (prompt_BT, decoder.empty_cache(cfg, layout, batch, length))
        (ids_BT, _), _ = jax.lax.scan(one, start, jnp.arange(length - 1))
        return ids_BT

    return jax.jit(sample)


def generate(
    cfg: Any,
    layout: Layout,
    params: Any,
    tokenizer: Any,
    prompt: str,
    new_tokens: int,
    temperatures: tuple[float, ...],
    seed: int = 0,
) -> list[str]:
    """One text (prompt and continuation) for each temperature; 0 is greedy. Stops at the end-of-document id.

    Run under the mesh of `params`; every device computes the same few rows.
    """
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None and cfg.add_bos:
        ids = np.concatenate([[tokenizer.bos_id], ids])
    first = len(ids)
    slots = np.zeros((len(temperatures), first + new_tokens), np.int32)
    slots[:, :first] = ids
    sampler = make_sampler(cfg, layout.unsplit("activation_batch", "activation_length"), slots.shape[1])
    whole = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    arguments = (slots, np.int32(first), np.asarray(temperatures, np.float32), jax.random.key(seed))
    out = np.asarray(sampler(params, *(jax.device_put(x, whole) for x in arguments)))
    return [_text(tokenizer, row, first) for row in out]


def _text(tokenizer: Any, row: np.ndarray, first: int) -> str:
    ends = np.flatnonzero(row[first:] == tokenizer.eos_id) if tokenizer.eos_id is not None else np.empty(0, int)
    row = row[: first + int(ends[0])] if len(ends) else row
    return tokenizer.decode(
        [int(i) for i in row if i < tokenizer.vocab_size and i not in (tokenizer.bos_id, tokenizer.eos_id)]
    )
