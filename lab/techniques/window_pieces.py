"""The pieces in which attention with a sliding window is computed, without torch."""

from lab.units import Ki

PIECE = 64 * Ki
"""The most tokens in one call of a kernel, if a window is not longer: enough to keep a GPU busy."""
