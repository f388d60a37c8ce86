"""Chosen operators in the order of their calls, inside and outside the meter."""

import pytest

from lab.memory.meter import Meter
from lab.memory.spans import Spans
from lab_tests.support.decoder_step import LAYERS, batch, checkpoint_and_offload, decoder

FLASH = "aten._scaled_dot_product_flash_attention"


@pytest.mark.parametrize("outside", [True, False])
def test_the_chosen_operators_are_listed_once_each_in_order(outside):
    model, meter = checkpoint_and_offload(decoder()), Meter()
    spans = Spans("lab.", FLASH)
    if outside:
        with spans, meter.measure(model), meter.phase("step"):
            model(**batch()).loss.backward()
    else:
        with meter.measure(model), meter.phase("step"), spans:
            model(**batch()).loss.backward()
    again, back = f"{FLASH}_for_cpu", f"{FLASH}_for_cpu_backward"
    forward = ["lab.to_host", again] * (LAYERS - 1) + [again]
    backward = ["lab.from_host", again, back] * (LAYERS - 1) + [again, back]
    assert [name for name, _, _ in spans.all] == forward + backward
    ends = [0.0, *(end for _, _, end in spans.all)]
    assert all(before <= start < end for before, (_, start, end) in zip(ends, spans.all, strict=False))


def test_operators_outside_the_block_are_not_listed():
    model, spans = decoder(), Spans("aten.mm")
    model(**batch())
    assert spans.all == []
