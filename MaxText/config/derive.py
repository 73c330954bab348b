"""The values that follow from others: computed once, when the configuration is complete."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from MaxText.config.resolved import DERIVED

UNROLLED_LAYERS = 4

Sources = dict[str, tuple[str, ...]]


def complete(values: Mapping[str, Any]) -> tuple[dict[str, Any], Sources]:
    """All keys resolved and all derived values; and, per name computed here, the keys that it came from."""
    done, sources = dict(values), dict(DERIVED)

    def fill(key: str, empty: object, source: str) -> None:
        if values[key] == empty:
            done[key], sources[key] = values[source], (source,)

    fill("steps", -1, "learning_rate_schedule_steps")
    fill("learning_rate_schedule_steps", -1, "steps")
    fill("mu_dtype", "", "weight_dtype")
    done |= scaled(values)
    if values["scan_layers"] is None:  # unrolled steps are faster, and few layers compile as fast (docs/log.md)
        done["scan_layers"] = done["num_decoder_layers"] > UNROLLED_LAYERS
        sources["scan_layers"] = ("base_num_decoder_layers",)
    done["run_folder"] = Path(values["base_output_directory"]).expanduser() / values["run_name"]
    return done, sources


def run_name(model_name: str, stem: str) -> tuple[str, str]:
    """The name of a run that has none, and what it came from. `stem` is the CONFIG file's name."""
    if model_name == "default":
        return stem, "the CONFIG file's name"
    return model_name if not is_path(model_name) else Path(model_name).stem, "model_name"


def is_path(model_name: str) -> bool:
    """Whether `model_name` is the path of a model file, not a name in configs/models."""
    return "/" in model_name or model_name.endswith((".yml", ".yaml"))


def scaled(values: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the model: base sizes, doubled so that the parameters grow about `global_parameter_scale` times.

    scale = 2^n, n = 3q + r: layers double q times; width q times, once more if r = 2; heads and mlp q times, once more
    if r >= 1. Scale 4 turns emb 2048, heads 16, mlp 7168, layers 16 into 4096, 32, 14336, 16.
    """
    q, r = divmod(values["global_parameter_scale"].bit_length() - 1, 3)
    emb, heads = q + (r == 2), q + (r >= 1)
    moe = values["base_moe_mlp_dim"]
    return {
        "emb_dim": values["base_emb_dim"] << emb,
        "num_query_heads": values["base_num_query_heads"] << heads,
        "num_kv_heads": values["base_num_kv_heads"] << heads,
        "mlp_dim": values["base_mlp_dim"] << heads,
        "moe_mlp_dim": (values["base_mlp_dim"] if moe == -1 else moe) << heads,
        "num_decoder_layers": values["base_num_decoder_layers"] * values["layers_per_decoder_layer"] << q,
    }
