"""Logical names of dims to mesh axes: one table, used by every array of the program.

A *dim* belongs to a tensor and has a logical name ("embed", "heads", "activation_batch"); an *axis* belongs to the
mesh. Layers speak of dims only. Two rules hold everywhere:

1. A mesh axis may shard one dim of an array; a second use is a collision and raises. Only the dim "stage_layers" takes
its axes away from the others: an array that lies on one stage is not split over the stages again.
2. Weights are *stored* in pieces over all their axes, and *gathered* over the axes in `gathered` for the moment of use
(ZeRO-3).
   Their gradients are born in the stored layout (a reduce-scatter), so nothing whole is ever kept.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from MaxText.errors import PlanError

Axes = tuple[str | None, ...]
STAGE_LAYERS = "stage_layers"  # layers that a pipeline deals to its stages


@dataclass(frozen=True)
class Layout:
    """The table. `rules` maps a logical name to mesh axes, major first; `sizes` holds the size of every mesh axis."""

    rules: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: tuple[tuple[str, int], ...]
    gathered: frozenset[str] = frozenset()
    staged: str = ""  # the axis along which every place computes on an array of its own, under `jax.vmap`
    platform: str = "cpu"  # of the devices: where a kernel is made for one of them

    @functools.cached_property
    def _rules(self) -> Mapping[str, tuple[str, ...]]:
        return dict(self.rules)

    @functools.cached_property
    def _sizes(self) -> Mapping[str, int]:
        return dict(self.sizes)

    def axes(self, dim: str | None) -> tuple[str, ...]:
        """Mesh axes larger than one over which `dim` is split. Axes of size 1 are left out: specs must agree to the
        letter."""
        if dim is None:
            return ()
        if dim not in self._rules:
            raise PlanError(
                f"no rule for the logical dim {dim!r}. Known: {', '.join(sorted(self._rules))}", id="plan.no-rule"
            )
        return tuple(axis for axis in self._rules[dim] if self._sizes[axis] > 1)

    def size(self, axis: str) -> int:
        """Devices along a mesh axis."""
        return self._sizes[axis]

    def ways(self, dim: str | None) -> int:
        """Into how many pieces `dim` is split."""
        return math.prod(self._sizes[axis] for axis in self.axes(dim))

    def split(self, dims: Sequence[str | None]) -> list[tuple[str, ...]]:
        """The mesh axes of each dim of one array."""
        staged = self.axes(STAGE_LAYERS) if STAGE_LAYERS in dims else ()
        return [tuple(axis for axis in self.axes(dim) if dim == STAGE_LAYERS or axis not in staged) for dim in dims]

    def pieces(self, dims: Sequence[str | None]) -> list[int]:
        """Into how many pieces each dim of one array is split."""
        return [math.prod(self._sizes[axis] for axis in axes) for axes in self.split(dims)]

    def spec(self, dims: Sequence[str | None], without: frozenset[str] = frozenset()) -> PartitionSpec:
        """The PartitionSpec of an array with these dims, leaving out the mesh axes in `without`."""
        used: dict[str, str | None] = {}
        entries: list[tuple[str, ...] | str | None] = []
        for dim, all_axes in zip(dims, self.split(dims), strict=True):
            axes = tuple(axis for axis in all_axes if axis not in without)
            for axis in axes:
                if axis in used:
                    raise PlanError(
                        f"mesh axis {axis!r} would split both {used[axis]!r} and {dim!r} of one array {tuple(dims)}. "
                        "Change one of the two rules.",
                        id="plan.collision",
                    )
                used[axis] = dim
            entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return PartitionSpec(*entries)

    def compute_spec(self, dims: Sequence[str | None]) -> PartitionSpec:
        """The spec of a weight while it is used: not split over the gathered axes."""
        return self.spec(dims, without=self.gathered)

    def spread(self, dims: Sequence[str | None], shape: Sequence[int], axis: str) -> PartitionSpec:
        """The spec of a stored array that is split over one more mesh axis: minor on the first dim that divides, those
        that are split already before the others. As it was where none divides or the axis is in use."""
        spec, size, split, pieces = self.spec(dims), self._sizes[axis], self.split(dims), self.pieces(dims)
        if size == 1 or any(axis in axes for axes in split):
            return spec
        order = sorted(range(len(dims)), key=lambda i: (not split[i], dims[i] in ("layers", STAGE_LAYERS)))
        for i in order:
            if shape[i] % (pieces[i] * size) == 0:
                axes = (*split[i], axis)
                return PartitionSpec(*spec[:i], axes[0] if len(axes) == 1 else axes, *spec[i + 1 :])
        return spec

    def unsplit(self, *dims: str) -> Layout:
        """The same table with `dims` whole on every device: for arrays too small to split."""
        rules = tuple((name, () if name in dims else axes) for name, axes in self.rules)
        return dataclasses.replace(self, rules=rules)

    def inside(self, axis: str) -> Layout:
        """The table within one place along a mesh axis: nothing is split over it."""
        rules = tuple((dim, tuple(a for a in axes if a != axis)) for dim, axes in self.rules)
        return dataclasses.replace(self, rules=rules)

    def whole_outside(self, axis: str) -> Layout:
        """The table with every weight whole along a mesh axis, except layers that are dealt out over it."""
        kept = ("activation_", STAGE_LAYERS)
        rules = tuple(
            (d, axes if d.startswith(kept) else tuple(a for a in axes if a != axis)) for d, axes in self.rules
        )
        return dataclasses.replace(self, rules=rules)

    def shard_map(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any, check_vma: bool = True
    ) -> Callable[..., Any]:
        """`jax.shard_map` over all axes of the mesh; on a stage of a pipeline it sees the arrays of that stage."""
        shard_map = functools.partial(jax.shard_map, check_vma=check_vma)
        if self.staged:
            return _on_stages(self.staged, shard_map, function, in_specs, out_specs)
        return shard_map(function, in_specs=in_specs, out_specs=out_specs)

    def constrain(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """`x` resharded to the layout of `dims`; nothing happens if it is there already."""
        return jax.reshard(x, self.spec(dims))

    def gather(self, w: jax.Array, dims: Sequence[str | None]) -> jax.Array:
        """A stored weight in its layout of use."""
        return jax.reshard(w, self.compute_spec(dims))


def _on_stages(
    axis: str, shard_map: Callable[..., Any], function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` for use under a `jax.vmap` whose dim lies on the mesh axis, one element a device.

    By itself `vmap` would leave that axis out of the manual ones and batch the body, for which neither ragged matmuls
    nor kernels are made. Here the body sees one device's arrays, as without vmap."""

    @jax.custom_batching.custom_vmap
    def call(*args: Any) -> Any:  # only its types are used
        island = functools.partial(jax.sharding.auto_axes, axes=axis, out_sharding=out_specs)
        return island(shard_map(function, in_specs=in_specs, out_specs=out_specs))(*args)

    @call.def_vmap
    def on_all_stages(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        def one(*args: Any) -> Any:
            own = jax.tree.map(lambda on, x: x[0] if on else x, tuple(batched), args)
            return jax.tree.map(lambda y: y[None], function(*own))

        specs = jax.tree.broadcast(in_specs, args, is_leaf=_is_spec)
        specs = jax.tree.map(lambda on, spec: PartitionSpec(axis, *spec) if on else spec, tuple(batched), specs)
        out = jax.tree.map(lambda spec: PartitionSpec(axis, *spec), out_specs, is_leaf=_is_spec)
        found = shard_map(one, in_specs=specs, out_specs=out)(*args)
        return found, jax.tree.map(lambda _: True, found)

    return call


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _operands(equation: str) -> tuple[str, str, str]:
    inputs, out = equation.replace(" ", "").split("->")
    x, w = inputs.split(",")
    return x, w, out


class Kernel(NamedTuple):
    """How a stored weight is used: `equation` of einsum over (x, weight), dims of the weight, dims of the result."""

    equation: str
    dims: Axes
    out_dims: Axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(layout: Layout, kernels: tuple[Kernel, ...], x: jax.Array, weights: tuple[jax.Array, ...]):
    return _project_forward(layout, kernels, x, weights)[0]


def _project_forward(layout, kernels, x, weights):
    ys = tuple(
        jnp.einsum(kernel.equation, x, _used(layout, kernel, x, w), out_sharding=layout.spec(kernel.out_dims))
        for kernel, w in zip(kernels, weights, strict=True)
    )
    return ys, (x, weights)


def _used(layout: Layout, kernel: Kernel, x: jax.Array, w: jax.Array) -> jax.Array:
    return layout.gather(w.astype(x.dtype), kernel.dims)


def _project_backward(layout, kernels, saved, dys):
    x, weights = saved
    dx = _input_gradient(layout, kernels, x, weights, dys)
    return dx, tuple(
        _weight_gradient(layout, kernel, x, w, dy) for kernel, w, dy in zip(kernels, weights, dys, strict=True)
    )


def _weight_gradient(layout: Layout, kernel: Kernel, x: jax.Array, w: jax.Array, dy: jax.Array) -> jax.Array:
    x_labels, w_labels, out_labels = _operands(kernel.equation)
    equation = f"{x_labels},{out_labels}->{w_labels}"
    return jnp.einsum(equation, x, dy, preferred_element_type=w.dtype, out_sharding=layout.spec(kernel.dims))


def _input_gradient(layout, kernels, x, weights, dys) -> jax.Array:
    """The sum over kernels. Where a dim of theirs that x lacks is split, every device sums its part over all kernels
    before the parts are summed over devices: once, not once a kernel."""
    used = tuple(_used(layout, kernel, x, w) for kernel, w in zip(kernels, weights, strict=True))
    spec = jax.typeof(x).sharding.spec

    def summed(used, dys, out_sharding):
        total = None
        for kernel, w, dy in zip(kernels, used, dys, strict=True):
            x_labels, w_labels, out_labels = _operands(kernel.equation)
            part = jnp.einsum(f"{out_labels},{w_labels}->{x_labels}", dy, w, out_sharding=out_sharding)
            total = part if total is None else total + part
        return total

    axes = {_contracted(layout, kernel) for kernel in kernels}
    if len(kernels) == 1 or len(axes) > 1 or axes == {()}:
        return summed(used, dys, spec)
    (split,) = axes
    in_specs = (
        tuple(layout.compute_spec(kernel.dims) for kernel in kernels),
        tuple(jax.typeof(dy).sharding.spec for dy in dys),
    )
    wall = layout.shard_map(
        lambda used, dys: jax.lax.psum(summed(used, dys, None), split), in_specs=in_specs, out_specs=spec
    )
    return wall(used, dys)


def _contracted(layout: Layout, kernel: Kernel) -> tuple[str, ...]:
    """The mesh axes over which the input's gradient is a sum."""
    x_labels, w_labels, _ = _operands(kernel.equation)
    dims = (dim for label, dim in zip(w_labels, kernel.dims, strict=True) if label not in x_labels)
    return tuple(axis for dim in dims for axis in layout.axes(dim) if axis not in layout.gathered)


_project.defvjp(_project_forward, _project_backward)


def project(layout: Layout, equation: str, x: jax.Array, w: jax.Array, w_dims: Axes, out_dims: Axes) -> jax.Array:
    """`einsum(equation, x, w)` for a stored weight `w` with dims `w_dims`; computes in x's dtype, result has
    `out_dims`.

    Forward: w is cast, then gathered over the ZeRO axes (fewer bytes than gathering the stored dtype). Backward: w is
    gathered again and dw is contracted straight into the stored layout, in w's dtype: one reduce-scatter, no whole
    gradient."""
    return project_many(layout, x, {"y": w}, {"y": Kernel(equation, w_dims, out_dims)})["y"]


def project_many(
    layout: Layout, x: jax.Array, weights: Mapping[str, jax.Array], kernels: Mapping[str, Kernel]
) -> dict[str, jax.Array]:
    """`project` of the same x by several stored weights: {name: result} for all of `weights`. The gradients by x are
    summed on each device before they are summed over devices."""
    used = tuple(kernels[name] for name in weights)
    return dict(zip(weights, _project(layout, used, x, tuple(weights.values())), strict=True))
