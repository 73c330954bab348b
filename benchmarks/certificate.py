"""The gradient certificate: every axis of the mesh, and every pair of axes, computes what one device computes.

    python -m benchmarks.certificate [BLOCK ...] [cut=AXIS[+AXIS]] [part=K/N] [save=CELLS.json]
    python -m benchmarks.certificate from=CELLS.json[,CELLS.json...] out=docs/certificate.md

For each kind of block and each cut of size two (or two by two) over virtual CPU devices: the loss, and the gradient of
every parameter, in float32 under plain SGD, at the first step and at the fifth, against the same steps on one device.
An error is |gradient - reference| / |reference|, of the worst parameter; the bar is 1e-5. The bytes of a training
state on each device must equal the plan's to the byte. `part=2/7` takes every seventh cell from the second on; parts
run side by side, and one page is made of what they saved. A cut that the planner refuses for a block is shown with its
reason, and fails unless it is an expert axis without experts; exit code 1 if any cell fails."""

# ruff: noqa: E402 (the environment comes before JAX)
from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICES = 4
if __name__ == "__main__" and "jax" not in sys.modules:  # a test has devices of its own, or will have
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from MaxText import balance, blueprint, config, decoder, optimizer, planner, session, state, step
from MaxText.errors import MaxTextError
from MaxText.hardware import Hardware
from MaxText.layout import Layout

ROWS, LENGTH, STEPS, RATE, BAR = 8, 32, 5, 0.02, 1e-5
AXES = ("data", "fsdp", "fsdp_transpose", "tensor", "expert", "context", "pipeline")
CUTS = tuple((axis,) for axis in AXES) + tuple(itertools.combinations(AXES, 2))
TOY: dict[str, Any] = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 8,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 4,
    "scan_layers": True,
    "vocab_size": 96,
    "max_target_length": LENGTH,
    "global_batch_size": ROWS,
    "dtype": "float32",
    "steps": STEPS,
    "eval_files": (),
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 16,
    "shared_experts": 1,
    "load_balance_loss_weight": 0.01,
    "router_z_loss_weight": 0.001,
}
BLOCKS: dict[str, dict[str, Any]] = {
    "dense GQA": {"base_num_query_heads": 8, "head_dim": 4},
    "sliding window": {"layer_pattern": ["local_sliding", "global"], "sliding_window_size": 7, "attention_sink": True},
    "MLA": {
        "decoder_block": "deepseek",
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "rope_type": "default",
    },
    "MoE dropless": EXPERTS
    | {
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "routed_bias_update_rate": 0.01,
        "n_routing_groups": 2,
        "topk_routing_group": 1,
    },
    "MoE capacity": EXPERTS | {"capacity_factor": 1.0, "load_balance_loss_type": "sequence"},
    "tied embeddings": {"logits_via_embedding": True, "num_vocab_tiling": 2},
    "packed batches": {},
    "MTP": {"mtp_num_layers": 1},
}


@dataclass(frozen=True)
class Cell:
    """One block under one cut: the worst relative errors, or why it was refused; only experts that are not there may
    be. Bytes are those of one device."""

    block: str
    cut: tuple[str, ...]
    loss: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    bytes_found: int = 0
    bytes_planned: int = 0
    refused: str = ""

    @property
    def holds(self) -> bool:
        if self.refused:
            return "expert" in self.cut and "num_experts" not in BLOCKS[self.block]
        return self.loss < BAR and self.gradient < BAR and self.bytes_found == self.bytes_planned

    def __str__(self) -> str:
        if self.refused:
            return f"{self.block}, {'+'.join(self.cut)}: {'' if self.holds else 'FAILS: '}refused: {self.refused}"
        verdict = "holds" if self.holds else f"FAILS at {self.worst}"
        return (
            f"{self.block}, {'+'.join(self.cut) or 'one device'}: loss {self.loss:.1e}, gradient {self.gradient:.1e}, "
            f"bytes {self.bytes_found} of {self.bytes_planned}: {verdict}"
        )


def batches(block: str) -> list[dict[str, np.ndarray]]:
    """One batch [ROWS, LENGTH] a step: whole rows, or packed ones with several documents and padding."""
    rng = np.random.default_rng(7)
    return [_batch(rng, packed=block == "packed batches") for _ in range(STEPS)]


