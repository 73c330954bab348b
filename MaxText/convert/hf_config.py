"""A whole config.json ↔ a whole recipe, by the table of its family; nothing is guessed.

In: every key must be one that the family knows or one without effect. Out: the config.json is read back, and must give
the same model as ours, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from MaxText import architecture, config
from MaxText.convert.families import FAMILIES, WITHOUT_EFFECT, Family
from MaxText.convert.fields import FIELDS, MISSING
from MaxText.convert.refusal import Refusal
from MaxText.errors import ConfigError, StorageError

NAME = "config.json"
NESTED = "text_config"


def load(folder: Path) -> dict[str, Any]:
    """The config.json in `folder`. Raises StorageError "convert.damaged"."""
    file = folder / NAME
    try:
        content, why = json.loads(file.read_text()), "it is no JSON object"
    except OSError as error:
        content, why = None, f"it cannot be read: {error.strerror}"
    except ValueError as error:
        content, why = None, f"it is no JSON: {error}"
    if not isinstance(content, dict) or not isinstance(content.get(NESTED, {}), dict):
        raise StorageError(f"{file}: {why}. Copy the file again. [convert.damaged]", id="convert.damaged")
    return content


def text_part(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's settings: the whole, or what a multimodal config.json nests."""
    if NESTED not in theirs:
        return dict(theirs)
    outer = {key: theirs[key] for key in ("tie_word_embeddings",) if key in theirs}
    return {**outer, **theirs[NESTED]}


def family_of(theirs: Mapping[str, Any]) -> Family:
    """The family of a config.json's model_type. Raises ConfigError "convert.unknown-family"."""
    inner = text_part(theirs)
    name = inner.get("model_type", theirs.get("model_type"))
    for family in FAMILIES:
        if name in (family.name, *family.other_names):
            return family
    known = ", ".join(name for family in FAMILIES for name in (family.name, *family.other_names))
    raise ConfigError(
        f"model_type {name!r} (architectures {theirs.get('architectures')}) is not known here. Known: {known}. "
        "[convert.unknown-family]",
        id="convert.unknown-family",
    )


