"""The streamed layer: one autograd node a decoder layer, whose long tensors are in host memory."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from lab.decoder import Patch, check_hooks, decoder_of, has_cache
from lab.errors import RecipeError
from lab.techniques.attention.documents import Documents
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.exchange import size_of
from lab.techniques.host_file import HostFile
from lab.techniques.host_tiles import TileCopiers
from lab.techniques.streaming.passes import layer_backward, run_stages, run_tail
from lab.techniques.streaming.segments import LayerRun
from lab.techniques.streaming.tensors import StreamedLayer
from lab.techniques.tiling import check_tile
from lab.techniques.upipe.schedule import schedule
from lab.torch_private import is_held_elsewhere, storage_id, version
from lab.units import check_counts


def apply_streaming(
    model: nn.Module,
    *,
    tile: int,
    head_chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    overlap: bool = False,
    segment: int = 1,
    attention: bool = False,
    file: HostFile | None = None,
) -> None:
    """Replace every decoder layer of ``model`` by one node, with its long tensors in host memory.

    A layer maps x [b, s, E] to y [b, s, E]. Its *head* computes q, k and v from x; its *tail* computes y from
    x and the outputs of all heads. Both compute each token alone, so they run on one tile of t tokens after
    the other. Attention between them runs in the stages of UPipe. On the host are x, the outputs of the
    heads, and their gradients; they cross the bus a tile at a time, the next one while a tile is computed.

    1. Forward: x is copied to the host; this copy is what backward keeps. Each stage computes q, k and v from
       tiles of x, attends, and sends its outputs to the host. The tail then computes y tile by tile.
    2. Backward: the stages run again, unless the outputs were kept. The tail is run and differentiated for
       each tile: the gradient of x is written over that of y, and the gradients of the outputs go to the
       host. The stages of attention's backward write dq over the outputs. The head is run and differentiated
       for each tile, and adds to the gradient of x.

    With ``segment`` = k > 1, only the input of every k-th layer is kept. When backward reaches the last layer
    of a segment, the segment's layers run forward once more, and each leaves its input and the outputs of its
    heads on the host. Attention still runs twice forward and once backward per layer. A segment also begins
    at the first layer that backward reaches, and at a layer whose input a hook changed.

    Letters: b rows, s tokens of one rank, E hidden size, H query heads, K key/value heads, D head_dim, C
    ranks of ``group``, L layers, k = ``segment``, U = ``head_chunk``, U_kv = C times the schedule's
    ``slots_in_flight``, w bytes per element, f = 4 bytes per element of a sum (8 in fp64). Bytes of tensors:
    A = w*b*s*E for x, h = w*b*s*D for one head, dW for the gradients of the weights of the tail.

    Args:
        model: The model. Its MLPs and norms are called with tiles.
        tile: t, at least 1. If it does not divide s, the last tile is shorter.
        head_chunk: U, the query heads of a stage; None for one stage with all heads, as in Ulysses.
        group: The C ranks of the Ulysses group. None is a group of one rank.
        overlap: Whether the inputs of a stage are sent during the stage before it, see ``apply_upipe``.
        segment: k, the layers of a segment, at least 1. If it does not divide L, the last segment is shorter.
        attention: Keep the outputs of the heads and the LSEs of all layers on the host, from forward to
            backward. Attention then runs once forward.
        file: Where the inputs, the outputs of heads and the gradients lie, in place of host memory. The LSEs
            stay in host memory.

    Saves:
        Whole hidden states on the device. If s is much larger than t, the peak of a layer is in
        attention's backward, at A + dW + h*(4U + 4*U_kv) + sums + f*b*s*U bytes: the gradient of x, a stage,
        and its LSEs; sums = 2*h*U_kv*f/w, if several stages use the same keys and values. ``apply_upipe``
        with ``apply_offload`` holds 3*A + h*H + f*b*s*(H - U) more.
    Costs:
        Host memory: (ceil(L/k) + k - 1)*A + k*(h*H + f*b*s*H) + max(h*H, 2*h*K) bytes at most, without the
        last pages: inputs, the outputs of heads with their LSEs, and the gradients of the outputs, or those
        of keys and values; with ``attention``, L*(h*H + f*b*s*H). A stage reads x once, and computes its norm
        again; forward, the replay and backward have H/U stages each. With ``segment``, all layers but the
        last one of a segment are computed once more without their attention, and FSDP gathers their
        parameters once more.
    Source:
        ALST (arXiv 2506.13996) and Untied Ulysses (arXiv 2602.21196), whose checkpoint offload and tiling are
        one loop over tiles here. Chen et al. (arXiv 1604.06174), section 4, for segments.
    Composes with:
        Ring attention and kernels in tiles, applied before; the stages of UPipe; FSDP2, applied after; tiled
        loss. It takes the place of ``apply_upipe``, ``apply_ulysses``, ``apply_checkpointing``,
        ``apply_offload``, and of tiled MLPs.

    Raises:
        RecipeError: ``tile`` or ``segment`` is less than 1; see also ``apply_upipe``. In forward: there is a
            mask or a key/value cache; there is a hook on a module inside a layer. In backward: a second
            backward, or ``create_graph=True``.
    """
    check_tile("stream", tile)
    check_counts({"segment": segment}, RecipeError)
    decoder = decoder_of(model)
    heads = decoder.shape.H
    stages = schedule(heads, decoder.shape.K, size_of(group), heads if head_chunk is None else head_chunk)
    apply_attention(model)
    segments, copiers = _Segments(segment), TileCopiers(file)
    for i, parts in enumerate(decoder.layers):
        layer = StreamedLayer(
            parts, stages, group, overlap, tile=tile, copiers=copiers, keeps_outputs=attention
        )
        parts.module.forward = _streamed(layer, segments, i, last=i == len(decoder.layers) - 1)


class _Segments:
    """Which layers follow each other in a segment of a forward pass.

    Args:
        length: k.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        # The newest layer's pass, its output, and how often the output was changed in place, until the next
        # layer begins.
        self._newest: tuple[LayerRun, Tensor, int] | None = None

    def before(self, index: int, x: Tensor) -> tuple[LayerRun, ...]:
        """Return the passes of the layers before this one in its segment; none if it begins a segment.

        Each k-th layer begins a segment. So does a layer whose input is not the output of the layer before
        it, because a hook changed it, and a layer before which no backward follows: when a segment runs
        again, each of its layers but the first gets what the layer before it has computed.
        """
        newest, self._newest = self._newest, None
        if index % self._length == 0 or newest is None or not _is_unchanged(x, *newest[1:]):
            return ()
        return *newest[0].before, newest[0]

    def note(self, run: LayerRun, output: Tensor) -> None:
        """Note what the next layer of the segment is expected to get."""
        self._newest = run, output.detach(), version(output)


