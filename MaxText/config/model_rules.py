"""Rules between architecture keys: what makes no model. Registered with those of `rules`."""

from __future__ import annotations

from MaxText.config.rules import divisors, rule

FLASH_ROWS = 128
"""Of a row, the flash kernel takes a multiple of this many tokens."""


@rule("config.window")
def local_layers_have_a_window(
    layer_pattern: tuple[str, ...], attention_type: str, sliding_window_size: int
) -> str | None:
    """There is a sliding_window_size if and only if there are local_sliding layers."""
    local = "local_sliding" in layer_pattern or attention_type == "local_sliding"
    if local == bool(sliding_window_size):
        return None
    if local:
        return "local_sliding layers need a window; set sliding_window_size=1024"
    return "no layer is local_sliding; set attention_type=local_sliding, a layer_pattern, or sliding_window_size=0"


@rule("config.chunk")
def chunk_layers_have_a_length(
    layer_pattern: tuple[str, ...], attention_type: str, chunk_attn_window_size: int
) -> str | None:
    """There is a chunk_attn_window_size if and only if there are chunk layers."""
    chunked = "chunk" in layer_pattern or attention_type == "chunk"
    if chunked == bool(chunk_attn_window_size):
        return None
    if chunked:
        return "chunk layers need a length; set chunk_attn_window_size=8192"
    return "no layer is chunk; set attention_type=chunk, a layer_pattern, or chunk_attn_window_size=0"


@rule("config.pattern")
def pattern_or_type(layer_pattern: tuple[str, ...], attention_type: str) -> str | None:
    """A layer_pattern leaves attention_type at global."""
    if layer_pattern and attention_type != "global":
        return "both say what a query sees; keep layer_pattern with attention_type=global, or set layer_pattern=[]"
    return None


@rule("config.latent")
def latent_attention_is_plain(
    attention_type: str, use_qk_norm: bool, use_v_norm: bool, attention_sink: bool, num_kv_shared_layers: int
) -> str | None:
    """attention_type=mla has no use_qk_norm, use_v_norm, attention_sink or num_kv_shared_layers."""
    if attention_type == "mla" and (use_qk_norm or use_v_norm or attention_sink or num_kv_shared_layers):
        return "latent attention has its own norms, and no sinks or shared keys; leave the others out"
    return None