def read(theirs: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """(family, recipe): our keys, `decoder_block` first.

    Raises:
      ConfigError: "convert.unknown-family"; "convert.refused" with every key that cannot be expressed.
    """
    family, inner = family_of(theirs), text_part(theirs)
    ours: dict[str, Any] = {"decoder_block": family.block}
    problems: list[Refusal] = []
    with_defaults = _with_defaults(family, inner)

    def attempt(read: Any) -> None:
        try:
            ours.update(read())
        except Refusal as refusal:
            problems.append(refusal)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(Refusal(str(error), "is missing or has a strange value"))

    for name in family.fields:
        attempt(lambda name=name: _field(family, name, with_defaults))
    for part in family.parts:
        attempt(lambda part=part: part.read(with_defaults))
    problems += _unknown(family, inner)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(
            f"config.json of {family.name} says what cannot be expressed here:\n{lines}\nNothing was written. "
            "[convert.refused]",
            id="convert.refused",
        )
    return family, ours | {"normalize_embedding_logits": False} | dict(family.given)


def _with_defaults(family: Family, inner: Mapping[str, Any]) -> dict[str, Any]:
    """`inner` with the family's values for absent keys, and what transformers derives."""
    rope = {"rope_theta", "rope_local_base_freq"} if "rope_parameters" in inner else set()
    full = {key: value for key, value in family.defaults.items() if key not in rope} | dict(inner)
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = full.get("num_attention_heads")
    if full.get("head_dim") is None and "num_attention_heads" in full and "hidden_size" in full:
        full["head_dim"] = full["hidden_size"] // full["num_attention_heads"]
    return full


def _field(family: Family, name: str, theirs: Mapping[str, Any]) -> dict[str, Any]:
    value = FIELDS[name].read(theirs, family.defaults.get(name, MISSING))
    return dict.fromkeys(FIELDS[name].ours, value)


def _unknown(family: Family, inner: Mapping[str, Any]) -> list[Refusal]:
    known = {name for field in family.fields for name in (field, *FIELDS[field].others)}
    known |= {key for part in family.parts for key in part.theirs} | WITHOUT_EFFECT
    problems = []
    for key, value in inner.items():
        if key in family.only:
            if value not in (allowed := family.only[key]):
                problems.append(Refusal(key, f"{value} cannot be expressed; only {' or '.join(map(str, allowed))}"))
        elif key not in known:
            problems.append(Refusal(key, f"is not known for {family.name}; its value here is {value}"))
    return problems


def to_yaml(recipe: Mapping[str, Any], comment: str) -> str:
    """A model file."""
    from MaxText.config.resolved import scalar

    lines = [f"{key}: {scalar(tuple(value) if isinstance(value, list) else value)}" for key, value in recipe.items()]
    return f"# {comment}\n" + "\n".join(lines) + "\n"


# --- out -------------------------------------------------------------------------------------------------------------


def write(cfg: Any) -> tuple[Family, dict[str, Any]]:
    """(family, config.json) that read back to the same model as `cfg`.

    Raises:
      ConfigError: "convert.no-family", with what stands in the way of the nearest families.
    """
    tried: list[tuple[int, str]] = []
    for family in sorted(FAMILIES, key=lambda family: family.block != cfg.decoder_block):
        theirs = _written(family, cfg)
        try:
            _, recipe = read(theirs)
            different = differences(cfg, config.make(**recipe))
        except ConfigError as error:
            tried.append((1000, f"{family.name}: {' '.join(str(error).split())[:200]}"))
            continue
        if not different:
            return family, theirs
        tried.append((len(different), f"{family.name}: {'; '.join(different)}"))
    nearest = "\n".join(f"  {text}" for _, text in sorted(tried)[:3])
    raise ConfigError(
        f"no Hugging Face family has this architecture. The nearest, and what they lack:\n{nearest}\n"
        "Nothing was written. [convert.no-family]",
        id="convert.no-family",
    )


def differences(here: Any, there: Any) -> list[str]:
    """What makes the functions of two configurations differ, a line each; none where they are one function."""
    found = _differences(function_of(here), function_of(there))
    return [f"{key} ({_short(mine)} here, {_short(other)} there)" for key, mine, other in found]


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value here, value there); of layers, the fields of the first that differs."""
    for key in here:
        if key != "layers" and here[key] != there[key]:
            yield key, here[key], there[key]
    pairs = enumerate(zip(here["layers"], there["layers"], strict=False))
    number, pair = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, None))
    if pair:
        left, right = map(vars, pair)
        yield from (
            (f"{name} of layer {number}", left[name], right[name]) for name in left if left[name] != right[name]
        )
    if len(here["layers"]) != len(there["layers"]):
        yield "layers", len(here["layers"]), len(there["layers"])


def _short(value: Any, limit: int = 90) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _written(family: Family, cfg: Any) -> dict[str, Any]:
    theirs: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name}
    theirs |= {key: allowed[0] for key, allowed in family.only.items()}
    theirs |= {name: FIELDS[name].write(cfg) for name in family.fields}
    for part in family.parts:
        theirs |= part.write(cfg)
    return theirs


# Keys that shape the function beside what `architecture.layers` says; those of a group count where it is in use.
ALWAYS = [
    "emb_dim",
    "vocab_size",
    "logits_via_embedding",
    "scale_embedding",
    "trainable_position_size",
    "mlp_activations",
    "mlp_activations_limit",
    "swiglu_alpha",
    "mlp_bias",
    "norm_type",
    "normalization_layer_epsilon",
    "norm_unit_offset",
    "use_pre_norm",
    "use_post_attn_norm",
    "use_post_ffw_norm",
    "layer_output_scale",
    "attention_bias",
    "attention_out_bias",
    "attention_sink",
    "attn_logits_soft_cap",
    "final_logits_soft_cap",
    "use_v_norm",
    "temperature_tuning",
    "hidden_size_per_layer_input",
    "mtp_num_layers",
]
GROUPS = {
    "logits_via_embedding": ("normalize_embedding_logits",),
    "use_v_norm": ("v_norm_with_scale",),
    "use_qk_norm": ("qk_norm_with_scale",),
    "temperature_tuning": ("temperature_tuning_scale", "temperature_tuning_length", "temperature_tuning_offset"),
}
EXPERTS = [
    "num_experts",
    "num_experts_per_tok",
    "moe_mlp_dim",
    "shared_experts",
    "routed_scaling_factor",
    "routed_bias",
    "n_routing_groups",
    "topk_routing_group",
    "scale_expert_input",
    "router_input_norm",
    "router_expert_scale",
]


def function_of(cfg: Any) -> dict[str, Any]:
    """Everything that decides which function of which parameters a model is: equal for equal models."""
    found = {name: getattr(cfg, name) for name in ALWAYS} | {"layers": architecture.layers(cfg)}
    for switch, names in GROUPS.items():
        found |= {name: getattr(cfg, name) if getattr(cfg, switch) else None for name in names}
    rows = cfg.vocab_size_per_layer_input or cfg.vocab_size
    found["vocab_size_per_layer_input"] = rows if cfg.hidden_size_per_layer_input else None
    experts = cfg.num_experts > 1
    found |= {name: getattr(cfg, name) if experts else None for name in EXPERTS}
    groups = experts and cfg.n_routing_groups > 1
    found["routing_group_score"] = cfg.routing_group_score if groups else None
    found["routed_score_func"] = _score(cfg) if experts else None
    return found


def _score(cfg: Any) -> str:
    """Softmax of the chosen is softmax of all, normalised."""
    match cfg.routed_score_func:
        case "softmax":
            return "softmax" if not cfg.norm_topk_prob else "softmax of the chosen"
        case "sigmoid":
            return f"sigmoid, {'' if cfg.norm_sigmoid_scores else 'not '}normalised"
    return "softmax of the chosen"
