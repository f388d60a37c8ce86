"""The stages of a layer: forward, and backward from the output and the LSEs of attention.

``LayerTensors`` has the tensors of all heads, which the stages read and write a few heads at a time.
``DeviceTensors`` keeps them in device memory; ``lab.techniques.streaming`` keeps them in host memory.

Letters: b rows, s tokens of one rank, S = C*s tokens of all C ranks, E hidden size, H query heads, K
key/value heads, D head_dim, n query heads of a rank in a stage, m slots in memory (a slot is one of the
key/value heads that a rank attends to). An LSE is the log-sum-exp of each row of attention scores, which the
backward of a flash kernel needs. dq, dk, dv, dout and dy are the gradients of q, k, v, attention's output,
and the layer's output y.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from lab.decoder import Rotation
from lab.shape import HeadNorms
from lab.techniques.attention.flash import Kernel
from lab.techniques.attention.sinks import sink_gradients, sink_kernel
from lab.techniques.exchange import rank_in
from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.precision import accumulation_dtype
from lab.techniques.rope import rotate_
from lab.techniques.upipe.buffers import ALL, KEYS_AND_VALUES, QUERIES, Arrival, StageBuffers
from lab.techniques.upipe.clipping import clip_backward_
from lab.techniques.upipe.schedule import HeadRange, Schedule, Stage
from lab.techniques.upipe.width_norms import backward_, normalize_, token_scales


@dataclass(frozen=True)
class LayerSettings:
    """The arguments of a layer's passes that are not tensors.

    Attributes:
        schedule: The stages of the layer.
        group: The ranks of the Ulysses group. None is a group of one rank.
        kernel: Computes attention.
        scale: Multiplies the attention scores.
        head_dim: D.
        norms: q_norm and k_norm of the attention module, or None.
        norm_kind: What they normalize; see ``Layer``.
        overlap: Whether the inputs of a stage are sent during the stage before it.
        rotation: The pairs of dimensions of q and k that are rotated by their positions.
        clip: The largest absolute value of q, k and v, to which larger ones are clipped after their
            projections; None if they are not clipped.
    """

    schedule: Schedule
    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    head_dim: int
    norms: tuple[nn.Module | None, nn.Module | None]
    norm_kind: HeadNorms
    overlap: bool
    rotation: Rotation
    clip: float | None

    def tokens_at_once(self, tokens: int) -> int:
        """Return of how many tokens all heads are computed at once.

        In fp32, what a norm's backward holds of so many tokens is less than the heads of a stage.
        """
        return max(1, tokens * self.schedule.chunk // (8 * self.schedule.heads))


@dataclass(frozen=True)
class Inputs:
    """The tensors, besides x, from which a layer is computed, in forward and again in backward.

    Attributes:
        cos: Cosines of the positions, [b, s, D] or [1, s, D].
        sin: Sines of the positions, like ``cos``.
        wq: The weight of the query projection, [H*D, E].
        wk: The weight of the key projection, [K*D, E].
        wv: The weight of the value projection, [K*D, E].
        wo: The weight of the output projection, [E, H*D], or None where the stages do not use it.
        bq: The bias of the query projection, [H*D], or None.
        bk: The bias of the key projection, [K*D], or None.
        bv: The bias of the value projection, [K*D], or None.
        bo: The bias of the output projection, [E], or None.
        sinks: The sinks of all query heads, [H], or None.
        scales: Of a norm over all heads of q, and of k, the ``token_scales``, [b, s, 1]; else None.
    """

    cos: Tensor
    sin: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor | None
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    bo: Tensor | None
    sinks: Tensor | None
    scales: tuple[Tensor | None, Tensor | None] = (None, None)

    def with_scales(self, settings: LayerSettings, tensors: LayerTensors) -> Inputs:
        """Return these with the ``scales`` of a layer whose norms are over all heads."""
        q_norm, k_norm = settings.norms
        if settings.norm_kind != "all" or q_norm is None or k_norm is None:
            return self
        part = settings.tokens_at_once(tensors.shape[1])
        scales_of = partial(token_scales, shape=tensors.shape, part=part)
        queries = scales_of(q_norm, tensors.input_tiles(), self.wq, self.bq)
        keys = scales_of(k_norm, tensors.input_tiles(), self.wk, self.bk)
        return replace(self, scales=(queries, keys))


class LayerTensors(Protocol):
    """The tensors of a layer that its stages read and write.

    Heads are [C, b, s, heads, D], by sequence; see ``StageBuffers``.
    """

    shape: tuple[int, int]
    """b and s."""

    def input_tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token of each tile, and the input of the projections for the tile, [b, t, E]."""
        ...

    def write_outputs(self, buffers: StageBuffers, stage: Stage, outputs: Tensor) -> None:
        """Store the outputs of the stage's query heads."""
        ...

    def read_output_grads(self, buffers: StageBuffers, stage: Stage, target: Tensor) -> None:
        """Write the gradient of the outputs of the stage's query heads to ``target``."""
        ...

    def read_outputs(self, buffers: StageBuffers, stage: Stage, target: Tensor) -> None:
        """Write the outputs of the stage's query heads to ``target``."""
        ...

    def write_query_grads(self, buffers: StageBuffers, stage: Stage, dq: Tensor, scratch: Tensor) -> None:
        """Store the gradient of the stage's rotated queries; ``scratch`` is flat memory of its size."""
        ...

    def write_slot_grads(
        self, buffers: StageBuffers, slots: range, dk: Tensor, dv: Tensor, scratch: Tensor
    ) -> None:
        """Store the gradients of rotated keys and of values, [C/replicas, b, s, m, D]."""
        ...


