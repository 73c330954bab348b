"""From config, blueprint and hardware to a plan: mesh, layout, batch, exact state bytes; or a refusal with both numbers
and advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from MaxText import blueprint, compat, flops
from MaxText.errors import PlanError
from MaxText.hardware import Hardware
from MaxText.layout import Layout

# Every axis always exists; size 1 is a size. Outermost first, so that tensor neighbours are physical neighbours.
MESH_AXES = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "fsdp_transpose", "expert")
ZERO_AXES = ("fsdp", "fsdp_transpose", "expert")
# Axes that no layer can use yet: a degree above 1 is refused, not ignored.
UNUSED_AXES = ("pipeline", "context")

RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embed", ZERO_AXES),
    ("vocab", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("head_dim", ()),
    ("norm", ()),
    ("head_norm", ()),
    ("layers", ()),
    ("positions", ()),
    ("latent", ZERO_AXES),
    ("experts", ()),
    ("moe_mlp", ("tensor",)),
    ("activation_batch", BATCH_AXES),
    ("activation_length", ("context",)),
    ("activation_embed", ()),
    ("activation_heads", ("tensor",)),
    ("activation_kv_heads", ("tensor",)),
    ("activation_mlp", ("tensor",)),
    ("activation_vocab", ("tensor",)),
)


@dataclass(frozen=True)
class Plan:
    """How a config runs on a hardware. Sizes in rows and bytes; `*_bytes` are per device and exact."""

    ici: dict[str, int]
    dcn: dict[str, int]
    layout: Layout
    tree: blueprint.Blueprint
    devices: int
    global_batch_size: int
    microbatches: int
    eval_batch_size: int
    tokens_per_step: int
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    flops_per_step_per_device: float

    @property
    def mesh_shape(self) -> dict[str, int]:
        return {axis: self.ici[axis] * self.dcn[axis] for axis in MESH_AXES}

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes

    def describe_mesh(self) -> str:
        """For the start screen: the axes larger than one, or "1 device"."""
        large = [f"{axis}={size}" for axis, size in self.mesh_shape.items() if size > 1]
        return " x ".join(large) if large else "one device"


def _degrees(cfg: Any, level: str) -> dict[str, int]:
    return {axis: getattr(cfg, f"{level}_{axis}_parallelism") for axis in MESH_AXES}


def _filled(degrees: dict[str, int], total: int, level: str, what: str) -> dict[str, int]:
    """Degrees with the one -1 replaced so that the product is `total`; otherwise a refusal with the numbers."""
    free = [axis for axis, size in degrees.items() if size == -1]
    fixed = math.prod(size for size in degrees.values() if size != -1)
    shown = (
        " x ".join(f"{level}_{axis}_parallelism={size}" for axis, size in degrees.items() if size != 1)
        or "all degrees 1"
    )
    if len(free) > 1:
        names = " and ".join(f"{level}_{axis}_parallelism" for axis in free)
        raise PlanError(
            f"{names} are both -1; only one degree can fill up to {total} {what}. Set all but one.", id="plan.two-free"
        )
    if free and total % fixed == 0:
        return {**degrees, free[0]: total // fixed}
    if free or fixed != total:
        raise PlanError(
            f"{shown}: the product of the fixed degrees is {fixed}, but there are {total} {what}. "
            f"{'It must divide' if free else 'It must equal'} {total}: change a degree, or set one to -1 to fill up"
            + (", or num_cpu_devices to simulate more devices on a CPU." if level == "ici" else "."),
            id="plan.mesh",
        )
    return degrees


def mesh_degrees(cfg: Any, hardware: Hardware) -> tuple[dict[str, int], dict[str, int]]:
    """(degrees within a slice, degrees across slices), every -1 filled."""
    slices = hardware.slices if cfg.num_slices == -1 else cfg.num_slices
    if slices != hardware.slices:
        raise PlanError(
            f"num_slices={slices}, but {hardware.slices} slices are here. Set num_slices=-1 to detect.",
            id="plan.slices",
        )
    dcn = _filled(_degrees(cfg, "dcn"), slices, "dcn", f"slices (num_slices={slices})")
    ici = _filled(_degrees(cfg, "ici"), hardware.devices // slices, "ici", f"{hardware.platform} devices in a slice")
    for axis in UNUSED_AXES:
        if ici[axis] * dcn[axis] > 1:
            raise PlanError(
                f"ici_{axis}_parallelism={ici[axis]}, dcn_{axis}_parallelism={dcn[axis]}: no layer can be split "
                f"over {axis} in this version. Legal here: 1. Use fsdp, data or tensor instead.",
                id="plan.unused-axis",
            )
    return ici, dcn


def _legal(size: int, limit: int = 4096) -> str:
    return ", ".join(str(n) for n in range(1, min(size, limit) + 1) if size % n == 0)


def _indivisible(cfg: Any, tree: blueprint.Blueprint, layout: Layout) -> list[str]:
    """Every dim of a parameter that the mesh does not divide, with both numbers and the legal degrees."""
    names = {
        ("embed", cfg.emb_dim): "emb_dim",
        ("heads", cfg.num_query_heads): "num_query_heads",
        ("kv_heads", cfg.num_kv_heads): "num_kv_heads",
        ("kv_heads", cfg.global_num_kv_heads): "global_num_kv_heads",
        ("mlp", cfg.mlp_dim): "mlp_dim",
        ("moe_mlp", cfg.moe_mlp_dim): "moe_mlp_dim",
        ("latent", cfg.q_lora_rank): "q_lora_rank",
        ("latent", cfg.kv_lora_rank): "kv_lora_rank",
        ("vocab", cfg.vocab_size): "vocab_size",
    }
    used = dict.fromkeys(
        (dim, size) for _, p in blueprint.leaves(tree) for dim, size in zip(p.axes, p.shape, strict=True) if dim
    )
    return [
        f"{names.get((dim, size), dim)}={size} cannot be split {layout.ways(dim)} ways over "
        f"{' x '.join(layout.axes(dim))}. Legal here: {_legal(size)}."
        for dim, size in used
        if size % layout.ways(dim)
    ]


def _rows(cfg: Any, devices: int, ways: int) -> tuple[int, int, list[str]]:
    """(rows of an optimizer step, rows of an eval batch, problems)."""
    accumulation = cfg.gradient_accumulation_steps
    problems = []
    exact = cfg.global_batch_size / accumulation if cfg.global_batch_size else devices * cfg.per_device_batch_size
    micro = int(exact)
    given = (
        f"global_batch_size={cfg.global_batch_size} / gradient_accumulation_steps={accumulation}"
        if cfg.global_batch_size
        else f"per_device_batch_size={cfg.per_device_batch_size:g} x {devices} devices"
    )
    if micro != exact or micro % ways or micro == 0:
        below = max(ways, int(exact // ways * ways))
        problems.append(
            f"{given} gives {exact:g} rows a microbatch; they must be a whole multiple of {ways}, the ways the batch "
            f"is split. Nearest: {below} rows, per_device_batch_size={below / devices:g}."
        )
    eval_exact = devices * (cfg.eval_per_device_batch_size or cfg.per_device_batch_size)
    eval_rows = max(ways, int(eval_exact // ways * ways))
    if eval_rows != eval_exact and cfg.eval_per_device_batch_size:
        problems.append(
            f"eval_per_device_batch_size={cfg.eval_per_device_batch_size:g} x {devices} devices gives {eval_exact:g} "
            f"rows; they must be a whole multiple of {ways}. Nearest: {eval_rows / devices:g}."
        )
    return micro * accumulation, eval_rows, problems


def make_layout(mesh_shape: dict[str, int]) -> Layout:
    """The project's rules on a mesh of this shape."""
    return Layout(RULES, tuple(mesh_shape.items()), frozenset(ZERO_AXES))


