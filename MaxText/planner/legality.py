"""What a mesh may be for a model: every rule that refuses, with both numbers and the legal values.

One function for each axis and question; `make` collects the problems of all of them before it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from MaxText import blueprint, pipeline
from MaxText.layout import Layout
from MaxText.planner.rules import LEGAL_AXES, legal

Sizes = Mapping[str, int]  # of every mesh axis
KV_HEADS = ("num_kv_heads", "global_num_kv_heads", "kv_heads")


def indivisible(cfg: Any, tree: blueprint.Blueprint, layout: Layout) -> list[str]:
    """Every dim of a parameter that the mesh does not divide, with both numbers and the legal degrees."""
    names = {
        ("embed", cfg.emb_dim): "emb_dim",
        ("mlp_embed", cfg.emb_dim): "emb_dim",
        ("heads", cfg.num_query_heads): "num_query_heads",
        ("kv_heads", cfg.num_kv_heads): "num_kv_heads",
        ("kv_heads", cfg.global_num_kv_heads): "global_num_kv_heads",
        ("mlp", cfg.mlp_dim): "mlp_dim",
        ("experts", cfg.num_experts): "num_experts",
        ("moe_embed", cfg.emb_dim): "emb_dim",
        ("moe_mlp", cfg.moe_mlp_dim): "moe_mlp_dim",
        ("latent", cfg.q_lora_rank): "q_lora_rank",
        ("latent", cfg.kv_lora_rank): "kv_lora_rank",
    }
    used = dict.fromkeys(
        (names.get((str(dim), size), str(dim)), size, axes, ways)
        for _, p in blueprint.leaves(tree)
        for dim, size, axes, ways in zip(p.axes, p.shape, layout.split(p.axes), layout.pieces(p.axes), strict=True)
    )
    return [
        f"{name}={size} cannot be split {ways} ways over {' x '.join(axes)}. "
        f"Legal here: {legal(size)}."
        f"{' Or set shard_kv_heads=false to replicate them in groups.' if name in KV_HEADS else ''}"
        for name, size, axes, ways in used
        if size % ways
    ]


def unmatched_rules(cfg: Any, tree: blueprint.Blueprint) -> list[str]:
    """Rows of the user's rules for dims that no parameter of this model has."""
    dims = {dim for _, p in blueprint.leaves(tree) for dim in p.axes}
    wanted = (row.partition("=")[0].strip() for row in cfg.logical_axis_rules)
    found = ", ".join(sorted(LEGAL_AXES.keys() & dims))
    return [
        f"logical_axis_rules: no parameter of this model has the dim {dim!r}; leave its row out. It has: {found}."
        for dim in wanted
        if dim not in dims
    ]


