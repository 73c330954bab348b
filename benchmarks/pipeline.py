"""What a pipeline costs beside its bubble, on virtual CPU devices: `python -m benchmarks.pipeline` prints a JSON line.

The devices share the cores, and an idle stage of the one program computes as a busy one does. So a step's processor
time is that of all stages together, and should be that of the same layers without a pipeline (the rows split over
`data`, on as many devices) times 1 / (1 - bubble) for the layers. What is more than that is the program's own:
hand-over, buffers, weights exchanged at the door.

cases[].seconds   median processor seconds of a step over all cores; steps of all cases alternate
cases[].ratio     over the case without a pipeline, step by step
cases[].bound     1 / (1 - bubble): iterations over those at work
"""

# ruff: noqa: E402 (the environment comes before JAX)
from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

STAGES, STEPS, WARM_UP = 2, 7, 1
os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={STAGES}"

import jax

from MaxText import config, session

SHAPE: dict[str, Any] = {
    "base_emb_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 64,
    "base_mlp_dim": 1024,
    "base_num_decoder_layers": 4,
    "global_batch_size": 8,
    "max_target_length": 256,
    "dtype": "float32",
    "remat_policy": "full",
    "scan_layers": True,
    "dataset_type": "synthetic",
    "eval_files": (),
    "ici_fsdp_parallelism": 1,
}
PIPELINE = {"ici_pipeline_parallelism": STAGES}
CASES: dict[str, dict[str, Any]] = {
    "no pipeline": {"ici_data_parallelism": STAGES},
    "2 microbatches": PIPELINE | {"num_pipeline_repeats": 1},
    "4 microbatches": PIPELINE | {"num_pipeline_repeats": 1, "num_pipeline_microbatches": 4},
    "8 microbatches": PIPELINE | {"num_pipeline_repeats": 1, "num_pipeline_microbatches": 8},
    "2 microbatches, 2 repeats": PIPELINE | {"num_pipeline_repeats": 2},
}


def case(keys: dict[str, Any]) -> tuple[Callable[[], float], float]:
    """(processor seconds of one step, the bound)."""
    made = session.prepare(config.make(**SHAPE, **keys))
    with jax.set_mesh(made.mesh):
        state, compiled = made.fresh_state(), made.compile_step()
        batch = made.put_train(made.train.batch(0))
    box = [state]

    def step() -> float:
        begin = time.process_time()
        box[0], metrics = compiled(box[0], batch)
        jax.block_until_ready((box[0], metrics))
        return time.process_time() - begin

    schedule = made.plan.pipeline
    return step, 1 / (1 - schedule.bubble) if schedule else 1.0


def main() -> None:
    """Measure all cases, turn by turn."""
    cases = {name: case(keys) for name, keys in CASES.items()}
    rows = [{name: step() for name, (step, _) in cases.items()} for _ in range(WARM_UP + STEPS)][WARM_UP:]
    figures = {
        name: {
            "seconds": round(statistics.median(row[name] for row in rows), 3),
            "ratio": round(statistics.median(row[name] / row["no pipeline"] for row in rows), 3),
            "bound": round(bound, 3),
        }
        for name, (_, bound) in cases.items()
    }
    print(json.dumps({"benchmark": "pipeline", "jax": jax.__version__, "cases": figures}))


if __name__ == "__main__":
    main()
