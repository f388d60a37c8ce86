"""Offload: the tensors that a checkpointed layer saves for backward wait in host memory.

They are its input and, if asked for, its attention's results, which are then not computed a second time.
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
from lab.techniques.host_transfer import HostCopier, HostTensor


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
    state = _OffloadState(HostCopier(pinned), prefetch, attention)
    for i, layer in enumerate(layers):
        layer.forward = _with_offload(layer.forward, state, first=i == 0, last=i == len(layers) - 1)


class _OffloadState:
    """What the layers of a model share: the copier, the settings, and the tensors sent last."""

    def __init__(self, copier: HostCopier, prefetch: bool, attention: bool) -> None:
        self.copier, self.prefetch, self.attention = copier, prefetch, attention
        self.newest: _LayerTensors | None = None


class _LayerTensors:
    """What one layer saves in one forward pass: its input, and its attention's results if they are sent.

    ``previous`` belongs to the previous layer in the same pass; so several passes may interleave.
    """

    def __init__(
        self, state: _OffloadState, previous: _LayerTensors | None, x: Tensor, *, stays: bool
    ) -> None:
        self._state, self._previous = state, previous
        self._input = HostTensor(state.copier, x, stays=stays)
        self.attention: tuple[HostTensor, ...] = ()

    def prefetch(self) -> None:
        """Start the copies back to the device."""
        for tensor in (self._input, *self.attention):
            tensor.prefetch()

    def get_input(self) -> Tensor:
        """The input on the device. With prefetch, also start the copies that are needed next."""
        x = self._input.get()
        if self._state.prefetch:
            for tensor in self.attention:
                tensor.prefetch()
            if self._previous is not None:
                self._previous.prefetch()
        return x

    def attention_results(self, compute: Callable[[], Results]) -> Results:
        """The layer's ``ResultCache``: compute the results and send them; after that, copy them back."""
        if self.attention:
            return tuple(tensor.get() for tensor in self.attention)
        results = compute()
        self.attention = tuple(HostTensor(self._state.copier, x) for x in results)
        return results


def _with_offload(inner: Callable[..., Any], state: _OffloadState, *, first: bool, last: bool) -> Patch:
    """Wrap the forward of a checkpointed layer so that the input it saves lies in host memory."""

    def forward(hidden_states: Tensor, *args: Any, **rest: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden_states, *args, **rest)
        tensors = _LayerTensors(state, None if first else state.newest, hidden_states, stays=last)
        state.newest = None if last else tensors
        # Only its id: autograd keeps the hooks alive until backward, and they would keep the tensor alive.
        input_id = id(hidden_states)

        def pack(tensor: Tensor) -> Tensor | _LayerTensors:
            # Checkpoint saves the layer's input (and in older releases an empty tensor).
            return tensors if id(tensor) == input_id else tensor

        def unpack(saved: Tensor | _LayerTensors) -> Tensor:
            return saved.get_input() if isinstance(saved, _LayerTensors) else saved

        if state.attention:
            rest["lab_cache"] = tensors.attention_results
        try:
            # Inside the layer, checkpoint's own hooks take precedence: these see only the layer's input.
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = inner(hidden_states, *args, **rest)
        finally:
            # The caller drops the input after this, and its memory may be reused.
            state.copier.wait_until_sent()
        if state.attention and not tensors.attention:
            raise RecipeError(
                "offload='attention' with a decoder layer that hands no keywords on to its attention; use "
                "offload='inputs' with this one"
            )
        return out

    patch = Patch(forward, inner)
    patch.checkpointed = True
    return patch
