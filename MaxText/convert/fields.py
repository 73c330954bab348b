"""Keys of a config.json ↔ our keys, one by one. `families` says which of them a family has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from MaxText.convert.refusal import Refusal

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "relu": "relu"}
_WRITTEN = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}


def _gate(theirs: Any) -> list[str]:
    if theirs not in ACTIVATIONS:
        raise Refusal("hidden_act", f"{theirs} is not known here; known: {', '.join(ACTIVATIONS)}")
    return [ACTIVATIONS[theirs], "linear"]


def _activation(ours: Any) -> str | None:
    """None: no name on the other side."""
    return _WRITTEN.get(ours[0]) if len(ours) == 2 and ours[1] == "linear" else None


Law = tuple[Callable[[Any], Any], Callable[[Any], Any]]
SAME: Law = (lambda x: x, lambda x: x)
OR_NULL: Law = (lambda x: x or 0, lambda x: x or None)  # null there, 0 here: without
OR_ONE: Law = (lambda x: -1 if x in (None, 1) else x, lambda x: 1 if x == -1 else x)  # one group is none
GATE: Law = (_gate, _activation)
FLOAT: Law = (float, float)
ALONE: Law = (lambda x: _gate(x)[:1], lambda x: _WRITTEN.get(x[0]) if len(x) == 1 else None)


@dataclass(frozen=True)
class Field:
    """`theirs` (or one of `others`, which is read and not written) ↔ every key of `ours`."""

    theirs: str
    ours: tuple[str, ...]
    law: Law = SAME
    others: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any], default: Any) -> Any:
        """Their value by our law; `default` where the key is absent (a Refusal if that is MISSING)."""
        given = [config[name] for name in (self.theirs, *self.others) if config.get(name) is not None]
        nulls = [name for name in (self.theirs, *self.others) if name in config]
        value = given[0] if given else None if nulls and default is MISSING else default
        if value is MISSING:
            raise Refusal(self.theirs, "is missing")
        return self.law[0](value)

    def write(self, cfg: Any) -> Any:
        """Our value by their law."""
        return self.law[1](getattr(cfg, self.ours[0].removeprefix("base_")))  # sizes after scaling


MISSING = object()


def field(theirs: str, *ours: str, law: Law = SAME, others: tuple[str, ...] = ()) -> Field:
    return Field(theirs, ours or (theirs,), law, others)


FIELDS = {
    known.theirs: known
    for known in (
        field("vocab_size"),
        field("hidden_size", "base_emb_dim"),
        field("num_hidden_layers", "base_num_decoder_layers"),
        field("num_attention_heads", "base_num_query_heads"),
        field("num_key_value_heads", "base_num_kv_heads"),
        field("head_dim"),
        field("intermediate_size", "base_mlp_dim"),
        field("rms_norm_eps", "normalization_layer_epsilon", law=FLOAT),
        field("tie_word_embeddings", "logits_via_embedding"),
        field("hidden_act", "mlp_activations", law=GATE, others=("hidden_activation",)),
        field("hidden_activation", "mlp_activations", law=GATE, others=("hidden_act",)),
        field("attention_bias", "attention_bias", "attention_out_bias"),
        field("mlp_bias"),
        field("attn_logit_softcapping", "attn_logits_soft_cap", law=OR_NULL),
        field("final_logit_softcapping", "final_logits_soft_cap", law=OR_NULL),
        field("num_local_experts", "num_experts"),
        field("num_experts", law=SAME, others=("num_local_experts",)),
        field("n_routed_experts", "num_experts", others=("num_local_experts", "num_experts")),
        field("num_experts_per_tok"),
        field("moe_intermediate_size", "base_moe_mlp_dim"),
        field("n_shared_experts", "shared_experts", law=OR_NULL),
        field("first_k_dense_replace", "first_num_dense_layers"),
        field("decoder_sparse_step", "interleave_moe_layer_step"),
        field("norm_topk_prob"),
        field("routed_scaling_factor", law=FLOAT),
        field("n_group", "n_routing_groups", law=OR_ONE),
        field("topk_group", "topk_routing_group", law=OR_ONE),
        field("q_lora_rank", law=OR_NULL),
        field("kv_lora_rank"),
        field("qk_nope_head_dim"),
        field("qk_rope_head_dim"),
        field("v_head_dim"),
        field("rope_interleave"),
        field("swiglu_limit", "mlp_activations_limit", law=FLOAT),
        field("swiglu_alpha", law=FLOAT),
        field("index_n_heads", "indexer_n_heads"),
        field("index_head_dim", "indexer_head_dim"),
        field("index_topk", "indexer_topk"),
        field("hidden_size_per_layer_input"),
        field("num_kv_shared_layers"),
        field("use_double_wide_mlp"),
        field("attention_k_eq_v", "share_kv_projections"),
        field("use_qk_norm"),
        field("attn_temperature_tuning", "temperature_tuning"),
        field("attn_scale", "temperature_tuning_scale", law=FLOAT),
        field("floor_scale", "temperature_tuning_length", law=(int, int)),
        field("n_embd", "base_emb_dim"),
        field("n_layer", "base_num_decoder_layers"),
        field("n_head", "base_num_query_heads", "base_num_kv_heads"),
        field("n_positions", "trainable_position_size"),
        field("layer_norm_epsilon", "normalization_layer_epsilon", law=FLOAT),
        field("activation_function", "mlp_activations", law=ALONE),
    )
}
