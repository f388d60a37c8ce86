"""Offload: the one tensor that a checkpointed layer keeps waits for backward in host memory.

The only place that crosses between device and host, through one pair of operators, ``lab::to_host`` and
``lab::from_host``. On CPU both sides are the same memory, and the copies are made all the same: a meter that
counts what ``lab::to_host`` returns in the host's lane sees a CPU rank, or a plan on fake tensors, move
bytes just as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lab.errors import RecipeError


def apply_offload(model: nn.Module, *, pin: bool = True, prefetch: bool = True) -> None:
    """Send the input of every checkpointed decoder layer but the last to the host until backward wants it.

    Layer i keeps x ``[b, s, E]``, of A = b*s*E*w bytes with w bytes an element. Its copy to the host runs
    beside its forward; x is dropped when the layer has ended. In backward, layer i is recomputed from its
    copy while the input of layer i-1 already comes back (with CUDA: on a stream of its own, from pinned
    memory). The last layer's input stays on the device: backward begins with it, and a copy would have to
    turn round at once.

    Saves: between forward and backward the device holds A instead of L*A, and in backward at most 2*A
    instead of L*A: the layer's own input and the next to come. The host holds (L-1)*A.
    Costs: (L-1)*A bytes over the bus in each direction, hidden where a layer computes longer than A
    travels. Pinned memory comes in powers of two (torch's host allocator rounds up), and what is pinned no
    process can page out: at A = 5 GiB a layer holds 8. ``pin=False`` takes what it needs and waits for
    every copy. ``prefetch=False`` brings an input back when its layer wants it: the device holds A in
    backward, one A less, and the layer waits the whole way, L-1 times A over the bus's rate in a step.
    Source: ALST (arXiv 2506.13996), its checkpoint offload; Untied Ulysses (arXiv 2602.21196)
    offloads block inputs: 31 x S x 8192 bytes for the 32 layers of Llama3-8B.
    Composes with: checkpointing, which must be applied before; FSDP2, applied after.

    Raises:
        RecipeError: the layers are not checkpointed, so there is no one tensor to send.
    """
    layers = list(model.model.layers)  # type: ignore[union-attr, arg-type]
    for layer in layers:
        if not getattr(layer.forward, "checkpointed", False):
            raise RecipeError(
                "offload='inputs' without checkpointing: a layer then keeps all its activations and not its "
                "input alone; use checkpoint=True with it, or offload='none'"
            )
    road = _Road(pin, prefetch)
    for i, layer in enumerate(layers):
        layer.forward = _offloaded(layer.forward, road, first=i == 0, last=i == len(layers) - 1)


@torch.library.custom_op("lab::to_host", mutates_args=())
def to_host(x: Tensor, pin: bool) -> Tensor:
    """Copy x to new host memory, pinned or not. From CUDA: in order of the current stream, not waited for."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pin and x.is_cuda)
    return host.copy_(x, non_blocking=True)


@to_host.register_fake
def _(x: Tensor, pin: bool) -> Tensor:
    # On CUDA the result is a CPU tensor; a plan runs on CPU tensors, where the two are the same.
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@torch.library.custom_op("lab::from_host", mutates_args=("out",))
def from_host(host: Tensor, out: Tensor) -> None:
    """Copy host memory into ``out`` on the device. To CUDA: in the current stream's order, not waited for."""
    out.copy_(host, non_blocking=True)


@from_host.register_fake
def _(host: Tensor, out: Tensor) -> None:
    return None


class _Parcel:
    """One layer's input, of one forward pass: on the host, on its way back, or kept on the device.

    ``before`` is the parcel of the layer before it in the same pass, so passes may interleave.
    """

    def __init__(self, road: _Road, before: _Parcel | None, x: Tensor, stays: bool) -> None:
        self._road, self._before = road, before
        # Detached: the saved tensor would otherwise hold the graph that made it.
        self._device: Tensor | None = x.detach() if stays else None
        self._stays, self._like = stays, (x.shape, x.dtype, x.device)
        self._host: Tensor | None = None if stays else road.send(x.detach())
        self._arrival: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Begin the way back; nothing waits for it yet."""
        if self._device is None:
            assert self._host is not None
            shape, dtype, device = self._like
            self._device, self._arrival = self._road.bring(
                self._host, torch.empty(shape, dtype=dtype, device=device)
            )

    def open(self) -> Tensor:
        """The input, on the device, once it is there; with prefetch the one before it sets out."""
        self.fetch()
        if self._arrival is not None:
            torch.cuda.current_stream(self._like[2]).wait_event(self._arrival)
        if self._before is not None and self._road.prefetch:
            self._before.fetch()
        x = self._device
        assert x is not None
        if not self._stays:
            # The caller has it now; a second backward over a retained graph fetches it again.
            self._device = self._arrival = None
        return x


class _Road:
    """Between device and host: CUDA copies travel on one stream beside the one that computes.

    A buffer belongs to the computing stream, which waits for the copy before it lets go of the buffer; so
    torch's allocator may hand it out again at once, and needs to be told of no second stream.
    """

    def __init__(self, pin: bool, prefetch: bool) -> None:
        self.pin, self.prefetch = pin, prefetch
        self.newest: _Parcel | None = None
        self.departure: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def send(self, x: Tensor) -> Tensor:
        """Begin x's way to the host; ``departure`` is when it has left."""
        with torch.no_grad(), self._beside(x):
            host: Tensor = torch.ops.lab.to_host(x, self.pin)
            self.departure = self._mark(x)
        return host

    def bring(self, host: Tensor, out: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin the way back into ``out``; also returns when it has arrived."""
        with torch.no_grad(), self._beside(out):
            torch.ops.lab.from_host(host, out)
            return out, self._mark(out)

    @contextmanager
    def _beside(self, x: Tensor) -> Iterator[None]:
        if not x.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        # What was queued before may still write x, or still read the memory that a new buffer was cut from.
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self, x: Tensor) -> torch.cuda.Event | None:
        return self._stream.record_event() if x.is_cuda and self._stream is not None else None


def _offloaded(inner: Callable[..., Any], road: _Road, *, first: bool, last: bool) -> Callable[..., Any]:
    """Wrap the forward of a checkpointed layer so that the tensor it saves is a parcel."""

    def forward(hidden_states: Tensor, *args: Any, **rest: Any) -> Any:
        # Not the tensor itself: autograd keeps the hooks as long as the parcel, and they would keep it.
        wanted = id(hidden_states)

        def pack(tensor: Tensor) -> Tensor | _Parcel:
            # Checkpoint saves the layer's input (and in older releases an empty tensor).
            if id(tensor) != wanted:
                return tensor
            parcel = _Parcel(road, None if first else road.newest, tensor, stays=last)
            road.newest = None if last else parcel
            return parcel

        def unpack(saved: Tensor | _Parcel) -> Tensor:
            return saved.open() if isinstance(saved, _Parcel) else saved

        # Inside the layer checkpoint's own hooks stand before these: they see its input and nothing else.
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = inner(hidden_states, *args, **rest)
        if road.departure is not None:
            # The caller drops the input after this, and its memory may be written again.
            torch.cuda.current_stream(hidden_states.device).wait_event(road.departure)
            road.departure = None
        return out

    forward.checkpointed = True  # type: ignore[attr-defined]
    return forward
