"""Real devices in the shape of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from MaxText import compat
from MaxText.planner.plan import Plan
from MaxText.planner.rules import MESH_AXES


def build_mesh(plan: Plan, devices: Sequence[jax.Device]) -> Mesh:
    """Real devices in the plan's shape: by physical neighbourhood on TPU (an axis may take a part of a physical one),
    by slice where there are several, in order on CPU (whose equal parts, in order of process, play the slices)."""
    ici, dcn = tuple(plan.ici.values()), tuple(plan.dcn.values())
    if math.prod(dcn) > 1:
        array = _hybrid(ici, dcn, devices)
    elif devices[0].platform == "tpu":
        array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    else:
        array = np.asarray(devices).reshape(ici)
    return compat.explicit_mesh(array, MESH_AXES)


def _hybrid(ici: tuple[int, ...], dcn: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    if devices[0].platform != "cpu":
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
    slices = math.prod(dcn)
    proxies = [_InSlice(device, i * slices // len(devices)) for i, device in enumerate(devices)]
    array = mesh_utils.create_hybrid_device_mesh(ici, dcn, proxies)
    return np.vectorize(lambda proxy: proxy.device, otypes=[object])(array)


class _InSlice:
    """A CPU device that says in which slice it is; all CPU devices themselves say 0."""

    def __init__(self, device: jax.Device, slice_index: int) -> None:
        self.device, self.slice_index = device, slice_index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)
