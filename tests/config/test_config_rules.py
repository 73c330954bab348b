"""Each rule refuses what it should, by id, and lets the neighbour pass."""

import pytest

from MaxText import config
from MaxText.config.rules import RULES

LOCAL = {
    "enable_emergency_checkpoint": True,
    "local_checkpoint_directory": "/dev/shm/c",
    "local_checkpoint_period": 5,
}
BROKEN = {
    "config.run-name": [{"run_name": name} for name in ("..", "a/b", "a\\b", "a\nb", " a", "-a", "~", "é" * 200)],
    "config.output-directory": [{"base_output_directory": path} for path in ("", "gs://bucket/runs", "a\0b")],
    "config.metrics-file": [{"metrics_file": path} for path in ("out/", "s3://bucket/m.jsonl", "a\nb")],
    "config.steps": [{"steps": -1, "learning_rate_schedule_steps": -1}, {"steps": -1}],
    "config.resume-without-checkpoints": [{"start": "resume", "enable_checkpointing": False}],
    "config.local-checkpoints": [
        {"local_checkpoint_period": 5},
        {"local_checkpoint_directory": "/dev/shm/c"},
        {"enable_emergency_checkpoint": True, "local_checkpoint_period": 5},
        {"enable_emergency_checkpoint": True, "local_checkpoint_directory": "/dev/shm/c"},
        LOCAL | {"checkpoint_period": 5},
        LOCAL | {"enable_checkpointing": False},
        LOCAL | {"local_checkpoint_directory": "gs://bucket/c"},
    ],
    "config.cpu-devices": [{"num_cpu_devices": 8, "hardware": "gpu"}],
    "config.scale": [{"global_parameter_scale": scale} for scale in (3, 6, 12, 1000)],
    "config.heads": [{"base_num_query_heads": 16, "base_num_kv_heads": 5}, {"base_num_kv_heads": 8}],
    "config.head-dim": [{"head_dim": 33}, {"head_dim": 1}],
    "config.rope": [{"rope_max_timescale": 1}, {"rope_min_timescale": 20_000}],
    "config.window": [
        {"sliding_window_size": 8},
        {"layer_pattern": ["local_sliding", "global"]},
        {"attention_type": "local_sliding"},
    ],
    "config.chunk": [{"chunk_attn_window_size": 8}, {"layer_pattern": ["chunk"]}],
    "config.pattern": [{"layer_pattern": ["global"], "attention_type": "mla"}],
    "config.latent": [
        {"attention_type": "mla", "use_qk_norm": True},
        {"attention_type": "mla", "attention_sink": True},
        {"attention_type": "mla", "num_kv_shared_layers": 1},
    ],
    "config.flash": [
        {"attention": "flash", "max_target_length": 200},
        {"attention": "flash", "max_target_length": 64},
    ],
    "config.indexer": [
        {"use_indexer": True},
        {"use_indexer": True, "attention_type": "mla"},
        {"use_indexer": True, "attention_type": "mla", "q_lora_rank": 8, "indexer_head_dim": 32},
    ],
    "config.rotary-part": [{"partial_rotary_factor": 0.2}],
    "config.latent-rope": [{"qk_rope_head_dim": 63}],
    "config.global-heads": [{"global_num_kv_heads": 3}, {"global_head_dim": 33}],
    "config.kv-sharing": [{"num_kv_shared_layers": 4}],
    "config.double-wide": [{"use_double_wide_mlp": True}],
    "config.layer-embedding": [{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 287}],
    "config.gate": [{"swiglu_alpha": 1.7, "mlp_activations": ["gelu"]}],
    "config.experts-per-token": [{"num_experts": 4, "num_experts_per_tok": 5}],
    "config.expert-groups": [
        {"num_experts": 8, "n_routing_groups": 3, "topk_routing_group": 1},
        {"num_experts": 8, "n_routing_groups": 4},
        {"num_experts": 8, "n_routing_groups": 4, "topk_routing_group": 5},
        {"num_experts": 8, "num_experts_per_tok": 4, "n_routing_groups": 4, "topk_routing_group": 1},
    ],
    "config.no-experts": [{"shared_experts": 1}, {"first_num_dense_layers": 1}],
    "config.dense-layers": [{"num_experts": 4, "interleave_moe_layer_step": 5}],
    "config.balance": [{"num_experts": 4, "routed_bias_update_rate": 0.1}],
    "config.capacity": [{"capacity_factor": 0.0}, {"capacity_factor": -2.0}],
    "config.buffer": [{"ragged_buffer_factor": 0.0}, {"ragged_buffer_factor": -2.0}],
    "config.remat-places": [
        {"query_proj": "device"},
        {"decoder_layer_input": "offload", "remat_policy": "full"},
        {"decoder_layer_input": "remat", "remat_policy": "custom"},
    ],
    "config.vocab-tiling": [{"num_vocab_tiling": 5}, {"num_vocab_tiling": 289}],
    "config.ici-fill": [{"ici_data_parallelism": -1}, {"ici_tensor_parallelism": -1, "ici_expert_parallelism": -1}],
    "config.dcn-fill": [{"dcn_fsdp_parallelism": -1}],
    "config.slices": [
        {"num_slices": 4, "dcn_data_parallelism": 2},
        {"num_slices": 4, "dcn_tensor_parallelism": 3},
        {"num_slices": 2, "dcn_data_parallelism": 1},
    ],
    "config.accumulation": [{"global_batch_size": 10, "gradient_accumulation_steps": 4}],
    "config.train-files": [{"train_files": []}],
    "config.empty-file-name": [{"train_files": ["a.txt", " "]}, {"eval_files": [""]}],
    "config.eval-files": [{"eval_files": [], "eval_interval": 10}],
    "config.tokenizer-path": [{"tokenizer_path": "tokenizer.json"}, {"tokenizer_type": "sentencepiece"}],
    "config.data-source": [
        {"dataset_type": "tfds"},
        {"dataset_type": "hf"},
        {"dataset_type": "prepared"},
        {"dataset_type": "grain"},
        {"dataset_type": "grain", "grain_train_files": "a", "grain_train_mixture_config_path": "b"},
    ],
    "config.data-type": [
        {"hf_path": "json"},
        {"dataset_path": "rows"},
        {"dataset_type": "hf", "hf_path": "json", "grain_eval_files": "a"},
        {"dataset_type": "grain", "grain_train_files": "a", "dataset_name": "c4"},
    ],
    "config.data-columns": [{"train_data_columns": []}, {"eval_data_columns": ["a", "b"]}],
    "config.mixture": [
        {"mixture_schedule": ["10:1"]},
        {"train_files": ["a", "b"], "mixture_weights": [1]},
        {"train_files": ["a", "b"], "mixture_weights": [0.7, 0.2]},
        {"train_files": ["a", "b"], "mixture_weights": [1.5, -0.5]},
        {"train_files": ["a", "b"], "mixture_weights": [0.5, 0.5], "mixture_schedule": ["10:0.5/0.6"]},
        {"train_files": ["a", "b"], "mixture_weights": [0.5, 0.5], "mixture_schedule": ["ten:0.5/0.5"]},
        {"train_files": ["a", "b"], "mixture_weights": [0.5, 0.5], "mixture_schedule": ["9:1/0", "8:0/1"]},
        {"dataset_type": "grain", "grain_train_files": "a", "mixture_weights": [1]},
    ],
    "config.streaming": [
        {"dataset_type": "hf", "hf_path": "json", "hf_streaming": True, "packing_type": "best_fit"},
        {"dataset_type": "hf", "hf_path": "json", "hf_streaming": True, "held_out_every": 10},
        {"dataset_type": "hf", "hf_path": "json", "hf_streaming": True, "quarantine": ["a"]},
    ],
    "config.schedule-fractions": [
        {"lr_schedule_type": "wsd", "warmup_steps_fraction": 0.5, "wsd_decay_steps_fraction": 0.6}
    ],
    "config.profiler-window": [{"profiler": "xplane", "steps": 5}],
    "config.two-beginnings": [{"load_parameters_path": "a", "load_full_state_path": "b"}],
    "config.keep-period": [{"checkpoint_period": 200, "checkpoint_keep_period": 300}],
}
LEGAL = [
    {"checkpoint_period": 100, "checkpoint_keep_period": 300},
    LOCAL | {"checkpoint_period": 6},
    {},
    {"run_name": "my run-1.β"},
    {"steps": -1, "learning_rate_schedule_steps": 7},
    {"steps": 7, "learning_rate_schedule_steps": -1},
    {"start": "resume"},
    {"num_cpu_devices": 8, "hardware": "cpu"},
    {"global_parameter_scale": 4},
    {"base_num_query_heads": 16, "base_num_kv_heads": 4},
    {"num_vocab_tiling": 4},
    {"layer_pattern": ["local_sliding", "global"], "sliding_window_size": 8},
    {"attention_type": "mla", "q_lora_rank": 8, "use_indexer": True},
    {"num_experts": 8, "num_experts_per_tok": 2, "n_routing_groups": 4, "topk_routing_group": 1},
    {"num_experts": 8, "routed_bias": True, "routed_score_func": "sigmoid", "routed_bias_update_rate": 0.1},
    {"ici_data_parallelism": -1, "ici_fsdp_parallelism": 4},
    {"num_slices": 4, "dcn_data_parallelism": 2, "dcn_fsdp_parallelism": 2},
    {"num_slices": 4, "dcn_fsdp_parallelism": 2},
    {"global_batch_size": 12, "gradient_accumulation_steps": 4},
    {"dataset_type": "synthetic", "train_files": [], "eval_files": [], "eval_interval": 5},
    {"eval_files": []},
    {"warmup_steps_fraction": 0.7, "wsd_decay_steps_fraction": 0.6},
    {"lr_schedule_type": "wsd", "warmup_steps_fraction": 0.7, "wsd_decay_steps_fraction": 0.3},
    {"profiler": "xplane", "steps": 6},
    {"dataset_type": "tfds", "dataset_name": "c4", "dataset_path": "sets", "eval_interval": 5},
    {"dataset_type": "prepared", "dataset_path": "rows", "eval_interval": 5},
    {"dataset_type": "grain", "grain_train_files": "a,0.5;b,0.5", "held_out_every": 10, "eval_interval": 5},
    {"train_files": ["a", "b"], "mixture_weights": [0.7, 0.3], "mixture_schedule": ["10:0.5/0.5", "20:1/0"]},
]


