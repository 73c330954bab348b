"""The families: each a handful of data. What config.json says, what it must not say, and how tensors are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from MaxText.convert import parts, rows
from MaxText.convert.parts import Part
from MaxText.convert.rows import Row

# They say nothing of the function of the trained text model.
WITHOUT_EFFECT = {
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "use_cache",
    "attention_dropout",
    "hidden_dropout",
    "pretraining_tp",
    "max_position_embeddings",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "aux_loss_alpha",
    "seq_aux",
    "cache_implementation",
    "attn_implementation",
    "_attn_implementation",
    "ep_size",
    "moe_layer_freq",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "initial_context_length",
    "experts_per_token",
    "for_llm_compressor",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_mamba_kernels",
    "tokenizer_class",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "is_encoder_decoder",
    "vision_config",
    "audio_config",
    "image_token_index",
    "image_token_id",
    "boi_token_id",
    "eoi_token_id",
    "boa_token_id",
    "eoa_token_id",
    "audio_token_id",
    "video_token_id",
    "mm_tokens_per_image",
    "vision_soft_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "is_llama_config",
    "n_ctx",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "reorder_and_upcast_attn",
    "task_specific_params",
    "rope_interleaved",
    "router_aux_loss_weight",
}


@dataclass(frozen=True)
class Family:
    """One model_type of Hugging Face.

    `rows` name its tensors, as they are written; `other_rows` are tables of other forms, which are only read;
    `fields` are keys of `fields.FIELDS`; `given` our keys that the type itself decides, beside the bundle `block`;
    `only` their keys of which we can express these values alone, the first of which is written; `defaults` their
    values for absent keys.
    """

    name: str
    architecture: str
    block: str
    rows: tuple[Row, ...]
    fields: tuple[str, ...]
    parts: tuple[Part, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_names: tuple[str, ...] = ()
    other_rows: tuple[tuple[Row, ...], ...] = ()
    nested_in: tuple[str, ...] = ()  # names of multimodal types that hold this one in text_config


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
)
PLAIN = (*SIZES, "hidden_act")
GEMMA = (*SIZES, "hidden_activation")
UNTIED = {"tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}
TIED = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
NO_BIAS = {"attention_bias": (False,)}
ONE_WAY = {"use_bidirectional_attention": (None, False)}
TWO_KINDS = ("sliding_attention", "full_attention")
FIVE_TO_ONE = ("sliding_attention",) * 5 + ("full_attention",)

_LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "routed_scaling_factor",
)
LATENT = (*(name for name in PLAIN if name not in ("head_dim", "rms_norm_eps")), *_LATENT_FIELDS)
# The norms of latents have this epsilon in the reference, whatever config.json says; we have one for all.
LATENT_ONLY = {"rms_norm_eps": (1e-6,), "attention_bias": (False,), "mlp_bias": (False,), "moe_layer_freq": (1,)}
LATENT_ROWS = rows.PLAIN + rows.LATENT + rows.PRE_NORMS + rows.SHARED_EXPERTS
LATENT_GIVEN = {"attention_type": "mla", "normalization_layer_epsilon": 1e-6}
LATENT_DEFAULTS = (
    UNTIED | {"first_k_dense_replace": 0, "n_shared_experts": 1, "q_lora_rank": None} | {"n_group": 1, "topk_group": 1}
)

FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", "llama2", rows.PLAIN + rows.PRE_NORMS,
        (*PLAIN, "attention_bias", "mlp_bias"), (parts.rope(),),
        only={"mlp_bias": (False,)},
        defaults=UNTIED | {"attention_bias": False, "mlp_bias": False},
    ),
    Family(
        "mistral", "MistralForCausalLM", "mistral", rows.PLAIN + rows.PRE_NORMS,
        PLAIN, (parts.rope(), parts.window(4096)), only=NO_BIAS, defaults=UNTIED,
    ),
    Family(
        "ministral3", "Ministral3ForCausalLM", "mistral", rows.PLAIN + rows.PRE_NORMS,
        PLAIN, (parts.rope(tempered=True), parts.window(None)), only=NO_BIAS,
        defaults=UNTIED | {"rms_norm_eps": 1e-5}, nested_in=("mistral3",),
    ),
    Family(
        "qwen2", "Qwen2ForCausalLM", "qwen2", rows.PLAIN + rows.PRE_NORMS,
        PLAIN, (parts.rope(), parts.layers(("full_attention",))),
        given={"attention_bias": True, "attention_out_bias": False}, defaults=UNTIED | {"use_sliding_window": False},
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", "qwen3", rows.PLAIN + rows.PRE_NORMS,
        (*PLAIN, "attention_bias"), (parts.rope(), parts.layers(("full_attention",))),
        defaults=UNTIED | {"attention_bias": False, "head_dim": 128, "use_sliding_window": False},
    ),
    Family(
        "gemma", "GemmaForCausalLM", "gemma", rows.PLAIN + rows.PRE_NORMS,
        PLAIN, (parts.rope(),), only=NO_BIAS | ONE_WAY,
        defaults=TIED | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256},
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM", "gemma2", rows.PLAIN + rows.FOUR_NORMS,
        (*GEMMA, "attn_logit_softcapping", "final_logit_softcapping"),
        (parts.rope(), parts.layers(TWO_KINDS, 4096), parts.QUERY_SCALE),
        given={"layers_per_decoder_layer": 1}, only=NO_BIAS | ONE_WAY,
        defaults=TIED | {"head_dim": 256, "query_pre_attn_scalar": 256}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", "gemma3", rows.PLAIN + rows.FOUR_NORMS,
        (*GEMMA, "attn_logit_softcapping", "final_logit_softcapping"),
        (parts.rope(nested=True), parts.layers(FIVE_TO_ONE, 4096), parts.QUERY_SCALE), only=NO_BIAS | ONE_WAY,
        defaults=TIED | {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "vocab_size": 262_208}
        | {"rope_local_base_freq": 1e4, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        nested_in=("gemma3",),
    ),
    Family(
        "gemma4_text", "Gemma4ForCausalLM", "gemma4", rows.PLAIN + rows.FOUR_NORMS + rows.GEMMA4,
        (*GEMMA, "final_logit_softcapping", "hidden_size_per_layer_input")
        + ("num_kv_shared_layers", "use_double_wide_mlp", "attention_k_eq_v"),
        (parts.rope(nested=True), parts.layers(FIVE_TO_ONE, 512, last_global=True), parts.GEMMA4),
        only=NO_BIAS | ONE_WAY,
        defaults=TIED | {"head_dim": 256, "final_logit_softcapping": None, "hidden_size_per_layer_input": 256}
        | {"vocab_size_per_layer_input": 262_144, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        | {"attention_k_eq_v": False},
        nested_in=("gemma4",),
    ),
    Family(
        "mixtral", "MixtralForCausalLM", "mixtral", rows.PLAIN + rows.PRE_NORMS + rows.EXPERTS_MIXTRAL,
        (*PLAIN, "num_local_experts", "num_experts_per_tok"), (parts.rope(), parts.window(None), parts.SAME_WIDTH),
        other_rows=(rows.PLAIN + rows.PRE_NORMS + rows.EXPERTS_FUSED,), only=NO_BIAS,
        defaults=UNTIED | {"rms_norm_eps": 1e-5},
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", rows.PLAIN + rows.PRE_NORMS + rows.EXPERTS_APART,
        (*PLAIN, "attention_bias", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        + ("decoder_sparse_step",),
        (parts.rope(), parts.layers(("full_attention",))),
        other_rows=(rows.PLAIN + rows.PRE_NORMS + rows.EXPERTS_FUSED,),
        given={"routed_score_func": "softmax"}, only={"mlp_only_layers": ([], None)},
        defaults=UNTIED | {"attention_bias": False, "norm_topk_prob": False, "decoder_sparse_step": 1}
        | {"use_sliding_window": False},
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", "deepseek", LATENT_ROWS + rows.EXPERTS_APART,
        LATENT, (parts.rope(latent=True), parts.GREEDY, parts.LATENT),
        other_rows=(LATENT_ROWS + rows.EXPERTS_FUSED,),
        given=LATENT_GIVEN | {"routed_score_func": "softmax", "norm_topk_prob": False, "rope_interleave": True},
        only=LATENT_ONLY | {"norm_topk_prob": (False,), "scoring_func": ("softmax",)},
        defaults=LATENT_DEFAULTS,
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", "deepseek", LATENT_ROWS + rows.EXPERTS_APART,
        (*LATENT, "n_group", "topk_group", "rope_interleave"), (parts.rope(latent=True), parts.LATENT),
        other_rows=(LATENT_ROWS + rows.EXPERTS_FUSED,),
        given=LATENT_GIVEN | {"routed_score_func": "sigmoid", "routed_bias": True, "norm_sigmoid_scores": True},
        only=LATENT_ONLY | {"norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        defaults=LATENT_DEFAULTS | {"rope_interleave": True}, other_names=("kimi_k2",),
    ),
    Family(
        "deepseek_v32", "DeepseekV32ForCausalLM", "deepseek", LATENT_ROWS + rows.INDEXER + rows.EXPERTS_APART,
        (*LATENT, "n_group", "topk_group", "index_n_heads", "index_head_dim", "index_topk"),
        (parts.rope(latent=True), parts.LATENT, parts.SPARSE),
        other_rows=(LATENT_ROWS + rows.INDEXER + rows.EXPERTS_FUSED,),
        given=LATENT_GIVEN | {"routed_score_func": "sigmoid", "routed_bias": True, "norm_sigmoid_scores": True}
        | {"use_indexer": True, "rope_interleave": True},
        only=LATENT_ONLY | {"norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        defaults=LATENT_DEFAULTS | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    ),
    Family(
        "mistral4", "Mistral4ForCausalLM", "deepseek", LATENT_ROWS + rows.EXPERTS_FUSED,
        (*LATENT, "n_group", "topk_group", "norm_topk_prob", "rope_interleave"),
        (parts.rope(latent=True, tempered=True), parts.LATENT),
        other_rows=(LATENT_ROWS + rows.EXPERTS_APART,),
        given=LATENT_GIVEN | {"routed_score_func": "softmax"}, only=LATENT_ONLY,
        defaults=LATENT_DEFAULTS | {"rope_interleave": True, "norm_topk_prob": True},
        nested_in=("mistral3",),
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM", "gpt_oss", rows.PLAIN + rows.PRE_NORMS + rows.EXPERTS_GPT_OSS,
        (*PLAIN, "attention_bias", "num_local_experts", "num_experts_per_tok", "swiglu_limit", "swiglu_alpha"),
        (parts.rope(), parts.layers(TWO_KINDS, 128), parts.SAME_WIDTH),
        defaults=UNTIED | {"rms_norm_eps": 1e-5, "attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
        | {"rope_theta": 150_000.0, "head_dim": 64},
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM", "olmo2", rows.PLAIN + rows.POST_NORMS,
        PLAIN, (parts.rope(),), only=NO_BIAS, defaults=UNTIED | {"rms_norm_eps": 1e-5},
    ),
    Family(
        "olmo3", "Olmo3ForCausalLM", "olmo3", rows.PLAIN + rows.POST_NORMS,
        PLAIN, (parts.rope(nested=True), parts.layers(("sliding_attention",) * 3 + ("full_attention",), 4096)),
        only=NO_BIAS, defaults=UNTIED | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
    Family(
        "gpt2", "GPT2LMHeadModel", "gpt3", rows.GPT2,
        ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "layer_norm_epsilon", "activation_function")
        + ("tie_word_embeddings",),
        (parts.GPT2,),
        only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)}
        | {"add_cross_attention": (False,), "tie_word_embeddings": (True,)},
        defaults={"vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
        | {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    ),
    Family(
        "llama4_text", "Llama4ForCausalLM", "llama4", rows.MODEL + rows.ATTENTION + rows.PRE_NORMS + rows.LLAMA4,
        tuple(name for name in PLAIN if name != "intermediate_size")
        + ("num_local_experts", "num_experts_per_tok", "use_qk_norm", "attn_temperature_tuning", "attn_scale")
        + ("floor_scale",),
        (parts.rope(), parts.LLAMA4), only=NO_BIAS,
        defaults=UNTIED | {"rms_norm_eps": 1e-5, "use_qk_norm": True, "attn_temperature_tuning": True}
        | {"attn_scale": 0.1, "floor_scale": 8192, "head_dim": 128, "rope_theta": 500_000.0},
        nested_in=("llama4",),
    ),
)  # fmt: skip
