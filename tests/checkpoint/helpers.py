"""What the checkpoint tests share: a state with every kind of leaf, and ways to damage a file."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from MaxText.checkpoint import named_leaves
from MaxText.errors import StorageError

ROOT = Path(__file__).parents[2]


def mesh(*shape):
    return jax.make_mesh(shape, ("fsdp", "tensor")[: len(shape)], axis_types=(AxisType.Explicit,) * len(shape))


def sharding(on, array):
    axes = on.axis_names if array.ndim == len(on.axis_names) else ()
    return NamedSharding(on, PartitionSpec(*axes))


def host_state(seed=0):
    """Every kind of leaf: matrices of several dtypes, a scalar, zeros, optax's named tuples with empty ones inside."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": rng.standard_normal((16, 8), dtype=np.float32),
        "layers": {"w": rng.standard_normal((8, 8)).astype(jnp.bfloat16), "norm": np.ones(24, np.float32)},
    }
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(jax.tree.map(jnp.asarray, params))
    opt = jax.tree.map(np.asarray, opt)
    return {"step": np.int32(seed).reshape(()), "params": params, "opt": opt, "flags": np.array([True, False] * 4)}


def state(seed=0, on=None):
    on = on or mesh(4, 2)
    return jax.tree.map(lambda array: jax.device_put(array, sharding(on, array)), host_state(seed))


def target(on=None):
    on = on or mesh(4, 2)
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(on, array)), host_state()
    )


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for name, leaf in named_leaves(found).items():
        other = np.asarray(named_leaves(wanted)[name])
        assert leaf.dtype == other.dtype and np.asarray(leaf).tobytes() == other.tobytes(), name


def orbax(folder):
    """The tree that Orbax reads from the `state` folder of a step."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(folder)


def raises(id):
    return pytest.raises(StorageError, check=lambda error: error.id == id)


def data_files(folder):
    return sorted(path for path in (folder / "20").rglob("*") if path.is_file() and path.name != "manifest.json")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {"flip": flip, "truncate": truncate, "delete": Path.unlink, "empty": lambda path: path.write_bytes(b"")}