def _is_unchanged(x: Tensor, output: Tensor, changes: int) -> bool:
    """Return whether ``x`` is ``output``, changed in place as often as ``output`` was then."""
    return (
        storage_id(x.untyped_storage()) == storage_id(output.untyped_storage())
        and (x.shape, x.stride(), x.storage_offset())
        == (output.shape, output.stride(), output.storage_offset())
        and version(x) == changes
    )


def _streamed(layer: StreamedLayer, segments: _Segments, index: int, *, last: bool) -> Patch:
    module = layer.parts.module

    def forward(
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        lab_documents: Documents | None = None,
        **keywords: Any,
    ) -> Tensor:
        if attention_mask is not None or has_cache(keywords):
            raise RecipeError(
                "a streamed layer with a mask or a cache is not supported: pass no attention_mask, and "
                "use_cache=False"
            )
        for submodule in module.modules():
            if submodule is not module:
                check_hooks(submodule, "stream")
        cos, sin = (t.to(hidden_states.dtype) for t in position_embeddings)
        parameters = [p for p in module.parameters() if p.requires_grad]
        backward_follows = torch.is_grad_enabled() and (hidden_states.requires_grad or bool(parameters))
        before = segments.before(index, hidden_states)
        run = LayerRun(replace(layer, documents=lab_documents), (cos, sin), before, backward_follows)
        out: Tensor = _StreamedLayer.apply(run, hidden_states, *parameters)  # type: ignore[no-untyped-call]
        if backward_follows and not last:
            segments.note(run, out)
        return out

    return Patch(forward, module.forward)


class _StreamedLayer(Function):
    """A layer as one node: x [b, s, E] and the trained parameters -> y [b, s, E]."""

    @staticmethod
    def forward(ctx: Any, run: LayerRun, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run = run
        tensors = run_stages(run.layer, x, run.tables)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        run_tail(tensors, y)
        if run.awaits_backward:
            run.keep(x, tensors)
        # After this, the caller drops x, and its memory may be reused.
        run.layer.copiers.to_host.wait_until_sent()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        run: LayerRun = ctx.run
        if torch.is_grad_enabled():
            raise RecipeError(
                "a backward with create_graph=True through a streamed layer, which overwrites its gradients: "
                "leave create_graph out, or set stream=None"
            )
        if not run.awaits_backward:
            raise RecipeError(
                "a second backward through a streamed layer: the first one overwrote what it needs; call "
                "backward once, without retain_graph, or set stream=None"
            )
        run.awaits_backward = False
        if not dy.is_contiguous():
            dy = dy.contiguous()
        elif is_held_elsewhere(dy):
            warnings.warn(
                "a hook or another variable holds the gradient of a layer's output, which a streamed layer "
                "overwrites: the layer works on a copy, and holds the gradient twice",
                stacklevel=1,
            )
            dy = dy.clone()
        tensors = run.prepare()
        gradients = layer_backward(tensors, run.tables, dy, x_needed=ctx.needs_input_grad[1])
        run.release()
        return None, dy if ctx.needs_input_grad[1] else None, *gradients
