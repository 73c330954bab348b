"""Names on the other side ↔ our paths: a row for each kind of parameter.

`{i}` is the number of a layer, `{e}` that of an expert. A row counts where all of its paths are in the model (of a row
with `{i}`: in that layer), so one list serves a family with and without biases, experts or norms. Several paths are the
arrays that one tensor holds, stacked as `p`. `rearrange` explains the patterns."""

from __future__ import annotations

from dataclasses import dataclass

from MaxText.convert.rearrange import Pattern


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    theirs: str
    ours: tuple[str, ...]
    pattern: Pattern

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.theirs

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.theirs


def table(prefix: str, *lines: str) -> tuple[Row, ...]:
    """Rows from lines "THEIRS | OURS[, OURS ...] | PATTERN"; `prefix` goes before every name of theirs."""
    rows = []
    for line in lines:
        theirs, ours, pattern = (part.strip() for part in line.split("|"))
        paths = tuple(path.strip() for path in ours.split(","))
        rows.append(Row(prefix + theirs, paths, Pattern(pattern)))
    return tuple(rows)


LAYER = "model.layers.{i}."

MODEL = table(
    "",
    "model.embed_tokens.weight | embedding | v d -> v d",
    "model.norm.weight | final_norm | d -> d",
    "lm_head.weight | logits | d v -> v d",
)
ATTENTION = table(
    LAYER + "self_attn.",
    "q_proj.weight | attention/query | d n h -> (n h) d",
    "k_proj.weight | attention/key | d k h -> (k h) d",
    "v_proj.weight | attention/value | d k h -> (k h) d",
    "o_proj.weight | attention/out | n h d -> d (n h)",
    "q_proj.bias | attention/query_bias | n h -> (n h)",
    "k_proj.bias | attention/key_bias | k h -> (k h)",
    "v_proj.bias | attention/value_bias | k h -> (k h)",
    "o_proj.bias | attention/out_bias | d -> d",
    "q_norm.weight | attention/query_norm | h -> h",
    "k_norm.weight | attention/key_norm | h -> h",
    "q_norm.weight | attention/query_norm | n h -> (n h)",
    "k_norm.weight | attention/key_norm | k h -> (k h)",
    "sinks | attention/sink | n -> n",
)
LATENT = table(
    LAYER + "self_attn.",
    "q_a_proj.weight | attention/query_a | d r -> r d",
    "q_a_layernorm.weight | attention/query_a_norm | r -> r",
    "q_b_proj.weight | attention/query_b | r n h -> (n h) r",
    "kv_a_proj_with_mqa.weight | attention/kv_a | d c -> c d",
    "kv_a_layernorm.weight | attention/kv_a_norm | c -> c",
    "kv_b_proj.weight | attention/kv_b | c n h -> (n h) c",
)
INDEXER = table(
    LAYER + "self_attn.indexer.",
    "wq_b.weight | attention/indexer/query | r x i -> (x i) r",
    "wk.weight | attention/indexer/key | d i -> i d",
    "k_norm.weight | attention/indexer/key_norm/scale | i -> i",
    "k_norm.bias | attention/indexer/key_norm/bias | i -> i",
    "weights_proj.weight | attention/indexer/weight | d x -> x d",
)


def mlp(name: str, path: str) -> tuple[Row, ...]:
    """A gated feed-forward."""
    return table(
        LAYER + name,
        f".gate_proj.weight | {path}/wi_0 | d f -> f d",
        f".up_proj.weight | {path}/wi_1 | d f -> f d",
        f".down_proj.weight | {path}/wo | f d -> d f",
    )


