"""The decoder again, as plainly as it can be written: NumPy, float64, one row, loops over queries, heads and experts.

Reads the keys of the config by itself and shares no code with the package but the order of the layers' parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from MaxText import architecture


def erf_free_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": erf_free_gelu,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": sigmoid,
    "linear": lambda x: x,
}


def softmax(x):
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def rms(cfg, x, weight=None):
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.normalization_layer_epsilon)
    if weight is None:
        return y
    return y * (1 + weight if cfg.norm_unit_offset else weight)


def norm(cfg, x, weight):
    if cfg.norm_type == "rms":
        return rms(cfg, x, weight)
    x = x - x.mean(-1, keepdims=True)
    return (
        x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.normalization_layer_epsilon) * weight["scale"]
        + weight["bias"]
    )


def layer_params(cfg: Any, params: Any) -> list[Any]:
    """The parameters of each layer, from the embedding up."""

    def at(tree, repeat):
        return {k: at(v, repeat) for k, v in tree.items()} if isinstance(tree, dict) else tree[repeat]

    return [
        at(params["decoder"][segment.name][str(i)], repeat)
        for segment in architecture.segments(cfg)
        for repeat in range(segment.repeats)
        for i in range(len(segment.pattern))
    ]


def kind_of(cfg, index):
    pattern = cfg.layer_pattern or (("global",) if cfg.attention_type == "mla" else (cfg.attention_type,))
    return pattern[index % len(pattern)]


def angles(cfg, kind, dim, position):
    """(cos, sin) of each pair at one position."""
    theta = cfg.rope_max_timescale
    proportion = cfg.global_rope_proportion
    if kind == "local_sliding":
        proportion = cfg.local_rope_proportion
        theta = cfg.local_rope_max_timescale if cfg.local_rope_max_timescale > 0 else theta
    elif cfg.global_rope_max_timescale > 0:
        theta = cfg.global_rope_max_timescale
    pairs, amplitude = dim // 2, 1.0
    frequency = np.array([theta ** (-2 * i / dim) if i < proportion * pairs else 0.0 for i in range(pairs)])
    stretched = cfg.rope_scaling_layers == "all" or kind == "global"
    if stretched and cfg.rope_linear_scaling_factor != 1:
        frequency = frequency / cfg.rope_linear_scaling_factor
    elif stretched and cfg.rope_type == "llama3.1" and cfg.rope_use_scale:
        factor, length = cfg.rope_factor or 8, cfg.original_max_position_embeddings or 8192
        for i, f in enumerate(frequency):
            wavelength = 2 * math.pi / f
            if wavelength > length / cfg.rope_low_freq_factor:
                frequency[i] = f / factor
            elif wavelength >= length / cfg.rope_high_freq_factor:
                low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
                smooth = (length / wavelength - low) / (high - low)
                frequency[i] = (1 - smooth) * f / factor + smooth * f
    elif stretched and cfg.rope_type == "yarn":
        factor, length = cfg.rope_factor or 40, cfg.original_max_position_embeddings or 4096

        def correction(turns):
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = correction(cfg.beta_fast), correction(cfg.beta_slow)
        if cfg.rope_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
        amplitude = 0.1 * math.log(factor) + 1 if cfg.rope_attention_scaling else 1.0
    angle = position * frequency
    return amplitude * np.cos(angle), amplitude * np.sin(angle)


def rotate(x, cos, sin, interleave):
    """x [heads, dim]; channels beyond the pairs stay."""
    out, pairs = x.copy(), len(cos)
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleave else (i, i + pairs)
        out[:, a] = x[:, a] * cos[i] - x[:, b] * sin[i]
        out[:, b] = x[:, b] * cos[i] + x[:, a] * sin[i]
    return out


def visible(cfg, kind, positions, segments, s):
    keys = [t for t in range(s + 1) if segments[t] == segments[s]]
    if kind == "local_sliding":
        keys = [t for t in keys if positions[s] - positions[t] < cfg.sliding_window_size]
    if kind == "chunk":
        length = cfg.chunk_attn_window_size
        keys = [t for t in keys if positions[s] // length == positions[t] // length]
    return keys


def attend(cfg, q, k, v, keys_of, sink):
    """q [S, N, H], already scaled; k, v [S, K, .]."""
    S, N, _ = q.shape
    out = np.zeros((S, N, v.shape[-1]))
    for s in range(S):
        for n in range(N):
            kv = n // (N // k.shape[1])
            scores = np.array([q[s, n] @ k[t, kv] for t in keys_of[s]])
            if cfg.attn_logits_soft_cap:
                scores = cfg.attn_logits_soft_cap * np.tanh(scores / cfg.attn_logits_soft_cap)
            weights = softmax(np.append(scores, sink[n]))[:-1] if sink is not None else softmax(scores)
            out[s, n] = sum(w * v[t, kv] for w, t in zip(weights, keys_of[s], strict=True))
    return out


def temper(cfg, positions):
    turns = np.floor((positions + cfg.temperature_tuning_offset) / cfg.temperature_tuning_length)
    return 1 + cfg.temperature_tuning_scale * np.log(1 + turns)


def grouped_attention(cfg, p, x, index, positions, segments, lent):
    kind = kind_of(cfg, index)
    nope = cfg.nope_layer_interval > 0 and (index + 1) % cfg.nope_layer_interval == 0
    roped = not nope and cfg.trainable_position_size == -1
    project = {}
    for name in ("query", "key", "value"):
        if name in p:
            project[name] = np.einsum("sd,dnh->snh", x, p[name]) + p.get(f"{name}_bias", 0)
    raw_key = project.get("key")

    def finish(name, y):
        if cfg.use_qk_norm and cfg.qk_norm_type == "head":
            y = rms(cfg, y, p[f"{name}_norm"])
        if cfg.use_qk_norm and cfg.qk_norm_type == "projection":
            flat = y.reshape(len(y), -1)
            y = (flat / np.sqrt((flat**2).mean(-1, keepdims=True) + cfg.normalization_layer_epsilon)).reshape(y.shape)
            y = y * p[f"{name}_norm"]
        if roped:
            dim = int(y.shape[-1] * cfg.partial_rotary_factor)
            y = np.stack(
                [rotate(y[s], *angles(cfg, kind, dim, positions[s]), cfg.rope_interleave) for s in range(len(y))]
            )
        if cfg.use_qk_norm and cfg.qk_norm_type == "l2" and not nope:
            y = rms(cfg, y)
        return y

    q = finish("query", project["query"])
    q = q * (cfg.query_pre_attn_scalar or q.shape[-1]) ** -0.5
    if cfg.temperature_tuning and (nope or cfg.temperature_tuning_layers == "all"):
        q = q * temper(cfg, positions)[:, None, None]
    if index >= cfg.num_decoder_layers - cfg.num_kv_shared_layers:
        k, v = lent[kind]
    else:
        k = finish("key", raw_key)
        v = project.get("value", raw_key)
        v = rms(cfg, v, p.get("value_norm")) if cfg.use_v_norm else v
        lent[kind] = (k, v)
    keys_of = [visible(cfg, kind, positions, segments, s) for s in range(len(x))]
    y = attend(cfg, q, k, v, keys_of, p.get("sink"))
    return np.einsum("snh,nhd->sd", y, p["out"]) + p.get("out_bias", 0)


def latent_attention(cfg, p, x, positions, segments):
    nope, rope, rank = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.kv_lora_rank
    turns = [angles(cfg, "global", rope, position) for position in positions]
    compressed = rms(cfg, x @ p["query_a"], p["query_a_norm"]) if cfg.q_lora_rank else x
    q = np.einsum("sr,rnh->snh", compressed, p["query_b" if cfg.q_lora_rank else "query"])
    down = x @ p["kv_a"]
    both = np.einsum("sc,cnh->snh", rms(cfg, down[:, :rank], p["kv_a_norm"]), p["kv_b"])
    N = q.shape[1]
    k = np.zeros((len(x), N, nope + rope))
    scale = (nope + rope) ** -0.5
    if cfg.rope_type == "yarn":
        scale *= (0.1 * cfg.mscale * math.log(cfg.rope_factor or 40) + 1) ** 2
    for s in range(len(x)):
        shared = rotate(down[s : s + 1, rank:], *turns[s], cfg.rope_interleave)
        k[s] = np.concatenate([both[s, :, :nope], np.repeat(shared, N, axis=0)], axis=-1)
        q[s, :, nope:] = rotate(q[s, :, nope:], *turns[s], cfg.rope_interleave)
    if cfg.temperature_tuning:
        q = q * temper(cfg, positions)[:, None, None]
    keys_of = [visible(cfg, "global", positions, segments, s) for s in range(len(x))]
    if cfg.use_indexer:
        keys_of = index(cfg, p["indexer"], x, compressed, turns, keys_of)
    y = attend(cfg, q * scale, k, both[:, :, nope:], keys_of, None)
    return np.einsum("snh,nhd->sd", y, p["out"])


def index(cfg, p, x, compressed, turns, keys_of):
    q = np.einsum("sr,rxi->sxi", compressed, p["query"])
    k = x @ p["key"]
    k = k - k.mean(-1, keepdims=True)
    k = k / np.sqrt((k * k).mean(-1, keepdims=True) + 1e-6) * p["key_norm"]["scale"] + p["key_norm"]["bias"]
    q = np.stack([rotate(q[s], *turns[s], False) for s in range(len(x))])
    k = np.concatenate([rotate(k[s : s + 1], *turns[s], False) for s in range(len(x))])
    weight = x @ p["weight"] * cfg.indexer_n_heads**-0.5
    chosen = []
    for s, keys in enumerate(keys_of):
        scores = [weight[s] @ np.maximum(q[s] @ k[t] * cfg.indexer_head_dim**-0.5, 0) for t in keys]
        best = sorted(range(len(keys)), key=lambda i: (-scores[i], i))[: cfg.indexer_topk]
        chosen.append(sorted(keys[i] for i in best))
    return chosen


def feed_forward(cfg, x, matrices, biases):
    branches = [x @ w + b for w, b in zip(matrices[:-1], biases[:-1], strict=True)]
    if cfg.mlp_activations_limit > 0:
        limit = cfg.mlp_activations_limit
        branches = [np.minimum(branches[0], limit), *(np.clip(b, -limit, limit) for b in branches[1:])]
    if cfg.swiglu_alpha:
        gate, up = branches
        hidden = gate * sigmoid(cfg.swiglu_alpha * gate) * (up + 1)
    else:
        hidden = 1.0
        for name, branch in zip(cfg.mlp_activations, branches, strict=True):
            hidden = hidden * ACTIVATIONS[name](branch)
    return hidden @ matrices[-1] + biases[-1]


def names(cfg):
    return [*(f"wi_{i}" for i in range(len(cfg.mlp_activations))), "wo"]


def dense(cfg, p, x):
    return feed_forward(cfg, x, [p[n] for n in names(cfg)], [p.get(f"{n}_bias", 0) for n in names(cfg)])


def route(cfg, p, x):
    """[(expert, weight), ...] of one token."""
    if cfg.router_input_norm:
        x = x / np.sqrt((x * x).mean() + cfg.normalization_layer_epsilon) * p["input_scale"] * len(x) ** -0.5
    logits = x @ p["kernel"] + p.get("bias", 0)
    scores = {"": logits, "softmax": softmax(logits), "sigmoid": sigmoid(logits)}[cfg.routed_score_func]
    wanted = scores + p.get("correction_bias", 0)
    if cfg.n_routing_groups > 1:
        groups = wanted.reshape(cfg.n_routing_groups, -1)
        of_group = [sum(sorted(g)[-2:]) if cfg.routing_group_score == "top2" else max(g) for g in groups]
        kept = np.argsort(of_group)[-cfg.topk_routing_group :]
        wanted = np.concatenate([g if i in kept else np.full(len(g), -np.inf) for i, g in enumerate(groups)])
    chosen = np.argsort(-wanted)[: cfg.num_experts_per_tok]
    weights = scores[chosen]
    if cfg.routed_score_func == "":
        weights = softmax(weights)
    elif cfg.norm_topk_prob if cfg.routed_score_func == "softmax" else cfg.norm_sigmoid_scores:
        weights = weights / weights.sum()
    weights = weights * cfg.routed_scaling_factor * p.get("expert_scale", np.ones(cfg.num_experts))[chosen]
    return list(zip(chosen, weights, strict=True))


def experts(cfg, p, x, router_x, segments):
    out = dense(cfg, p["shared"], x) if "shared" in p else np.zeros_like(x)
    taken = np.zeros(cfg.num_experts, int)
    capacity = math.ceil(len(x) * cfg.num_experts_per_tok / cfg.num_experts * cfg.capacity_factor)
    for s in range(len(x)):
        for e, weight in route(cfg, p["router"], router_x[s]):
            if cfg.capacity_factor > 0 and segments[s] == 0:
                continue
            taken[e] += 1
            if cfg.capacity_factor > 0 and taken[e] > capacity:
                continue
            biases = [p[f"{n}_bias"][e] if cfg.mlp_bias else 0 for n in names(cfg)]
            matrices = [p[n][e] for n in names(cfg)]
            if cfg.scale_expert_input:
                out[s] += feed_forward(cfg, x[s] * weight, matrices, biases)
            else:
                out[s] += weight * feed_forward(cfg, x[s], matrices, biases)
    return out


def layer(cfg, p, x, i, positions, segments, lent, own):
    def normed(name, y):
        return norm(cfg, y, p[name]) if name in p else y

    inner = normed("attention_norm", x)
    if cfg.attention_type == "mla":
        y = latent_attention(cfg, p["attention"], inner, positions, segments)
    else:
        y = grouped_attention(cfg, p["attention"], inner, i, positions, segments, lent)
    x = x + normed("attention_post_norm", y)
    inner = normed("mlp_norm", x)
    sparse = cfg.num_experts > 1 and i >= cfg.first_num_dense_layers and (i + 1) % cfg.interleave_moe_layer_step == 0
    if sparse and cfg.parallel_dense_mlp:
        y = normed("dense_post_norm", dense(cfg, p["mlp"], inner))
        y = y + normed("moe_post_norm", experts(cfg, p["moe"], normed("moe_norm", x), x, segments))
    elif sparse:
        y = experts(cfg, p["moe"], inner, inner, segments)
    else:
        y = dense(cfg, p["mlp"], inner)
    x = x + normed("mlp_post_norm", y)
    if own is not None:
        gate = ACTIVATIONS[cfg.mlp_activations[0]](x @ p["layer_input"]["gate"])
        x = x + norm(cfg, gate * own @ p["layer_input"]["projection"], p["layer_input"]["norm"])
    return x * p.get("output_scale", 1.0)


def embed(cfg, params, ids):
    return params["embedding"][ids] * (math.sqrt(cfg.emb_dim) if cfg.scale_embedding else 1)


def stream(cfg: Any, params: Any, ids: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """The stream [S, D] after the last layer, before the last norm."""
    x = embed(cfg, params, ids)
    if cfg.trainable_position_size > 0:
        x = x + params["positions"][positions]
    own = [None] * cfg.num_decoder_layers
    if cfg.hidden_size_per_layer_input:
        p, width = params["layer_inputs"], cfg.hidden_size_per_layer_input
        table = (p["table"][ids] * math.sqrt(width)).reshape(len(ids), -1, width)
        projected = (x @ p["projection"] / math.sqrt(cfg.emb_dim)).reshape(len(ids), -1, width)
        own = list(np.moveaxis((norm(cfg, projected, p["norm"]) + table) / math.sqrt(2), 1, 0))
    lent: dict[str, Any] = {}
    for i, p in enumerate(layer_params(cfg, params)):
        x = layer(cfg, p, x, i, positions, segments, lent, own[i])
    return x


def head(cfg, params, x):
    if cfg.logits_via_embedding:
        y = x @ params["embedding"].T * (cfg.emb_dim**-0.5 if cfg.normalize_embedding_logits else 1)
    else:
        y = x @ params["logits"]
    return cfg.final_logits_soft_cap * np.tanh(y / cfg.final_logits_soft_cap) if cfg.final_logits_soft_cap else y


def logits(cfg: Any, params: Any, ids: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Logits [S, V] of one row. `params` are float64 arrays."""
    return head(cfg, params, norm(cfg, stream(cfg, params, ids, positions, segments), params["final_norm"]))


def further(
    cfg: Any, params: Any, ids: np.ndarray, positions: np.ndarray, segments: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Logits [S, V] of each further prediction: of the token 2, 3, ... places on.

    Prediction k joins the embedding of token s + k and the stream of prediction k - 1 (of the decoder, for the first,
    before its last norm), each normed, the embedding first, as in the released weights (eh_proj); then a layer like the
    decoder's last, a norm of its own, and the decoder's head."""
    x, found = stream(cfg, params, ids, positions, segments), []
    for k in range(1, cfg.mtp_num_layers + 1):
        p = params["mtp"][str(k - 1)]
        token = embed(cfg, params, np.append(ids[k:], np.zeros(k, ids.dtype)))
        pair = np.concatenate([norm(cfg, token, p["embedding_norm"]), norm(cfg, x, p["stream_norm"])], axis=-1)
        x = pair @ p["projection"].reshape(2 * cfg.emb_dim, cfg.emb_dim)
        x = layer(cfg, p["layer"], x, cfg.num_decoder_layers - 1, positions, segments, {}, None)
        found.append(head(cfg, params, norm(cfg, x, p["final_norm"])))
    return tuple(found)
