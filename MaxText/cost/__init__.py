"""What a plan costs: work, communication, memory and seconds, by arithmetic alone; nothing here touches a device."""

from MaxText.cost import communication, host, memory, sizes, timing, torus, work
from MaxText.cost.efficiency import Efficiency, load

__all__ = ["Efficiency", "communication", "host", "load", "memory", "sizes", "timing", "torus", "work"]
