"""What a config.json says in several keys at once: which layers see what, which have experts, how wide heads are.

A part reads their keys into ours, and writes ours into theirs. `theirs` are the keys that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from MaxText import architecture
from MaxText.convert import rope_config
from MaxText.convert.refusal import Refusal

Theirs = Mapping[str, Any]
Ours = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One group of keys. `read` sees their whole config.json, `write` our whole configuration."""

    theirs: frozenset[str]
    read: Callable[[Theirs], Ours]
    write: Callable[[Any], dict[str, Any]]


def part(read: Callable[[Theirs], Ours], write: Callable[[Any], dict[str, Any]], *theirs: str) -> Part:
    return Part(frozenset(theirs), read, write)


# --- rope


def rope(nested: bool = False, latent: bool = False, tempered: bool = False) -> Part:
    """Rope; `nested`: written for each kind of layer; `latent`: of latent attention; `tempered`: the family's queries
    may grow with position."""

    def read(theirs: Theirs) -> Ours:
        ours = rope_config.read(theirs, latent)
        if "temperature_tuning" in ours and not tempered:
            raise Refusal("llama_4_scaling_beta", "has no effect in this family")
        longest = {"max_position_embeddings": theirs.get("max_position_embeddings")}
        return {key: value for key, value in longest.items() if value} | ours

    def write(cfg: Any) -> dict[str, Any]:
        return {"max_position_embeddings": cfg.max_position_embeddings} | rope_config.write(cfg, nested)

    return part(read, write, *rope_config.KEYS)


def _write_query_scale(cfg: Any) -> dict[str, Any]:
    scale = cfg.query_pre_attn_scalar or cfg.head_dim
    return {"query_pre_attn_scalar": int(scale) if scale == int(scale) else scale}  # the reference wants an integer


QUERY_SCALE = part(
    lambda theirs: {"query_pre_attn_scalar": float(theirs["query_pre_attn_scalar"])},
    _write_query_scale,
    "query_pre_attn_scalar",
)


# --- what layers see

KINDS = {"full_attention": "global", "sliding_attention": "local_sliding", "chunked_attention": "chunk"}
NAMES = {ours: theirs for theirs, ours in KINDS.items()}


def _shortest_pattern(kinds: Sequence[str]) -> list[str]:
    """The shortest list that gives `kinds` when it is repeated and cut."""
    for period in range(1, len(kinds) + 1):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return list(kinds[:period])
    return list(kinds)


def _kinds(theirs: Theirs, default: Sequence[str]) -> list[str]:
    given = theirs.get("layer_types")
    count = theirs["num_hidden_layers"]
    if given is None:
        every = theirs.get("sliding_window_pattern") or theirs.get("_sliding_window_pattern")
        if isinstance(every, int):
            default = ("sliding_attention",) * (every - 1) + ("full_attention",)
        given = [default[i % len(default)] for i in range(count)]
    if unknown := sorted(set(given) - set(KINDS)):
        raise Refusal("layer_types", f"{', '.join(unknown)} is not known here; known: {', '.join(KINDS)}")
    if len(given) != count:
        raise Refusal("layer_types", f"names {len(given)} layers of {count}")
    return [KINDS[kind] for kind in given]


def _pattern(kinds: Sequence[str], sizes: Mapping[str, tuple[str, int | None]]) -> Ours:
    """layer_pattern, or attention_type where all layers are alike, and the sizes of what they see."""
    pattern = _shortest_pattern(kinds)
    ours: Ours = {"layer_pattern": pattern if len(pattern) > 1 else []}
    ours["attention_type"] = pattern[0] if len(pattern) == 1 else "global"
    for kind, (key, size) in sizes.items():
        if kind in pattern and not size:
            raise Refusal("layer_types", f"{NAMES[kind]} layers have no size")
        ours[key] = size if kind in pattern else 0
    return ours