def test_every_rule_has_a_negative_test():
    assert {rule.id for rule in RULES} == set(BROKEN)


@pytest.mark.parametrize(("id", "overrides"), [(id, each) for id, several in BROKEN.items() for each in several])
def test_broken(id, overrides):
    with pytest.raises(config.InvalidConfig) as caught:
        config.make(**overrides)
    assert caught.value.ids == (id,)
    assert caught.value.exit_code == 2
    line = str(caught.value)
    assert "\n" not in line
    assert all(key in line for key, value in overrides.items() if value != 1)


@pytest.mark.parametrize("overrides", LEGAL)
def test_legal(overrides):
    config.make(**overrides)


def test_rules_read_keys_only():
    for rule in RULES:
        assert set(rule.keys) <= config.Config.model_fields.keys() - config.DERIVED.keys()
        assert rule.meaning


def test_a_rule_is_silent_about_a_key_that_is_already_wrong():
    with pytest.raises(config.InvalidConfig) as caught:
        config.make(base_num_kv_heads="many", base_num_query_heads=3)
    assert caught.value.ids == ("config.type",)


RANGES = {
    "steps": (0, -2),
    "num_cpu_devices": (-1,),
    "init_weights_seed": (-1,),
    "global_parameter_scale": (0, -2),
    "base_emb_dim": (0, -1),
    "head_dim": (0,),
    "vocab_size": (0,),
    "normalization_layer_epsilon": (0, -1e-5),
    "attn_logits_soft_cap": (-1,),
    "ici_tensor_parallelism": (0, -2),
    "dcn_data_parallelism": (0,),
    "num_vocab_tiling": (0,),
    "per_device_batch_size": (0, -1),
    "global_batch_size": (-1,),
    "eval_per_device_batch_size": (-1,),
    "gradient_accumulation_steps": (0,),
    "max_target_length": (0, 1),
    "num_epoch": (0,),
    "learning_rate": (-1,),
    "warmup_steps_fraction": (-0.1, 1.1),
    "learning_rate_schedule_steps": (0, -2),
    "adam_b1": (1, -0.1),
    "checkpoint_period": (0, -1),
    "max_num_checkpoints_to_keep": (0,),
    "eval_interval": (0, -2),
    "eval_steps": (0,),
    "log_period": (0,),
    "profiler_steps": (0,),
    "sample_length": (-1,),
    "decode_sampling_temperature": (-0.1,),
    "mlp_activations": ([], ["silu", "linear", "linear"]),
}
CHOICES = {
    "dtype": "fp16",
    "opt_type": "lion",
    "lr_schedule_type": "linear",
    "dataset_type": "csv",
    "attention": "flashy",
    "remat_policy": "foo",
    "qk_norm_type": "all",
    "layer_pattern": ["global", "mla"],
    "routed_score_func": "tanh",
    "start": "again",
    "mu_dtype": "float16",
    "mlp_activations": ["silu", "square"],
    "tokenizer_type": "words",
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in RANGES.items() for value in values])
def test_range(key, value):
    with pytest.raises(config.InvalidConfig) as caught:
        config.make(**{key: value})
    assert caught.value.ids == ("config.range",)
    assert "must be" in str(caught.value)


@pytest.mark.parametrize(("key", "value"), CHOICES.items())
def test_choice(key, value):
    with pytest.raises(config.InvalidConfig) as caught:
        config.make(**{key: value})
    assert caught.value.ids == ("config.choice",)
    assert "pydantic" not in str(caught.value) and "Input should" not in str(caught.value)
