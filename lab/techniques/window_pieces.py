"""The pieces in which attention with sliding windows or sinks is computed, without torch."""

from lab.units import Ki

PIECE = 64 * Ki
"""The most tokens in one call of a windowed kernel, unless one window is longer: enough for a GPU."""

SINK_PIECE = 8 * Ki
"""The number of tokens whose products are in memory at once, while the gradients of sinks are computed."""
