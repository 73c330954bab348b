"""Every key: name, type, range, default and one line of meaning. Keys are declared here, those of data in
`data_keys.py`, and nowhere else.

To add a key, add one line to the class of its group; `configs/base.yml` and `docs/keys.md` are written from here
(`python -m MaxText base`, `python -m MaxText keys`). A rule between several keys goes to `rules.py`.
Keys of `Architecture` are the ones that a model file may hold.
"""

from __future__ import annotations

from typing import Literal

from MaxText.config.data_keys import Data
from MaxText.config.fields import (
    Activations,
    AttentionType,
    Count,
    Decay,
    DType,
    Fraction,
    Group,
    MatmulPrecision,
    NonNegative,
    Pattern,
    Place,
    Positive,
    RematPolicy,
    Share,
    Size,
    SizeOrMinusOne,
    Texts,
    key,
)


class Run(Group):
    title = "run"
    run_name: str = key("", 'names the run folder; "" = the model\'s name, or else that of the CONFIG file')
    base_output_directory: str = key("runs", "the run folder is base_output_directory/run_name")
    model_name: str = key("default", "a name in configs/models, or a path to such a .yml; default = none")
    override_model_config: bool = key(
        False, "let architecture keys of command line and environment beat the model file"
    )
    hardware: str = key("auto", "auto, cpu, gpu or tpu; or a slice to plan for: v5p-512, 2xv6e-256, tpu7x-4x4x8")
    num_cpu_devices: Count = key(0, "virtual CPU devices; 0 = as many as the mesh asks for")
    steps: SizeOrMinusOne = key(800, "optimizer steps; -1 = learning_rate_schedule_steps")
    start: Literal["auto", "fresh", "resume"] = key("auto", "demand one; auto = resume if there is a checkpoint")
    plan_only: bool = key(False, "print the plan and stop")
    log_config: bool = key(False, "print every key and its origin at start")
    init_weights_seed: Count = key(0, "seed of the initial weights")
    jax_cache_dir: str = key("~/.cache/maxtext/xla", 'folder of compiled programs, kept between runs; "" = none')


class Processes(Group):
    title = "processes"
    jax_distributed_initialization_timeout: Size = key(300, "seconds in which all processes of a run must come")
    jax_distributed_heartbeat_timeout_seconds: Size = key(100, "silence after which a process counts as lost")
    process_wait_timeout: Size = key(600, "seconds that processes wait for one another at a save, or at the end")


