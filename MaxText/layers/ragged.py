"""Rows in groups: their products with a matrix of each group, and their exchange between devices.

The only place that knows which of these runs on which device. Local arrays only: call it inside `jax.shard_map`.
M, R: rows; E: groups; P: devices that exchange rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from MaxText.layers import local

SMALLEST_TILE, LARGEST_TILE = 16, 256  # rows that a CPU multiplies at once


# --- products of groups


def matmul(x_MD: Float[Array, "M D"], w_EDF: Float[Array, "E D F"], rows_E: Int[Array, " E"]) -> Float[Array, "M F"]:
    """Each row times the matrix of its group: the first rows_E[0] rows belong to group 0, and so on. Rows beyond all
    groups give zeros. Has no gradient."""
    tiled, at_once = functools.partial(_tiled, contract=1), functools.partial(_at_once, contract=1)
    return lax.platform_dependent(x_MD, w_EDF, rows_E, cpu=tiled, default=at_once)


def matmul_transposed(
    x_MF: Float[Array, "M F"], w_EDF: Float[Array, "E D F"], rows_E: Int[Array, " E"]
) -> Float[Array, "M D"]:
    """The same with every matrix transposed."""
    tiled, at_once = functools.partial(_tiled, contract=2), functools.partial(_at_once, contract=2)
    return lax.platform_dependent(x_MF, w_EDF, rows_E, cpu=tiled, default=at_once)


def outer(x_MD: Float[Array, "M D"], y_MF: Float[Array, "M F"], rows_E: Int[Array, " E"]) -> Float[Array, "E D F"]:
    """x^T y of each group's rows, accumulated in float32. Has no gradient."""
    return lax.platform_dependent(x_MD, y_MF, rows_E, cpu=_outer_tiled, default=_outer_at_once)


def _numbers(contract: tuple[int, int], groups: list[int]) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers((([contract[0]], [contract[1]]), ([], [])), [0], groups)


def _at_once(x_MD: Array, w: Array, rows_E: Array, contract: int) -> Array:
    y_MF = lax.ragged_dot_general(x_MD, w, rows_E, _numbers((1, contract), [0]))
    inside_M = jnp.arange(x_MD.shape[0]) < rows_E.sum()  # a kernel leaves the rest as it found it
    return jnp.where(inside_M[:, None], y_MF, 0)


def _outer_at_once(x_MD: Array, y_MF: Array, rows_E: Array) -> Array:
    return lax.ragged_dot_general(x_MD, y_MF, rows_E, _numbers((0, 0), []), preferred_element_type=jnp.float32)


# `lax.ragged_dot` multiplies every row by every matrix on CPU. A loop over tiles of rows of one group does not, and is
# as long as there are rows.


class _Tile(NamedTuple):
    group: Array
    start: Array
    mine_T: Array  # which rows of the tile belong to the group


