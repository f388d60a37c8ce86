"""Inputs of layers on the host: each returns to its own layer and pass, one layer ahead of backward."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.host_transfer import HostCopier, HostTensor, piece_sizes
from lab.techniques.offload import apply_offload
from lab_tests.support.decoder_step import (
    BATCH,
    HIDDEN,
    LAYERS,
    TOKENS,
    batch,
    checkpoint_and_offload,
    decoder,
    rows_of,
    step,
    step_timeline,
)
from lab_tests.support.operators import BytesAtAttention, TransfersAndAttention
from lab_tests.support.reference import error

DEEP = 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bit_for_bit_what_checkpointing_alone_gives(dtype):
    model = decoder(dtype=dtype)
    checkpointed = copy.deepcopy(model)
    apply_checkpointing(checkpointed)
    assert error(step(checkpoint_and_offload(model)), step(checkpointed)) == 0


@pytest.mark.parametrize("layers", [1, 2, DEEP])
def test_between_forward_and_backward_the_host_has_all_but_one(layers):
    model = decoder(layers=layers)
    checkpointed = copy.deepcopy(model)
    apply_checkpointing(checkpointed)
    block_input = BATCH * TOKENS * HIDDEN * 8
    here, before = step_timeline(checkpoint_and_offload(model), batch()), step_timeline(checkpointed, batch())
    end, end_before = rows_of(here, "forward")[-1], rows_of(before, "forward")[-1]
    assert here.host[end] == (layers - 1) * 32768  # the 30720 bytes of a block input, in whole pages
    assert before.total[end_before] - here.total[end] == (layers - 1) * block_input
    assert here.host_peak == (layers - 1) * 32768
    assert before.host_peak == 0
    assert here.host[-1] == 0


def test_backward_holds_two_block_inputs_at_most():
    block_input = BATCH * TOKENS * HIDDEN * 8
    seen = {}
    for apply in (apply_checkpointing, checkpoint_and_offload):
        model, meter = decoder(layers=DEEP), Meter()
        apply(model)
        with meter.measure(model), meter.phase("step"), BytesAtAttention(meter) as observed:
            model(**batch()).loss.backward()
        seen[apply] = observed.seen[DEEP:]  # those of the recomputation
    saved = [a - b for a, b in zip(seen[apply_checkpointing], seen[checkpoint_and_offload], strict=True)]
    # Layer i: its own input and all before it (i + 1), against its own and the next to come (2, at last 1).
    assert saved == [(i + 1 - min(i + 1, 2)) * block_input for i in reversed(range(DEEP))]


def test_one_copy_each_way_and_back_before_it_is_wanted():
    model = checkpoint_and_offload(decoder(layers=4))
    with TransfersAndAttention() as observed:
        step(model)
    again, back = "flash_attention_for_cpu", "flash_attention_for_cpu_backward"
    forward = ["to_host", again] * 3 + [again]
    backward = ["from_host", again, back] * 3 + [again, back]
    assert observed.order == forward + backward


def test_a_plan_counts_device_and_host_bytes():
    tokens = 2**20
    block_input = tokens * HIDDEN * 2
    with FakeTensorMode():
        model, inputs = checkpoint_and_offload(decoder(dtype=torch.bfloat16)), batch(tokens, rows=1)
        meter = Meter()
        with meter.measure(model):
            with meter.phase("forward"):
                loss = model.model(input_ids=inputs["input_ids"]).last_hidden_state.sum()
            with meter.phase("backward"):
                loss.backward()
    timeline = meter.timeline()
    assert timeline.host_peak == (LAYERS - 1) * block_input
    assert timeline.host[-1] == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 30720, 5 * 2**30, 5 * 2**30 + 1, 2**40 - 1])
def test_pieces_are_powers_of_two_with_less_than_a_page_of_waste(nbytes):
    sizes = piece_sizes(nbytes)
    assert all(size & (size - 1) == 0 and size >= 4096 for size in sizes)
    assert len(set(sizes)) == len(sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert 0 <= sum(sizes) - nbytes < 4096


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_a_tensor_comes_back_as_it_was(dtype):
    """In one piece or in many: turned round, with an offset, with gaps, expanded, empty, one number."""
    torch.manual_seed(5)
    x = torch.randn(11, 7, 613).to(dtype)
    dense = [x, x.transpose(0, 2), x[3:], x[:, None], x[0, 0, 0]]
    for sent in (*dense, x[:, 2:5], x[:, :, :1], x[:1].expand(4, 7, 613), x[:0]):
        copier = HostCopier()
        host_tensor = HostTensor(copier, sent)
        assert sum(piece.nbytes for piece in host_tensor._host) - sent.nbytes in range(4096)
        copier.wait_until_sent()
        back = host_tensor.get()
        assert (back.shape, back.dtype) == (sent.shape, dtype)
        assert torch.equal(back, sent)
        assert any(sent is each for each in dense) <= (back.stride() == sent.stride())


def test_names_and_refusal():
    model = decoder()
    before = list(model.state_dict())
    with pytest.raises(RecipeError, match="checkpoint=True"):
        apply_offload(model)
    assert list(checkpoint_and_offload(model, pinned=0).state_dict()) == before


@pytest.mark.parametrize("pinned", [True, False])
def test_the_host_waits_for_copies_of_memory_that_is_not_pinned(monkeypatch, pinned):
    """Only between a GPU and pinned memory does a copy run while the host goes on."""
    waits, copy = [], torch.Tensor.copy_

    def noted(to, source, non_blocking=False):
        waits.append(not non_blocking)
        return copy(to, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    x = torch.randn(5, 7)
    pieces = torch.ops.lab.to_host(x, [False] * len(piece_sizes(x.nbytes)))
    torch.ops.lab.write_host(x, pieces, 0)
    torch.ops.lab.from_host(pieces, torch.empty(5, 7))
    torch.ops.lab.to_host_whole(x, False)
    assert waits == [not pinned] * 4
