"""The way back from the host, one layer ahead or at the last moment: the same numbers, one input apart."""

import copy

import pytest

from lab.memory.meter import Meter
from lab_tests.test_checkpointing import BATCH, HIDDEN, TOKENS, batch, decoder, step, worst
from lab_tests.test_offload import Crossings, Held, offloaded

DEEP = 5
INPUT = BATCH * TOKENS * HIDDEN * 8
"""Bytes of what one layer keeps."""


def recomputing(**knobs):
    """Device bytes at each layer's attention, when backward runs it again, last layer first."""
    model, meter = offloaded(decoder(layers=DEEP), **knobs), Meter()
    with meter.measure(model), meter.phase("step"), Held(meter) as held:
        model(**batch()).loss.backward()
    return held.seen[DEEP:], meter.timeline()


def test_without_it_backward_holds_one_input_less():
    (ahead, measured), (late, measured_late) = recomputing(), recomputing(prefetch=False)
    # The first layer, which backward reaches last, has none before it to be fetched.
    assert [a - b for a, b in zip(ahead, late, strict=True)] == [INPUT] * (DEEP - 1) + [0]
    assert measured.host_peak == measured_late.host_peak == (DEEP - 1) * 32768  # in whole pages


@pytest.mark.parametrize(
    ("prefetch", "way"),
    [
        (True, ["from_host", "again", "back"] * 3 + ["again", "back"]),
        (False, ["again", "back"] + ["from_host", "again", "back"] * 3),
    ],
)
def test_each_input_comes_back_before_the_layer_that_wants_it(prefetch, way):
    model = offloaded(decoder(layers=4), prefetch=prefetch)
    with Crossings() as crossings:
        step(model)
    names = {"flash_attention_for_cpu": "again", "flash_attention_for_cpu_backward": "back"}
    backward = crossings.order[crossings.order.index("from_host") - 2 * (not prefetch) :]
    assert [names.get(name, name) for name in backward] == way


def test_the_numbers_do_not_know():
    model = decoder()
    other = copy.deepcopy(model)
    assert worst(step(offloaded(model, prefetch=False)), step(offloaded(other))) == 0
