"""The decoder: causal by its gradients, packed rows equal separate ones, and one result for every way to run it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText import decoder, loss, remat
from tests.helpers import LENGTH, TOY, toy, toy_batch, toy_config


def nll(made, batch):
    """-log p of each target [B, S]."""

    def run(params, batch):
        x = decoder.forward(made.cfg, made.layout, params, batch)
        return loss.token_loss(made.cfg, made.layout, params, x, batch["targets"]).nll_BS

    return np.asarray(made.run(run, made.params, batch))


def one_document(ids) -> dict[str, np.ndarray]:
    """A row that holds one document of these ids, padded to the toy's length."""
    count = len(ids) - 1
    row = {key: np.zeros((1, LENGTH), np.int32) for key in ("inputs", "targets", "positions", "segments", "loss_mask")}
    row["inputs"][0, :count], row["targets"][0, :count] = ids[:-1], ids[1:]
    row["positions"][0, :count], row["segments"][0, :count], row["loss_mask"][0, :count] = np.arange(count), 1, 1
    return row


@pytest.mark.parametrize("model", [{}, {"use_qk_norm": True, "attn_logits_soft_cap": 2.0}], ids=["plain", "qk-norm"])
def test_no_loss_feels_a_later_token(model):
    """d loss(t) / d embedding of the input at s is zero for s > t, and not for s <= t; same documents only."""
    made = toy(vocab_size=LENGTH, **model)  # the input at s is id s, so row s of the table is felt at s alone
    ids = np.arange(LENGTH, dtype=np.int32)[None]
    segments = np.where(ids < 6, 1, 2).astype(np.int32)
    batch = {
        "inputs": ids,
        "targets": (ids * 5 + 3) % LENGTH,
        "positions": np.where(segments == 1, ids, ids - 6).astype(np.int32),
        "segments": segments,
    }

    def per_token(table, params):
        params = params | {"embedding": table}
        x = decoder.forward(made.cfg, made.layout, params, batch)
        return loss.token_loss(made.cfg, made.layout, params, x, batch["targets"]).nll_BS[0]

    felt = made.run(jax.jacrev(per_token), made.params["embedding"], made.params)
    felt = np.abs(np.asarray(felt)).sum(-1) > 0
    at = np.arange(LENGTH)
    wanted = (at[:, None] >= at[None, :]) & (segments[0][:, None] == segments[0][None, :])
    np.testing.assert_array_equal(felt, wanted)


def test_packed_documents_lose_what_they_lose_alone():
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, TOY["vocab_size"], size).astype(np.int32) for size in (5, 8, 4)]
    packed = {key: np.zeros((1, LENGTH), np.int32) for key in one_document([0, 1])}
    at, slices = 0, []
    for number, document in enumerate(documents, start=1):
        count = len(document) - 1
        where = slice(at, at + count)
        for key, values in one_document(document).items():
            packed[key][0, where] = number if key == "segments" else values[0, :count]
        slices.append(where)
        at += count
    made = toy()
    together = nll(made, packed)
    for document, where in zip(documents, slices, strict=True):
        alone = nll(made, one_document(document))
        np.testing.assert_allclose(together[0, where], alone[0, : len(document) - 1], rtol=1e-5, atol=1e-5)


def test_what_padding_holds_is_not_felt():
    made, batch = toy(), one_document(np.arange(9))
    noise = {key: np.where(batch["segments"] == 0, 3, value).astype(np.int32) for key, value in batch.items()}
    noise |= {"segments": batch["segments"], "loss_mask": batch["loss_mask"]}
    np.testing.assert_array_equal(nll(made, batch)[0, :8], nll(made, noise)[0, :8])


def test_scanned_equals_unrolled_per_token():
    batch = toy_batch(rows=2)
    scanned, unrolled = (nll(toy(scan_layers=scan, base_num_decoder_layers=3), batch) for scan in (True, False))
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-5)


def test_layers_run_in_order():
    """With the layers' parameters swapped the result is another one."""
    made, batch = toy(), toy_batch(rows=2)
    swapped = made.params | {"decoder": jax.tree.map(lambda p: p[::-1], made.params["decoder"])}
    run = lambda p: decoder.forward(made.cfg, made.layout, p, batch)  # noqa: E731
    assert not np.allclose(made.run(run, made.params), made.run(run, swapped), atol=1e-3)


KEPT = {
    "full": ("decoder_layer_input",),
    "save_qkv_proj": ("decoder_layer_input", "query_proj", "key_proj", "value_proj"),
    "save_out_proj": ("decoder_layer_input", "out_proj"),
    "save_dot_except_mlp": ("decoder_layer_input", "query_proj", "key_proj", "value_proj", "out_proj"),
}


@pytest.mark.parametrize("policy", KEPT)
def test_a_policy_says_what_is_kept(policy):
    latent = {"query_wa_proj", "kv_wa_proj", "kv_proj"}
    found = remat.places(toy_config(remat_policy=policy))
    assert {name for name, place in found.items() if place == "device"} - latent == {*KEPT[policy]}


@pytest.mark.parametrize("policy", ["none", "minimal", "full"])
def test_what_a_policy_keeps_for_the_backward_pass(policy):
    """Residuals of the loss: the less is kept, the fewer floats a layer leaves behind."""
    made, batch = toy(remat_policy=policy, scan_layers=True), toy_batch(rows=2)
    with jax.set_mesh(made.mesh):
        saved = jax.eval_shape(
            lambda p: jax.vjp(lambda p: loss.sums(made.cfg, made.layout, p, batch).nll, p)[1], made.params
        )
    layers = made.cfg.num_decoder_layers
    per_layer = sum(leaf.size // layers for leaf in jax.tree.leaves(saved) if leaf.shape[:3] == (layers, 2, LENGTH))
    cfg, tokens = made.cfg, 2 * LENGTH
    heads = cfg.head_dim * (cfg.num_query_heads + 2 * cfg.num_kv_heads)
    # The layer's input; minimal keeps every projection as well but the last, whose result is not needed again.
    least, minimal = cfg.emb_dim, cfg.emb_dim + heads + cfg.emb_dim + 2 * cfg.mlp_dim
    if policy == "none":
        assert per_layer > tokens * minimal
    else:
        assert per_layer == tokens * {"full": least, "minimal": minimal}[policy]


def test_rank_promotion_raises_in_every_test():
    assert jax.config.jax_numpy_rank_promotion == "raise"
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_stream_has_the_configured_dtype(dtype):
    made = toy(dtype=dtype)
    with jax.set_mesh(made.mesh):
        x = jax.eval_shape(lambda p: decoder.forward(made.cfg, made.layout, p, toy_batch()), made.params)
    assert x.dtype == dtype and x.shape == (16, LENGTH, 32)
