"""Offload: a checkpointed layer's input waits in host memory until backward needs it.

The results of the layer's attention may wait there too. They are then not computed a second time.
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
    """Store the input of every checkpointed decoder layer, except the last, in host memory until backward.

    The input of a layer, x [b, s, E], has A bytes. Its copy to the host runs during the layer's forward, and
    x is dropped when the layer has ended. In backward, layer i is recomputed from its copy, while the input
    of layer i-1 is already copied back. On CUDA, copies run on their own stream, from and to pinned memory.
    The input of the last layer stays on the device, because backward begins with that layer.

    With ``attention``, each layer also sends the output of its attention [b, s, H*D] and its LSE [b, H, s],
    B bytes together. The recomputation then uses these results instead of running the kernel. Under UPipe it
    also skips all stages, projections and all-to-alls. The last layer sends its results too: otherwise the
    device would hold them during the loss, where memory may be at its peak. They are copied back while the
    norm and the projections of the layer are recomputed.

    Letters: b rows, s tokens of one rank, S tokens of all, E hidden size, H query heads, D head_dim,
    L layers, w bytes per element, f = 4 bytes per LSE (8 in fp64); A = b*s*E*w, B = b*s*H*(D*w + f).

    Args:
        model: A model whose layers are checkpointed.
        attention: Also store the results of attention.
        pinned: The number of bytes of host memory that this process may pin in all, including the memory
            that earlier models have pinned. By default, see ``lab.techniques.host_memory.pinnable``. Tensors
            beyond it are stored in pageable memory, and the host waits for each of their copies.
        prefetch: In backward, copy the tensors of a layer back while the layer after it is recomputed.

    Saves:
        Between forward and backward, the device holds A bytes instead of L*A. In backward it holds at most
        2*A bytes instead of L*A: the input of the layer, and that of the next one. Without ``prefetch`` it
        holds A bytes in backward.
        With ``attention``, a step runs one attention forward instead of two. A checkpointed attention takes
        the time of 4.5 forwards (2 forwards, and a backward of 2.5), and now takes that of 3.5.
    Costs:
        The host holds (L-1)*A bytes, and with ``attention`` L*B bytes more. They cross the bus once in each
        direction, which takes no extra time if a layer computes longer than its copies run. With
        ``attention``, the device holds B bytes more in backward: the results that the next layer needs.
        A tensor on the host consists of pieces whose sizes are powers of two, because torch's allocator of
        pinned memory rounds each block up to a power of two. A tensor of 5 GiB has pieces of 4 and 1 GiB.
        Hence A and B on the host are rounded up to whole pages of 4096 bytes. Pinned memory cannot be paged
        out, and torch never unpins it. Without ``prefetch``, each layer waits for its input, which takes the
        time of L-1 copies of A bytes per step.
    Source:
        ALST (arXiv 2506.13996), checkpoint offload; Untied Ulysses (arXiv 2602.21196), which offloads the
        inputs of blocks: 31*S*8192 bytes for the 32 layers of Llama3-8B. FlashAttention (arXiv 2205.14135),
        appendix B.4: backward needs only the output and the LSE of attention's forward.
    Composes with:
        Checkpointing, which must be applied before; every exchange, ring and UPipe; FSDP2, applied after.

    Raises:
        RecipeError: The layers are not checkpointed, so there is no single tensor to send. With
            ``attention``: see ``apply_attention``; in forward, a layer does not pass its keywords on to its
            attention.
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
    """The state that a model's layers share: the copier, the settings, and the newest layer's tensors."""

    def __init__(self, copier: HostCopier, prefetch: bool, attention: bool) -> None:
        self.copier, self.prefetch, self.attention = copier, prefetch, attention
        self.newest: _LayerTensors | None = None


class _LayerTensors:
    """The tensors that one layer saves in one forward pass: its input, and perhaps its attention's results.

    ``previous`` has the tensors of the layer before, in the same forward pass. Backward of one pass may
    therefore run after the forward of another.
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
        """Return the input on the device. With prefetch, also start the copies that are needed next."""
        x = self._input.get()
        if self._state.prefetch:
            for tensor in self.attention:
                tensor.prefetch()
            if self._previous is not None:
                self._previous.prefetch()
        return x

    def attention_results(self, compute: Callable[[], Results]) -> Results:
        """Return the attention's results; this method is the layer's ``ResultCache``.

        The first call computes the results and sends them to the host. Later calls copy them back.
        """
        if self.attention:
            return tuple(tensor.get() for tensor in self.attention)
        results = compute()
        self.attention = tuple(HostTensor(self._state.copier, x) for x in results)
        return results


def _with_offload(inner: Callable[..., Any], state: _OffloadState, *, first: bool, last: bool) -> Patch:
    """Wrap the forward of a checkpointed layer, so that the input that it saves is stored in host memory."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden_states, *args, **kwargs)
        tensors = _LayerTensors(state, None if first else state.newest, hidden_states, stays=last)
        state.newest = None if last else tensors
        # Autograd keeps the hooks alive until backward. They refer to the input by its id only, because they
        # would otherwise keep the tensor alive too.
        input_id = id(hidden_states)

        def pack(tensor: Tensor) -> Tensor | _LayerTensors:
            # Checkpoint saves the layer's input, and in older releases of torch also an empty tensor.
            return tensors if id(tensor) == input_id else tensor

        def unpack(saved: Tensor | _LayerTensors) -> Tensor:
            return saved.get_input() if isinstance(saved, _LayerTensors) else saved

        if state.attention:
            kwargs["lab_cache"] = tensors.attention_results
        try:
            # Inside the layer, checkpoint's own hooks take precedence, so these hooks see the input only.
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = inner(hidden_states, *args, **kwargs)
        finally:
            # After this, the caller drops the input, and the memory of the input may be reused.
            state.copier.wait_until_sent()
        if state.attention and not tensors.attention:
            raise RecipeError(
                "offload='attention' with a decoder layer that does not pass keywords on to its attention; "
                "use offload='inputs' with this model"
            )
        return out

    patch = Patch(forward, inner)
    patch.checkpointed = True
    return patch