def forward_stages(settings: LayerSettings, tensors: LayerTensors, inputs: Inputs) -> list[Tensor]:
    """Compute the outputs of all heads, stage by stage.

    Args:
        settings: The settings of the layer.
        tensors: The input of the layer; the outputs are written there.
        inputs: The positions, weights and biases.

    Returns:
        One LSE per head range, [b, heads of the range, S].
    """
    inputs = inputs.with_scales(settings, tensors)
    buffers, lses = _buffers(settings, tensors, inputs), []

    def send(stage: Stage, ahead: bool) -> list[Arrival]:
        return [_send_stage(buffers, settings, tensors, inputs, stage, ahead)]

    for stage, _ in _stages_with_inputs(settings, send):
        views = buffers.split_by_range(buffers.q, stage)
        for i, (heads, queries) in enumerate(zip(stage, views, strict=True)):
            if i and heads.opens:
                arrive = _project_and_send(buffers, settings, tensors, inputs, None, heads.slots)
                arrive()
            buffers.free()
            kernel = _kernel(buffers, settings, inputs, heads)
            result, lse = kernel.forward(queries, buffers.keys, buffers.values, scale=settings.scale)
            queries.copy_(result)
            del result
            lses.append(lse)
        with buffers.send_back(QUERIES) as ((outputs,), _):
            tensors.write_outputs(buffers, stage, outputs)
    buffers.close()
    return lses


def _buffers(settings: LayerSettings, tensors: LayerTensors, inputs: Inputs) -> StageBuffers:
    return StageBuffers(settings.schedule, settings.group, tensors.shape, settings.head_dim, inputs.cos)


def _kernel(buffers: StageBuffers, settings: LayerSettings, inputs: Inputs, heads: HeadRange) -> Kernel:
    """Return the kernel of a head range, with the sinks of its heads."""
    if inputs.sinks is None:
        return settings.kernel
    sinks = buffers.heads.of_range(inputs.sinks, heads, rank_in(settings.group))
    return sink_kernel(settings.kernel, sinks.flatten())


def _stages_with_inputs(
    settings: LayerSettings, send: Callable[[Stage, bool], Iterable[Arrival]]
) -> Iterator[tuple[Stage, list[Tensor]]]:
    """Yield every stage with its inputs.

    With overlap, the inputs of the next stage are sent while the caller computes this stage. Without overlap,
    the inputs of a stage are sent when the stage begins, one after the other.

    Args:
        settings: The settings of the layer.
        send: Starts to send the inputs of a stage. The bool says whether an earlier stage still runs.
    """
    stages, ahead = settings.schedule.stages, list[Arrival]()
    for i, stage in enumerate(stages):
        arrived = [arrive() for arrive in ahead or send(stage, False)]
        ahead = list(send(stages[i + 1], True)) if settings.overlap and i + 1 < len(stages) else []
        # If the stage fails, the transfers that have not arrived yet keep their buffers alive.
        yield stage, arrived


def _send_stage(
    buffers: StageBuffers,
    settings: LayerSettings,
    tensors: LayerTensors,
    inputs: Inputs,
    stage: Stage,
    ahead: bool,
) -> Arrival:
    """Project and send a stage's queries, and its keys and values unless an earlier stage has sent them."""
    slots = stage[0].slots if stage[0].opens else None
    return _project_and_send(buffers, settings, tensors, inputs, stage, slots, ahead=ahead)


