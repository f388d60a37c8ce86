"""The memory events of torch's profiler, which include what operators allocate inside."""

from typing import Any


def peak_of_events(profiler: Any) -> int:
    """Return the most bytes that were held at a time, of those that were allocated under the profiler."""
    events = profiler.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, size in memory:
        held += size
        peak = max(peak, held)
    return peak