class Architecture(Group):
    title = "architecture"
    decoder_block: str = key("llama2", "the family's bundle of decoder features: a name in configs/decoder_blocks")
    global_parameter_scale: Size = key(1, "multiplies the size of the model; a power of two")
    base_emb_dim: Size = key(128, "model width, before scaling")
    base_num_query_heads: Size = key(4, "query heads, before scaling")
    base_num_kv_heads: Size = key(4, "key/value heads, before scaling; must divide the query heads")
    head_dim: Size = key(32, "width of one head; even, since rope rotates pairs")
    base_mlp_dim: Size = key(512, "width of the feed-forward layer, before scaling")
    base_num_decoder_layers: Size = key(4, "decoder layers, before scaling")
    layers_per_decoder_layer: Size = key(
        1, "layers that each of base_num_decoder_layers counts for; gemma2 counts pairs"
    )
    vocab_size: Size = key(288, "rows of the embedding; at least the ids of the tokenizer")
    logits_via_embedding: bool = key(False, "use the embedding also as output projection (tied)")
    normalize_embedding_logits: bool = key(True, "divide tied logits by sqrt(emb_dim)")
    scale_embedding: bool = key(False, "multiply the embedding of a token by sqrt(emb_dim)")
    trainable_position_size: SizeOrMinusOne = key(
        -1, "rows of a table of learned positions, instead of rope; -1 = none"
    )
    mlp_activations: Activations = key(("silu", "linear"), "two = gated feed-forward, their product; one = plain")
    mlp_activations_limit: float = key(-1.0, "clamp the gate from above and the other branch both ways; -1 = off")
    swiglu_alpha: NonNegative = key(
        0.0, "above 0: the gate is x * sigmoid(alpha x), and 1 is added to the other branch"
    )
    mlp_bias: bool = key(False, "biases in feed-forward and experts")
    norm_type: Literal["rms", "layer"] = key("rms", "layer = LayerNorm with scale and bias")
    normalization_layer_epsilon: Positive = key(1e-5, "epsilon of the norms")
    norm_unit_offset: bool = key(False, "norms multiply by 1 + weight, which starts at zero")
    use_pre_norm: bool = key(True, "norms before attention and feed-forward")
    use_post_attn_norm: bool = key(False, "norm on the output of attention, before it is added")
    use_post_ffw_norm: bool = key(False, "norm on the output of the feed-forward, before it is added")
    layer_output_scale: bool = key(False, "multiply the output of each layer by a learned number")
    dense_init_scale: Positive = key(1.0, "variance scale of the initial kernels")
    attention: Literal["autoselected", "flash", "dot_product"] = key(
        "autoselected", "flash = a kernel without scores in memory; dot_product = XLA; autoselected = flash on TPU"
    )
    attention_type: AttentionType = key("global", "what a query sees, in every layer; mla = latent attention, sees all")
    layer_pattern: Pattern = key(
        (), "the same, layer by layer, repeated over the depth; [] = attention_type everywhere"
    )
    sliding_window_size: Count = key(0, "positions that a local_sliding layer sees, its own included")
    chunk_attn_window_size: Count = key(0, "length of the chunks of a chunk layer, which sees its own chunk only")
    query_pre_attn_scalar: NonNegative = key(0.0, "queries are divided by its root; 0 = head_dim")
    attention_bias: bool = key(False, "biases of query, key and value projections")
    attention_out_bias: bool = key(False, "bias of the attention's output projection")
    attention_sink: bool = key(False, "one learned logit per head that takes its share of the softmax")
    attn_logits_soft_cap: NonNegative = key(0.0, "tanh cap on attention logits; 0 = off")
    final_logits_soft_cap: NonNegative = key(0.0, "tanh cap on output logits; 0 = off")
    use_qk_norm: bool = key(False, "norm on queries and keys")
    qk_norm_type: Literal["head", "projection", "l2"] = key("head", "over a head, all heads, or a head after rope")
    qk_norm_with_scale: bool = key(True, "learned scale in that norm; l2 has none")
    use_v_norm: bool = key(False, "norm on the value heads")
    v_norm_with_scale: bool = key(True, "learned scale in that norm")
    nope_layer_interval: SizeOrMinusOne = key(-1, "every n-th layer has no rope; -1 = all have it")
    temperature_tuning: bool = key(
        False, "queries grow with position: 1 + scale * log(1 + floor((pos + offset) / length))"
    )
    temperature_tuning_layers: Literal["nope", "all"] = key("nope", "in which layers")
    temperature_tuning_scale: NonNegative = key(0.1, "its scale")
    temperature_tuning_length: Size = key(8192, "its length")
    temperature_tuning_offset: Count = key(1, "its offset")
    global_head_dim: Count = key(0, "head_dim of global layers; 0 = the same")
    global_num_kv_heads: Count = key(0, "key/value heads of global layers; 0 = the same")
    share_kv_projections: bool = key(
        False, "global layers have no value projection: values are the keys before their norm"
    )
    num_kv_shared_layers: Count = key(0, "last layers that use the keys and values of an earlier layer of their kind")
    use_double_wide_mlp: bool = key(False, "those layers have a feed-forward twice as wide")
    hidden_size_per_layer_input: Count = key(0, "width of the embedding that each layer gets of its own; 0 = none")
    vocab_size_per_layer_input: Count = key(0, "rows of that embedding; 0 = vocab_size")
    q_lora_rank: Count = key(0, "mla: width of the compressed queries; 0 = not compressed")
    kv_lora_rank: Size = key(512, "mla: width of the compressed keys and values")
    qk_nope_head_dim: Size = key(128, "mla: part of a head without rope")
    qk_rope_head_dim: Size = key(64, "mla: part of a head with rope; of keys, shared by all heads")
    v_head_dim: Size = key(128, "mla: width of a value head")
    use_indexer: bool = key(False, "mla: each query sees only the keys that a small indexer chooses")
    indexer_n_heads: Size = key(64, "heads of the indexer")
    indexer_head_dim: Size = key(128, "width of an indexer head")
    indexer_topk: Size = key(2048, "keys that a query sees")
    indexer_loss_scaling_factor: NonNegative = key(0.0, "weight of the loss that teaches the indexer the attention")
    rope_type: Literal["default", "yarn", "llama3.1"] = key("default", "how rope is stretched to longer texts")
    rope_min_timescale: Size = key(1, "shortest wavelength of rope, over 2 pi")
    rope_max_timescale: Size = key(10_000, "longest wavelength of rope, over 2 pi (theta)")
    local_rope_max_timescale: SizeOrMinusOne = key(-1, "the same in local_sliding layers; -1 = the same")
    global_rope_max_timescale: SizeOrMinusOne = key(-1, "the same in global layers; -1 = the same")
    local_rope_proportion: Share = key(
        1.0, "part of the frequencies that turn, in local_sliding layers; the rest stand"
    )
    global_rope_proportion: Share = key(1.0, "the same in all other layers")
    partial_rotary_factor: Share = key(1.0, "first part of a head that is rotated at all")
    rope_interleave: bool = key(False, "pairs are neighbours, not (i, i + half)")
    rope_scaling_layers: Literal["all", "global"] = key("all", "layers that are stretched; the others have plain rope")
    rope_linear_scaling_factor: Positive = key(1.0, "positions are divided by it")
    rope_use_scale: bool = key(True, "false = rope_type llama3.1 without its stretching")
    rope_factor: NonNegative = key(0.0, "yarn, llama3.1: how many times longer; 0 = 40 for yarn, 8 for llama3.1")
    original_max_position_embeddings: Count = key(0, "their length before; 0 = 4096 for yarn, 8192 for llama3.1")
    max_position_embeddings: Size = key(163_840, "their length after; mscale counts only if this is longer")
    rope_low_freq_factor: Positive = key(1.0, "llama3.1: fewer turns than this in the original length are stretched")
    rope_high_freq_factor: Positive = key(4.0, "llama3.1: more turns than this are kept")
    beta_fast: Positive = key(32.0, "yarn: more turns than this in the original length are kept")
    beta_slow: Positive = key(1.0, "yarn: fewer turns than this are stretched")
    rope_truncate: bool = key(True, "yarn: round the borders between the two to whole frequencies")
    rope_attention_scaling: bool = key(False, "yarn: multiply sine and cosine by 0.1 log(rope_factor) + 1")
    mscale: NonNegative = key(1.0, "mla with yarn: logits grow by (0.1 mscale log(rope_factor) + 1) squared")
    num_experts: Size = key(1, "experts of a layer; 1 = dense feed-forward")
    num_experts_per_tok: Size = key(1, "experts that a token passes")
    base_moe_mlp_dim: SizeOrMinusOne = key(-1, "width of an expert, before scaling; -1 = base_mlp_dim")
    shared_experts: Count = key(0, "experts that every token passes, as one feed-forward of their joint width")
    first_num_dense_layers: Count = key(0, "first layers with a dense feed-forward")
    interleave_moe_layer_step: Size = key(1, "every n-th layer has experts, the others a dense feed-forward")
    parallel_dense_mlp: bool = key(False, "dense feed-forward beside the experts, each with its own norms")
    routed_score_func: Literal["", "softmax", "sigmoid"] = key(
        "", 'scores before the choice; "" = softmax of the chosen'
    )
    norm_topk_prob: bool = key(False, "softmax: divide the chosen scores by their sum")
    norm_sigmoid_scores: bool = key(True, "sigmoid: divide the chosen scores by their sum")
    routed_scaling_factor: Positive = key(1.0, "multiplies the weights of the chosen experts")
    routed_bias: bool = key(
        False, 'bias for the choice only, moved toward balance; with routed_score_func="" of logits'
    )
    routed_bias_update_rate: NonNegative = key(0.0, "how far a step moves that bias")
    n_routing_groups: SizeOrMinusOne = key(-1, "groups of experts, of which a token uses some; -1 = no groups")
    topk_routing_group: SizeOrMinusOne = key(-1, "how many groups a token uses")
    routing_group_score: Literal["top2", "max"] = key("top2", "a group counts as its two best experts, or its best")
    scale_expert_input: bool = key(False, "the weight multiplies the expert's input, not its output")
    router_input_norm: bool = key(
        False, "the router reads the normed stream, with a learned scale and times emb_dim^-0.5"
    )
    router_expert_scale: bool = key(False, "a learned number per expert multiplies its weight")
    capacity_factor: float = key(
        -1.0, "above 0: an expert takes that many times its even share of a row; the rest drop"
    )
    ragged_buffer_factor: float = key(
        -1.0, "room for that many times a shard's even share of choices; -1 = for all that can come"
    )
    load_balance_loss_weight: NonNegative = key(0.0, "weight of the loss for equal use of experts")
    load_balance_loss_type: Literal["global", "sequence"] = key("global", "balance over the batch, or in each row")
    router_z_loss_weight: NonNegative = key(0.0, "weight of the square of log Z of the router")
    mtp_num_layers: Count = key(0, "further layers that each predict one token further ahead, in training")
    mtp_loss_scaling_factor: NonNegative = key(0.1, "weight of the mean of their losses")


