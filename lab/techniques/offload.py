"""Offload: what a checkpointed layer keeps waits for backward in host memory.

Its input; and, if asked for, what its attention made, which then is not computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lab.decoder import Patch, decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.saved_results import Results
from lab.techniques.host_transfer import Parcel, Road


def apply_offload(
    model: nn.Module, *, attention: bool = False, pinned: int | None = None, prefetch: bool = True
) -> None:
    """Send the input of every checkpointed decoder layer but the last to the host until backward wants it.

    Layer i keeps x ``[b, s, E]``, of A = b*s*E*w bytes with w bytes an element. Its copy to the host runs
    beside its forward; x is dropped when the layer has ended. In backward, layer i is recomputed from its
    copy while the input of layer i-1 already comes back (with CUDA: on a stream of its own, from pinned
    memory). The last layer's input stays on the device: backward begins with it, and a copy would have to
    turn round at once.

    With ``attention`` each layer also sends its attention's output ``[b, s, H*D]`` and LSE ``[b, H, s]``, of
    B = b*s*H*(D*w + f) bytes (f = 4, in fp64 8), and the recomputation takes them from there instead of
    running the kernel; under UPipe it skips all stages, projections and all-to-alls with them. The last
    layer's go too: between them and backward stands the loss, where B more may be the peak, and they are on
    their way back while the layer's norm and projections run.

    Saves: between forward and backward the device holds A instead of L*A, and in backward at most 2*A
    instead of L*A: the layer's own input and the next to come. The host holds (L-1)*A.
    With ``attention`` one attention forward of two, of the 4.5 forwards' worth (1 + 1 + 2.5) that a
    checkpointed attention takes. The host holds (L-1)*A + L*B, and the device in backward B more, the next
    to come.
    Costs: what the host holds goes over the bus in each direction, hidden where a layer computes longer than
    its part travels. On the host a tensor lies in pieces that are powers of two, for torch's allocator of
    pinned memory rounds each block up to one: at A = 5 GiB in two of 4 and 1 GiB. So A and B above are whole
    pages of 4096 bytes. What is pinned no process can page out, and torch never gives it back. ``pinned``
    bounds it, in bytes a rank, what earlier models of the process have pinned included (None: half of this
    machine's memory, shared by its GPUs); what is beyond waits for every copy. ``prefetch=False`` brings an
    input back when its layer wants it: the device holds A in backward, one A less, and the layer waits the
    whole way, L-1 times A over the bus's rate in a step.
    Source: ALST (arXiv 2506.13996), its checkpoint offload; Untied Ulysses (arXiv 2602.21196)
    offloads block inputs: 31 x S x 8192 bytes for the 32 layers of Llama3-8B. That backward needs of an
    attention its output and LSE alone: FlashAttention (arXiv 2205.14135), appendix B.4.
    Composes with: checkpointing, which must be applied before; every exchange, ring and UPipe; FSDP2, applied
    after.

    Raises:
        RecipeError: the layers are not checkpointed, so there is no one tensor to send. With ``attention``:
            see ``apply_attention``; in forward, a layer that does not hand its keywords to its attention.
    """
    layers = [layer.module for layer in decoder_of(model).layers]
    for layer in layers:
        if not getattr(layer.forward, "checkpointed", False):
            raise RecipeError(
                f"offload={'attention' if attention else 'inputs'!r} without checkpointing: a layer then "
                "keeps all its activations and not its input alone; use checkpoint=True with it, or "
                "offload='none'"
            )
    if attention:
        apply_attention(model)
    trip = _Trip(Road(pinned), prefetch, attention)
    for i, layer in enumerate(layers):
        layer.forward = _offloaded(layer.forward, trip, first=i == 0, last=i == len(layers) - 1)


class _Trip:
    """What the layers of a model share: the road, how it is taken, and the luggage sent last."""

    def __init__(self, road: Road, prefetch: bool, attention: bool) -> None:
        self.road, self.prefetch, self.attention = road, prefetch, attention
        self.newest: _Luggage | None = None


class _Luggage:
    """What one layer keeps of one forward pass: its input, and its attention's results if they are sent.

    ``before`` is that of the layer before it in the same pass, so passes may interleave.
    """

    def __init__(self, trip: _Trip, before: _Luggage | None, x: Tensor, *, stays: bool) -> None:
        self._trip, self._before = trip, before
        self._input = Parcel(trip.road, x, stays=stays)
        self.attention: tuple[Parcel, ...] = ()

    def fetch(self) -> None:
        """Begin the way back of all of it."""
        for parcel in (self._input, *self.attention):
            parcel.fetch()

    def open(self) -> Tensor:
        """The input, on the device; with prefetch the rest sets out, and the luggage before it."""
        x = self._input.open()
        if self._trip.prefetch:
            for parcel in self.attention:
                parcel.fetch()
            if self._before is not None:
                self._before.fetch()
        return x

    def keep(self, making: Callable[[], Results]) -> Results:
        """The layer's ``Keep``: the first time results are made and sent, after that they come back."""
        if self.attention:
            return tuple(parcel.open() for parcel in self.attention)
        made = making()
        self.attention = tuple(Parcel(self._trip.road, x) for x in made)
        return made


def _offloaded(inner: Callable[..., Any], trip: _Trip, *, first: bool, last: bool) -> Patch:
    """Wrap the forward of a checkpointed layer so that the tensor it saves is luggage."""

    def forward(hidden_states: Tensor, *args: Any, **rest: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden_states, *args, **rest)
        luggage = _Luggage(trip, None if first else trip.newest, hidden_states, stays=last)
        trip.newest = None if last else luggage
        # Not the tensor itself: autograd keeps the hooks as long as the luggage, and they would keep it.
        wanted = id(hidden_states)

        def pack(tensor: Tensor) -> Tensor | _Luggage:
            # Checkpoint saves the layer's input (and in older releases an empty tensor).
            return luggage if id(tensor) == wanted else tensor

        def unpack(saved: Tensor | _Luggage) -> Tensor:
            return saved.open() if isinstance(saved, _Luggage) else saved

        if trip.attention:
            rest["lab_keep"] = luggage.keep
        try:
            # Inside the layer checkpoint's own hooks stand before these: they see its input, nothing else.
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = inner(hidden_states, *args, **rest)
        finally:
            # The caller drops the input after this, and its memory may be written again.
            trip.road.depart()
        if trip.attention and not luggage.attention:
            raise RecipeError(
                "offload='attention' with a decoder layer that hands no keywords on to its attention; use "
                "offload='inputs' with this one"
            )
        return out

    patch = Patch(forward, inner)
    patch.checkpointed = True
    return patch
