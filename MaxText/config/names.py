"""What to say to a person who types a name that is no key: nearest names, other words, known keys not offered."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping

SYNONYMS = {
    "batch_size": "per_device_batch_size",
    "d_ff": "base_mlp_dim",
    "d_model": "base_emb_dim",
    "epochs": "num_epoch",
    "grad_accum": "gradient_accumulation_steps",
    "grad_clip": "gradient_clipping_threshold",
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "lr": "learning_rate",
    "max_grad_norm": "gradient_clipping_threshold",
    "max_iters": "steps",
    "max_steps": "steps",
    "model": "model_name",
    "n_embd": "base_emb_dim",
    "n_head": "base_num_query_heads",
    "n_layer": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_heads": "base_num_query_heads",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_key_value_heads": "base_num_kv_heads",
    "num_layers": "base_num_decoder_layers",
    "optimizer": "opt_type",
    "output_dir": "base_output_directory",
    "rms_norm_eps": "normalization_layer_epsilon",
    "rope_theta": "rope_max_timescale",
    "save_interval": "checkpoint_period",
    "seed": "init_weights_seed",
    "seq_len": "max_target_length",
    "sequence_length": "max_target_length",
    "tie_word_embeddings": "logits_via_embedding",
    "warmup_steps": "warmup_steps_fraction",
    "weight_decay": "adam_weight_decay",
}

_BY_SENTENCE: dict[str, str] = {
    # run
    "the planner makes the table from logical to mesh axes itself; set the ici_* and dcn_* degrees": """
        override_logical_axis_rules mesh_axes data_sharding input_data_sharding_logical_axes
        custom_mesh_and_rule custom_mesh context_sharding""",
    "processes find each other by themselves; leave it out": """
        skip_jax_distributed_system""",
    "start one process per host": "enable_single_controller colocated_python_data_input",
    "use dataset_type=synthetic for a run without input": "reuse_example_batch",
    "use plan_only=true to see how each tensor is sharded": "debug_sharding",
    "token ids are always checked and a non-finite loss stops the run (abort_on_nan_loss)": "max_checkify",
    # architecture
    "dropout_rate alone decides; leave it out": "enable_dropout",
    "the output projection is as wide as base_emb_dim": "attention_output_dim",
    "the embedding chooses its lookup itself": "use_iota_embed",
    "positions are rope's, or learned: trainable_position_size": "use_untrainable_positional_embedding",
    "projections are kept apart; leave it out": "fused_qkv fused_mlp",
    "it follows from layer_pattern, nope_layer_interval and interleave_moe_layer_step; leave it out": """
        inhomogeneous_layer_cycle_interval""",
    # attention
    "write which layer sees what with layer_pattern": "moba moba_chunk_size moba_topk",
    "attention and loss choose where float32 is needed; set dtype or matmul_precision": """
        float32_qk_product float32_logits float32_weight_sum float32_gate_logits activations_in_float32
        logits_dot_in_fp32 cast_logits_to_fp32""",
    "use indexer_loss_scaling_factor": "indexer_sparse_training",
    "use gradient_clipping_threshold or attn_logits_soft_cap": "use_qk_clip qk_clip_threshold",
    "kernels choose their tiles themselves; set attention": "sa_* local_sa_* wi_tile_* wo_tile_*",
    "set ici_context_parallelism, context_parallel_strategy and context_parallel_load_balance": """
        context_parallel_reorder_strategy context_parallel_size""",
    # experts
    "experts are multiplied group by group without dropping, unless capacity_factor is above 0": """
        sparse_matmul megablox use_tokamax_gmm use_gmm_v2 num_moe_token_chunks
        num_moe_emb_chunks""",
    "use dataset_type=synthetic for a run that measures speed": "use_random_routing",
    "how experts are sharded follows from the ici degrees": """
        use_ring_of_experts shard_exp_on_fsdp use_2d_fsdp_sharding moe_fsdp_use_two_stage_all_gather""",
    "the first prediction is the one that is evaluated": "mtp_eval_target_module",
    # precision, mesh, memory
    "use dtype=bfloat16": "quantization use_qwix_quantization *_quantization_calibration_method",
    "the sequence is split by ici_context_parallelism, dcn_context_parallelism": """
        ici_sequence_parallelism dcn_sequence_parallelism""",
    "use ici_context_parallelism with context_parallel_strategy=ulysses": """
        ici_context_usp_ulysses_parallelism dcn_context_usp_ulysses_parallelism""",
    "the mesh has no such axis; use data, fsdp, fsdp_transpose or tensor": """
        ici_diloco_parallelism
        ici_context_autoregressive_parallelism ici_tensor_sequence_parallelism ici_autoregressive_parallelism
        dcn_diloco_parallelism
        dcn_context_autoregressive_parallelism dcn_tensor_sequence_parallelism dcn_autoregressive_parallelism""",
    "the order of devices is the planner's; leave it out": "allow_split_physical_axes optimize_mesh_for_tpu_v6e",
    "sharding is always explicit (Shardy); leave it out": "shard_mode shardy",
    "the planner refuses what it cannot shard; plan_only=true shows it": "sharding_tolerance",
    "a pipeline scans its iterations, gathers weights in each, and keeps what remat_policy says": """
        pipeline_delay_activation_forwarding pipeline_fsdp_* scan_pipeline_* scan_layers_per_stage
        set_remat_policy_on_*""",
    "of a feed-forward with one branch use mlpwi_0": "mlpwi",
    "projections are kept apart: query_proj, key_proj, value_proj": "qkv_proj",
    "use query_proj and kv_proj": "mla_q mla_kv",
    "use context": "attention_out",
    "use remat_policy": "engram remat_policy_for_vit",
    "parameters and optimizer stay on the device; shard more (ici_fsdp_parallelism), or offload activations": """
        optimizer_memory_host_offload parameter_memory_host_offload""",
    "use scan_layers": "param_scan_axis force_unroll",
    "use num_vocab_tiling": "vocab_tiling_ag_once",
    # data
    "the batch has one size for the whole run: per_device_batch_size or global_batch_size": """
        enable_rampup_batch_size per_device_batch_size_start per_device_batch_size_increment global_rampup_samples""",
    "every host reads its own rows; leave it out": "expansion_factor_real_data",
    "set the variable HF_TOKEN: a key would be written into the run folder": "hf_access_token",
    "use packing_type": "grain_packing_type max_segments_per_seq",
    "the reader has no buffers or workers to set; leave it out": """
        grain_worker_count grain_*_worker_count grain_*_buffer_size grain_num_threads grain_ram_budget_mb
        grain_data_source_max_workers grain_use_elastic_iterator""",
    "a tokenizer is trained by `python -m MaxText tokenizer train`": "max_corpus_chars",
    "long documents are always cut into chunks, never truncated": "use_truncation",
    # optimizer
    "decay falls on matrices, not on norms; set adam_weight_decay": "adamw_mask",
    "all parameters are trained; leave it out": "trainable_parameters_mask",
    "opt_type is adamw or sgd": "muon_*",
    "use gradient_clipping_threshold": "skip_step_*",
    "use dcn_data_parallelism": "enable_diloco diloco_* num_diloco_replicas",
    "use learning_rate_final_fraction": "cosine_learning_rate_final_fraction",
    # checkpoint
    "use checkpoint_period": """
        save_checkpoint_on_start enable_continuous_checkpointing""",
    "use enable_emergency_checkpoint, local_checkpoint_directory and local_checkpoint_period": """
        enable_multi_tier_checkpointing multi_tier_checkpointing_* mtc_data_parallelism""",
    "a signal always saves before the run stops": "enable_autocheckpoint",
    "storage has no settings; leave it out": """
        checkpoint_storage_* enable_single_replica_ckpt_restoring enable_checkpoint_cloud_logger""",
    "use max_num_checkpoints_to_keep": "checkpoint_todelete_*",
    # eval, metrics, goodput, profiling, ahead-of-time
    "use eval_interval and eval_steps": "eval_start_step target_eval_loss",
    "metrics are written to metrics.jsonl; add a copy with metrics_file": """
        enable_tensorboard enable_wandb wandb_* gcs_metrics record_internal_nn_metrics tensorboard_dir metrics_dir
        report_* write_estimator_result""",
    "goodput is always recorded; `python -m MaxText goodput RUN` prints it": """
        enable_goodput_recording monitor_goodput goodput_* enable_pathways_goodput monitor_step_time_deviation
        step_deviation_interval_seconds""",
    "use profiler, skip_first_n_steps_for_profiler and profiler_steps": """
        profile_periodically_period upload_all_profiler_results profile_cleanly""",
    "use XLA_FLAGS=--xla_dump_to=FOLDER": "dump_hlo* dump_step dump_jaxpr",
    "use plan_only=true to see what a run needs without its devices": """
        compile_topology compile_topology_num_slices compiled_trainstep_file internal_compile*""",
    "use the variable XLA_FLAGS": "compile_xla_flags",
    "the same command continues a run on the devices that are there": "elastic_*",
    # computed
    "it is computed: per_device_batch_size x devices x gradient_accumulation_steps, or set global_batch_size": """
        global_batch_size_to_train_on micro_batch_size_to_train_on global_batch_size_to_load
        global_batch_size_to_eval_on""",
    "it is computed from the devices and the mesh": "num_target_devices ici_parallelism dcn_parallelism",
    "it is computed from base_output_directory and run_name": "checkpoint_dir",
    "it never had an effect; leave it out": """
        enable_llm_inference_pool enable_padding_causal_mask max_inflight_computations""",
}

# A model file in MaxText's vocabulary may hold these: they say nothing about the function of the text decoder.
NOT_THE_MODEL = [
    "*_for_vit",
    "vision_*",
    "image_placeholder*",
    "use_multimodal",
    "use_bidirectional_image_attn",
    "ple_pad_*",
    "use_clipped_linears_for_vit",
    "enable_dropout",
    "use_iota_embed",
    "fused_qkv",
    "fused_mlp",
    "inhomogeneous_layer_cycle_interval",
    "float32_*",
    "activations_in_float32",
    "logits_dot_in_fp32",
    "cast_logits_to_fp32",
    "sparse_matmul",
    "megablox",
    "tokenizer_type",
    "tokenizer_path",
    "scan_layers",
]

# These it may hold although they are a run's: MaxText's files of GPT-3 do.
OF_THE_RUN = {
    "opt_type",
    "adam_b1",
    "adam_b2",
    "adam_eps",
    "adam_weight_decay",
    "gradient_clipping_threshold",
    "max_target_length",
}
SAME_VALUE = {"adam_pax": "adamw"}  # Pax writes Adam's bias correction otherwise; the numbers are the same

NOT_OFFERED: dict[str, str] = {name: text for text, names in _BY_SENTENCE.items() for name in names.split()}
"""Keys that people know from other versions (patterns with `*`) → one sentence: what to do instead."""


def not_offered(name: str) -> str | None:
    """The sentence for a known key that is not offered; None for an unknown name."""
    if name in NOT_OFFERED:
        return NOT_OFFERED[name]
    return next((text for pattern, text in NOT_OFFERED.items() if fnmatch.fnmatchcase(name, pattern)), None)


def beside_the_model(name: str) -> bool:
    """Whether a model file may hold this name without effect: vision, storage, number formats, tokenizer."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_THE_MODEL)


def nearest(name: str, keys: Mapping[str, object], cutoff: float = 0.6) -> list[str]:
    """Up to three keys that the person may have meant, the likeliest first."""
    lower = name.lower().replace("-", "_")
    if lower in keys:
        return [lower]
    if lower in SYNONYMS:
        return [SYNONYMS[lower]]
    return difflib.get_close_matches(lower, list(keys), n=3, cutoff=cutoff)