class Precision(Group):
    title = "precision"
    dtype: Literal["auto", "float32", "bfloat16"] = key("auto", "type of the arithmetic; auto = the faster")
    weight_dtype: DType = key("float32", "type of the stored parameters")
    grad_dtype: DType = key("float32", "type of the gradients")
    mu_dtype: Literal["", "float32", "bfloat16"] = key("", 'type of the first moment; "" = weight_dtype')
    matmul_precision: MatmulPrecision = key("default", "XLA's precision of float32 matmuls")


class Mesh(Group):
    title = "mesh"
    ici_pipeline_parallelism: SizeOrMinusOne = key(
        1, "pipeline stages inside a slice; one of the ici degrees may be -1 = the rest"
    )
    ici_data_parallelism: SizeOrMinusOne = key(1, "data parallel inside a slice: parameters replicated")
    ici_fsdp_parallelism: SizeOrMinusOne = key(-1, "data parallel inside a slice, parameters sharded")
    ici_fsdp_transpose_parallelism: SizeOrMinusOne = key(1, "the same, sharding the other dim of each parameter")
    ici_expert_parallelism: SizeOrMinusOne = key(1, "experts inside a slice")
    ici_context_parallelism: SizeOrMinusOne = key(1, "sequence split inside a slice")
    ici_tensor_parallelism: SizeOrMinusOne = key(1, "heads and feed-forward split inside a slice")
    dcn_pipeline_parallelism: SizeOrMinusOne = key(
        1, "pipeline stages between slices; one of the dcn degrees may be -1 = the rest"
    )
    dcn_data_parallelism: SizeOrMinusOne = key(-1, "data parallel between slices: parameters replicated")
    dcn_fsdp_parallelism: SizeOrMinusOne = key(1, "data parallel between slices, parameters sharded")
    dcn_fsdp_transpose_parallelism: SizeOrMinusOne = key(1, "the same, sharding the other dim of each parameter")
    dcn_expert_parallelism: SizeOrMinusOne = key(1, "experts between slices")
    dcn_context_parallelism: SizeOrMinusOne = key(1, "sequence split between slices")
    dcn_tensor_parallelism: SizeOrMinusOne = key(1, "heads and feed-forward split between slices")
    shard_kv_heads: bool = key(True, "false = key/value heads need not divide over tensor: replicated in groups")
    context_parallel_strategy: Literal["all_gather", "ring", "ulysses"] = key(
        "all_gather", "how split rows attend: gather all keys, pass them round, or exchange rows for heads"
    )
    context_parallel_load_balance: bool = key(
        True, "give each shard an early and a late part of the row (not for ulysses)"
    )
    auto_plan: bool = key(False, "choose mesh, microbatches and remat policy by forecast; what is set by hand stays")
    num_layers_per_pipeline_stage: SizeOrMinusOne = key(
        -1, "layers of a stage in a repeat; -1 = as num_pipeline_repeats asks, or one layer pattern"
    )
    num_pipeline_repeats: SizeOrMinusOne = key(
        -1, "how often a microbatch passes all stages; -1 = as the layers ask; between slices once"
    )
    pipeline_parallel_layers: SizeOrMinusOne = key(
        -1, "layers that are pipelined, the rest follow; -1 = all of the largest segment"
    )
    pipeline_pad_layers: bool = key(False, "fill uneven stages with empty layers, which compute and change nothing")
    num_pipeline_microbatches: SizeOrMinusOne = key(
        -1, "microbatches of the pipeline, a multiple of its stages; -1 = one each"
    )
    num_slices: SizeOrMinusOne = key(-1, "slices; -1 = as many as there are")
    logical_axis_rules: Texts = key(
        (), "rows dim=axis+axis in place of the planner's, such as embed=fsdp; dim= keeps a dim whole"
    )
    shard_optimizer_over_data: bool = key(
        False, "split the state of the optimizer, not the parameters, over the data axis too (ZeRO-1)"
    )


