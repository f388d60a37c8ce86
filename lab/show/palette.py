"""The colours: one per kind of bytes, the same in every picture (Okabe and Ito's, for every eye)."""

from lab.memory.timeline import CATEGORIES

COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#D55E00",
    "other": "#999999",
    "host": "#CC79A7",
    "workspace": "#56B4E9",
}
"""Colour by what holds the bytes: the categories of a timeline, then host memory and kernels' workspaces."""

CATEGORY_COLOURS = tuple(COLOURS[category] for category in CATEGORIES)
"""The categories' colours in stacking order."""

TEXT = "#767676"
"""Text and axes of static pictures: the grey that reads equally well on white and on black."""

SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", TEXT)
"""Colours of lines that are not kinds of bytes, in the order of use: one for each rung of the ladder."""

PHASE_TINTS = {"forward": 0.07, "backward": 0.14, "optimizer": 0.21}
"""Opacity of the grey band behind a phase. Every other phase has none."""
