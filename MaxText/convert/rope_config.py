"""Rope in a config.json ↔ our keys: `rope_theta` and `rope_scaling` (old), `rope_parameters` (new), one for all layers
or one for each kind of layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from MaxText.convert.refusal import Refusal

GLOBAL, LOCAL = "full_attention", "sliding_attention"
# Keys of each kind that we know; another one is refused.
_ALWAYS = {"rope_type", "type", "rope_theta", "llama_4_scaling_beta"}
_KNOWN = {
    "default": {"partial_rotary_factor"},
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate", "attention_factor",
        "mscale", "mscale_all_dim", "partial_rotary_factor", "max_position_embeddings",
    },
    "proportional": {"partial_rotary_factor"},
}  # fmt: skip
KEYS = {"rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"}


def read(theirs: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    """Our keys. `latent`: for latent attention, whose logits grow with `mscale_all_dim`."""
    wide, local = _by_kind(theirs)
    ours: dict[str, Any] = {"rope_max_timescale": _whole(wide.get("rope_theta", 10_000.0))}
    ours |= _stretched(wide, theirs, latent)
    if local is None:
        return ours
    ours["local_rope_max_timescale"] = _whole(local.get("rope_theta", 10_000.0))
    if _kind(local) not in ("default", _kind(wide)):
        raise Refusal("rope_parameters", f"local layers are stretched otherwise than global ones ({dict(local)})")
    if _kind(wide) not in ("default", "proportional"):
        same = _stretched(local, theirs, latent) == _stretched(wide, theirs, latent)
        if _kind(local) != "default" and not same:
            raise Refusal("rope_parameters", "local and global layers are stretched by different factors")
        ours["rope_scaling_layers"] = "all" if same else "global"
    return ours


def _by_kind(theirs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """(parameters of global layers, of local layers where they have their own)."""
    new = theirs.get("rope_parameters")
    if new and GLOBAL in new:
        return new[GLOBAL], new.get(LOCAL, new[GLOBAL])
    old = dict(theirs.get("rope_scaling") or {})
    wide = new or {"rope_theta": theirs.get("rope_theta", 10_000.0), **old}
    if "rope_theta" not in wide and "rope_theta" in theirs:
        wide = {**wide, "rope_theta": theirs["rope_theta"]}
    if "rope_local_base_freq" in theirs:
        return wide, {"rope_theta": theirs["rope_local_base_freq"]}
    return wide, None


def _kind(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _whole(value: float) -> int:
    if value != int(value):
        raise Refusal("rope_theta", f"{value} is no whole number")
    return int(value)


def _stretched(p: Mapping[str, Any], theirs: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    kind = _kind(p)
    if kind not in _KNOWN:
        raise Refusal("rope_type", f"{kind} is not known here; known: {', '.join(_KNOWN)}")
    if unknown := sorted(set(p) - _KNOWN[kind] - _ALWAYS):
        raise Refusal("rope_parameters", f"{', '.join(unknown)} of rope_type {kind} is not known here")
    ours = _temperature(p)
    match kind:
        case "default":
            part = p.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
            ours |= {} if latent or part == 1.0 else {"partial_rotary_factor": part}
        case "linear":
            ours["rope_linear_scaling_factor"] = float(p["factor"])
        case "llama3":
            ours |= {"rope_type": "llama3.1", "rope_factor": float(p["factor"])}
            ours |= {f"rope_{name}": float(p[name]) for name in ("low_freq_factor", "high_freq_factor")}
            ours["original_max_position_embeddings"] = int(p["original_max_position_embeddings"])
        case "yarn":
            ours |= _yarn(p, theirs, latent)
        case "proportional":
            ours["global_rope_proportion"] = float(p.get("partial_rotary_factor", 1.0))
    return ours


def _temperature(p: Mapping[str, Any]) -> dict[str, Any]:
    if not p.get("llama_4_scaling_beta"):
        return {}
    return {
        "temperature_tuning": True,
        "temperature_tuning_layers": "all",
        "temperature_tuning_scale": float(p["llama_4_scaling_beta"]),
        "temperature_tuning_length": int(p["original_max_position_embeddings"]),
        "temperature_tuning_offset": 0,
    }


def _yarn(p: Mapping[str, Any], theirs: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    factor, longest = float(p["factor"]), int(theirs.get("max_position_embeddings", 0))
    original = int(p.get("original_max_position_embeddings") or longest)
    natural = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    mscale, all_dims = p.get("mscale") or 0, p.get("mscale_all_dim") or 0
    amplitude = p.get("attention_factor")
    if amplitude is None:
        grown = [0.1 * m * math.log(factor) + 1.0 for m in (mscale, all_dims)]
        amplitude = grown[0] / grown[1] if mscale and all_dims else natural
    if not any(math.isclose(amplitude, choice, rel_tol=1e-6) for choice in (1.0, natural)):
        raise Refusal("rope_parameters", f"yarn with an attention factor of {amplitude:g}, neither 1 nor {natural:g}")
    return {
        "rope_type": "yarn",
        "rope_factor": factor,
        "original_max_position_embeddings": original,
        "max_position_embeddings": max(longest, original + 1) if latent else longest or original,
        "beta_fast": float(p.get("beta_fast") or 32),
        "beta_slow": float(p.get("beta_slow") or 1),
        "rope_truncate": bool(p.get("truncate", True)),
        "rope_attention_scaling": not math.isclose(amplitude, 1.0, rel_tol=1e-6),
        "mscale": float(all_dims) if latent else 1.0,
    }


def write(cfg: Any, nested: bool) -> dict[str, Any]:
    """`rope_parameters` for a config.json; by kind of layer if `nested`."""
    wide_theta = cfg.rope_max_timescale if cfg.global_rope_max_timescale == -1 else cfg.global_rope_max_timescale
    local_theta = cfg.rope_max_timescale if cfg.local_rope_max_timescale == -1 else cfg.local_rope_max_timescale
    wide = {**_written(cfg), "rope_theta": float(wide_theta)}
    if not nested:
        return {"rope_parameters": wide}
    stretched = cfg.rope_scaling_layers == "all" and cfg.global_rope_proportion == 1.0
    local = {**(_written(cfg) if stretched else {"rope_type": "default"}), "rope_theta": float(local_theta)}
    return {"rope_parameters": {GLOBAL: wide, LOCAL: local}}


def _written(cfg: Any) -> dict[str, Any]:
    if cfg.rope_linear_scaling_factor != 1.0:
        return {"rope_type": "linear", "factor": cfg.rope_linear_scaling_factor}
    if cfg.global_rope_proportion != 1.0:
        return {"rope_type": "proportional", "partial_rotary_factor": cfg.global_rope_proportion}
    if cfg.rope_type == "llama3.1" and cfg.rope_use_scale:
        return {
            "rope_type": "llama3",
            "factor": cfg.rope_factor or 8.0,
            "low_freq_factor": cfg.rope_low_freq_factor,
            "high_freq_factor": cfg.rope_high_freq_factor,
            "original_max_position_embeddings": cfg.original_max_position_embeddings or 8192,
        }
    if cfg.rope_type == "yarn":
        return _written_yarn(cfg)
    part = {} if cfg.partial_rotary_factor == 1.0 else {"partial_rotary_factor": cfg.partial_rotary_factor}
    return {"rope_type": "default", **part}


def _written_yarn(cfg: Any) -> dict[str, Any]:
    theirs = {
        "rope_type": "yarn",
        "factor": cfg.rope_factor or 40.0,
        "beta_fast": cfg.beta_fast,
        "beta_slow": cfg.beta_slow,
        "original_max_position_embeddings": cfg.original_max_position_embeddings or 4096,
        "truncate": cfg.rope_truncate,
    }
    if not cfg.rope_attention_scaling:
        theirs["attention_factor"] = 1.0
    longer = cfg.max_position_embeddings > theirs["original_max_position_embeddings"]
    if cfg.attention_type == "mla" and cfg.mscale and longer:
        theirs["mscale"] = theirs["mscale_all_dim"] = cfg.mscale
    if cfg.temperature_tuning:
        theirs["llama_4_scaling_beta"] = cfg.temperature_tuning_scale
    return theirs
