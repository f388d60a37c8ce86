"""The colours of all pictures, which colour-blind readers can tell apart; a test computes how well."""

from lab.memory.categories import CATEGORIES

COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#D55E00",
    "recomputed activations": "#DDCC88",
    "gradients of activations": "#882255",
    "temporary buffers": "#56B4E9",
    "other": "#AAAAAA",
    "host": "#8877FF",
    "disk": "#665533",
}
"""The colour of each category of bytes: those of a timeline, then host memory and a disk.

Five are of Okabe and Ito's palette. To every kind of colour-blind eye, any two differ by 12 in CIEDE2000, and
two that are stacked side by side by 17. No series has one of these colours.
"""

CATEGORY_COLOURS = tuple(COLOURS[category] for category in CATEGORIES)
"""The colours of a timeline's categories, in the order in which they are stacked."""

TEXT = "#767676"
"""The colour of text and axes in static pictures: a grey that is readable on white and on black."""

SERIES_COLOURS = ("#992299", "#226611", "#555555", "#EE44FF", "#66BB22", "#AA99AA", "#778866", "#BBCCAA")
"""Colours for series that are not categories of bytes, in the order of use: eight, as the ladder's rungs."""

Dashes = str | tuple[int, tuple[int, ...]]
"""A line style of matplotlib."""

SERIES_LINES: tuple[tuple[Dashes, str], ...] = (
    ("-", "o"),
    ("--", "s"),
    ("-.", "^"),
    (":", "D"),
    ((0, (8, 2)), "v"),
    ((0, (3, 1, 1, 1, 1, 1)), "P"),
    ((0, (1, 1)), "X"),
    ((0, (6, 1, 1, 1)), "*"),
)
"""The dashes and the marker of each series that is a line."""

PHASE_TINTS = {"forward": 0.07, "backward": 0.14, "optimizer": 0.21}
"""The opacity of the grey band behind a phase. Other phases have no band."""
