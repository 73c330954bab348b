"""The goldens check what they seem to: by the plain decoder of `naive`, which needs no compiler, every feature switched
off alone, and every norm, bias, sink and scale made neutral alone, is seen in the reference's logits.

A feature is switched off in the configuration; parameters that remain keep their values, those that another
configuration has more are drawn, so that nothing fails merely because it no longer fits."""

from __future__ import annotations

import functools

import naive
import numpy as np
import pytest

from MaxText import architecture, blueprint, config, decoder
from MaxText.convert.weights import pieces
from tests.convert.helpers import FAMILIES, golden, source

SEEN = 3e-3  # of the largest logit: thirty times what float32 may differ by

# (family, feature, how it is switched off or changed)
FEATURES = [
    ("gemma", "one key/value head, of all", {"base_num_kv_heads": 4}),
    ("llama", "grouped queries", {"base_num_kv_heads": 1}),
    ("deepseek_v3", "compressed queries", {"q_lora_rank": 0}),
    ("deepseek_v3", "rope on a part of the head", {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6}),
    ("deepseek_v3", "interleaved rope", {"rope_interleave": False}),
    ("deepseek_v2", "logits grow with the length", {"mscale": 0.0}),
    ("mistral", "window", {"attention_type": "global", "sliding_window_size": 0}),
    ("mistral", "its size", {"sliding_window_size": 7}),
    ("llama4", "chunks", {"layer_pattern": [], "chunk_attn_window_size": 0}),
    ("llama4", "their size", {"chunk_attn_window_size": 12}),
    ("gemma2", "alternating layers", {"layer_pattern": ["global", "local_sliding"]}),
    ("gpt_oss", "alternating layers", {"layer_pattern": ["global", "local_sliding"]}),
    ("gpt_oss", "sinks", {"attention_sink": False}),
    ("gemma2", "cap on attention", {"attn_logits_soft_cap": 0.0}),
    ("gemma2", "cap on logits", {"final_logits_soft_cap": 0.0}),
    ("gemma2", "query scale", {"query_pre_attn_scalar": 0.0}),
    ("qwen3", "norm of queries and keys", {"use_qk_norm": False}),
    ("qwen3", "by head", {"qk_norm_type": "projection"}),
    ("olmo2", "by projection", {"qk_norm_type": "head"}),
    ("llama4", "l2 norm of queries and keys", {"use_qk_norm": False}),
    ("gemma4", "norm of values", {"use_v_norm": False}),
    ("gemma4", "values are keys", {"share_kv_projections": False}),
    ("gemma4", "other heads in global layers", {"global_head_dim": 0}),
    ("gemma4", "other key/value heads there", {"global_num_kv_heads": 0}),
    ("gemma4", "output scale", {"layer_output_scale": False}),
    ("gemma4", "dense beside experts", {"parallel_dense_mlp": False}),
    ("gemma4", "the router reads a normed stream", {"router_input_norm": False}),
    ("gemma4", "scale by expert", {"router_expert_scale": False}),
    ("gemma4", "part of the frequencies", {"global_rope_proportion": 1.0}),
    ("gemma4_small", "shared keys", {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}),
    ("gemma4_small", "wider where shared", {"use_double_wide_mlp": False}),
    ("gemma4_small", "an embedding for each layer", {"hidden_size_per_layer_input": 0}),
    ("llama", "stretched as Llama 3.1", {"rope_type": "default"}),
    ("ministral3", "stretched as YaRN", {"rope_type": "default"}),
    ("gemma3", "stretched linearly", {"rope_linear_scaling_factor": 1.0}),
    ("gemma3", "in global layers only", {"rope_scaling_layers": "all"}),
    ("gemma3", "theta of local layers", {"local_rope_max_timescale": -1}),
    ("gpt_oss", "sine and cosine grow", {"rope_attention_scaling": False}),
    ("gpt_oss", "borders not rounded", {"rope_truncate": True}),
    ("kimi_k2", "border of YaRN", {"beta_fast": 4.0}),
    ("gpt2", "learned positions", {"trainable_position_size": -1}),
    ("gpt2", "LayerNorm", {"norm_type": "rms"}),
    ("gpt2", "plain feed-forward", {"mlp_activations": ["gelu", "linear"]}),
    ("llama4", "layers without rope", {"nope_layer_interval": -1}),
    ("llama4", "temperature", {"temperature_tuning": False}),
    ("ministral3", "temperature in all layers", {"temperature_tuning_layers": "nope"}),
    ("olmo2", "no norm before", {"use_pre_norm": True}),
    ("gemma2", "norm after attention", {"use_post_attn_norm": False}),
    ("gemma2", "norm after feed-forward", {"use_post_ffw_norm": False}),
    ("gemma", "norms times 1 + weight", {"norm_unit_offset": False}),
    ("gemma", "scaled embedding", {"scale_embedding": False}),
    ("gemma", "tied logits not divided", {"normalize_embedding_logits": True}),
    ("gemma", "tied embedding", {"logits_via_embedding": False}),
    ("gemma", "activation", {"mlp_activations": ["silu", "linear"]}),
    ("qwen2", "biases of attention", {"attention_bias": False}),
    ("gpt2", "bias of its output", {"attention_out_bias": False}),
    ("gpt2", "biases of the feed-forward", {"mlp_bias": False}),
    ("gpt_oss", "biases of experts", {"mlp_bias": False}),
    ("gpt_oss", "bias of the router", {"routed_bias": False}),
    ("gpt_oss", "x sigmoid(1.7 x), and 1 more", {"swiglu_alpha": 0.0}),
    ("gpt_oss", "clamp", {"mlp_activations_limit": -1.0}),
    ("deepseek_v2", "shared experts", {"shared_experts": 0}),
    ("deepseek_v3", "first layers dense", {"first_num_dense_layers": 0}),
    ("llama4", "every second layer has experts", {"interleave_moe_layer_step": 1}),
    ("llama4", "the input of experts is scaled", {"scale_expert_input": False}),
    ("mixtral", "two experts", {"num_experts_per_tok": 1}),
    ("deepseek_v3", "sigmoid scores", {"routed_score_func": "softmax"}),
    ("deepseek_v2", "softmax scores", {"routed_score_func": "sigmoid"}),
    ("deepseek_v3", "groups", {"n_routing_groups": -1, "topk_routing_group": -1}),
    ("deepseek_v3", "score of a group", {"routing_group_score": "max"}),
    ("deepseek_v2", "groups", {"n_routing_groups": -1, "topk_routing_group": -1}),
    ("deepseek_v3", "normalised weights", {"norm_sigmoid_scores": False}),
    ("qwen3_moe", "normalised weights", {"norm_topk_prob": False}),
    ("kimi_k2", "scaled weights", {"routed_scaling_factor": 1.0}),
    ("deepseek_v3", "correction bias", {"routed_bias": False}),
    ("deepseek_v32", "indexer", {"use_indexer": False}),
    ("deepseek_v32", "keys that it chooses", {"indexer_topk": 4}),
]