def layers(default: Sequence[str], window: int = 0, last_global: bool = False) -> Part:
    """`layer_types` of full and sliding attention; `default`: where config.json has none, over and over. With
    `last_global` the last layer is a full one whatever is written, as in the reference of Gemma 4."""

    def read(theirs: Theirs) -> Ours:
        size = theirs.get("sliding_window", window)
        if theirs.get("use_sliding_window", True) is False:
            return _pattern(_kinds(theirs, ("full_attention",)), {"local_sliding": ("sliding_window_size", 0)})
        if "max_window_layers" in theirs and "layer_types" not in theirs:
            first = theirs["max_window_layers"]
            kinds = ["global" if i < first or not size else "local_sliding" for i in range(theirs["num_hidden_layers"])]
        else:
            kinds = _kinds(theirs, default)
        kinds = [*kinds[:-1], "global"] if last_global else kinds
        return _pattern(kinds, {"local_sliding": ("sliding_window_size", size)})

    def write(cfg: Any) -> dict[str, Any]:
        kinds = [NAMES[reach.kind] for reach in architecture.reaches(cfg)]
        sliding = "sliding_attention" in kinds
        switch = {"use_sliding_window": sliding} if not window else {}
        return {"layer_types": kinds, "sliding_window": cfg.sliding_window_size or None, **switch}

    keys = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    return part(read, write, *keys, "sliding_window_pattern", "_sliding_window_pattern")


def window(default: int | None) -> Part:
    """`sliding_window` of all layers, or null."""

    def read(theirs: Theirs) -> Ours:
        size = theirs.get("sliding_window", default)
        return {"attention_type": "local_sliding" if size else "global", "sliding_window_size": size or 0}

    return part(read, lambda cfg: {"sliding_window": cfg.sliding_window_size or None}, "sliding_window")


# --- Llama 4


def _read_llama4(theirs: Theirs) -> Ours:
    count = theirs["num_hidden_layers"]
    every = theirs.get("no_rope_layer_interval", 4)
    turning = theirs.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    nope = [i + 1 for i, turns in enumerate(turning) if not turns]
    interval = nope[0] if nope else -1
    if nope != (list(range(interval, count + 1, interval)) if nope else []):
        raise Refusal("no_rope_layers", f"layers {nope} are not every n-th one")
    step = theirs.get("interleave_moe_layer_step", 1)
    experts = theirs.get("moe_layers")
    if experts is not None and list(experts) != list(range(step - 1, count, step)):
        raise Refusal("moe_layers", f"{list(experts)} is not every {step}-th layer")
    default = ["chunked_attention" if turns else "full_attention" for turns in turning]
    kinds = [KINDS[kind] for kind in theirs.get("layer_types") or default]
    sizes = {"chunk": ("chunk_attn_window_size", theirs.get("attention_chunk_size", 8192))}
    return {
        **_pattern(kinds, sizes),
        "nope_layer_interval": interval,
        "interleave_moe_layer_step": step,
        "base_moe_mlp_dim": theirs["intermediate_size"],
        "base_mlp_dim": theirs["intermediate_size_mlp"],
        "shared_experts": 1,
        "temperature_tuning_offset": 1,
    }


def _write_llama4(cfg: Any) -> dict[str, Any]:
    specs = architecture.layers(cfg)
    return {
        "layer_types": [NAMES[spec.reach.kind] for spec in specs],
        "attention_chunk_size": cfg.chunk_attn_window_size or None,
        "no_rope_layers": [int(spec.rope is not None) for spec in specs],
        "interleave_moe_layer_step": cfg.interleave_moe_layer_step,
        "moe_layers": [i for i, spec in enumerate(specs) if spec.experts],
        "intermediate_size": cfg.moe_mlp_dim,
        "intermediate_size_mlp": cfg.mlp_dim,
    }


LLAMA4 = part(
    _read_llama4, _write_llama4, "layer_types", "attention_chunk_size", "no_rope_layers", "no_rope_layer_interval",
    "interleave_moe_layer_step", "moe_layers", "intermediate_size", "intermediate_size_mlp",
)  # fmt: skip


# --- Gemma 4


