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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from lab.techniques.attention.sinks import sink_gradients, sink_kernel
from lab.techniques.attention.window import kernel_of
from lab.techniques.exchange import rank_in
from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.precision import accumulation_dtype
from lab.techniques.rope import rotate_
from lab.techniques.upipe.buffers import ALL, KEYS_AND_VALUES, QUERIES, Arrival, StageBuffers
from lab.techniques.upipe.clipping import clip_backward_
from lab.techniques.upipe.schedule import HeadRange, Stage
from lab.techniques.upipe.settings import Inputs, LayerSettings
from lab.techniques.upipe.width_norms import backward_, normalize_, token_scales


class LayerTensors(Protocol):
    """The tensors of a layer that its stages read and write.

    Heads are [C, b, s, heads, D], by sequence; see ``StageBuffers``.
    """

    shape: tuple[int, int]
    """b and s."""

    def input_tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token of each tile, and the input of the projections for the tile, [b, t, E]."""
        ...

    def write_outputs(self, stage: Stage, outputs: Tensor) -> None:
        """Store the outputs of the stage's query heads."""
        ...

    def read_output_grads(self, stage: Stage, target: Tensor) -> None:
        """Write the gradient of the outputs of the stage's query heads to ``target``."""
        ...

    def read_outputs(self, stage: Stage, target: Tensor) -> None:
        """Write the outputs of the stage's query heads to ``target``."""
        ...

    def write_query_grads(self, stage: Stage, dq: Tensor, scratch: Tensor) -> None:
        """Store the gradient of the stage's rotated queries; ``scratch`` is flat memory of its size."""
        ...

    def write_slot_grads(self, slots: range, dk: Tensor, dv: Tensor, scratch: Tensor) -> None:
        """Store the gradients of rotated keys and of values, [C/replicas, b, s, m, D]."""
        ...


