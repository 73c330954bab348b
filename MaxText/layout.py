"""Logical names of dims to mesh axes: one table, used by every array of the program.

A *dim* belongs to a tensor and has a logical name ("embed", "heads", "activation_batch"); an *axis* belongs to the
mesh. Layers speak of dims only. Two rules hold everywhere:

1. A mesh axis may shard one dim of an array; a second use is a collision and raises.
2. Weights are *stored* in pieces over all their axes, and *gathered* over the axes in `gathered` for the moment of use
(ZeRO-3).
   Their gradients are born in the stored layout (a reduce-scatter), so nothing whole is ever kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from MaxText.errors import PlanError

Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Layout:
    """The table. `rules` maps a logical name to mesh axes, major first; `sizes` holds the size of every mesh axis."""

    rules: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: tuple[tuple[str, int], ...]
    gathered: frozenset[str] = frozenset()

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

    def ways(self, dim: str | None) -> int:
        """Into how many pieces `dim` is split."""
        ways = 1
        for axis in self.axes(dim):
            ways *= self._sizes[axis]
        return ways

    def spec(self, dims: Sequence[str | None], without: frozenset[str] = frozenset()) -> PartitionSpec:
        """The PartitionSpec of an array with these dims, leaving out the mesh axes in `without`."""
        used: dict[str, str | None] = {}
        entries: list[tuple[str, ...] | str | None] = []
        for dim in dims:
            axes = tuple(axis for axis in self.axes(dim) if axis not in without)
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
        spec, size = self.spec(dims), self._sizes[axis]
        if size == 1 or any(axis in self.axes(dim) for dim in dims):
            return spec
        order = sorted(range(len(dims)), key=lambda i: (not self.axes(dims[i]), dims[i] == "layers"))
        for i in order:
            if shape[i] % (self.ways(dims[i]) * size) == 0:
                axes = (*self.axes(dims[i]), axis)
                return PartitionSpec(*spec[:i], axes[0] if len(axes) == 1 else axes, *spec[i + 1 :])
        return spec

    def unsplit(self, *dims: str) -> Layout:
        """The same table with `dims` whole on every device: for arrays too small to split."""
        rules = tuple((name, () if name in dims else axes) for name, axes in self.rules)
        return dataclasses.replace(self, rules=rules)

    def constrain(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """`x` resharded to the layout of `dims`; nothing happens if it is there already."""
        return jax.reshard(x, self.spec(dims))

    def gather(self, w: jax.Array, dims: Sequence[str | None]) -> jax.Array:
        """A stored weight in its layout of use."""
        return jax.reshard(w, self.compute_spec(dims))


def _operands(equation: str) -> tuple[str, str, str]:
    inputs, out = equation.replace(" ", "").split("->")
    x, w = inputs.split(",")
    return x, w, out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4, 5))
def _project(layout: Layout, equation: str, x: jax.Array, w: jax.Array, w_dims: Axes, out_dims: Axes) -> jax.Array:
    return _project_forward(layout, equation, x, w, w_dims, out_dims)[0]


def _project_forward(layout, equation, x, w, w_dims, out_dims):
    w_used = layout.gather(w.astype(x.dtype), w_dims)
    y = jnp.einsum(equation, x, w_used, out_sharding=layout.spec(out_dims))
    return y, (x, w)


def _project_backward(layout, equation, w_dims, out_dims, saved, dy):
    x, w = saved
    x_labels, w_labels, out_labels = _operands(equation)
    w_used = layout.gather(w.astype(x.dtype), w_dims)
    dx = jnp.einsum(f"{out_labels},{w_labels}->{x_labels}", dy, w_used, out_sharding=jax.typeof(x).sharding.spec)
    dw = jnp.einsum(
        f"{x_labels},{out_labels}->{w_labels}",
        x,
        dy,
        preferred_element_type=w.dtype,
        out_sharding=layout.spec(w_dims),
    )
    return dx, dw


_project.defvjp(_project_forward, _project_backward)


def project(layout: Layout, equation: str, x: jax.Array, w: jax.Array, w_dims: Axes, out_dims: Axes) -> jax.Array:
    """`einsum(equation, x, w)` for a stored weight `w` with dims `w_dims`; computes in x's dtype, result has
    `out_dims`.

    Forward: w is cast, then gathered over the ZeRO axes (fewer bytes than gathering the stored dtype). Backward: w is
    gathered again and dw is contracted straight into the stored layout, in w's dtype: one reduce-scatter, no whole
    gradient."""
    return _project(layout, equation, x, w, w_dims, out_dims)
