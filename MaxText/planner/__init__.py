"""From config, blueprint and hardware to a plan: mesh, layout, batch, exact state bytes; or a refusal."""

from MaxText.planner.degrees import mesh_degrees as mesh_degrees
from MaxText.planner.mesh import build_mesh as build_mesh
from MaxText.planner.plan import Plan as Plan
from MaxText.planner.plan import make as make
from MaxText.planner.rules import BATCH_AXES as BATCH_AXES
from MaxText.planner.rules import MESH_AXES as MESH_AXES
from MaxText.planner.rules import RULES as RULES
from MaxText.planner.rules import ZERO_AXES as ZERO_AXES
from MaxText.planner.rules import make_layout as make_layout
from MaxText.planner.rules import table as table
