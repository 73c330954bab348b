"""The vocabulary of a model: one `Param` record per parameter, and pure functions over nested dicts of them.

Sharding, initial values, memory, decay mask, parameter count and checkpoint path all derive from this record; none is
written twice."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from MaxText.layout import STAGE_LAYERS, Axes, Layout

# A "router" parameter is moved by the step itself, not by gradients, and is kept in float32.
Kind = Literal["kernel", "embedding", "norm", "bias", "router"]
Blueprint = Mapping[str, Any]  # nested; leaves are Param
STACKED: tuple[Axes, ...] = (("layers",), (STAGE_LAYERS,))  # how the axes of a stack of layers begin


@dataclass(frozen=True)
class Init:
    """How a parameter starts. `std` is the standard deviation for the normal ones (truncated: before truncation at 2
    sigma)."""

    law: Literal["zeros", "ones", "normal", "truncated_normal"]
    std: float = 0.0


ZEROS = Init("zeros")
ONES = Init("ones")


def normal(std: float) -> Init:
    """N(0, std^2)."""
    return Init("normal", std)


def fan_in(size: int, scale: float = 1.0) -> Init:
    """Variance scaling: truncated normal whose variance after truncation at two sigma is scale/size."""
    truncation_shrinks_std_to = 0.87962566103423978
    return Init("truncated_normal", math.sqrt(scale / size) / truncation_shrinks_std_to)


@dataclass(frozen=True)
class Param:
    """One parameter: shape, a logical name for each dim, initial law, and its role (which decides on weight decay).

    `real` is the shape without padding, where a dim was made longer to be split evenly: the padding starts as zeros, is
    never read, and is neither counted nor saved."""

    shape: tuple[int, ...]
    axes: Axes
    init: Init
    kind: Kind = "kernel"
    real: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def real_shape(self) -> tuple[int, ...]:
        return self.real or self.shape

    @property
    def size(self) -> int:
        """Number of real entries."""
        return math.prod(self.real_shape)

    def dtype(self, weight_dtype: Any) -> Any:
        """The type it is stored in, where weights are stored in `weight_dtype`."""
        return jnp.dtype(jnp.float32 if self.kind == "router" else weight_dtype)


def map_params(function: Callable[[str, Param], Any], tree: Blueprint, prefix: str = "") -> dict[str, Any]:
    """The tree with every Param replaced by `function(path, param)`; paths are "/"-joined."""
    out: dict[str, Any] = {}
    for name, node in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        out[name] = function(path, node) if isinstance(node, Param) else map_params(function, node, path)
    return out


def leaves(tree: Blueprint, prefix: str = "") -> Iterator[tuple[str, Param]]:
    """Every (path, Param), in the tree's order."""
    for name, node in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(node, Param):
            yield path, node
        else:
            yield from leaves(node, path)


def count(tree: Blueprint) -> int:
    """Number of parameters."""
    return sum(param.size for _, param in leaves(tree))


def stack(tree: Blueprint, repeats: int, dim: str = "layers") -> dict[str, Any]:
    """The same tree with a leading dim of `repeats` on every parameter: "layers", or STAGE_LAYERS."""
    return map_params(lambda _, p: replace(p, shape=(repeats, *p.shape), axes=(dim, *p.axes)), tree)


def pad(tree: Blueprint, dim: str, multiple: int) -> dict[str, Any]:
    """The same tree with every dim of that name padded up to a multiple."""

    def longer(_: str, p: Param) -> Param:
        shape = tuple(
            -(-size // multiple) * multiple if name == dim else size for size, name in zip(p.shape, p.axes, strict=True)
        )
        return p if shape == p.shape else replace(p, shape=shape, real=p.real_shape)

    return map_params(longer, tree)


def key_of(key: jax.Array, path: str) -> jax.Array:
    """The random key of the parameter at `path`: independent of the tree around it."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def _draw(param: Param, key: jax.Array, dtype: Any, layout: Layout) -> jax.Array:
    if param.real:
        axes = tuple(
            None if size != real else dim for dim, size, real in zip(param.axes, param.shape, param.real, strict=True)
        )
        value = _draw(replace(param, shape=param.real, axes=axes, real=()), key, dtype, layout)
        return padded(value, param.shape, layout.spec(param.axes))
    spec = layout.spec(param.axes)
    match param.init.law:
        case "zeros":
            return jnp.zeros(param.shape, dtype, out_sharding=spec)
        case "ones":
            return jnp.ones(param.shape, dtype, out_sharding=spec)
        case "normal":
            sample = jax.random.normal(key, param.shape, jnp.float32, out_sharding=spec)
        case "truncated_normal":
            sample = jax.random.truncated_normal(key, -2.0, 2.0, param.shape, jnp.float32, out_sharding=spec)
    return (sample * param.init.std).astype(dtype)


def padded(x: jax.Array, shape: tuple[int, ...], spec: Any) -> jax.Array:
    """`x` with zeros at its end up to `shape`, in the layout `spec`. Dims to be padded are not split yet."""
    return jax.reshard(jnp.pad(x, [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]), spec)


def initialise(tree: Blueprint, key: jax.Array, dtype: Any, layout: Layout) -> dict[str, Any]:
    """Arrays for the tree, born sharded. The values do not depend on the mesh, but for the last bit."""
    return map_params(lambda path, p: _draw(p, key_of(key, path), p.dtype(dtype), layout), tree)