def _project_and_send(
    buffers: StageBuffers,
    settings: LayerSettings,
    tensors: LayerTensors,
    inputs: Inputs,
    stage: Stage | None,
    slots: range | None,
    *,
    ahead: bool = False,
) -> Arrival:
    """Project, normalize, rotate and send the queries of ``stage``, and the keys and values of ``slots``."""
    transfer = buffers.prepare(_sent_parts(stage, slots), ahead=ahead)
    whole = buffers.targets(transfer)
    for start, x in tensors.input_tiles():
        targets = [target.narrow(2, start, x.shape[1]) for target in whole]
        cos, sin = (t.narrow(1, start, x.shape[1]) for t in (inputs.cos, inputs.sin))
        rotated = []
        if stage is not None:
            rotated.append(targets.pop(0))
            buffers.heads.project_queries(x, stage, inputs.wq, inputs.bq, rotated[0])
            _clip(settings, rotated[0])
            of_stage = buffers.heads.query_vector
            _norm(settings, inputs, 0, rotated[0], start, partial(of_stage, stage))
        if slots is not None:
            k, v = targets
            buffers.heads.project_slots(x, slots, inputs.wk, inputs.bk, k)
            buffers.heads.project_slots(x, slots, inputs.wv, inputs.bv, v)
            _clip(settings, k, v)
            _norm(settings, inputs, 1, k, start, partial(buffers.heads.slot_vector, slots))
            rotated.append(k)
        for heads in rotated:
            rotate_(heads, cos, sin, rotation=settings.rotation, scratch=transfer.received)
    return buffers.send(transfer)


def _sent_parts(stage: Stage | None, slots: range | None) -> slice:
    if stage is None:
        return KEYS_AND_VALUES
    return QUERIES if slots is None else ALL


def _clip(settings: LayerSettings, *projected: Tensor) -> None:
    """Clip projected heads in place, if the layer does."""
    if settings.clip is not None:
        for heads in projected:
            heads.clamp_(-settings.clip, settings.clip)


def _norm(
    settings: LayerSettings,
    inputs: Inputs,
    which: int,
    heads: Tensor,
    start: int,
    of_heads: Callable[[Tensor], Tensor],
) -> None:
    """Normalize heads of q (``which`` = 0) or of k (1) in place, from the token ``start``.

    ``of_heads`` returns the part of a vector of all heads for these.
    """
    norm, scale = settings.norms[which], inputs.scales[which]
    if norm is None:
        return
    if settings.norm_kind == "each":
        heads.copy_(norm(heads))
        return
    weight: Tensor = norm.weight  # type: ignore[assignment]
    if scale is None:
        heads.copy_(functional_call(norm, {"weight": of_heads(weight.flatten())}, heads))
        return
    normalize_(heads, scale.narrow(1, start, heads.shape[2]), of_heads(weight))