class Stages:
    """The stages of one pass of a layer: what forward and backward have in common.

    Args:
        settings: The settings of the layer.
        tensors: The input of the layer, and the tensors of all heads.
        inputs: The positions, weights and biases.
    """

    def __init__(self, settings: LayerSettings, tensors: LayerTensors, inputs: Inputs[Tensor]) -> None:
        self.settings, self.tensors, self.inputs = settings, tensors, inputs
        self.kernel = kernel_of(settings.parts.attention, settings.documents)
        self.scales = self._token_scales()

    @cached_property
    def buffers(self) -> StageBuffers:
        """The memory that the stages share, from its first use on."""
        return StageBuffers(self.settings, self.tensors.shape, self.inputs.cos)

    def _token_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the ``token_scales`` of q and of k, [b, s, 1], if their norms are over all heads."""
        inputs, shape = self.inputs, self.tensors.shape
        q_norm, k_norm = self.settings.parts.head_norms
        if self.settings.parts.norm_kind != "all" or q_norm is None or k_norm is None:
            return None, None
        scales_of = partial(token_scales, shape=shape, part=self.settings.tokens_at_once(shape[1]))
        queries = scales_of(q_norm, self.tensors.input_tiles(), inputs.wq, inputs.bq)
        return queries, scales_of(k_norm, self.tensors.input_tiles(), inputs.wk, inputs.bk)

    def in_order(self) -> Iterator[tuple[Stage, list[Tensor]]]:
        """Yield every stage with its inputs.

        With overlap, the inputs of the next stage are sent while the caller computes this stage. Without
        overlap, the inputs of a stage are sent when the stage begins, one after the other.
        """
        stages, ahead = self.settings.schedule.stages, list[Arrival]()
        # A group of one rank sends nothing.
        overlap = self.settings.overlap and self.settings.schedule.ranks > 1
        for i, stage in enumerate(stages):
            arrived = [arrive() for arrive in ahead or self.send(stage, ahead=False)]
            ahead = list(self.send(stages[i + 1], ahead=True)) if overlap and i + 1 < len(stages) else []
            # If the stage fails, the transfers that have not arrived yet keep their buffers alive.
            yield stage, arrived

    def send(self, stage: Stage, *, ahead: bool) -> Iterator[Arrival]:
        """Start to send the inputs of a stage; ``ahead`` says whether an earlier stage still runs.

        They are its queries, and its keys and values unless an earlier stage has sent them.
        """
        yield self._project_and_send(stage, stage[0].slots if stage[0].opens else None, ahead=ahead)

    def ranges(self, stage: Stage) -> Iterator[HeadRange]:
        """Yield the head ranges of a stage, each when its keys and values have arrived."""
        for i, heads in enumerate(stage):
            if i and heads.opens:
                self._project_and_send(None, heads.slots, ahead=False)()
            yield heads

    def of_range(self, vector: Tensor, heads: HeadRange) -> Tensor:
        """View the elements of ``vector`` [H] that belong to this rank's query heads of a range."""
        return self.settings.heads.of_range(vector, heads, rank_in(self.settings.group))

    def _project_and_send(self, stage: Stage | None, slots: range | None, *, ahead: bool) -> Arrival:
        """Project, normalize, rotate and send the queries of a stage, and the keys and values of slots."""
        inputs, heads = self.inputs, self.settings.heads
        transfer = self.buffers.prepare(_sent_parts(stage, slots), ahead=ahead)
        whole = self.buffers.targets(transfer)
        for start, x in self.tensors.input_tiles():
            targets = [target.narrow(2, start, x.shape[1]) for target in whole]
            cos, sin = (t.narrow(1, start, x.shape[1]) for t in (inputs.cos, inputs.sin))
            rotated = []
            if stage is not None:
                q = targets.pop(0)
                heads.project_queries(x, stage, inputs.wq, inputs.bq, q)
                self._clip(q)
                self._norm(0, q, start, partial(heads.query_vector, stage))
                rotated.append(q)
            if slots is not None:
                k, v = targets
                heads.project_slots(x, slots, inputs.wk, inputs.bk, k)
                heads.project_slots(x, slots, inputs.wv, inputs.bv, v)
                self._clip(k, v)
                self._norm(1, k, start, partial(heads.slot_vector, slots))
                rotated.append(k)
            for part in rotated:
                rotate_(part, cos, sin, rotation=self.settings.parts.rotation, scratch=transfer.received)
        return self.buffers.send(transfer)

    def _clip(self, *projected: Tensor) -> None:
        """Clip projected heads in place, if the layer does."""
        clip = self.settings.parts.clip
        if clip is not None:
            for heads in projected:
                heads.clamp_(-clip, clip)

    def _norm(self, which: int, heads: Tensor, start: int, of_heads: Callable[[Tensor], Tensor]) -> None:
        """Normalize heads of q (``which`` = 0) or of k (1) in place, from the token ``start``.

        ``of_heads`` returns the part of a vector of all heads for these.
        """
        norm, scale = self.settings.parts.head_norms[which], self.scales[which]
        if norm is None:
            return
        if self.settings.parts.norm_kind == "each":
            heads.copy_(norm(heads))
            return
        weight: Tensor = norm.weight  # type: ignore[assignment]
        if scale is None:
            heads.copy_(functional_call(norm, {"weight": of_heads(weight.flatten())}, heads))
            return
        normalize_(heads, scale.narrow(1, start, heads.shape[2]), of_heads(weight))


def _sent_parts(stage: Stage | None, slots: range | None) -> slice:
    if stage is None:
        return KEYS_AND_VALUES
    return QUERIES if slots is None else ALL


def forward_stages(settings: LayerSettings, tensors: LayerTensors, inputs: Inputs[Tensor]) -> list[Tensor]:
    """Compute the outputs of all heads, stage by stage.

    Args:
        settings: The settings of the layer.
        tensors: The input of the layer; the outputs are written there.
        inputs: The positions, weights and biases.

    Returns:
        One LSE per head range, [b, heads of the range, S].
    """
    stages, lses = Stages(settings, tensors, inputs), []
    buffers = stages.buffers
    for stage, _ in stages.in_order():
        views = buffers.split_by_range(buffers.q, stage)
        for heads, queries in zip(stages.ranges(stage), views, strict=True):
            buffers.free()
            kernel = stages.kernel
            if inputs.sinks is not None:
                kernel = sink_kernel(kernel, stages.of_range(inputs.sinks, heads).flatten())
            result, lse = kernel.forward(queries, buffers.keys, buffers.values, scale=settings.scale)
            queries.copy_(result)
            del result
            lses.append(lse)
        with buffers.send_back(QUERIES) as ((outputs,), _):
            tensors.write_outputs(stage, outputs)
    buffers.close()
    return lses


