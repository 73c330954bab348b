"""A dropless layer of experts, forward and backward, against dense matmuls of the same FLOPs and against a plain loop:
`python -m benchmarks.moe [DTYPE ...]`. One device; one JSON line a dtype:

ours_seconds    routing, sorting, grouped products, weighted sum, and all gradients
floor_seconds   a gated feed-forward of the same FLOPs: every token through one dense expert as wide as the chosen ones
loop_seconds    every token through every expert, weighted by what was chosen: what a few lines would do
ragged_seconds  the same products as ours by `jax.lax.ragged_dot`, already sorted
ratio           the median over alternating turns of ours / floor
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.step import timed
from MaxText import config, runtime

ROWS, LENGTH, TURNS, WARM_UP = 4, 512, 9, 2
SHAPE: dict[str, Any] = {
    "base_emb_dim": 256,
    "base_moe_mlp_dim": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_target_length": LENGTH,
    "dataset_type": "synthetic",
    "eval_files": (),
}


def programs(dtype: str) -> dict[str, Callable[[], Any]]:
    """Each a compiled step of value and gradients, by name."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from MaxText import blueprint, compat, planner
    from MaxText.layers import mlp, moe

    cfg = config.make(dtype=dtype, **SHAPE)
    shape = dict.fromkeys(planner.MESH_AXES, 1)
    layout = planner.make_layout(shape)
    jax.set_mesh(compat.explicit_mesh(_one_device(shape), planner.MESH_AXES))
    params = blueprint.initialise(moe.declare(cfg, shared=False), jax.random.key(0), jnp.float32, layout)
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, cfg.emb_dim)).astype(dtype)
    wide = {"wi_0": params["wi_0"][:2], "wi_1": params["wi_1"][:2], "wo": params["wo"][:2]}
    dense = {name: jnp.concatenate(list(w), axis=0 if name == "wo" else 1) for name, w in wide.items()}
    even = ROWS * LENGTH * cfg.num_experts_per_tok // cfg.num_experts

    def ours(params, x):
        return moe.moe(cfg, layout, params, x, x, jnp.ones(x.shape[:2], bool))[0]

    def floor(params, x):
        return mlp.mlp(cfg, layout, params, x)

    def one(params, x):
        gate, up = (x @ params[name].astype(x.dtype) for name in ("wi_0", "wi_1"))
        return mlp.combine(cfg, [gate, up]).astype(x.dtype) @ params["wo"].astype(x.dtype)

    def loop(params, x):
        weight, chosen = jax.lax.top_k(x.astype(jnp.float32) @ params["router"]["kernel"], cfg.num_experts_per_tok)
        weight, y = jax.nn.softmax(weight), jnp.zeros(x.shape, jnp.float32)
        for e in range(cfg.num_experts):
            own = {name: params[name][e] for name in wide}
            y = y + one(own, x) * jnp.where(chosen == e, weight, 0.0).sum(-1, keepdims=True)
        return y

    @functools.partial(jax.shard_map, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    def ragged(params, x):  # JAX has no rule for the sharding of its result
        def product(rows, name):
            sizes = jnp.full(cfg.num_experts, even, jnp.int32)
            return jax.lax.ragged_dot(rows, params[name].astype(x.dtype), sizes)

        rows = jnp.repeat(x.reshape(-1, x.shape[-1]), cfg.num_experts_per_tok, axis=0)
        return product(mlp.combine(cfg, [product(rows, "wi_0"), product(rows, "wi_1")]).astype(x.dtype), "wo")

    def compiled(function, params):
        step = jax.jit(jax.value_and_grad(lambda p, x: function(p, x).astype(jnp.float32).sum(), argnums=(0, 1)))
        program = step.lower(params, x).compile()
        return lambda: jax.block_until_ready(program(params, x))

    given = {"ours": (ours, params), "floor": (floor, dense), "loop": (loop, params), "ragged": (ragged, params)}
    return {name: compiled(*what) for name, what in given.items()}


def _one_device(shape: dict[str, int]) -> Any:
    import jax
    import numpy as np

    return np.asarray(jax.devices()[:1]).reshape(tuple(shape.values()))


def measure(dtype: str) -> dict[str, Any]:
    """The figures of one dtype."""
    turns = programs(dtype)
    seconds = [{name: timed(run) for name, run in turns.items()} for _ in range(WARM_UP + TURNS)][WARM_UP:]
    medians = {f"{name}_seconds": round(statistics.median(turn[name] for turn in seconds), 4) for name in turns}
    ratio = round(statistics.median(turn["ours"] / turn["floor"] for turn in seconds), 2)
    return {"benchmark": "moe", "dtype": dtype, **medians, "ratio": ratio}


if __name__ == "__main__":
    runtime.prepare(config.make())
    for name in sys.argv[1:] or ["float32", "bfloat16"]:
        print(json.dumps(measure(name)), flush=True)
