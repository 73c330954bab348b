"""From config to layers: one pure function that says what each layer of the stack is.

`layers(cfg)` lists a `LayerSpec` for every layer, from the embedding up; `segments(cfg)` folds that list into repeats
of patterns. Parameters, forward pass, cache and FLOPs all derive from these records, so a family is a set of values
here and never a name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from MaxText.config.model_rules import FLASH_ROWS

LONGEST_PATTERN = 16


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one kind of layer. The first `dim` channels of a head are rotated, in dim/2 frequencies.

    Frequency i is theta^(-2i/dim) over `min_timescale`; those from `turning` on stand still. `factor` stretches them by
    the law of `scaling`; sine and cosine are multiplied by `amplitude`.
    """

    dim: int
    theta: float
    min_timescale: float = 1.0
    turning: int = -1
    interleave: bool = False
    scaling: Literal["none", "linear", "llama3.1", "yarn"] = "none"
    factor: float = 1.0
    original_length: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0


class Reach(NamedTuple):
    """What a query sees: everything before it, the last `size` positions, or its own chunk of `size` positions."""

    kind: Literal["global", "local_sliding", "chunk"]
    size: int = 0


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention; query_rank 0 = queries are not compressed."""

    query_rank: int
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    indexer: bool


@dataclass(frozen=True)
class LayerSpec:
    """One layer. `latent` is None for grouped-query attention; `keys` says whose keys and values it uses: its own, its
    own which later layers of the same reach use too ("lent"), or those ("borrowed")."""

    reach: Reach
    rope: Rope | None
    query_heads: int
    kv_heads: int
    head_dim: int
    query_scale: float
    latent: Latent | None
    qk_norm: Literal["none", "head", "projection", "l2"]
    tempered: bool
    values_are_keys: bool
    keys: Literal["own", "lent", "borrowed"]
    ffn: Literal["dense", "moe", "parallel"]
    mlp_dim: int

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def experts(self) -> bool:
        return self.ffn != "dense"


@dataclass(frozen=True)
class Segment:
    """`repeats` times the same pattern of layers; the pattern is unrolled inside the scan."""

    name: str
    repeats: int
    pattern: tuple[LayerSpec, ...]
    first: int = 0  # its first layer's number in the stack


def reaches(cfg: Any) -> list[Reach]:
    """What the queries of each layer see."""
    kinds = cfg.layer_pattern or ("global" if cfg.attention_type == "mla" else cfg.attention_type,)
    sizes = {"global": 0, "local_sliding": cfg.sliding_window_size, "chunk": cfg.chunk_attn_window_size}
    return [
        Reach(cast(Any, kinds[i % len(kinds)]), sizes[kinds[i % len(kinds)]]) for i in range(cfg.num_decoder_layers)
    ]


def _stretched(cfg: Any, reach: Reach) -> dict[str, Any]:
    """The fields of a Rope that say how it is stretched."""
    if cfg.rope_scaling_layers == "global" and reach.kind != "global":
        return {}
    if cfg.rope_linear_scaling_factor != 1.0:
        return {"scaling": "linear", "factor": cfg.rope_linear_scaling_factor}
    if cfg.rope_type == "llama3.1" and cfg.rope_use_scale:
        return {
            "scaling": "llama3.1",
            "factor": cfg.rope_factor or 8.0,
            "original_length": cfg.original_max_position_embeddings or 8192,
            "low": cfg.rope_low_freq_factor,
            "high": cfg.rope_high_freq_factor,
        }
    if cfg.rope_type == "yarn":
        factor = cfg.rope_factor or 40.0
        return {
            "scaling": "yarn",
            "factor": factor,
            "original_length": cfg.original_max_position_embeddings or 4096,
            "beta_fast": cfg.beta_fast,
            "beta_slow": cfg.beta_slow,
            "truncate": cfg.rope_truncate,
            "amplitude": 0.1 * math.log(factor) + 1.0 if cfg.rope_attention_scaling and factor > 1 else 1.0,
        }
    return {}


def _rope(cfg: Any, reach: Reach, head_dim: int) -> Rope:
    local = reach.kind == "local_sliding"
    own_theta = cfg.local_rope_max_timescale if local else cfg.global_rope_max_timescale
    proportion = cfg.local_rope_proportion if local else cfg.global_rope_proportion
    dim = int(head_dim * cfg.partial_rotary_factor)
    return Rope(
        dim=dim,
        theta=float(cfg.rope_max_timescale if own_theta == -1 else own_theta),
        min_timescale=float(cfg.rope_min_timescale),
        turning=-1 if proportion == 1.0 else int(proportion * dim / 2),
        interleave=cfg.rope_interleave,
        **_stretched(cfg, reach),
    )


def _latent(cfg: Any) -> Latent | None:
    if cfg.attention_type != "mla":
        return None
    return Latent(
        cfg.q_lora_rank,
        cfg.kv_lora_rank,
        cfg.qk_nope_head_dim,
        cfg.qk_rope_head_dim,
        cfg.v_head_dim,
        cfg.use_indexer,
    )


def _query_scale(cfg: Any, head_dim: int, latent: Latent | None, rope: Rope | None) -> float:
    scale = (cfg.query_pre_attn_scalar or head_dim) ** -0.5
    stretched = rope is not None and rope.scaling == "yarn" and cfg.max_position_embeddings > rope.original_length
    if latent and stretched and rope is not None:
        scale *= (0.1 * cfg.mscale * math.log(rope.factor) + 1.0) ** 2
    return scale


def _has_experts(cfg: Any, index: int) -> bool:
    every = cfg.interleave_moe_layer_step
    return cfg.num_experts > 1 and index >= cfg.first_num_dense_layers and (index + 1) % every == 0


def _keys(cfg: Any, index: int, all_reaches: Sequence[Reach]) -> Literal["own", "lent", "borrowed"]:
    own = cfg.num_decoder_layers - cfg.num_kv_shared_layers
    if index >= own:
        return "borrowed"
    last_of_its_kind = all_reaches[index] not in all_reaches[index + 1 : own]
    return "lent" if cfg.num_kv_shared_layers and last_of_its_kind else "own"


class _Kind(NamedTuple):
    """In what layers of one model differ."""

    reach: Reach
    nope: bool
    keys: Literal["own", "lent", "borrowed"]
    experts: bool


def _kind(cfg: Any, index: int, all_reaches: Sequence[Reach]) -> _Kind:
    nope = cfg.nope_layer_interval != -1 and (index + 1) % cfg.nope_layer_interval == 0
    return _Kind(all_reaches[index], nope, _keys(cfg, index, all_reaches), _has_experts(cfg, index))


def _layer(cfg: Any, kind: _Kind) -> LayerSpec:
    reach, nope, keys, experts = kind
    wide = reach.kind == "global"
    latent = _latent(cfg)
    if latent:
        head_dim, rotated = latent.nope_dim + latent.rope_dim, latent.rope_dim
    else:
        head_dim = rotated = (cfg.global_head_dim if wide else 0) or cfg.head_dim
    rope = None if nope or cfg.trainable_position_size != -1 else _rope(cfg, reach, rotated)
    return LayerSpec(
        reach=reach,
        rope=rope,
        query_heads=cfg.num_query_heads,
        kv_heads=cfg.num_query_heads if latent else (cfg.global_num_kv_heads if wide else 0) or cfg.num_kv_heads,
        head_dim=head_dim,
        query_scale=_query_scale(cfg, head_dim, latent, rope),
        latent=latent,
        qk_norm="none" if not cfg.use_qk_norm or (cfg.qk_norm_type == "l2" and nope) else cfg.qk_norm_type,
        tempered=cfg.temperature_tuning and (nope or cfg.temperature_tuning_layers == "all"),
        values_are_keys=cfg.share_kv_projections and wide,
        keys=keys,
        ffn="dense" if not experts else "parallel" if cfg.parallel_dense_mlp else "moe",
        mlp_dim=cfg.mlp_dim * (2 if keys == "borrowed" and cfg.use_double_wide_mlp else 1),
    )


def layers(cfg: Any) -> tuple[LayerSpec, ...]:
    """Every layer of the stack, from the embedding up."""
    all_reaches = reaches(cfg)
    kinds = [_kind(cfg, i, all_reaches) for i in range(cfg.num_decoder_layers)]
    made = {kind: _layer(cfg, kind) for kind in set(kinds)}
    return tuple(made[kind] for kind in kinds)


def _covered(specs: Sequence[LayerSpec], period: int) -> int:
    """How many layers from the first are whole repeats of the first `period`."""
    repeats = 1
    while specs[repeats * period : (repeats + 1) * period] == specs[:period]:
        repeats += 1
    return repeats * period


def fold(specs: Sequence[LayerSpec]) -> list[tuple[int, tuple[LayerSpec, ...]]]:
    """(repeats, pattern) pairs that unroll to `specs`: at each point the pattern that repeats over most layers, the
    shortest of equals; a layer that does not repeat stands alone."""
    folded = []
    specs = tuple(specs)
    while specs:
        periods = range(1, min(LONGEST_PATTERN, len(specs) // 2) + 1)
        repeating = [period for period in periods if _covered(specs, period) > period]
        best = max(repeating, key=lambda period: (_covered(specs, period), -period), default=1)
        folded.append((_covered(specs, best) // best, specs[:best]))
        specs = specs[_covered(specs, best) :]
    return folded


def segments(cfg: Any) -> tuple[Segment, ...]:
    """The stack as segments, from the embedding up; named `layers`, or `layers_0`, `layers_1`, ... if several."""
    folded = fold(layers(cfg))
    found, first = [], 0
    for number, (repeats, pattern) in enumerate(folded):
        name = "layers" if len(folded) == 1 else f"layers_{number}"
        found.append(Segment(name, repeats, pattern, first))
        first += repeats * len(pattern)
    return tuple(found)


def further_prediction(cfg: Any) -> LayerSpec:
    """The layer that each further prediction (mtp_num_layers) adds: one like the last of the stack."""
    return layers(cfg)[-1]


def scale_down(cfg: Any) -> Any:
    """The same architecture, small enough for a laptop's second: every feature stays, every size shrinks.

    The rule: width 64, heads of 16 (global ones 32 where they differ), four query heads with as many key/value heads as
    keep the kind (all, half, one); windows of 8, chunks of 16; eight experts, two per token (one where there was one);
    two repeats of the layer pattern after at most one dense layer; the vocabulary of the byte tokenizer.
    """
    period = math.lcm(len(cfg.layer_pattern) or 1, cfg.interleave_moe_layer_step, max(cfg.nope_layer_interval, 1))
    dense = min(cfg.first_num_dense_layers, 1)
    layers = dense + 2 * period
    small: dict[str, Any] = {
        "global_parameter_scale": 1,
        "base_emb_dim": 64,
        "base_num_query_heads": 4,
        "base_num_kv_heads": _kept_kind(cfg.num_query_heads, cfg.num_kv_heads),
        "head_dim": 16,
        "base_mlp_dim": 96,
        "base_num_decoder_layers": -(-layers // cfg.layers_per_decoder_layer),
        "first_num_dense_layers": dense,
        "vocab_size": 288,
        "sliding_window_size": 8 if cfg.sliding_window_size else 0,
        "chunk_attn_window_size": 16 if cfg.chunk_attn_window_size else 0,
        "num_kv_shared_layers": period if cfg.num_kv_shared_layers else 0,
        "hidden_size_per_layer_input": 16 if cfg.hidden_size_per_layer_input else 0,
        "vocab_size_per_layer_input": 0,
        "temperature_tuning_length": 16,
        "trainable_position_size": min(cfg.trainable_position_size, max(256, cfg.max_target_length)),
        "query_pre_attn_scalar": min(cfg.query_pre_attn_scalar, 24),
        "original_max_position_embeddings": 32 if cfg.rope_type != "default" else 0,
    }
    if cfg.global_head_dim:
        small["global_head_dim"] = 32
    if cfg.global_num_kv_heads:
        small["global_num_kv_heads"] = _kept_kind(cfg.num_query_heads, cfg.global_num_kv_heads)
    if cfg.attention_type == "mla":
        small |= {"q_lora_rank": 32 if cfg.q_lora_rank else 0, "kv_lora_rank": 16}
        small |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        small |= {"indexer_n_heads": 4, "indexer_head_dim": 16, "indexer_topk": 8}
    if cfg.num_experts > 1:
        grouped = cfg.n_routing_groups > 1
        small |= {"num_experts": 8, "num_experts_per_tok": min(cfg.num_experts_per_tok, 2), "base_moe_mlp_dim": 32}
        small |= {"n_routing_groups": 4 if grouped else -1, "topk_routing_group": 2 if grouped else -1}
    return cfg.replace(**small)


def takes_flash(attention: str, platform: str, length: int) -> bool:
    """Whether attention over whole rows of `length` tokens runs in the flash kernel, by the value of the key."""
    asked = attention == "flash" or (attention == "autoselected" and platform == "tpu")
    return asked and length % FLASH_ROWS == 0


def _kept_kind(query_heads: int, kv_heads: int) -> int:
    """Key/value heads for four query heads: as many, one, or two."""
    return {query_heads: 4, 1: 1}.get(kv_heads, 2)