MLP = mlp("mlp", "mlp")
PRE_NORMS = table(
    LAYER,
    "input_layernorm.weight | attention_norm | d -> d",
    "post_attention_layernorm.weight | mlp_norm | d -> d",
)
POST_NORMS = table(
    LAYER,
    "post_attention_layernorm.weight | attention_post_norm | d -> d",
    "post_feedforward_layernorm.weight | mlp_post_norm | d -> d",
)
FOUR_NORMS = POST_NORMS + table(
    LAYER,
    "input_layernorm.weight | attention_norm | d -> d",
    "pre_feedforward_layernorm.weight | mlp_norm | d -> d",
)
EXPERTS_APART = table(
    LAYER + "mlp.",
    "gate.weight | moe/router/kernel | d e -> e d",
    "gate.e_score_correction_bias | moe/router/correction_bias | e -> e",
    "experts.{e}.gate_proj.weight | moe/wi_0 | d f -> f d",
    "experts.{e}.up_proj.weight | moe/wi_1 | d f -> f d",
    "experts.{e}.down_proj.weight | moe/wo | f d -> d f",
)
SHARED_EXPERTS = mlp("mlp.shared_experts", "moe/shared")
EXPERTS_MIXTRAL = table(
    LAYER + "block_sparse_moe.",
    "gate.weight | moe/router/kernel | d e -> e d",
    "experts.{e}.w1.weight | moe/wi_0 | d f -> f d",
    "experts.{e}.w3.weight | moe/wi_1 | d f -> f d",
    "experts.{e}.w2.weight | moe/wo | f d -> d f",
)
EXPERTS_GPT_OSS = table(
    LAYER + "mlp.",
    "router.weight | moe/router/kernel | d e -> e d",
    "router.bias | moe/router/bias | e -> e",
    "experts.gate_up_proj | moe/wi_0, moe/wi_1 | p e d f -> e d (f p)",
    "experts.gate_up_proj_bias | moe/wi_0_bias, moe/wi_1_bias | p e f -> e (f p)",
    "experts.down_proj | moe/wo | e f d -> e f d",
    "experts.down_proj_bias | moe/wo_bias | e d -> e d",
)
# As transformers 5 holds most mixtures in memory, and saves those that were born so.
EXPERTS_FUSED = table(
    LAYER + "mlp.",
    "gate.weight | moe/router/kernel | d e -> e d",
    "gate.e_score_correction_bias | moe/router/correction_bias | e -> e",
    "experts.gate_up_proj | moe/wi_0, moe/wi_1 | p e d f -> e (p f) d",
    "experts.down_proj | moe/wo | e f d -> e d f",
)
LLAMA4 = (
    mlp("feed_forward", "mlp")
    + mlp("feed_forward.shared_expert", "moe/shared")
    + table(
        LAYER + "feed_forward.",
        "router.weight | moe/router/kernel | d e -> e d",
        "experts.gate_up_proj | moe/wi_0, moe/wi_1 | p e d f -> e d (p f)",
        "experts.down_proj | moe/wo | e f d -> e f d",
    )
)
GEMMA4 = table(
    LAYER,
    "layer_scalar | output_scale | -> 1",
    "router.proj.weight | moe/router/kernel | d e -> e d",
    "router.scale | moe/router/input_scale | d -> d",
    "router.per_expert_scale | moe/router/expert_scale | e -> e",
    "experts.gate_up_proj | moe/wi_0, moe/wi_1 | p e d f -> e (p f) d",
    "experts.down_proj | moe/wo | e f d -> e d f",
    "pre_feedforward_layernorm_2.weight | moe_norm | d -> d",
    "post_feedforward_layernorm_1.weight | dense_post_norm | d -> d",
    "post_feedforward_layernorm_2.weight | moe_post_norm | d -> d",
    "per_layer_input_gate.weight | layer_input/gate | d p -> p d",
    "per_layer_projection.weight | layer_input/projection | p d -> d p",
    "post_per_layer_input_norm.weight | layer_input/norm | d -> d",
) + table(
    "model.",
    "embed_tokens_per_layer.weight | layer_inputs/table | v j -> v j",
    "per_layer_model_projection.weight | layer_inputs/projection | d j -> j d",
    "per_layer_projection_norm.weight | layer_inputs/norm | p -> p",
)

# Its matrices lie as ours do, inputs first.
GPT2 = table(
    "transformer.",
    "wte.weight | embedding | v d -> v d",
    "wpe.weight | positions | s d -> s d",
    "ln_f.weight | final_norm/scale | d -> d",
    "ln_f.bias | final_norm/bias | d -> d",
) + table(
    "transformer.h.{i}.",
    "ln_1.weight | attention_norm/scale | d -> d",
    "ln_1.bias | attention_norm/bias | d -> d",
    "attn.c_attn.weight | attention/query, attention/key, attention/value | p d n h -> d (p n h)",
    "attn.c_attn.bias | attention/query_bias, attention/key_bias, attention/value_bias | p n h -> (p n h)",
    "attn.c_proj.weight | attention/out | n h d -> (n h) d",
    "attn.c_proj.bias | attention/out_bias | d -> d",
    "ln_2.weight | mlp_norm/scale | d -> d",
    "ln_2.bias | mlp_norm/bias | d -> d",
    "mlp.c_fc.weight | mlp/wi_0 | d f -> d f",
    "mlp.c_fc.bias | mlp/wi_0_bias | f -> f",
    "mlp.c_proj.weight | mlp/wo | f d -> f d",
    "mlp.c_proj.bias | mlp/wo_bias | d -> d",
)

PLAIN = MODEL + ATTENTION + MLP

# llama.cpp turns neighbouring pairs, so its files hold the rows of queries and keys in that order: head, pair, half.
GGUF = table(
    "",
    "token_embd.weight | embedding | v d -> v d",
    "output_norm.weight | final_norm | d -> d",
    "output.weight | logits | d v -> v d",
) + table(
    "blk.{i}.",
    "attn_q.weight | attention/query | d n (t h) -> (n h t) d",
    "attn_k.weight | attention/key | d k (t h) -> (k h t) d",
    "attn_v.weight | attention/value | d k h -> (k h) d",
    "attn_output.weight | attention/out | n h d -> d (n h)",
    "attn_norm.weight | attention_norm | d -> d",
    "ffn_norm.weight | mlp_norm | d -> d",
    "ffn_gate.weight | mlp/wi_0 | d f -> f d",
    "ffn_up.weight | mlp/wi_1 | d f -> f d",
    "ffn_down.weight | mlp/wo | f d -> d f",
)
