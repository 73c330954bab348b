"""Generation: the cached forward pass is the uncached one, greedy text is the argmax, and any mesh writes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText import decoder, loss, tokenizer
from MaxText.generate import generate
from tests.helpers import LENGTH, MESHES, toy

BYTES = {"vocab_size": 288}
PROMPT, NEW = "It is", 12
IDS = np.random.default_rng(0).integers(0, 96, (2, LENGTH)).astype(np.int32)


def whole_logits(made, ids):
    """Logits [B, S, V] without a cache."""
    ones = np.ones_like(ids)
    batch = {"inputs": ids, "positions": np.broadcast_to(np.arange(ids.shape[1]), ids.shape), "segments": ones}

    def run(params, batch):
        return loss.logits(made.cfg, made.layout, params, decoder.forward(made.cfg, made.layout, params, batch))

    return np.asarray(made.run(run, made.params, batch))


@pytest.mark.parametrize("chunk", [1, 4], ids=["token by token", "four at a time"])
@pytest.mark.parametrize("model", [{}, {"scan_layers": False, "use_qk_norm": True, "logits_via_embedding": True}])
def test_cached_logits_equal_uncached_ones(chunk, model):
    made = toy(**model)

    def run(params, ids):
        cache, found = decoder.empty_cache(made.cfg, made.layout, 2, LENGTH), []

        def one(cache, slot):
            piece = jax.lax.dynamic_slice_in_dim(ids, slot, chunk, axis=1)
            x, cache = decoder.decode(made.cfg, made.layout, params, piece, slot, cache)
            return cache, loss.logits(made.cfg, made.layout, params, x)

        _, found = jax.lax.scan(one, cache, jnp.arange(0, LENGTH, chunk))
        return jnp.moveaxis(found, 0, 1).reshape(2, LENGTH, -1)

    np.testing.assert_allclose(made.run(run, made.params, IDS), whole_logits(made, IDS), rtol=1e-4, atol=1e-4)


def write(made, temperatures=(0.0, 1.0), seed=0, prompt=PROMPT):
    words = tokenizer.make(made.cfg)
    with jax.set_mesh(made.mesh):
        return generate(made.cfg, made.layout, made.params, words, prompt, NEW, temperatures, seed)


def test_greedy_text_is_the_argmax_at_each_position():
    made = toy(**BYTES)
    words = tokenizer.make(made.cfg)
    ids = [words.bos_id, *words.encode(PROMPT)]
    while len(ids) < len(PROMPT) + 1 + NEW:
        padded = np.zeros((1, len(PROMPT) + 1 + NEW), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(whole_logits(made, padded)[0, len(ids) - 1].argmax()))
    end = ids.index(words.eos_id, len(PROMPT) + 1) if words.eos_id in ids[len(PROMPT) + 1 :] else len(ids)
    plain = [i for i in ids[1:end] if i < words.vocab_size and i not in (words.bos_id, words.eos_id)]
    assert write(made)[0] == words.decode(plain)


def test_the_seed_decides_the_draw_and_nothing_else():
    made = toy(**BYTES)
    first, again, other = write(made), write(made), write(made, seed=1)
    assert first == again
    assert first[0] == other[0] and first[1] != other[1]
    assert all(text.startswith(PROMPT) for text in (*first, *other))


@pytest.mark.parametrize("mesh", [MESHES["fsdp8"], MESHES["data2-fsdp2-tensor2"], {"context": 4, "fsdp": 2}], ids=str)
def test_every_mesh_writes_the_same(mesh):
    assert write(toy(mesh, **BYTES))[0] == write(toy(**BYTES))[0]


def test_an_empty_prompt_begins_with_the_document():
    assert isinstance(write(toy(**BYTES), prompt="")[0], str)