class Memory(Group):
    title = "memory"
    remat_policy: RematPolicy = key("none", "what the backward pass computes again; custom = as the next keys say")
    decoder_layer_input: Place = key("device", "custom: the input of each layer; offload = in the host's memory")
    query_proj: Place = key("remat", "custom: queries as they are projected")
    key_proj: Place = key("remat", "custom: keys, likewise")
    value_proj: Place = key("remat", "custom: values, likewise")
    query_wa_proj: Place = key("remat", "custom, mla: compressed queries")
    kv_wa_proj: Place = key("remat", "custom, mla: compressed keys and values")
    kv_proj: Place = key("remat", "custom, mla: keys and values of all heads")
    context: Place = key("remat", "custom: the output of attention, before its projection")
    out_proj: Place = key("remat", "custom: the same after its projection")
    mlpwi_0: Place = key("remat", "custom: the first branch of the feed-forward, before its activation")
    mlpwi_1: Place = key("remat", "custom: its second branch")
    mlpwo: Place = key("remat", "custom: the output of the feed-forward")
    moe_mlpwi_0: Place = key("remat", "custom: the first branch of the experts")
    moe_mlpwi_1: Place = key("remat", "custom: their second branch")
    moe_mlpwo: Place = key("remat", "custom: the output of the experts")
    scan_layers: bool | None = key(
        None, "loop over one compiled layer; false = unroll, same result; none = unroll up to 4 layers"
    )
    num_vocab_tiling: Size = key(1, "chunks of the vocabulary in the loss; must divide vocab_size")


