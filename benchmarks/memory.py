"""The memory model beside the TPU compiler: `python -m benchmarks.memory [FILE.json]` prints a table and one JSON line.

Every cell is a model small enough to compile in a minute on a CPU, on a topology, with a remat policy. What the
compiler said is kept in benchmarks/published/compiled.json (arguments and temporaries of a device, in bytes), so that
the model can be judged again in a second: cells that stand there are not compiled again. libtpu must be installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.aot import compile as aot

FILE = Path(__file__).parent / "published/compiled.json"
DENSE: dict[str, Any] = {
    "base_emb_dim": 1024,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 4,
    "head_dim": 128,
    "base_mlp_dim": 4096,
    "base_num_decoder_layers": 8,
    "vocab_size": 32_000,
    "max_target_length": 1024,
    "per_device_batch_size": 4.0,
}
EXPERTS = DENSE | {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 1024,
    "base_mlp_dim": 1024,
    "base_num_decoder_layers": 4,
}
LATENT = DENSE | {
    "attention_type": "mla",
    "base_num_kv_heads": 8,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
WIDE = DENSE | {"base_emb_dim": 2048, "base_num_query_heads": 16, "base_mlp_dim": 8192, "per_device_batch_size": 2.0}
TIED = DENSE | {"logits_via_embedding": True, "mlp_activations": ["gelu", "linear"], "base_mlp_dim": 6144}
LONG = DENSE | {"max_target_length": 2048, "per_device_batch_size": 2.0}
DEEP = DENSE | {"base_num_decoder_layers": 32, "vocab_size": 8_192}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "experts": EXPERTS,
    "capacity": EXPERTS | {"capacity_factor": 1.25},
    "latent": LATENT,
    "wide": WIDE,
    "tied": TIED,
    "long": LONG,
    "deep": DEEP,
}
# Narrower and deeper, so that the compiler has fewer sizes to try.
SMALL = DENSE | {
    "base_emb_dim": 512,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 2048,
    "base_num_decoder_layers": 24,
    "vocab_size": 8_192,
    "max_target_length": 512,
    "per_device_batch_size": 16.0,
}
SMALL_EXPERTS = SMALL | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 1024,
    "base_mlp_dim": 1024,
    "base_num_decoder_layers": 12,
}
MODELS |= {
    "small": SMALL,
    "small experts": SMALL_EXPERTS,
    "small capacity": SMALL_EXPERTS | {"capacity_factor": 1.25},
    "small latent": SMALL | {key: LATENT[key] for key in LATENT.keys() - DENSE.keys()} | {"base_num_kv_heads": 4},
    "small windows": SMALL | {"layer_pattern": ["local_sliding", "global"], "sliding_window_size": 128},
}
# Whole models, at their full depth.
SHORT = {"max_target_length": 1024, "per_device_batch_size": 2.0}
MODELS |= {name: SHORT | {"model_name": name} for name in ("llama3.1-8b", "llama3.2-1b", "gemma2-2b")}
HEADS = {"decoder_layer_input": "offload", "query_proj": "offload", "key_proj": "offload", "value_proj": "offload"}
TENSOR = {"ici_tensor_parallelism": 2}
FLASH = {"attention": "autoselected"}  # the others write their scores
# model, hardware, policy, other keys
CELLS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("dense", "v5e-4", "full", {}),
    ("deep", "v5e-16", "full", {}),
    ("dense", "v5e-4", "minimal", {}),
    ("dense", "v5p-8", "none", {}),
    ("latent", "v6e-4", "full", {}),
    ("wide", "v6e-8", "full", {}),
    ("dense", "tpu7x-8", "full", {}),
    ("llama3.1-8b", "v5p-16", "full", {}),
    ("dense", "2xv5e-4", "full", {}),
    ("llama3.2-1b", "v6e-8", "minimal_with_context", {}),
    ("experts", "v6e-8", "minimal", {}),
    ("gemma2-2b", "v6e-4", "full", {}),
    ("dense", "v6e-8", "custom", HEADS),
    ("tied", "v5p-8", "full", {}),
    ("small experts", "v5e-4", "full", {}),
    ("small", "v5p-8", "full", {"ici_pipeline_parallelism": 2}),
    ("small experts", "v6e-4", "full", {"ici_expert_parallelism": 2}),
    ("small", "v5e-16", "full", TENSOR),
    ("small", "v6e-4", "full", {"ici_context_parallelism": 2}),
    ("small", "tpu7x-8", "save_qkv_proj", {}),
    ("small", "v5e-4", "full", {"gradient_accumulation_steps": 2}),
    ("small latent", "v5p-8", "minimal", {}),
    ("small windows", "v6e-4", "save_out_proj", {}),
    ("small", "v5e-4", "full", {"num_vocab_tiling": 8}),
    ("small", "2xv6e-4", "save_dot_except_mlp", {}),
    ("small", "v6e-8", "full", {"mu_dtype": "bfloat16", "grad_dtype": "bfloat16"}),
    ("small capacity", "v5p-8", "full", {}),
    ("small", "v6e-8", "none", {}),
    ("dense", "v5e-4", "full", FLASH),
    ("dense", "v6e-8", "minimal_with_context", FLASH),
    ("small", "v6e-8", "none", FLASH),
    ("long", "v5p-8", "minimal", FLASH),
    ("latent", "v5e-4", "full", FLASH),
    ("small windows", "v6e-4", "save_out_proj", FLASH),
]


def name(cell: tuple[str, str, str, dict[str, Any]]) -> str:
    model, where, policy, keys = cell
    return " ".join([model, where, policy, *(f"{k}={v}" for k, v in keys.items() if policy != "custom")])


def planned(cell: tuple[str, str, str, dict[str, Any]]) -> tuple[Any, Any, Any]:
    """(configuration, plan, hardware) of a cell."""
    from MaxText import config, decoder, hardware, planner

    model, where, policy, keys = cell
    cfg = config.make(
        **(
            MODELS[model]
            | {"dtype": "bfloat16", "scan_layers": True, "remat_policy": policy, "attention": "dot_product"}
            | keys
        )
    )
    found = hardware.named(where)
    return cfg, planner.make(cfg, decoder.declare(cfg), found), found


def measure(known: dict[str, Any]) -> Iterator[str]:
    """Compile what is not known yet; every answer is written at once."""
    for cell in CELLS:
        if "total" not in known.get(name(cell), {}):
            cfg, plan, found = planned(cell)
            answer = aot.compile_step(cfg, plan, found.slice)
            known[name(cell)] = {
                "arguments": answer.arguments,
                "temporary": answer.temporary,
                "total": answer.total,
            }
            FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            yield name(cell)


def report(known: dict[str, Any]) -> dict[str, Any]:
    """Prints the table; the errors' median and 95th percentile."""
    from MaxText.cost import memory

    print("| cell | state, exact to | compiler, total | ours | error |\n| --- | --- | --- | --- | --- |")
    errors, states = [], []
    for cell in CELLS:
        if "total" not in known.get(name(cell), {}):
            continue
        cfg, plan, found = planned(cell)
        needs, said = memory.forecast(cfg, plan, found), known[name(cell)]
        states.append(abs(said["arguments"] / (plan.state_bytes + needs.batch) - 1))
        errors.append(needs.total / said["total"] - 1)
        both = f"{said['total'] / 1e6:.0f} MB | {needs.total / 1e6:.0f} MB"
        print(f"| {name(cell)} | {states[-1]:.4%} | {both} | {errors[-1]:+.1%} |")
        if "explain" in sys.argv:
            print(
                {k: round(v / 1e6) for k, v in needs.by_class().items()},
                {k: round(v / 1e6) for k, v in needs.moments.items()},
            )
    sizes = np.abs(errors)
    return {
        "cells": len(errors),
        "median": round(float(np.median(sizes)), 4),
        "p95": round(float(np.quantile(sizes, 0.95)), 4),
        "low": round(float(np.quantile(errors, 0.05)), 4),
        "high": round(float(np.quantile(errors, 0.95)), 4),
        "state_worst": round(max(states), 6),
    }


def main(arguments: list[str]) -> None:
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    if "compile" in arguments:
        aot.prepare()
        for done in measure(known):
            print(done, flush=True)
    print(json.dumps(report(known)))


if __name__ == "__main__":
    main(sys.argv[1:])
