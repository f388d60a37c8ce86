"""The memory of a training step: the meter counts bytes, and the timeline stores them over time."""

from typing import TYPE_CHECKING

from lab import load_on_first_use

if TYPE_CHECKING:
    from lab.memory.exchanges import Exchanges, memory_ranges
    from lab.memory.export import write_chrome_trace, write_memory_snapshot
    from lab.memory.measurement import measure
    from lab.memory.meter import Meter
    from lab.memory.spans import Spans
    from lab.memory.timeline import Timeline

__all__ = [
    "Exchanges",
    "Meter",
    "Spans",
    "Timeline",
    "measure",
    "memory_ranges",
    "write_chrome_trace",
    "write_memory_snapshot",
]

__getattr__ = load_on_first_use(
    __name__,
    {
        "Exchanges": "lab.memory.exchanges",
        "Meter": "lab.memory.meter",
        "Spans": "lab.memory.spans",
        "Timeline": "lab.memory.timeline",
        "measure": "lab.memory.measurement",
        "memory_ranges": "lab.memory.exchanges",
        "write_chrome_trace": "lab.memory.export",
        "write_memory_snapshot": "lab.memory.export",
    },
)
