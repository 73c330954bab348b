"""What a run will need and how fast it will be, said before anything is spent."""

from MaxText.forecast.record import Forecast, as_dict, make, of_plan
from MaxText.forecast.refusal import require_room
from MaxText.forecast.text import text

__all__ = ["Forecast", "as_dict", "make", "of_plan", "require_room", "text"]
