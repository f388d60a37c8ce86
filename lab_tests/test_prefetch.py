"""With and without prefetching a layer's input from the host: the same gradients, one input more or less."""

import copy

from lab.memory.meter import Meter
from lab_tests.support.decoder_step import (
    BATCH,
    HIDDEN,
    TOKENS,
    batch,
    checkpoint_and_offload,
    decoder,
    step,
)
from lab_tests.support.operators import BytesAtAttention, TransfersAndAttention
from lab_tests.support.reference import error

DEEP = 5
INPUT = BATCH * TOKENS * HIDDEN * 8
"""Bytes of what one layer keeps."""


def bytes_in_recomputation(**knobs):
    """Device bytes at each layer's attention, when backward runs it again, last layer first."""
    model, meter = checkpoint_and_offload(decoder(layers=DEEP), **knobs), Meter()
    with meter.measure(model), meter.phase("step"), BytesAtAttention(meter) as observed:
        model(**batch()).loss.backward()
    return observed.seen[DEEP:], meter.timeline()


def test_without_prefetching_backward_holds_one_input_less():
    (ahead, measured), (late, measured_late) = (
        bytes_in_recomputation(),
        bytes_in_recomputation(prefetch=False),
    )
    # The first layer, which backward reaches last, has none before it to be fetched.
    assert [a - b for a, b in zip(ahead, late, strict=True)] == [INPUT] * (DEEP - 1) + [0]
    assert measured.host_peak == measured_late.host_peak == (DEEP - 1) * 32768  # in whole pages


def test_without_it_each_input_comes_back_when_its_layer_wants_it():
    model = checkpoint_and_offload(decoder(layers=4), prefetch=False)
    with TransfersAndAttention() as observed:
        step(model)
    names = {"flash_attention_for_cpu": "again", "flash_attention_for_cpu_backward": "back"}
    backward = [names.get(name, name) for name in observed.order[observed.order.index("from_host") - 2 :]]
    assert backward == ["again", "back"] + ["from_host", "again", "back"] * 3


def test_prefetching_changes_no_gradient():
    model = decoder()
    prefetching = checkpoint_and_offload(copy.deepcopy(model))
    assert error(step(checkpoint_and_offload(model, prefetch=False)), step(prefetching)) == 0