@functools.cache
def parameters(family: str):
    """The golden's weights, float64."""
    found = source(family)

    def read(path, param):
        parts = [found.weights.read(path, index).astype(np.float64) for index in pieces(param)]
        return parts[0] if pieces(param) == [None] else np.stack(parts)

    return blueprint.map_params(read, found.tree)


def logits(family: str, cfg, params, document: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(ours, the reference's) of one document."""
    expected = golden(family)
    ids = expected[f"tokens_{document}"]
    ours = naive.logits(cfg, params, ids, np.arange(len(ids)), np.ones_like(ids))
    return ours, expected[f"logits_{document}"]


def error(family: str, cfg, params, document: int = 0) -> float:
    """Largest difference, over the largest logit."""
    ours, theirs = logits(family, cfg, params, document)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def refitted(cfg, params, changed):
    """The parameters for a changed configuration: layer by layer those of the same name and shape, others drawn."""
    rng = np.random.default_rng(0)
    tree, layers = decoder.declare(changed), naive.layer_params(cfg, params)

    def keep(wanted, old):
        if isinstance(wanted, dict):
            return {name: keep(part, old.get(name) if isinstance(old, dict) else None) for name, part in wanted.items()}
        if isinstance(old, np.ndarray | np.floating) and np.shape(old) == wanted.shape:
            return old
        start = {"ones": 1.0, "zeros": 0.0}.get(wanted.init.law, 0.0)
        return start + rng.normal(0.0, wanted.init.std or 0.3, wanted.shape)

    def one(param):  # of a stack, one layer
        return blueprint.Param(param.shape[1:], param.axes[1:], param.init, param.kind)

    fitted = keep({name: part for name, part in tree.items() if name != "decoder"}, params)
    fitted["decoder"] = {}
    for segment in architecture.segments(changed):
        stacks = {str(i): [] for i in range(len(segment.pattern))}
        for repeat in range(segment.repeats):
            for i in range(len(segment.pattern)):
                number = segment.first + repeat * len(segment.pattern) + i
                declared = blueprint.map_params(lambda _, p: one(p), tree["decoder"][segment.name][str(i)])
                stacks[str(i)].append(keep(declared, layers[number]))
        fitted["decoder"][segment.name] = {i: stacked(parts) for i, parts in stacks.items()}
    return fitted


def stacked(parts):
    if isinstance(parts[0], dict):
        return {name: stacked([part[name] for part in parts]) for name in parts[0]}
    return np.stack(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_decoder_computes_the_golden(family):
    cfg = source(family).cfg
    assert error(family, cfg, parameters(family)) < 1e-4
    assert error(family, cfg, refitted(cfg, parameters(family), cfg), document=2) < 1e-4


@pytest.mark.parametrize(("family", "feature", "change"), FEATURES, ids=[f"{f}: {name}" for f, name, _ in FEATURES])
def test_a_feature_switched_off_is_seen(family, feature, change):
    cfg = source(family).cfg
    changed = config.make(**source(family).recipe | {"dtype": "float32", "weight_dtype": "float32"} | change)
    assert error(family, changed, refitted(cfg, parameters(family), changed)) > SEEN


# A bias of keys adds the same to all scores of a query, which softmax takes out again; but for rope, which turns it.
WITHOUT_EFFECT = [("gpt2", "attention/key_bias")]


def gentle(family: str) -> list[str]:
    """Names of parameters that start at one or zero, without layer and segment."""
    names = {}
    for path, param in blueprint.leaves(source(family).tree):
        if param.init.law in ("ones", "zeros") or param.kind == "bias":
            names.setdefault(path.split("/", 3)[-1] if path.startswith("decoder/") else path, None)
    return list(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gentle_parameter_is_hot_and_matters(family):
    """Norms, biases, sinks, scales and correction biases: one kind at a time at its gentle start."""
    found, params = source(family), parameters(family)
    for name in gentle(family):
        if (family, name) in WITHOUT_EFFECT:
            continue

        def start(path, param, name=name):
            value = params
            for part in path.split("/"):
                value = value[part]
            hit = path == name or path.endswith(f"/{name}")
            return np.full(param.shape, 1.0 if param.init.law == "ones" else 0.0) if hit else value

        neutral = blueprint.map_params(start, found.tree)
        assert max(error(family, found.cfg, neutral, document) for document in (2, 0)) > SEEN, name
