"""Categories and series are told apart by colour-blind readers, on white paper and on a dark page."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lab.memory.categories import CATEGORIES
from lab.show.palette import CATEGORY_COLOURS, COLOURS, SERIES_COLOURS, SERIES_LINES, TEXT

EYES = {
    "normal": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""What an eye sees of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1."""

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE, DARK = "#FFFFFF", "#111111"
"""The pages: paper, and JupyterLab's dark theme."""


def linear(colour):
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab_of(colour, eye="normal"):
    """CIE Lab, white D65."""
    xyz = TO_XYZ @ np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def ciede2000(first, second):
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean7 = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    stretch = 1.5 - 0.5 * np.sqrt(mean7 / (mean7 + 25**7))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0
    light, chroma, hue = (l1 + l2) / 2, (c1 + c2) / 2, h1 + turn / 2 if c1 * c2 else h1 + h2
    t = 1 + sum(
        part * np.cos(np.radians(times * hue + shift))
        for part, times, shift in ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.2, 4, -63))
    )
    by_light = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2))
    by_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    by_hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    rotation = np.sin(np.radians(60 * np.exp(-(((hue % 360 - 275) / 25) ** 2))))
    crossed = -2 * np.sqrt(chroma**7 / (chroma**7 + 25**7)) * rotation * by_chroma * by_hue
    return np.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + crossed)


def difference(first, second):
    """The difference of two colours to the eye that tells them apart the least."""
    return min(ciede2000(lab_of(first, eye), lab_of(second, eye)) for eye in EYES)


def contrast(colour, page):
    bright, dim = sorted((TO_XYZ[1] @ linear(each) for each in (colour, page)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize(
    ("first", "second", "published"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((50, -0.001, 2.49), (50, 0.0011, -2.49), 4.7461),
    ],
)
def test_the_difference_is_that_of_the_published_pairs(first, second, published):
    """Of Sharma, Wu and Dalal 2005, table 1."""
    assert ciede2000(first, second) == pytest.approx(published, abs=1e-4)


def test_every_category_has_a_colour_of_its_own():
    assert list(COLOURS) == [*CATEGORIES, "host", "disk"]
    close = {pair: difference(*(COLOURS[name] for name in pair)) for pair in combinations(COLOURS, 2)}
    assert {pair: value for pair, value in close.items() if value < 11.9} == {}


def test_areas_that_are_stacked_side_by_side_differ_more():
    close = {pair: difference(*pair) for pair in pairwise(CATEGORY_COLOURS)}
    assert {pair: value for pair, value in close.items() if value < 17} == {}


def test_every_area_stands_out_from_the_page():
    pale = {
        (c, page): contrast(c, page) for c in (*COLOURS.values(), *SERIES_COLOURS) for page in (WHITE, DARK)
    }
    assert {pair: value for pair, value in pale.items() if value < 1.5} == {}


def test_text_is_readable_on_paper_and_on_black():
    """WCAG's contrast of small text."""
    assert min(contrast(TEXT, page) for page in ("#FFFFFF", "#000000")) > 4.5


def test_no_series_has_the_colour_of_a_category_and_eight_lines_have_eight_styles():
    alike = {
        pair: ciede2000(*map(lab_of, pair))
        for pair in ((s, c) for s in SERIES_COLOURS for c in COLOURS.values())
    }
    assert {pair: value for pair, value in alike.items() if value < 11} == {}
    near = {pair: difference(*pair) for pair in combinations(SERIES_COLOURS, 2)}
    assert {pair: value for pair, value in near.items() if value < 17} == {}
    dashes, markers = zip(*SERIES_LINES, strict=True)
    assert len(SERIES_COLOURS) == len(set(dashes)) == len(set(markers)) == 8