@rule("config.flash")
def the_flash_kernel_takes_whole_tiles(attention: str, max_target_length: int, use_indexer: bool) -> str | None:
    """attention=flash needs a max_target_length that is a multiple of 128, and no indexer."""
    if attention != "flash":
        return None
    if use_indexer:
        return "the kernel knows no keys chosen by an indexer; set attention=autoselected"
    if max_target_length % FLASH_ROWS == 0:
        return None
    near = max(FLASH_ROWS, max_target_length // FLASH_ROWS * FLASH_ROWS)
    return f"the kernel takes multiples of {FLASH_ROWS} tokens; set max_target_length={near} or attention=autoselected"


@rule("config.indexer")
def indexer_reads_latent_queries(
    use_indexer: bool, attention_type: str, q_lora_rank: int, indexer_head_dim: int, qk_rope_head_dim: int
) -> str | None:
    """use_indexer needs attention_type=mla, q_lora_rank, and an indexer_head_dim of at least qk_rope_head_dim."""
    if not use_indexer:
        return None
    if attention_type != "mla" or not q_lora_rank:
        return "the indexer reads compressed queries; set attention_type=mla and q_lora_rank, or use_indexer=false"
    if indexer_head_dim < qk_rope_head_dim:
        return f"heads of {indexer_head_dim} do not hold the {qk_rope_head_dim} rotated channels"
    return None


@rule("config.rotary-part")
def rotated_part_is_even(head_dim: int, partial_rotary_factor: float) -> str | None:
    """partial_rotary_factor leaves a whole, even number of channels."""
    part = partial_rotary_factor * head_dim
    if partial_rotary_factor != 1 and (part != int(part) or int(part) % 2):
        return f"{part:g} of {head_dim} channels are rotated; they must be a whole even number"
    return None


@rule("config.latent-rope")
def latent_rope_is_even(qk_rope_head_dim: int) -> str | None:
    """qk_rope_head_dim is even, since rope rotates pairs."""
    return f"must be even, since rope rotates pairs; try {qk_rope_head_dim + 1}" if qk_rope_head_dim % 2 else None


@rule("config.global-heads")
def global_kv_heads_divide(base_num_query_heads: int, global_num_kv_heads: int, global_head_dim: int) -> str | None:
    """global_num_kv_heads divides the query heads, and global_head_dim is even."""
    if global_num_kv_heads and base_num_query_heads % global_num_kv_heads:
        legal = divisors(base_num_query_heads)
        return f"{global_num_kv_heads} kv heads do not divide {base_num_query_heads} query heads. Legal: 0, {legal}"
    return f"must be even; try {global_head_dim + 1}" if global_head_dim % 2 else None


@rule("config.kv-sharing")
def sharing_layers_have_a_source(
    num_kv_shared_layers: int, base_num_decoder_layers: int, layer_pattern: tuple[str, ...]
) -> str | None:
    """Before the last num_kv_shared_layers there is a layer of every kind."""
    own = base_num_decoder_layers - num_kv_shared_layers
    if num_kv_shared_layers and own < len(set(layer_pattern) or {""}):
        return f"{own} layers with keys of their own cannot serve every kind of layer; lower num_kv_shared_layers"
    return None


@rule("config.double-wide")
def wide_layers_share(use_double_wide_mlp: bool, num_kv_shared_layers: int) -> str | None:
    """use_double_wide_mlp needs num_kv_shared_layers."""
    if use_double_wide_mlp and not num_kv_shared_layers:
        return "widens the layers that share keys, and there are none; set use_double_wide_mlp=false"
    return None


@rule("config.layer-embedding")
def layer_embedding_covers_the_vocabulary(
    hidden_size_per_layer_input: int, vocab_size_per_layer_input: int, vocab_size: int
) -> str | None:
    """With hidden_size_per_layer_input, vocab_size_per_layer_input is 0 or at least vocab_size."""
    if hidden_size_per_layer_input and 0 < vocab_size_per_layer_input < vocab_size:
        return f"{vocab_size_per_layer_input} rows do not hold {vocab_size} ids; set vocab_size_per_layer_input=0"
    return None


@rule("config.gate")
def alpha_needs_a_gate(swiglu_alpha: float, mlp_activations: tuple[str, ...]) -> str | None:
    """swiglu_alpha needs two mlp_activations."""
    if swiglu_alpha and len(mlp_activations) != 2:
        return "is for a gated feed-forward; set mlp_activations=[silu,linear], or swiglu_alpha=0"
    return None


@rule("config.experts-per-token")
def chosen_are_at_most_all(num_experts_per_tok: int, num_experts: int) -> str | None:
    """num_experts_per_tok is at most num_experts."""
    if num_experts_per_tok > num_experts:
        return f"a token cannot pass {num_experts_per_tok} of {num_experts} experts"
    return None


@rule("config.expert-groups")
def groups_divide_experts(
    n_routing_groups: int, topk_routing_group: int, num_experts: int, num_experts_per_tok: int
) -> str | None:
    """n_routing_groups divides num_experts, and topk_routing_group of them hold num_experts_per_tok experts."""
    if n_routing_groups == topk_routing_group == -1:
        return None
    if -1 in (n_routing_groups, topk_routing_group) or topk_routing_group > n_routing_groups:
        return "set both, with topk_routing_group at most n_routing_groups; or both to -1"
    if num_experts % n_routing_groups:
        return f"{n_routing_groups} groups do not divide {num_experts} experts. Legal: {divisors(num_experts)}"
    held = num_experts // n_routing_groups * topk_routing_group
    if held < num_experts_per_tok:
        return f"{topk_routing_group} groups hold {held} experts, fewer than the {num_experts_per_tok} of a token"
    return None


@rule("config.no-experts")
def expert_keys_need_experts(num_experts: int, shared_experts: int, first_num_dense_layers: int) -> str | None:
    """shared_experts and first_num_dense_layers need num_experts above 1."""
    if num_experts == 1 and (shared_experts or first_num_dense_layers):
        return "there are no experts; set num_experts, or leave the others at 0"
    return None


@rule("config.dense-layers")
def some_layer_has_experts(
    num_experts: int,
    first_num_dense_layers: int,
    interleave_moe_layer_step: int,
    base_num_decoder_layers: int,
    layers_per_decoder_layer: int,
) -> str | None:
    """With num_experts above 1, some layer has experts."""
    layers = base_num_decoder_layers * layers_per_decoder_layer
    if num_experts > 1 and max(first_num_dense_layers, interleave_moe_layer_step - 1) >= layers:
        return f"none of {layers} layers would have experts"
    return None


@rule("config.balance")
def bias_moves_where_it_is(
    routed_bias_update_rate: float, num_experts: int, routed_bias: bool, routed_score_func: str
) -> str | None:
    """routed_bias_update_rate needs num_experts above 1, routed_bias and a routed_score_func."""
    if routed_bias_update_rate and not (num_experts > 1 and routed_bias and routed_score_func):
        return "there is no bias to move; set routed_bias=true with num_experts and routed_score_func, or the rate to 0"
    return None


@rule("config.capacity")
def capacity_is_off_or_positive(capacity_factor: float) -> str | None:
    """capacity_factor is -1 or above 0."""
    return "must be above 0, or -1 for no limit" if capacity_factor <= 0 and capacity_factor != -1 else None


@rule("config.buffer")
def buffer_is_whole_or_positive(ragged_buffer_factor: float) -> str | None:
    """ragged_buffer_factor is -1 or above 0."""
    unset = ragged_buffer_factor <= 0 and ragged_buffer_factor != -1
    return "must be above 0, or -1 for a buffer that holds all that can come" if unset else None
