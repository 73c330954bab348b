"""Real devices in the shape of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from MaxText import compat
from MaxText.planner.plan import Plan
from MaxText.planner.rules import MESH_AXES


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
