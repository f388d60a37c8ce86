"""The picture of an exchange: each cell has the colour of the rank that holds it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lab.show
from lab.errors import LabError
from lab.show.palette import SERIES_COLOURS
from lab.techniques.exchange import heads_from_sequence
from lab.techniques.ring import local_positions
from lab_tests.support.shown import rectangles

TOKENS, HEADS, KV_HEADS = 8, 12, 2


def exchange_heads(heads):
    named = torch.cartesian_prod(torch.arange(TOKENS), torch.arange(heads)).view(1, TOKENS, heads, 2)
    before = named.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return before, heads_from_sequence(before, dist.group.WORLD)


def cells_of(axes):
    """Colour at (token, place across the heads), read off the rectangles."""
    return {(top, left): (colour, right - left) for left, top, right, _, colour in rectangles(axes)}


@pytest.mark.long
def test_what_the_ranks_exchanged_is_what_is_drawn(ranks4):
    before, after = zip(*ranks4.apply(exchange_heads, HEADS), strict=True)
    picture = lab.show.exchange({"before": before, "after": after}, title="q")
    left, right = picture.figure.axes
    cells = [(token, head) for token in range(TOKENS) for head in range(HEADS)]
    assert cells_of(left) == {(t, h): (SERIES_COLOURS[t // 2], 1.0) for t, h in cells}
    assert cells_of(right) == {(t, h): (SERIES_COLOURS[h // 3], 1.0) for t, h in cells}
    assert [text.get_text() for text in right.texts] == ["0", "1", "2", "3"]
    assert [text.get_position() for text in right.texts] == [(1.5 + 3 * rank, 4) for rank in range(4)]
    assert (
        repr(picture) == "q: before, every rank 2 tokens of 12 heads; after, every rank 8 tokens of 3 heads."
    )


def test_heads_that_several_ranks_hold_are_cut_in_stripes(ranks4):
    _, after = zip(*ranks4.apply(exchange_heads, KV_HEADS), strict=True)
    picture = lab.show.exchange({"k": after})
    (axes,) = picture.figure.axes
    wanted = {(t, rank / 2): (SERIES_COLOURS[rank], 0.5) for t in range(TOKENS) for rank in range(4)}
    assert cells_of(axes) == wanted
    assert repr(picture) == "Who holds what: k, every rank 8 tokens of 1 head, each on 2 ranks."


def test_what_nobody_holds_stays_empty_and_ranks_may_differ():
    picture = lab.show.exchange({"stage": [[[0, 0], [1, 0]], [[1, 3]]]})
    assert set(cells_of(picture.figure.axes[0])) == {(0, 0), (1, 0), (1, 3)}
    assert picture.figure.axes[0].get_xlim() == (0, 4)
    assert "rank 0 2 tokens of 1 head, rank 1 1 token of 1 head" in repr(picture)


def test_each_piece_of_a_ring_has_the_number_of_its_rank():
    held = [local_positions(8, ulysses=1, ring=2, index=rank) for rank in range(2)]
    cells = [torch.cartesian_prod(tokens, torch.arange(3)) for tokens in held]
    (axes,) = lab.show.exchange({"ring": cells}).figure.axes
    numbers = [(text.get_text(), text.get_position()) for text in axes.texts]
    # Rank 0 has tokens 0, 1, 6 and 7; those of rank 1 are one stretch.
    assert numbers == [("0", (1.5, 1)), ("0", (1.5, 7)), ("1", (1.5, 4))]


@pytest.mark.parametrize("grids", [{}, {"q": []}, {"q": [np.zeros((2, 3))]}, {"q": [np.zeros((0, 2))]}])
def test_grids_without_a_cell_to_draw_are_refused(grids):
    with pytest.raises(LabError, match=r"\[\.\.\., 2\]"):
        lab.show.exchange(grids)
