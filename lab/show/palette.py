"""The colours of all pictures: those of Okabe and Ito, which colour-blind readers can tell apart."""

from lab.memory.categories import CATEGORIES

COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#D55E00",
    "recomputed activations": "#F0E442",
    "gradients of activations": "#882255",
    "temporary buffers": "#56B4E9",
    "other": "#999999",
    "host": "#CC79A7",
}
"""The colour of each category of bytes: those of a timeline, then host memory."""

CATEGORY_COLOURS = tuple(COLOURS[category] for category in CATEGORIES)
"""The colours of a timeline's categories, in the order in which they are stacked."""

TEXT = "#767676"
"""The colour of text and axes in static pictures: a grey that is readable on white and on black."""

SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", TEXT)
"""Colours for series that are not categories of bytes, in the order of use: seven, as the ladder's rungs."""

PHASE_TINTS = {"forward": 0.07, "backward": 0.14, "optimizer": 0.21}
"""The opacity of the grey band behind a phase. Other phases have no band."""
