"""The memory of a training step: the meter counts bytes, and the timeline stores them over time."""

from lab.memory.exchanges import Exchanges, memory_ranges
from lab.memory.measure import measure
from lab.memory.meter import Meter
from lab.memory.spans import Spans
from lab.memory.timeline import Timeline

__all__ = ["Exchanges", "Meter", "Spans", "Timeline", "measure", "memory_ranges"]