class Batch(Group):
    title = "batch"
    per_device_batch_size: Positive = key(16.0, "rows per device and microbatch; may be a fraction")
    global_batch_size: Count = key(0, "rows of one optimizer step on all devices; 0 = from per_device_batch_size")
    eval_per_device_batch_size: NonNegative = key(0.0, "the same for evaluation; 0 = the rows of a training microbatch")
    gradient_accumulation_steps: Size = key(1, "microbatches of one optimizer step")
    max_target_length: int = key(128, "tokens of one row", ge=2)


class Optimizer(Group):
    title = "optimizer"
    opt_type: Literal["adamw", "sgd"] = key("adamw", "the optimizer")
    learning_rate: NonNegative = key(3e-3, "the peak of the schedule")
    lr_schedule_type: Literal["cosine", "wsd", "constant"] = key("cosine", "shape after warmup; wsd = stay, then decay")
    warmup_steps_fraction: Fraction = key(0.1, "part of the schedule that rises from 0 to the peak")
    learning_rate_final_fraction: Fraction = key(0.1, "last learning rate over peak")
    learning_rate_schedule_steps: SizeOrMinusOne = key(-1, "length of the schedule; -1 = steps")
    wsd_decay_steps_fraction: Fraction = key(0.1, "wsd: part of the schedule that decays")
    wsd_decay_style: Literal["linear", "cosine"] = key("linear", "wsd: shape of the decay")
    adam_b1: Decay = key(0.9, "decay of the first moment")
    adam_b2: Decay = key(0.95, "decay of the second moment")
    adam_eps: NonNegative = key(1e-8, "added to the root of the second moment")
    adam_eps_root: NonNegative = key(0.0, "added under the root")
    adam_weight_decay: NonNegative = key(0.1, "decoupled weight decay, on matrices only")
    gradient_clipping_threshold: NonNegative = key(1.0, "limit on the global norm of the gradient; 0 = off")
    z_loss_multiplier: NonNegative = key(0.0, "weight of the square of log Z in the loss; 0 = off")
    dropout_rate: Decay = key(0.0, "share of the embedding and of each sublayer's output that training drops; 0 = off")