class BackwardStages:
    """The stages of one backward pass of a layer.

    Args:
        settings: The settings of the layer.
        tensors: The input of the layer, the outputs of all heads, and the outputs' gradients. The gradients
            of q, k and v are written there.
        inputs: The positions, weights and biases.
        lses: The LSEs from ``forward_stages``. Each is taken when its head range runs.
        sinks_needed: Whether the gradients of the sinks are needed.

    Attributes:
        sink_grads: The gradients of the sinks of this rank's heads, [H] in the accumulation dtype, and zeros
            for the heads of others; None if they are not needed.
    """

    def __init__(
        self,
        settings: LayerSettings,
        tensors: LayerTensors,
        inputs: Inputs,
        lses: Iterable[Tensor],
        *,
        sinks_needed: bool,
    ) -> None:
        self.settings, self.tensors, self.lses = settings, tensors, iter(lses)
        self.inputs = inputs.with_scales(settings, tensors)
        self.sum_dtype = accumulation_dtype(inputs.cos.dtype)
        self.sums: list[Tensor] = []
        self.sink_grads: Tensor | None = None
        if inputs.sinks is not None and sinks_needed:
            self.sink_grads = torch.zeros_like(inputs.sinks, dtype=self.sum_dtype)

    def run(self) -> None:
        """Run all stages."""
        buffers = _buffers(self.settings, self.tensors, self.inputs)
        for stage, (_, dout, out) in _stages_with_inputs(self.settings, partial(self._send, buffers)):
            for i, heads in enumerate(stage):
                if i and heads.opens:
                    arrive = _project_and_send(
                        buffers, self.settings, self.tensors, self.inputs, None, heads.slots
                    )
                    arrive()
                views = (buffers.split_by_range(t, stage)[i] for t in (buffers.q, dout, out))
                self._attend(buffers, heads, *views)
                if heads.closes and i < len(stage) - 1:
                    self._send_gradients_back(buffers, None, heads.slots)
            buffers.release(dout, out)
            last = stage[-1]
            self._send_gradients_back(buffers, stage, last.slots if last.closes else None)
        buffers.close()

    def _send(self, buffers: StageBuffers, stage: Stage, ahead: bool) -> Iterator[Arrival]:
        """Send the inputs of a stage's backward: q, k and v; dout; and out."""
        yield _send_stage(buffers, self.settings, self.tensors, self.inputs, stage, ahead)
        dout = buffers.acquire()
        self.tensors.read_output_grads(buffers, stage, buffers.by_sequence(dout))
        yield buffers.to_heads(dout, ahead=ahead)
        out = buffers.acquire()
        self.tensors.read_outputs(buffers, stage, buffers.by_sequence(out))
        yield buffers.to_heads(out, ahead=ahead)

    def _attend(self, buffers: StageBuffers, heads: HeadRange, q: Tensor, dout: Tensor, out: Tensor) -> None:
        """Run the backward of attention for one head range.

        ``q``, ``dout`` and ``out`` are [b, heads of the range, S, D]. ``q`` is overwritten with dq. dk and dv
        are added to the sums of the range's slots.
        """
        buffers.free()
        kernel, scale = self.settings.kernel, self.settings.scale
        inputs = (dout, q, buffers.keys, buffers.values, out, next(self.lses))
        if self.sink_grads is not None:
            sinks = _kernel(buffers, self.settings, self.inputs, heads).sinks
            assert sinks is not None
            total = buffers.heads.of_range(self.sink_grads, heads, rank_in(self.settings.group))
            total.add_(sink_gradients(dout, out, inputs[-1], sinks).view_as(total))
        if kernel.accumulate is not None:
            if heads.opens:
                self.sums = [torch.zeros_like(t, dtype=self.sum_dtype) for t in inputs[2:4]]
            dk, dv = self.sums
            kernel.accumulate(*inputs, dk, dv, scale=scale)
            return
        dq, *dk_dv = kernel.backward(*inputs, scale=scale)
        q.copy_(dq)
        del dq
        if heads.opens:
            # The sums over all ranges with the same slots are kept in the accumulation dtype. If there is one
            # such range, no sum is needed.
            self.sums = [g if heads.closes else g.to(self.sum_dtype) for g in dk_dv]
        else:
            for total, part in zip(self.sums, dk_dv, strict=True):
                total.add_(part)

    def _send_gradients_back(self, buffers: StageBuffers, stage: Stage | None, slots: range | None) -> None:
        """Send dq of ``stage`` and the sums of dk and dv of ``slots`` back to the ranks of their tokens."""
        buffers.free()  # The memory of this transfer replaces that of the stage's buffers.
        with self._sending_back(buffers, stage, slots) as (parts, scratch):
            if stage is not None:
                self.tensors.write_query_grads(buffers, stage, parts.pop(0), scratch)
            if slots is not None:
                dk, dv = (buffers.heads.sum_replicas(t) for t in parts)
                self.tensors.write_slot_grads(buffers, slots, dk, dv, scratch)

    def _sending_back(
        self, buffers: StageBuffers, stage: Stage | None, slots: range | None
    ) -> AbstractContextManager[tuple[list[Tensor], Tensor]]:
        """Call ``send_back`` with the sums, and drop this object's references to them."""
        sums: list[Tensor] = []
        if slots is not None:
            sums, self.sums = self.sums, sums
        return buffers.send_back(_sent_parts(stage, slots), *sums)


