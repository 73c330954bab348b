"""The train step compiled for a slice that is not here, by its own compiler: libtpu needs no TPU for that."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText import compat, optimizer, planner, state, step
from MaxText.catalogue import Slice
from MaxText.errors import PlanError
from MaxText.layout import Axes

BATCH: Axes = (None, "activation_batch", "activation_length")
# libtpu as a compiler only: no query for a machine's metadata, no lock against a second process, no warnings.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what libtpu reads; before JAX starts a backend."""
    environ.update(ENVIRONMENT)


@dataclass(frozen=True)
class Compiled:
    """The compiler's answer. Bytes on one device. `total` is what it puts aside, and what it refuses by; `temporary`
    is what it calls temporaries, which on TPU is up to half as much again as it packs them into (docs/planner.md)."""

    program: jax.stages.Compiled
    mesh: Mesh
    arguments: int
    temporary: int
    total: int

    @property
    def text(self) -> str:
        """The program as the compiler wrote it."""
        return self.program.as_text() or ""


def require_compiler(where: Slice) -> None:
    """Raises:
    PlanError: without libtpu, or for a chip that it does not know; with what to type."""
    if where.chip.topology is None:
        known = "v4, v5e, v5p, v6e, tpu7x"
        raise PlanError(
            f"compile=true: there is no compiler here for {where.chip.name}. Legal: {known}.", id="plan.no-compiler"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "compile=true needs libtpu, the TPU's compiler, which runs without a TPU. Install it beside JAX:\n"
            "  .venv/bin/pip install -r requirements-tpu.txt",
            id="plan.no-compiler",
        )


def topology(where: Slice) -> list[jax.Device]:
    """Devices to compile for; nothing runs on them."""
    from jax.experimental import topologies

    sides = sorted(where.shape, key=lambda side: (side == 1, side))  # libtpu wants 2x2x1
    more: dict[str, Any] = {"chip_config_name": "megacore"} if where.chip.name == "v4" else {}
    if where.slices > 1:
        more["num_slices"] = where.slices
    found = topologies.get_topology_desc(
        topology_name=f"{where.chip.topology}:{'x'.join(map(str, sides))}", platform="tpu", **more
    )
    return list(found.devices)


def lower(cfg: Any, plan: planner.Plan, mesh: Mesh) -> jax.stages.Lowered:
    """The train step of a plan on a mesh, with the types of its state and batch."""
    tx = optimizer.make(cfg, plan.tree, plan.layout)

    def concrete(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh), jax.default_matmul_precision(cfg.matmul_precision):
        types = jax.tree.map(concrete, jax.eval_shape(lambda: state.init(cfg, plan.layout, plan.tree, tx)))
        rows = plan.global_batch_size // plan.microbatches
        sharding = NamedSharding(mesh, plan.layout.spec(BATCH))
        batch = jax.ShapeDtypeStruct((plan.microbatches, rows, cfg.max_target_length), np.int32, sharding=sharding)
        program = jax.jit(step.make_train_step(cfg, plan.layout, tx), donate_argnums=0)
        return program.lower(types, dict.fromkeys(step.BATCH_KEYS, batch))


def compile_step(cfg: Any, plan: planner.Plan, where: Slice) -> Compiled:
    """The real step of `plan` for the named slice.

    Raises:
      PlanError: without a compiler, or where the compiler finds that memory does not suffice; its own numbers."""
    require_compiler(where)
    mesh = planner.build_mesh(plan, topology(where))
    try:
        program = lower(cfg, plan, mesh).compile()
    except jax.errors.JaxRuntimeError as error:
        raise _refused(error) from error
    memory = program.memory_analysis()
    assert memory is not None, "the TPU compiler always says what it needs"
    total = compat.allocated_bytes(memory)
    return Compiled(program, mesh, memory.argument_size_in_bytes, memory.temp_size_in_bytes, total)


def _refused(error: Exception) -> Exception:
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
        return error
    first = next((line for line in text.splitlines() if "memory" in line.lower()), text.splitlines()[0])
    return PlanError(
        f"the TPU compiler refuses: {first.strip()}\nTry remat_policy=full, more gradient_accumulation_steps with a "
        "smaller per_device_batch_size, or more ways of ici_fsdp_parallelism.",
        id="plan.out-of-memory",
    )


def store(one: Compiled, path: Path) -> int:
    """The compiled program in a file, loadable where the devices are; its bytes. JAX cannot load it without them."""
    from jax.experimental.serialize_executable import serialize

    payload, _, _ = serialize(one.program)
    path.write_bytes(payload)
    return len(payload)