class BackwardStages(Stages):
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
        inputs: Inputs[Tensor],
        lses: Iterable[Tensor],
        *,
        sinks_needed: bool,
    ) -> None:
        super().__init__(settings, tensors, inputs)
        self.lses, self.sum_dtype = iter(lses), accumulation_dtype(inputs.cos.dtype)
        self.sums: list[Tensor] = []
        self.sink_grads: Tensor | None = None
        if inputs.sinks is not None and sinks_needed:
            self.sink_grads = torch.zeros_like(inputs.sinks, dtype=self.sum_dtype)

    def run(self) -> None:
        """Run all stages."""
        buffers = self.buffers
        for stage, (_, dout, out) in self.in_order():
            for i, heads in enumerate(self.ranges(stage)):
                views = (buffers.split_by_range(t, stage)[i] for t in (buffers.q, dout, out))
                self._attend(heads, *views)
                if heads.closes and i < len(stage) - 1:
                    self._send_gradients_back(None, heads.slots)
            buffers.release(dout, out)
            last = stage[-1]
            self._send_gradients_back(stage, last.slots if last.closes else None)
        buffers.close()

    def send(self, stage: Stage, *, ahead: bool) -> Iterator[Arrival]:
        """Start to send the inputs of a stage's backward: q, k and v; dout; and out."""
        yield from super().send(stage, ahead=ahead)
        for read in (self.tensors.read_output_grads, self.tensors.read_outputs):
            heads = self.buffers.acquire()
            read(stage, self.buffers.by_sequence(heads))
            yield self.buffers.to_heads(heads, ahead=ahead)

    def _attend(self, heads: HeadRange, q: Tensor, dout: Tensor, out: Tensor) -> None:
        """Run the backward of attention for one head range.

        ``q``, ``dout`` and ``out`` are [b, heads of the range, S, D]. ``q`` is overwritten with dq. dk and dv
        are added to the sums of the range's slots.
        """
        self.buffers.free()
        kernel, scale = self.kernel, self.settings.scale
        inputs = (dout, q, self.buffers.keys, self.buffers.values, out, next(self.lses))
        if self.sink_grads is not None and self.inputs.sinks is not None:
            sinks = self.of_range(self.inputs.sinks, heads).flatten()
            total = self.of_range(self.sink_grads, heads)
            total.add_(sink_gradients(dout, out, inputs[-1], sinks).view_as(total))
        if kernel.accumulate is not None:
            if heads.opens:
                self.sums = [torch.zeros_like(t, dtype=self.sum_dtype) for t in inputs[2:4]]
            kernel.accumulate(*inputs, *self.sums, scale=scale)
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

    def _send_gradients_back(self, stage: Stage | None, slots: range | None) -> None:
        """Send dq of ``stage`` and the sums of dk and dv of ``slots`` back to the ranks of their tokens."""
        self.buffers.free()  # The memory of this transfer replaces that of the stage's buffers.
        with self._sending_back(stage, slots) as (parts, scratch):
            if stage is not None:
                self.tensors.write_query_grads(stage, parts.pop(0), scratch)
            if slots is not None:
                dk, dv = (self.settings.heads.sum_replicas(t) for t in parts)
                self.tensors.write_slot_grads(slots, dk, dv, scratch)

    def _sending_back(
        self, stage: Stage | None, slots: range | None
    ) -> AbstractContextManager[tuple[list[Tensor], Tensor]]:
        """Call ``send_back`` with the sums, and drop this object's references to them."""
        sums: list[Tensor] = []
        if slots is not None:
            sums, self.sums = self.sums, sums
        return self.buffers.send_back(_sent_parts(stage, slots), *sums)


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
        inputs: Inputs[Tensor],
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
            for norm in settings.parts.head_norms
        ]

    def input_tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole input as one tile."""
        yield 0, self.x

    def write_outputs(self, stage: Stage, outputs: Tensor) -> None:
        """Write the stage's columns of ``out``."""
        self.settings.heads.write_columns(self.out, stage, outputs)

    def read_output_grads(self, stage: Stage, target: Tensor) -> None:
        """Compute the stage's dout from dy."""
        assert self.grad is not None
        assert self.inputs.wo is not None
        self.settings.heads.project_grad(stage, self.grad, self.inputs.wo, target)

    def read_outputs(self, stage: Stage, target: Tensor) -> None:
        """Read the stage's columns of ``out``."""
        self.settings.heads.read_columns(self.out, stage, target)

    def write_query_grads(self, stage: Stage, dq: Tensor, scratch: Tensor) -> None:
        """Write the gradient of the stage's projected queries to its columns of ``out``."""
        inputs = self.inputs
        self._rotate_back(dq, scratch)
        if self.settings.parts.norm_kind == "each":
            raw = scratch[: dq.numel()].view_as(dq)
            self.settings.heads.project_queries(self.x, stage, inputs.wq, inputs.bq, raw)
            dq.copy_(self._norm_backward(0, raw, dq))
        self.settings.heads.write_columns(self.out, stage, dq)

    def write_slot_grads(self, slots: range, dk: Tensor, dv: Tensor, scratch: Tensor) -> None:
        """Append the gradients of the slots' projected keys and values to ``dk`` and ``dv``."""
        inputs = self.inputs
        self._rotate_back(dk, scratch)
        if self.settings.parts.norm_kind == "each":
            schedule = self.settings.schedule
            raw = scratch[: dk.numel() * schedule.replicas].view(schedule.ranks, *dk.shape[1:])
            self.settings.heads.project_slots(self.x, slots, inputs.wk, inputs.bk, raw)
            dk.copy_(self._norm_backward(1, self.settings.heads.first_replicas(raw), dk))
        for grads, grad in ((self.dk, dk), (self.dv, dv)):
            grads.append(grad.permute(1, 2, 3, 0, 4).clone(memory_format=torch.contiguous_format))

    def _rotate_back(self, grad: Tensor, scratch: Tensor) -> None:
        cos, sin, rotation = self.inputs.cos, self.inputs.sin, self.settings.parts.rotation
        rotate_(grad, cos, sin, rotation=rotation, transposed=True, scratch=scratch)

    def differentiate(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Replace the gradients of q, k and v, [b*s, ...] each, by those of what is projected.

        They are the gradients of clipped heads, or of heads that are normalized all together or by scales of
        each head's own.
        """
        x, inputs, parts = self.x, self.inputs, self.settings.parts
        at_once = self.settings.tokens_at_once(self.shape[1])
        sides = [(inputs.wq, inputs.bq, dq), (inputs.wk, inputs.bk, dk), (inputs.wv, inputs.bv, dv)]
        if parts.norm_kind in ("own", "all"):
            of_norms = zip(sides[:2], parts.head_norms, self.norm_sums, strict=True)
            for (weight, bias, grad), norm, sums in of_norms:
                assert norm is not None
                backward_(norm, x, weight, bias, grad.unflatten(0, self.shape), sums, at_once)
        if parts.clip is not None:
            for weight, bias, grad in sides:
                clip_backward_(x, weight, bias, grad.unflatten(0, self.shape), clip=parts.clip, part=at_once)

    def norm_grads(self) -> Iterator[Tensor | None]:
        """Yield the gradients of the norms' parameters; each sum is rounded once."""
        for norm, sums in zip(self.settings.parts.head_norms, self.norm_sums, strict=True):
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
        norm = self.settings.parts.head_norms[which]
        assert norm is not None
        with torch.enable_grad(), parameter_aliases(norm) as aliases:
            leaf = raw.detach().requires_grad_()
            grads = torch.autograd.grad(norm(leaf), (leaf, *aliases), grad)
        for total, part in zip(self.norm_sums[which], grads[1:], strict=True):
            total.add_(part)
        return grads[0]


def forward_pass(settings: LayerSettings, x: Tensor, inputs: Inputs[Tensor]) -> tuple[Tensor, list[Tensor]]:
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
    inputs: Inputs[Tensor],
    lses: list[Tensor],
    grad: Tensor,
    x_needed: bool,
    needed: Inputs[bool],
    norms_needed: Sequence[bool],
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
        x_needed: Whether the gradient of x is needed.
        needed: Whether those of ``inputs`` are.
        norms_needed: Whether that of each parameter of the norms is.

    Returns:
        The gradients of x, of ``inputs`` and of the parameters. Those of cos and sin are None, and so is
        every gradient that is not needed.
    """
    flat_grad, dq, flat_x = (t.flatten(0, 1) for t in (grad, out, x))
    dwo = flat_grad.T @ dq if needed.wo else None
    dbo = flat_grad.sum(0) if needed.bo else None
    if not any((x_needed, *needed._replace(wo=False, bo=False), *norms_needed)):
        return *(None,) * 6, dwo, *(None,) * 3, dbo, None, *(None for _ in norms_needed)
    tensors = DeviceTensors(settings, x, inputs, out, grad)
    stages = BackwardStages(settings, tensors, inputs, lses, sinks_needed=bool(needed.sinks))
    stages.run()
    grads = (dq, _join(tensors.dk), _join(tensors.dv))
    tensors.differentiate(*grads)
    dw = [g.T @ flat_x if n else None for g, n in zip(grads, (needed.wq, needed.wk, needed.wv), strict=True)]
    db = [g.sum(0) if n else None for g, n in zip(grads, (needed.bq, needed.bk, needed.bv), strict=True)]
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