class Checkpoint(Group):
    title = "checkpoint"
    enable_checkpointing: bool = key(True, "save and resume")
    load_parameters_path: str = key("", "weights of a fresh run: of a run, a step, a Hugging Face folder, a GGUF file")
    load_full_state_path: str = key("", "everything of a run or a step, to go on from in this run; it counts its steps")
    async_checkpointing: bool = key(True, "write in the background while training goes on")
    checkpoint_period: Size = key(200, "steps between saves")
    save_checkpoint_on_completion: bool = key(True, "save after the last step")
    max_num_checkpoints_to_keep: int | None = key(
        3, "older ones are deleted once a newer is verified; none = all", ge=1
    )
    checkpoint_keep_period: Count = key(0, "but those after a multiple of so many steps are kept for good; 0 = none")
    enable_emergency_checkpoint: bool = key(False, "also save on each node, often; the newest of both is resumed from")
    local_checkpoint_directory: str = key("", "where on each node: a folder of its disk, or below /dev/shm")
    local_checkpoint_period: Count = key(0, "steps between saves there")


class EvalAndMetrics(Group):
    title = "eval and metrics"
    eval_interval: SizeOrMinusOne = key(-1, "steps between evaluations; -1 = only at the end")
    eval_steps: SizeOrMinusOne = key(-1, "batches of one evaluation; -1 = the whole eval split")
    log_period: Size = key(10, "print every log_period-th step; metrics.jsonl gets every one")
    metrics_file: str = key("", "write the metrics also here, one JSON object a line")
    abort_on_nan_loss: bool = key(True, "stop at the first NaN in the loss")
    abort_on_inf_loss: bool = key(True, "stop at the first infinity in the loss")
    profiler: Literal["", "xplane"] = key("", 'xplane = record a trace into the run folder; "" = off')
    skip_first_n_steps_for_profiler: Count = key(1, "steps before the trace")
    profiler_steps: Size = key(5, "steps in the trace")


class Sample(Group):
    title = "sample"
    prompt: str = key("It is a truth", "the beginning of the text that is generated at the end")
    sample_length: Count = key(200, "tokens to generate; 0 = none")
    decode_sampling_temperature: NonNegative = key(0.8, "of the second sample (the first is greedy); 0 = greedy")


GROUPS: tuple[type[Group], ...] = (
    Run, Processes, Architecture, Precision, Mesh, Memory, Batch, Data, Optimizer, Checkpoint, EvalAndMetrics, Sample,
)  # fmt: skip


class Schema(
    Sample, EvalAndMetrics, Checkpoint, Optimizer, Data, Batch, Memory, Mesh, Precision, Architecture, Processes, Run
):  # pydantic orders fields from the last base to the first
    """All keys as they were written, each by itself valid; relations are checked by `rules`."""

    title = "all"


ARCHITECTURE = frozenset(Architecture.model_fields)
TRAINING = (*Optimizer.model_fields, *Precision.model_fields)
"""What a step does with a model and a batch."""
