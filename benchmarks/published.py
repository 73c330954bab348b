"""Published training steps as configurations of ours: what the time model is calibrated and judged on.

`benchmarks/published/steps.json` and `scaling.json` hold the figures with their sources. A row becomes a plan on the
named slice with the published batch, mesh and rematerialisation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from MaxText import config, decoder, hardware, planner
from MaxText.cost import timing

FOLDER = Path(__file__).parent / "published"
LAYER_INPUT = {"decoder_layer_input": "offload"}
HEADS = dict.fromkeys(("query_proj", "key_proj", "value_proj"), "offload")
HEADS_KEPT = dict.fromkeys(("query_proj", "key_proj", "value_proj"), "device")
# What each published run kept; where a page names no policy, the one of its siblings.
CUSTOM: dict[str, dict[str, str]] = {
    "custom: layer_input→host": LAYER_INPUT,
    "see recipe": LAYER_INPUT,
    "custom: layer_input,mlpwo→host; k,v kept": LAYER_INPUT | {"key_proj": "device", "value_proj": "device"},
    "custom: layer_input,context,qkv kept": HEADS_KEPT | {"context": "device"},
    "as I14": HEADS_KEPT | {"context": "device"},
    "custom: layer_input,out,q,k,v→host": LAYER_INPUT | HEADS | {"out_proj": "offload"},
    "custom: layer_input,q,k,v→host": LAYER_INPUT | HEADS,
}
POLICIES = {"full": "full", "qkv_proj_offloaded": "qkv_proj_offloaded", "minimal_flash": "minimal_with_context"}
MESHES: dict[str, dict[str, int]] = {
    "fsdp_transpose=256": {"ici_fsdp_parallelism": 1, "ici_fsdp_transpose_parallelism": -1},
    "fsdp=256 × fsdp_transpose=2 (2-D fsdp)": {"ici_fsdp_transpose_parallelism": 2},
}


@dataclass(frozen=True)
class Row:
    """One published step: who, on what, its seconds; and our plan of it with its ideal times."""

    id: str
    chip: str
    model: str
    seconds: float
    cfg: Any
    hardware: hardware.Hardware
    plan: planner.Plan
    ideal: timing.Step


def _row(id: str, chip: str, model: str, seconds: float, cfg: Any, hw: hardware.Hardware) -> Row:
    assert hw.slice is not None
    plan = planner.make(cfg, decoder.declare(cfg), hw)
    return Row(id, chip, model, seconds, cfg, hw, plan, timing.ideal(cfg, plan, hw.slice))


def _step(found: dict[str, Any]) -> Row:
    remat, shard = found["remat"], found["shard"]
    keys = {"remat_policy": "custom", **CUSTOM[remat]} if remat in CUSTOM else {"remat_policy": POLICIES[remat]}
    keys |= MESHES.get(shard, {}) | ({"capacity_factor": 1.25} if "capacity 1.25" in shard else {})
    cfg = config.make(
        model_name=found["model"],
        dtype="bfloat16",
        global_batch_size=found["gbs"],
        max_target_length=found["seq"],
        scan_layers=True,
        **keys,
    )
    number = found["devices"] if found["chip"] == "tpu7x" else found["chips"]  # its names count cores
    hw = hardware.named(f"{found['chip']}-{number}", found["slices"])
    return _row(found["id"], found["chip"], found["model"], found["step"], cfg, hw)


def _scaled(found: dict[str, Any]) -> Row:
    dims = found["dims"]
    cfg = config.make(
        dtype="bfloat16",
        base_emb_dim=dims["d"],
        base_num_query_heads=dims["H"],
        base_num_kv_heads=dims["H"],
        head_dim=128,
        base_mlp_dim=dims["ff"],
        base_num_decoder_layers=dims["L"],
        vocab_size=32_000,
        remat_policy="full",
        scan_layers=True,
        per_device_batch_size=found["per_device_batch"],
        max_target_length=found["seq"],
    )
    hw = hardware.named(f"{found['chip']}-256", found["slices"])
    return _row(f"{found['model']}x{found['slices']}", found["chip"], found["model"], found["step"], cfg, hw)


def rows() -> list[Row]:
    """Every published step."""
    steps = json.loads((FOLDER / "steps.json").read_text(encoding="utf-8"))
    scaling = json.loads((FOLDER / "scaling.json").read_text(encoding="utf-8"))
    return [_step(found) for found in steps] + [_scaled(found) for found in scaling]
