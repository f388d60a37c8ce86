"""The pieces in which attention with sliding windows or sinks is computed, without torch."""

from lab.units import Ki

PIECE = 64 * Ki
"""The most tokens in one call of a kernel, if a window is not longer: enough to keep a GPU busy."""

SINK_PIECE = 8 * Ki
"""The tokens whose products are in memory at once while the gradients of sinks are computed."""