def _tile_rows(rows: int, groups: int) -> int:
    """About half a mean group: small enough to waste little, large enough to multiply fast."""
    half = 1 << max(0, (rows // (2 * groups)).bit_length() - 1)
    return min(rows, max(SMALLEST_TILE, min(LARGEST_TILE, half)))


def _over_tiles(rows: int, rows_E: Array, body: Any, init: Array) -> Array:
    """`body(tile, result)` for every tile, in order; `rows` are those of the operand."""
    size = _tile_rows(rows, rows_E.shape[0])
    tiles_E = (rows_E + size - 1) // size
    tile_ends_E, ends_E = jnp.cumsum(tiles_E), jnp.cumsum(rows_E)

    def step(i: Array, result: Array) -> Array:
        group = (tile_ends_E <= i).sum()
        first = ends_E[group] - rows_E[group] + (i - tile_ends_E[group] + tiles_E[group]) * size
        start = jnp.minimum(first, rows - size)
        at_T = start + jnp.arange(size)
        return body(_Tile(group, start, (at_T >= first) & (at_T < ends_E[group])), result)

    return lax.fori_loop(0, tile_ends_E[-1], step, init)


def _rows_of(x_MD: Array, tile: _Tile) -> Array:
    return lax.dynamic_slice_in_dim(x_MD, tile.start, tile.mine_T.shape[0])


def _tiled(x_MD: Array, w: Array, rows_E: Array, contract: int) -> Array:
    def body(tile: _Tile, y_MF: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(w, tile.group, keepdims=False)
        product = lax.dot_general(_rows_of(x_MD, tile), matrix, (((1,), (contract - 1,)), ((), ())))
        product = jnp.where(tile.mine_T[:, None], product, _rows_of(y_MF, tile))
        return lax.dynamic_update_slice_in_dim(y_MF, product, tile.start, axis=0)

    y = local.zeros((x_MD.shape[0], w.shape[3 - contract]), x_MD.dtype, x_MD, w, rows_E)
    return _over_tiles(x_MD.shape[0], rows_E, body, y)


def _outer_tiled(x_MD: Array, y_MF: Array, rows_E: Array) -> Array:
    def body(tile: _Tile, dw_EDF: Array) -> Array:
        x_TD = jnp.where(tile.mine_T[:, None], _rows_of(x_MD, tile), 0)
        product = jnp.einsum("TD,TF->DF", x_TD, _rows_of(y_MF, tile), preferred_element_type=jnp.float32)
        so_far = lax.dynamic_index_in_dim(dw_EDF, tile.group, keepdims=False)
        return lax.dynamic_update_index_in_dim(dw_EDF, so_far + product, tile.group, axis=0)

    dw = local.zeros((rows_E.shape[0], x_MD.shape[1], y_MF.shape[1]), jnp.float32, x_MD, y_MF, rows_E)
    return _over_tiles(x_MD.shape[0], rows_E, body, dw)


# --- exchange


class Route(NamedTuple):
    """What a device sends: for each peer where its rows start, how many they are, and where they land in the peer's
    result."""

    start_P: Int[Array, " P"]
    size_P: Int[Array, " P"]
    landing_P: Int[Array, " P"]


class Routes(NamedTuple):
    """A way there and its way back, as one device sees them."""

    there: Route
    back: Route


class Size(NamedTuple):
    """Rows before and after an exchange, and the most that any device sends to another."""

    before: int
    after: int
    pair: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def exchange(x_MD: Float[Array, "M D"], routes: Routes, size: Size, axes: tuple[str, ...]) -> Float[Array, "R D"]:
    """Rows sent along `routes.there` between the devices of `axes`; zeros where nothing landed. The gradient travels
    back the same way. A device that lacks a collective of ragged sizes sends `size.pair` rows to each peer."""
    return _exchange(x_MD, routes, size, axes)


def _exchange(x_MD: Array, routes: Routes, size: Size, axes: tuple[str, ...]) -> Array:
    ragged = functools.partial(_ragged, size=size, axes=axes)
    padded = functools.partial(_padded, size=size, axes=axes)
    return lax.platform_dependent(x_MD, *routes, cpu=padded, default=ragged)


def _ragged(x_MD: Array, there: Route, back: Route, size: Size, axes: tuple[str, ...]) -> Array:
    empty = local.zeros((size.after, x_MD.shape[1]), x_MD.dtype, x_MD, there.size_P)
    return lax.ragged_all_to_all(x_MD, empty, there.start_P, there.size_P, there.landing_P, back.size_P, axis_name=axes)


def _padded(x_MD: Array, there: Route, back: Route, size: Size, axes: tuple[str, ...]) -> Array:
    at = jnp.arange(size.pair)[None]
    rows = x_MD.at[there.start_P[:, None] + at].get(mode="clip")
    sent = jnp.where((at < there.size_P[:, None])[..., None], rows, 0)
    received = lax.all_to_all(sent, axes, 0, 0)
    landing = jnp.where(at < back.size_P[:, None], back.start_P[:, None] + at, size.after)
    empty = local.zeros((size.after, x_MD.shape[1]), x_MD.dtype, received)
    return empty.at[landing].set(received, mode="drop")


def _exchange_forward(x_MD, routes, size, axes):
    return _exchange(x_MD, routes, size, axes), routes


def _exchange_backward(size, axes, routes, dy):
    there_again = Size(size.after, size.before, size.pair)
    return _exchange(dy, Routes(routes.back, routes.there), there_again, axes), None


exchange.defvjp(_exchange_forward, _exchange_backward)