class DeviceTensors:
    """The tensors of a UPipe layer in device memory.

    In backward, dq is written over the outputs: those of a stage are not needed after that stage.

    Attributes:
        out: The outputs of all heads in the order of the model, [b, s, H*D]. In backward, dq.

    Args:
        settings: The settings of the layer.
        x: The input of the layer, [b, s, E].
        inputs: The positions, weights and biases.
        out: The outputs of forward, for backward.
        grad: dy, the gradient of the layer's output, [b, s, E], for backward.
    """

    def __init__(
        self,
        settings: LayerSettings,
        x: Tensor,
        inputs: Inputs,
        out: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> None:
        self.settings, self.x, self.inputs, self.grad = settings, x, inputs, grad
        self.shape = (x.shape[0], x.shape[1])
        columns = settings.schedule.heads * settings.head_dim
        self.out = x.new_empty(*self.shape, columns) if out is None else out
        # For this rank's tokens, one tensor [b, s, m, C/replicas, D] for each set of slots, in model order.
        self.dk: list[Tensor] = []
        self.dv: list[Tensor] = []
        self.norm_sums = [
            [
                torch.zeros_like(p, dtype=accumulation_dtype(x.dtype))
                for p in norm.parameters()
                if p.requires_grad
            ]
            if norm is not None and grad is not None
            else []
            for norm in settings.norms
        ]

    def input_tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole input as one tile."""
        yield 0, self.x

    def write_outputs(self, buffers: StageBuffers, stage: Stage, outputs: Tensor) -> None:
        """Write the stage's columns of ``out``."""
        buffers.heads.write_columns(self.out, stage, outputs)

    def read_output_grads(self, buffers: StageBuffers, stage: Stage, target: Tensor) -> None:
        """Compute the stage's dout from dy."""
        assert self.grad is not None
        assert self.inputs.wo is not None
        buffers.heads.project_grad(stage, self.grad, self.inputs.wo, target)

    def read_outputs(self, buffers: StageBuffers, stage: Stage, target: Tensor) -> None:
        """Read the stage's columns of ``out``."""
        buffers.heads.read_columns(self.out, stage, target)

    def write_query_grads(self, buffers: StageBuffers, stage: Stage, dq: Tensor, scratch: Tensor) -> None:
        """Write the gradient of the stage's projected queries to its columns of ``out``."""
        inputs = self.inputs
        self._rotate_back(dq, scratch)
        if self.settings.norm_kind == "each":
            raw = buffers.by_sequence(scratch[: dq.numel()])
            buffers.heads.project_queries(self.x, stage, inputs.wq, inputs.bq, raw)
            dq.copy_(self._norm_backward(0, raw, dq))
        buffers.heads.write_columns(self.out, stage, dq)

    def write_slot_grads(
        self, buffers: StageBuffers, slots: range, dk: Tensor, dv: Tensor, scratch: Tensor
    ) -> None:
        """Append the gradients of the slots' projected keys and values to ``dk`` and ``dv``."""
        inputs = self.inputs
        self._rotate_back(dk, scratch)
        if self.settings.norm_kind == "each":
            raw = buffers.by_sequence(scratch[: dk.numel() * self.settings.schedule.replicas])
            buffers.heads.project_slots(self.x, slots, inputs.wk, inputs.bk, raw)
            dk.copy_(self._norm_backward(1, buffers.heads.first_replicas(raw), dk))
        for grads, grad in ((self.dk, dk), (self.dv, dv)):
            grads.append(grad.permute(1, 2, 3, 0, 4).clone(memory_format=torch.contiguous_format))

    def _rotate_back(self, grad: Tensor, scratch: Tensor) -> None:
        cos, sin = self.inputs.cos, self.inputs.sin
        rotate_(grad, cos, sin, rotation=self.settings.rotation, transposed=True, scratch=scratch)

    def differentiate_norms_of_all_heads(self, dq: Tensor, dk: Tensor) -> None:
        """Replace the gradients of the normalized q and k, [b*s, ...], by those of the projected ones.

        They are norms of all heads together, or the scales of each head are its own.
        """
        if self.settings.norm_kind not in ("own", "all"):
            return
        x, inputs, part = self.x, self.inputs, self.settings.tokens_at_once(self.shape[1])
        sides = ((dq, inputs.wq, inputs.bq), (dk, inputs.wk, inputs.bk))
        for (grad, weight, bias), norm, sums in zip(sides, self.settings.norms, self.norm_sums, strict=True):
            assert norm is not None
            backward_(norm, x, weight, bias, grad.unflatten(0, self.shape), sums, part)

    def differentiate_clips(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Replace the gradients of the clipped q, k and v, [b*s, ...], by those of the projected ones."""
        x, inputs, clip = self.x, self.inputs, self.settings.clip
        if clip is None:
            return
        sides = ((dq, inputs.wq, inputs.bq), (dk, inputs.wk, inputs.bk), (dv, inputs.wv, inputs.bv))
        part = self.settings.tokens_at_once(self.shape[1])
        for grad, weight, bias in sides:
            clip_backward_(x, weight, bias, grad.unflatten(0, self.shape), clip=clip, part=part)

    def norm_grads(self) -> Iterator[Tensor | None]:
        """Yield the gradients of the norms' parameters; each sum is rounded once."""
        for norm, sums in zip(self.settings.norms, self.norm_sums, strict=True):
            totals = iter(sums)
            for parameter in norm.parameters() if norm is not None else ():
                yield next(totals).to(parameter.dtype) if parameter.requires_grad else None

    def _norm_backward(self, which: int, raw: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of a norm's input, and add the gradients of its parameters to their sums.

        Args:
            which: 0 for q_norm, 1 for k_norm.
            raw: The norm's input.
            grad: The gradient of the norm's output.
        """
        norm = self.settings.norms[which]
        assert norm is not None
        with torch.enable_grad(), parameter_aliases(norm) as aliases:
            leaf = raw.detach().requires_grad_()
            grads = torch.autograd.grad(norm(leaf), (leaf, *aliases), grad)
        for total, part in zip(self.norm_sums[which], grads[1:], strict=True):
            total.add_(part)
        return grads[0]


def forward_pass(settings: LayerSettings, x: Tensor, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Run the forward of a UPipe layer up to the outputs of its heads.

    Args:
        settings: The settings of the layer.
        x: The input of the layer, [b, s, E].
        inputs: The positions, weights and biases.

    Returns:
        The outputs in the order of the model's heads, [b, s, H*D], and one LSE per head range,
        [b, heads of the range, S].
    """
    tensors = DeviceTensors(settings, x, inputs)
    lses = forward_stages(settings, tensors, inputs)
    return tensors.out, lses


def backward_pass(
    settings: LayerSettings,
    x: Tensor,
    out: Tensor,
    inputs: Inputs,
    lses: list[Tensor],
    grad: Tensor,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Run the backward of a UPipe layer. ``out`` is overwritten with dq.

    No product is computed for a frozen weight. No stage runs if only gradients of the output projection are
    needed.

    Args:
        settings: The settings of the layer.
        x: The input of the layer, [b, s, E].
        out: The outputs of all heads, [b, s, H*D].
        inputs: The positions, weights and biases.
        lses: The LSEs from ``forward_stages``.
        grad: dy, the gradient of the layer's output, [b, s, E].
        needed: Whether a gradient is needed: for x, cos, sin, the four weights, the four biases, the sinks,
            and each parameter of the norms.

    Returns:
        The gradients in the order of ``needed``. Those of cos and sin are None, and so is every gradient that
        is not needed.
    """
    x_needed, _, _, *w_needed = needed[:7]
    b_needed, sinks_needed, norms_needed = needed[7:11], needed[11], needed[12:]
    flat_grad, dq, flat_x = (t.flatten(0, 1) for t in (grad, out, x))
    dwo = flat_grad.T @ dq if w_needed[3] else None
    dbo = flat_grad.sum(0) if b_needed[3] else None
    if not any((x_needed, *w_needed[:3], *b_needed[:3], sinks_needed, *norms_needed)):
        return *(None,) * 6, dwo, *(None,) * 3, dbo, None, *(None for _ in norms_needed)
    tensors = DeviceTensors(settings, x, inputs, out, grad)
    stages = BackwardStages(settings, tensors, inputs, lses, sinks_needed=sinks_needed)
    stages.run()
    grads = (dq, _join(tensors.dk), _join(tensors.dv))
    tensors.differentiate_norms_of_all_heads(*grads[:2])
    tensors.differentiate_clips(*grads)
    dw = [g.T @ flat_x if needed else None for g, needed in zip(grads, w_needed[:3], strict=True)]
    db = [g.sum(0) if needed else None for g, needed in zip(grads, b_needed[:3], strict=True)]
    dx = None
    if x_needed:
        dx = grads[0] @ inputs.wq
        dx = dx.addmm_(grads[1], inputs.wk).addmm_(grads[2], inputs.wv).view_as(x)
    dsinks = stages.sink_grads
    if dsinks is not None and inputs.sinks is not None:
        dsinks = dsinks.to(inputs.sinks.dtype)
    return dx, None, None, *dw, dwo, *db, dbo, dsinks, *tensors.norm_grads()


def _join(parts: list[Tensor]) -> Tensor:
    """Join one tensor [b, s, m, C/replicas, D] for each set of slots to [b*s, K*D], and clear the list."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    parts.clear()
    return whole.flatten(2).flatten(0, 1)
