"""Counting FLOPs of one training step, by the convention that MaxText's published figures use.

Per token, forward, in multiply-adds times two:
  weights    2 * (every matmul weight that the token passes: of experts the chosen and the shared ones; the output head
             counts, the input lookup does not)
  attention  scores and weighted sum are 2 * keys * heads * (key width + value width) a layer; a query sees on average
             S/2 keys in global layers, W - W^2/2S in windows of W < S, C/2 in chunks of C < S
A training step is three times that (one forward, two backward matmuls); rematerialised work is not counted.
"""

from __future__ import annotations

from typing import Any

from MaxText import architecture, blueprint
from MaxText.architecture import Latent, LayerSpec, Reach


def _latent_weights(cfg: Any, spec: LayerSpec, latent: Latent) -> int:
    d, n, r, c = cfg.emb_dim, spec.query_heads, latent.query_rank, latent.key_value_rank
    query = r * (d + n * spec.head_dim) if r else d * n * spec.head_dim
    key_value = d * (c + latent.rope_dim) + c * n * (latent.nope_dim + latent.value_dim)
    x, i = cfg.indexer_n_heads, cfg.indexer_head_dim
    index = r * x * i + d * (i + x) if latent.indexer else 0
    return query + key_value + n * latent.value_dim * d + index


def _attention_weights(cfg: Any, spec: LayerSpec) -> int:
    if spec.latent:
        return _latent_weights(cfg, spec, spec.latent)
    projected = 0 if spec.keys == "borrowed" else spec.kv_heads * (1 if spec.values_are_keys else 2)
    return cfg.emb_dim * spec.head_dim * (2 * spec.query_heads + projected)


def _feed_forward_weights(cfg: Any, spec: LayerSpec) -> int:
    matrices = len(cfg.mlp_activations) + 1
    dense = cfg.emb_dim * spec.mlp_dim * matrices
    if not spec.experts:
        return dense
    passed = cfg.num_experts_per_tok + (cfg.shared_experts if spec.ffn == "moe" else 0)
    experts = cfg.emb_dim * cfg.num_experts + passed * cfg.emb_dim * cfg.moe_mlp_dim * matrices
    return experts + (dense if spec.ffn == "parallel" else 0)


def _layer_weights(cfg: Any, spec: LayerSpec) -> int:
    own_input = 2 * cfg.emb_dim * cfg.hidden_size_per_layer_input
    return _attention_weights(cfg, spec) + _feed_forward_weights(cfg, spec) + own_input


def weights_per_token(cfg: Any) -> int:
    """Matmul weights that one token passes, further predictions included."""
    layers = sum(_layer_weights(cfg, spec) for spec in architecture.layers(cfg))
    head = cfg.emb_dim * cfg.vocab_size
    shared_input = cfg.emb_dim * cfg.hidden_size_per_layer_input * cfg.num_decoder_layers
    further = _layer_weights(cfg, architecture.further_prediction(cfg)) + 2 * cfg.emb_dim**2 + head
    return layers + shared_input + head + cfg.mtp_num_layers * further


def keys_seen(reach: Reach, length: int) -> float:
    """Keys that a query sees, averaged over a row without packing."""
    size = reach.size
    if reach.kind == "local_sliding" and size < length:
        return size - size**2 / (2 * length)
    return (min(size, length) if reach.kind == "chunk" else length) / 2


def _attention(cfg: Any, spec: LayerSpec) -> float:
    """FLOPs of scores and weighted sum of one token, forward; and of the indexer's scores."""
    width = spec.query_heads * (spec.head_dim + spec.value_dim)
    if not spec.latent or not spec.latent.indexer:
        return 2 * keys_seen(spec.reach, cfg.max_target_length) * width
    seen = keys_seen(Reach("local_sliding", cfg.indexer_topk), cfg.max_target_length)
    return 2 * seen * width + cfg.max_target_length * cfg.indexer_n_heads * cfg.indexer_head_dim


def per_token(cfg: Any) -> float:
    """FLOPs of training on one token at sequence length max_target_length."""
    specs = [*architecture.layers(cfg), *[architecture.further_prediction(cfg)] * cfg.mtp_num_layers]
    return 3.0 * (2 * weights_per_token(cfg) + sum(_attention(cfg, spec) for spec in specs))


def per_step_per_device(cfg: Any, tokens_per_step: int, devices: int) -> float:
    """FLOPs of one optimizer step on one device, padding slots included."""
    return per_token(cfg) * tokens_per_step / devices


def active_parameters(cfg: Any, tree: blueprint.Blueprint) -> int:
    """Parameters that one token passes: without tables that are only looked up
    and the router's correction biases, and of the experts only the chosen."""

    def active(path: str, param: blueprint.Param) -> int:
        looked_up = param.kind == "embedding" and not (path == "embedding" and cfg.logits_via_embedding)
        if looked_up or param.kind == "router":
            return 0
        return param.size * cfg.num_experts_per_tok // cfg.num_experts if "experts" in param.axes else param.size

    return sum(active(path, param) for path, param in blueprint.leaves(tree))
