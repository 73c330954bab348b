"""Counting FLOPs of one training step, by the convention that MaxText's published figures use.

Per token, forward, in multiply-adds times two:
  weights    2 * (every matmul weight that the token passes; the output head counts, the input lookup does not)
  attention  2 * S * heads * head_dim a layer: scores and weighted sum are 4 * S * heads * head_dim, and causality
             halves them
A training step is three times that (one forward, two backward matmuls); rematerialised work is not counted.
"""

from __future__ import annotations

from typing import Any


def weights_per_token(cfg: Any) -> int:
    """Matmul weights that one token passes: attention projections, feed-forward, output head."""
    attention = cfg.emb_dim * cfg.head_dim * (2 * cfg.num_query_heads + 2 * cfg.num_kv_heads)
    mlp = cfg.emb_dim * cfg.mlp_dim * (len(cfg.mlp_activations) + 1)
    return cfg.num_decoder_layers * (attention + mlp) + cfg.emb_dim * cfg.vocab_size


def per_token(cfg: Any) -> float:
    """FLOPs of training on one token at sequence length max_target_length."""
    attention = cfg.num_decoder_layers * 2 * cfg.max_target_length * cfg.num_query_heads * cfg.head_dim
    return 3.0 * (2 * weights_per_token(cfg) + attention)


def per_step_per_device(cfg: Any, tokens_per_step: int, devices: int) -> float:
    """FLOPs of one optimizer step on one device, padding slots included."""
    return per_token(cfg) * tokens_per_step / devices