def _bytes(tree: blueprint.Blueprint, layout: Layout, dtype: str) -> int:
    """Bytes on one device of one array for each parameter."""
    return sum(
        p.size // math.prod(layout.ways(dim) for dim in p.axes) * p.dtype(dtype).itemsize
        for _, p in blueprint.leaves(tree)
    )


def _optimizer_bytes(cfg: Any, tree: blueprint.Blueprint, layout: Layout) -> int:
    """Arrays that the optimizer keeps for each parameter (by dtype), and its int32 counters."""
    slots = {"adamw": (cfg.mu_dtype, cfg.weight_dtype), "sgd": ()}[cfg.opt_type]
    counters = {"adamw": 1, "sgd": 0}[cfg.opt_type]
    return sum(_bytes(tree, layout, dtype) for dtype in slots) + 4 * counters


def make(cfg: Any, tree: blueprint.Blueprint, hardware: Hardware) -> Plan:
    """The plan, or a PlanError that lists every problem of the batch and of divisibility at once. Touches no device."""
    ici, dcn = mesh_degrees(cfg, hardware)
    layout = make_layout({axis: ici[axis] * dcn[axis] for axis in MESH_AXES})
    rows, eval_rows, problems = _rows(cfg, hardware.devices, layout.ways("activation_batch"))
    problems += _indivisible(cfg, tree, layout)
    if problems:
        raise PlanError("\n".join(problems), id="plan.divisibility")
    tokens = rows * cfg.max_target_length
    return Plan(
        ici=ici,
        dcn=dcn,
        layout=layout,
        tree=tree,
        devices=hardware.devices,
        global_batch_size=rows,
        microbatches=cfg.gradient_accumulation_steps,
        eval_batch_size=eval_rows,
        tokens_per_step=tokens,
        parameters=blueprint.count(tree),
        parameter_bytes=_bytes(tree, layout, cfg.weight_dtype),
        optimizer_bytes=_optimizer_bytes(cfg, tree, layout) + 4,  # + the step counter
        flops_per_step_per_device=flops.per_step_per_device(cfg, tokens, hardware.devices),
    )


def build_mesh(plan: Plan, devices: Sequence[jax.Device]) -> Mesh:
    """Real devices in the plan's shape: by physical neighbourhood on TPU, by slice where there are several, in order on
    CPU."""
    ici, dcn = tuple(plan.ici.values()), tuple(plan.dcn.values())
    if math.prod(dcn) > 1:
        array = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    elif devices[0].platform == "tpu":
        array = mesh_utils.create_device_mesh(ici, devices)
    else:
        array = np.asarray(devices).reshape(ici)
    return compat.explicit_mesh(array, MESH_AXES)
