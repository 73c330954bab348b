"""Our train step against a hand-written one of the same shapes (`floor.py`): `python -m benchmarks.step [DTYPE ...]`.

Both run alternately in one process, so the machine's moods hit both; the ratio is the median over pairs. One JSON line
a dtype:

ours_seconds, floor_seconds   median time of a step
ratio                         median of ours / floor, pair by pair
matmul_tflops                 the best of a few large matmuls in that dtype: the peak that this machine shows
ours_of_peak, floor_of_peak   model FLOPs (rematerialisation not counted) / seconds / that peak
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import floor
from MaxText import config, runtime

SHAPE = floor.Shape()
PAIRS, WARM_UP = 11, 2
YARDSTICK: dict[str, Any] = {
    "base_emb_dim": SHAPE.emb,
    "base_num_query_heads": SHAPE.heads,
    "base_num_kv_heads": SHAPE.heads,
    "head_dim": SHAPE.head_dim,
    "base_mlp_dim": SHAPE.mlp,
    "base_num_decoder_layers": SHAPE.layers,
    "vocab_size": SHAPE.vocab,
    "per_device_batch_size": float(SHAPE.batch),
    "max_target_length": SHAPE.length,
    "dataset_type": "synthetic",
    "eval_files": (),
    "remat_policy": "full",
    "scan_layers": True,
    "learning_rate": 1e-3,
    "lr_schedule_type": "constant",
    "warmup_steps_fraction": 0.0,
}


def ours(dtype: str) -> tuple[Callable[[], None], float]:
    """(one step of the project, model FLOPs of it)."""
    import jax

    from MaxText import session

    made = session.prepare(config.make(dtype=dtype, **YARDSTICK))
    with jax.set_mesh(made.mesh):
        state, compiled = made.fresh_state(), made.compile_step()
        batch = made.put_train(made.train.batch(0))
    box = [state]

    def step() -> None:
        box[0], metrics = compiled(box[0], batch)
        jax.block_until_ready((box[0], metrics))

    return step, made.plan.flops_per_step_per_device


def by_hand(dtype: str) -> Callable[[], None]:
    """One step of the floor."""
    import jax
    import jax.numpy as jnp

    params = floor.init(SHAPE, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (SHAPE.batch, SHAPE.length + 1), 0, SHAPE.vocab)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    state = (params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))
    step_fn = jax.jit(floor.make_step(SHAPE, jnp.dtype(dtype)), donate_argnums=0)
    compiled = step_fn.lower(state, inputs, targets).compile()
    box = [state]

    def step() -> None:
        box[0], loss = compiled(box[0], inputs, targets)
        jax.block_until_ready((box[0], loss))

    return step


def matmul_tflops(dtype: str) -> float:
    """The best rate of a few square matmuls."""
    import jax

    best = 0.0
    multiply = jax.jit(lambda a, b: a @ b)
    for size in (1024, 2048):
        a = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
        times = [timed(lambda a=a: jax.block_until_ready(multiply(a, a))) for _ in range(6)]
        best = max(best, 2 * size**3 / min(times[1:]) / 1e12)
    return best


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(dtype: str) -> dict[str, Any]:
    """The figures of one dtype."""
    (step, flops), hand = ours(dtype), by_hand(dtype)
    pairs = [(timed(step), timed(hand)) for _ in range(WARM_UP + PAIRS)][WARM_UP:]
    peak = matmul_tflops(dtype)
    seconds = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return {
        "benchmark": "step",
        "dtype": dtype,
        "ours_seconds": round(seconds[0], 4),
        "floor_seconds": round(seconds[1], 4),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "matmul_tflops": round(peak, 3),
        "ours_of_peak": round(flops / seconds[0] / 1e12 / peak, 3),
        "floor_of_peak": round(flops / seconds[1] / 1e12 / peak, 3),
    }


if __name__ == "__main__":
    runtime.prepare(config.make())
    for name in sys.argv[1:] or ["float32", "bfloat16"]:
        print(json.dumps(measure(name)), flush=True)