def batch_rows(cfg: Any, devices: int, ways: int, schedule: pipeline.Schedule | None) -> tuple[int, int, list[str]]:
    """(rows of an optimizer step, rows of an eval batch, problems). Rows are split `ways` over devices, and within a
    pipeline into its microbatches; those of an evaluation may be fewer and need not fill these."""
    accumulation = cfg.gradient_accumulation_steps
    problems = []
    split, words = ways, f"{ways}, the ways the batch is split"
    if schedule and schedule.share > 1:
        split *= schedule.share
        words = (
            f"{split}: {ways} ways over devices, of which {schedule.stages} pipeline stages, for each "
            f"{schedule.stages} of num_pipeline_microbatches={schedule.microbatches}"
        )
    exact = cfg.global_batch_size / accumulation if cfg.global_batch_size else devices * cfg.per_device_batch_size
    micro = int(exact)
    given = (
        f"global_batch_size={cfg.global_batch_size} / gradient_accumulation_steps={accumulation}"
        if cfg.global_batch_size
        else f"per_device_batch_size={cfg.per_device_batch_size:g} x {devices} devices"
    )
    if micro != exact or micro % split or micro == 0:
        below = max(split, int(exact // split * split))
        key = "global_batch_size" if cfg.global_batch_size else "per_device_batch_size"
        value = below * accumulation if cfg.global_batch_size else below / devices
        fewer = f", or num_pipeline_microbatches={schedule.stages}" if schedule and split > ways else ""
        problems.append(
            f"{given} gives {exact:g} rows a microbatch; they must be a whole multiple of {words}. Nearest: {below} "
            f"rows, {key}={value:g}{fewer}."
        )
    eval_exact = devices * cfg.eval_per_device_batch_size or exact
    eval_rows = max(ways, int(eval_exact // ways * ways))
    if eval_rows != eval_exact and cfg.eval_per_device_batch_size:
        problems.append(
            f"eval_per_device_batch_size={cfg.eval_per_device_batch_size:g} x {devices} devices gives {eval_exact:g} "
            f"rows; they must be a whole multiple of {ways}. Nearest: {eval_rows / devices:g}."
        )
    return micro * accumulation, eval_rows, problems


def kernels(cfg: Any, layout: Layout) -> list[str]:
    """attention=flash asks for a kernel that is made for whole rows on TPUs."""
    if cfg.attention != "flash":
        return []
    problems = []
    if layout.platform == "gpu":
        problems.append("attention=flash: this version has no such kernel for a GPU. Set attention=autoselected.")
    if (ways := layout.ways("activation_length")) > 1:
        problems.append(
            f"attention=flash takes whole rows, and the context axis splits them {ways} ways, which has blocks of its "
            "own. Set attention=autoselected."
        )
    return problems


def _expert(cfg: Any, sizes: Sizes) -> list[str]:
    """Without experts the axis would be one more name for fsdp."""
    if cfg.num_experts > 1:
        return []
    return [
        f"ici_expert_parallelism x dcn_expert_parallelism = {sizes['expert']}: the model has no experts "
        f"(num_experts={cfg.num_experts}). Legal here: 1. Use fsdp, which splits weights and batch in the same way."
    ]


def _context(cfg: Any, sizes: Sizes) -> list[str]:
    """Rows are cut into equal chunks; what the layers need of their neighbours fits into one."""
    degree, length = sizes["context"], cfg.max_target_length
    given = f"ici_context_parallelism x dcn_context_parallelism = {degree}"
    zigzag = cfg.context_parallel_load_balance and cfg.context_parallel_strategy != "ulysses"
    chunks = degree * (2 if zigzag else 1)
    problems = []
    if length % chunks:
        plainly = zigzag and length % degree == 0
        problems.append(
            f"{given}: max_target_length={length} cannot be cut into {chunks} equal chunks"
            f"{f' (2 x {degree}, an early and a late one for each shard)' if zigzag else ''}. "
            f"Nearest max_target_length: {max(length // chunks, 1) * chunks}"
            f"{', or context_parallel_load_balance=false' if plainly else ''}."
        )
    elif cfg.mtp_num_layers > length // chunks:
        problems.append(
            f"{given}: mtp_num_layers={cfg.mtp_num_layers} predicts further ahead than a chunk of "
            f"{length // chunks} tokens reaches. Legal here: a degree below {degree}."
        )
    if cfg.use_indexer and cfg.context_parallel_strategy != "all_gather":
        problems.append(
            f"context_parallel_strategy={cfg.context_parallel_strategy}: the indexer ranks all keys of a query before "
            "it attends to any. Legal here: all_gather."
        )
    return problems + (_exchange(cfg, sizes, given) if cfg.context_parallel_strategy == "ulysses" else [])


def _exchange(cfg: Any, sizes: Sizes, given: str) -> list[str]:
    """Shards exchange rows for heads, so each must get as many heads; key/value heads may also go to several."""
    degree, tensor, problems = sizes["context"], sizes["tensor"], []
    queries = cfg.num_query_heads // tensor
    if queries % degree:
        problems.append(
            f"{given} with context_parallel_strategy=ulysses: num_query_heads={cfg.num_query_heads}, {queries} on each "
            f"of {tensor} tensor shards, cannot be split {degree} ways. Legal here: {legal(queries)}."
        )
    kinds = {"num_kv_heads": cfg.num_kv_heads, "global_num_kv_heads": cfg.global_num_kv_heads}
    for name, heads in kinds.items() if cfg.attention_type != "mla" else ():
        here = math.lcm(heads, tensor) // tensor
        if here and here % degree and degree % here:
            fitting = [n for n in range(1, queries + 1) if queries % n == 0 and (here % n == 0 or n % here == 0)]
            problems.append(
                f"{given} with context_parallel_strategy=ulysses: {name}={heads}, {here} on each of {tensor} tensor "
                f"shards, neither divides {degree} nor is divided by it. Legal here: {', '.join(map(str, fitting))}."
            )
    return problems


def _pipeline(cfg: Any, sizes: Sizes) -> list[str]:
    return pipeline.problems(cfg, sizes["pipeline"])


# Asked only where the axis is larger than one.
OF_AXIS: dict[str, Callable[[Any, Sizes], list[str]]] = {
    "expert": _expert,
    "pipeline": _pipeline,
    "context": _context,
}


def unusable_axes(cfg: Any, sizes: Sizes) -> list[str]:
    """Problems of the axes that this model cannot use, or not at this degree."""
    return [problem for axis, check in OF_AXIS.items() if sizes[axis] > 1 for problem in check(cfg, sizes)]