def _read_gemma4(theirs: Theirs) -> Ours:
    ours: Ours = {}
    if own := theirs.get("per_layer_config"):
        wide = [i for i, kind in enumerate(_kinds(theirs, ())) if kind == "global"]
        settings = [own.get(str(i), own.get(i)) for i in wide]
        if sorted(map(int, own)) != wide or any(setting != settings[0] for setting in settings):
            raise Refusal("per_layer_config", "not the same in all global layers, and in them only")
        given: Theirs = settings[0]
        head_dim, heads = given.get("head_dim", theirs["head_dim"]), given.get("num_key_value_heads")
    else:
        head_dim = theirs.get("global_head_dim", 512)
        heads = theirs.get("num_global_key_value_heads") if theirs.get("attention_k_eq_v") else None
    ours |= {"global_head_dim": head_dim, "global_num_kv_heads": heads or 0}
    if theirs.get("hidden_size_per_layer_input"):
        ours["vocab_size_per_layer_input"] = theirs["vocab_size_per_layer_input"]
    if theirs.get("enable_moe_block"):
        ours |= {
            "num_experts": theirs["num_experts"],
            "num_experts_per_tok": theirs["top_k_experts"],
            "base_moe_mlp_dim": theirs["moe_intermediate_size"],
        }
    return ours


def _write_gemma4(cfg: Any) -> dict[str, Any]:
    theirs: dict[str, Any] = {
        "global_head_dim": cfg.global_head_dim or cfg.head_dim,
        "num_global_key_value_heads": cfg.global_num_kv_heads or None,
        "enable_moe_block": cfg.num_experts > 1,
        "vocab_size_per_layer_input": cfg.vocab_size_per_layer_input or cfg.vocab_size,
    }
    if cfg.num_experts > 1:
        theirs |= {"num_experts": cfg.num_experts, "top_k_experts": cfg.num_experts_per_tok}
        theirs["moe_intermediate_size"] = cfg.moe_mlp_dim
    return theirs


GEMMA4 = part(
    _read_gemma4, _write_gemma4, "per_layer_config", "global_head_dim", "num_global_key_value_heads",
    "enable_moe_block", "vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size",
)  # fmt: skip


# --- experts


def _read_method(theirs: Theirs) -> Ours:
    match theirs.get("topk_method", "greedy"):
        case "greedy":
            return {"n_routing_groups": -1, "topk_routing_group": -1}
        case "group_limited_greedy":
            return {
                "n_routing_groups": theirs["n_group"],
                "topk_routing_group": theirs["topk_group"],
                "routing_group_score": "max",
            }
        case other:
            raise Refusal("topk_method", f"{other} is not known here; known: greedy, group_limited_greedy")


def _write_method(cfg: Any) -> dict[str, Any]:
    if cfg.n_routing_groups == -1:
        return {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    groups = {"n_group": cfg.n_routing_groups, "topk_group": cfg.topk_routing_group}
    return {"topk_method": "group_limited_greedy", **groups}


GREEDY = part(_read_method, _write_method, "topk_method", "n_group", "topk_group")

# All experts as wide as `intermediate_size`, and no other feed-forward.
SAME_WIDTH = part(lambda theirs: {"base_moe_mlp_dim": theirs["intermediate_size"]}, lambda cfg: {})
# Latent attention: the widths that transformers writes beside.
LATENT = part(
    lambda theirs: {},
    lambda cfg: {"qk_head_dim": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, "head_dim": cfg.qk_rope_head_dim},
    "qk_head_dim",
    "head_dim",
)


def _read_sparse(theirs: Theirs) -> Ours:
    count, dense = theirs["num_hidden_layers"], theirs["first_k_dense_replace"]
    kinds = ["dense"] * dense + ["sparse"] * (count - dense)
    if theirs.get("mlp_layer_types") not in (None, kinds):
        raise Refusal("mlp_layer_types", f"is not {dense} times dense and then sparse, as first_k_dense_replace says")
    if set(theirs.get("layer_types") or ()) - {"indexed_attention"}:
        raise Refusal("layer_types", "all layers must be indexed_attention")
    return {}


# Sparse attention in every layer, experts in all but the first ones.
SPARSE = part(_read_sparse, lambda cfg: {}, "mlp_layer_types", "layer_types")


# --- GPT-2


def _read_gpt2(theirs: Theirs) -> Ours:
    width, heads = theirs["n_embd"], theirs["n_head"]
    if width % heads:
        raise Refusal("n_head", f"{heads} heads do not divide n_embd={width}")
    return {"head_dim": width // heads, "base_mlp_dim": theirs.get("n_inner") or 4 * width}


GPT2 = part(_read_gpt2, lambda cfg: {"n_inner": cfg.mlp_dim}, "n_inner")
