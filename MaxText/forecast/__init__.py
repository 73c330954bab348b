"""What a run will need and how fast it will be, said before anything is spent."""

from MaxText.forecast.record import Forecast, as_dict, make, of_plan
from MaxText.forecast.refusal import fitting, refusal, require_room
from MaxText.forecast.search import choose, hardware_of, of_config, planned
from MaxText.forecast.text import text
from MaxText.planner import MESH_AXES

__all__ = [
    "MESH_AXES",
    "Forecast",
    "as_dict",
    "choose",
    "fitting",
    "hardware_of",
    "make",
    "of_config",
    "of_plan",
    "planned",
    "refusal",
    "require_room",
    "text",
]