def _batch(rng: np.random.Generator, packed: bool) -> dict[str, np.ndarray]:
    ids = rng.integers(0, TOY["vocab_size"], (ROWS, LENGTH + 1))
    segments = np.ones((ROWS, LENGTH), int)
    if packed:
        ends = np.sort(rng.integers(1, LENGTH, (ROWS, 3)), axis=1)
        number = 1 + (np.arange(LENGTH)[None, :, None] >= ends[:, None, :]).sum(axis=-1)
        segments = np.where(number == 4, 0, number)
    starts = np.concatenate([np.ones((ROWS, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    index = np.arange(LENGTH)[None]
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    last = np.concatenate([starts[:, 1:], np.ones((ROWS, 1), bool)], axis=1) & packed
    arrays = {
        "inputs": ids[:, :-1],
        "targets": ids[:, 1:],
        "positions": index - first,
        "segments": segments,
        "loss_mask": (segments != 0) & ~last,
    }
    return {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}


@dataclass(frozen=True)
class World:
    """A block on a mesh."""

    cfg: Any
    plan: planner.Plan
    mesh: Mesh

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def parameters(self) -> dict[str, Any]:
        """The same noise on every leaf for every mesh; no norm is one, so no factor can hide."""

        def draw(path: str, param: blueprint.Param) -> jax.Array:
            rng = np.random.default_rng(zlib.crc32(path.encode()))
            value = (param.init.law == "ones") + (param.init.std or 0.1) * rng.standard_normal(param.shape)
            return jax.device_put(value.astype(np.float32), NamedSharding(self.mesh, self.layout.spec(param.axes)))

        return blueprint.map_params(draw, self.plan.tree)

    def steps(self, block: str) -> list[tuple[float, dict[str, np.ndarray]]]:
        """(loss, gradient of every parameter) of each step of plain SGD."""

        def one(params: Any, batch: Any) -> Any:
            grads, metrics, loads = step.gradients_and_loads(self.cfg, self.layout, params, batch)
            moved = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
            return balance.moved(self.cfg, moved, loads), grads, metrics["loss"]

        found = []
        with jax.set_mesh(self.mesh):
            params, program = self.parameters(), jax.jit(one)
            for batch in batches(block):
                params, grads, loss = program(params, session.put_microbatches(self.mesh, self.plan, batch))
                found.append((float(loss), _by_path(grads)))
        return found

    def state_bytes(self) -> int:
        """Bytes of a training state on one device, from the shardings of its arrays."""
        tx = optimizer.make(self.cfg, self.plan.tree, self.layout)
        with jax.set_mesh(self.mesh):
            leaves = jax.tree.leaves(jax.eval_shape(lambda: state.init(self.cfg, self.layout, self.plan.tree, tx)))

        def size(leaf: jax.ShapeDtypeStruct) -> int:
            shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
            return math.prod(shape) * leaf.dtype.itemsize

        return sum(map(size, leaves))


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(key.key) for key in path): np.asarray(leaf, np.float64) for path, leaf in flat}


def world(block: str, cut: Iterable[str]) -> World:
    """The block planned on a mesh of two along each axis of the cut; raises the planner's refusal."""
    degrees = {"ici_fsdp_parallelism": 1} | {f"ici_{axis}_parallelism": 2 for axis in cut}
    cfg = config.make(**(TOY | BLOCKS[block] | degrees))
    plan = planner.make(cfg, decoder.declare(cfg), Hardware("cpu", "cpu", 2 ** len(tuple(cut)), 1, 1, None))
    return World(cfg, plan, planner.build_mesh(plan, jax.devices()[: plan.devices]))


@functools.cache
def reference(block: str) -> list[tuple[float, dict[str, np.ndarray]]]:
    return world(block, ()).steps(block)


def certify(block: str, cut: tuple[str, ...]) -> Cell:
    """The block under the cut against one device, at the first and at the last step."""
    try:
        made = world(block, cut)
    except MaxTextError as refusal:
        return Cell(block, cut, refused=str(refusal))
    found, wanted = made.steps(block), reference(block)
    errors: list[tuple[float, str]] = []
    losses = []
    for at in (0, STEPS - 1):
        (loss, grads), (want_loss, want) = found[at], wanted[at]
        assert grads.keys() == want.keys(), "the mesh changed the tree of parameters"
        losses.append(_error(np.float64(loss), np.float64(want_loss)))
        errors += [(_error(grads[path], want[path]), f"{path} at step {at}") for path in want]
    gradient, worst = max(errors)
    return Cell(block, cut, max(losses), gradient, worst, made.state_bytes(), made.plan.state_bytes)


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative to the norm of `wanted`; whatever is not finite is infinitely wrong, since NaN is less than any bar."""
    if not (np.isfinite(found).all() and np.isfinite(wanted).all()):
        return math.inf
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(found - wanted) / norm) if norm else float(np.abs(found).max() > 0)


def table(cells: list[Cell]) -> str:
    """Markdown: blocks down, cuts across in rows, the worst gradient error in each cell."""
    by_key = {(cell.block, cell.cut): cell for cell in cells}
    blocks = [block for block in BLOCKS if any(cell.block == block for cell in cells)]
    lines = [f"| cut | {' | '.join(blocks)} |", f"| --- |{' ---: |' * len(blocks)}"]
    for cut in sorted({cell.cut for cell in cells}, key=CUTS.index):
        found = [by_key.get((block, cut)) for block in blocks]
        lines.append(f"| {' x '.join(cut)} | {' | '.join(map(_shown, found))} |")
    reasons = sorted({f"{cell.block}: {cell.refused}" for cell in cells if cell.refused})
    return "\n".join(lines) + (
        "\n\nRefused (r):\n\n" + "\n".join(f"- {reason}" for reason in reasons) if reasons else ""
    )


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    said = "r" if cell.refused else f"{cell.gradient:.0e}"
    return said if cell.holds else f"**{said}**"


def document(cells: list[Cell]) -> str:
    """The page that docs/certificate.md holds."""
    tried = [cell for cell in cells if not cell.refused]
    return f"""# The gradient certificate

Made by `python -m benchmarks.certificate` with JAX {jax.__version__}: {len(tried)} cells, of
which {sum(cell.holds for cell in tried)} hold, and {len(cells) - len(tried)} refusals. In each cell a toy of the block
runs five steps of plain SGD in float32, cut in two along each axis named, over virtual CPU devices. The figure is the
worst relative error of any parameter's gradient, at the first step and at the fifth, against one device; the bar is
1e-5 for gradients and loss. In every cell the bytes of the training state (AdamW) on a device equal the plan's to the
byte.

{table(cells)}
"""


def read(path: Path) -> list[Cell]:
    """The cells that a part saved."""
    return [Cell(**cell | {"cut": tuple(cell["cut"])}) for cell in json.loads(path.read_text(encoding="utf-8"))]


def _place(axis: str) -> int:
    return AXES.index(axis) if axis in AXES else len(AXES)


def _wrong(options: dict[str, str], blocks: list[str], cuts: list[tuple[str, ...]]) -> str:
    """What is wrong with the arguments, if anything."""
    if unknown := options.keys() - {"cut", "part", "save", "from", "out"}:
        return f"{', '.join(sorted(unknown))}: no such option; there are cut, part, save, from and out"
    if unknown := set(blocks) - BLOCKS.keys():
        return f"{', '.join(sorted(unknown))}: no such block; there are {', '.join(BLOCKS)}"
    if unknown := {axis for cut in cuts for axis in cut} - set(AXES):
        return f"{', '.join(sorted(unknown))}: no such axis; there are {', '.join(AXES)}"
    if any(len(set(cut)) != len(cut) or 2 ** len(cut) > DEVICES for cut in cuts):
        return f"cut={options['cut']}: one axis, or two different ones"
    first, _, of = options.get("part", "1/1").partition("/")
    if not (first.isdecimal() and of.isdecimal() and 1 <= int(first) <= int(of)):
        return f"part={options['part']}: set K/N with K from 1 to N"
    return ""


def main(arguments: list[str]) -> int:
    """Run the cells asked for, print each as it is done; the exit code says whether all hold."""
    options = dict(a.split("=", 1) for a in arguments if "=" in a)
    blocks = [a for a in arguments if "=" not in a] or list(BLOCKS)
    cuts = [tuple(sorted(options["cut"].split("+"), key=_place))] if "cut" in options else list(CUTS)
    if wrong := _wrong(options, blocks, cuts):
        print(wrong, file=sys.stderr)
        return 2
    part, of = map(int, options.get("part", "1/1").split("/"))
    cells = [cell for name in options.get("from", "").split(",") if name for cell in read(Path(name))]
    for block, cut in [] if cells else list(itertools.product(blocks, cuts))[part - 1 :: of]:
        cells.append(certify(block, cut))
        print(cells[-1], flush=True)
    if "save" in options:
        Path(options["save"]).write_text(json.dumps([dataclasses.asdict(cell) for cell in cells]), encoding="utf-8")
    if "out" in options:
        Path(options["out"]).write_text(document(cells), encoding="utf-8")
    failed = [cell for cell in cells if not cell.holds]
    print(f"{len(cells) - len(failed)} of {len(cells)} cells hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
