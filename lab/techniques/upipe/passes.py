"""The two passes of a UPipe layer: forward stage by stage, and backward from the output and the LSEs.

An LSE is the log-sum-exp of a row of attention scores, which a flash kernel's backward takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.techniques.attention.flash import Kernel
from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.precision import accumulation_dtype
from lab.techniques.rope import rotate_
from lab.techniques.upipe.buffers import ALL, KEYS_AND_VALUES, QUERIES, Arrival, StageBuffers
from lab.techniques.upipe.schedule import HeadRange, Schedule, Stage


@dataclass(frozen=True)
class LayerSettings:
    """What a layer's passes need besides tensors.

    ``norms`` are q_norm and k_norm, or None. ``overlap`` sends a stage's inputs during the stage before it.
    """

    plan: Schedule
    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    head_dim: int
    norms: tuple[nn.Module | None, nn.Module | None]
    overlap: bool


@dataclass(frozen=True)
class Inputs:
    """What q, k and v are computed from, in forward and again in backward. Weights are [out, in]."""

    cos: Tensor
    sin: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    bo: Tensor | None


def forward_pass(settings: LayerSettings, x: Tensor, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """x [b, s, E] -> the heads' outputs in the model's order [b, s, H*D]; the head ranges' LSEs [b, n, S]."""
    buffers, lses = StageBuffers(settings.plan, settings.group, x, settings.head_dim), []
    out = x.new_empty(*x.shape[:2], settings.plan.heads * settings.head_dim)

    def send(stage: Stage, ahead: bool) -> list[Arrival]:
        return [_send_stage(buffers, settings, inputs, stage, ahead)]

    for stage, _ in _stages_with_inputs(settings, send):
        views = buffers.split_by_range(buffers.q, stage)
        for i, (heads, queries) in enumerate(zip(stage, views, strict=True)):
            if i and heads.opens:
                arrive = _project_and_send(buffers, settings, inputs, None, heads.slots)
                arrive()
            buffers.free()
            attended, lse = settings.kernel.forward(
                queries, buffers.keys, buffers.values, scale=settings.scale
            )
            queries.copy_(attended)
            del attended
            lses.append(lse)
        with buffers.send_back(QUERIES) as ((outputs,), _):
            buffers.heads.write_columns(out, stage, outputs)
    buffers.close()
    return out, lses


def _stages_with_inputs(
    settings: LayerSettings, send: Callable[[Stage, bool], Iterable[Arrival]]
) -> Iterator[tuple[Stage, list[Tensor]]]:
    """Yield every stage with its inputs, which ``send`` has sent for it.

    With overlap, the inputs of the next stage are already being sent while this one is computed. Without it,
    each input is sent when its stage begins, and has arrived before the next one is made.
    """
    stages, ahead = settings.plan.stages, list[Arrival]()
    for i, stage in enumerate(stages):
        arrived = [arrive() for arrive in ahead or send(stage, False)]
        ahead = list(send(stages[i + 1], True)) if settings.overlap and i + 1 < len(stages) else []
        # If the stage fails, transfers that have not arrived keep their buffers alive themselves.
        yield stage, arrived


def _send_stage(
    buffers: StageBuffers, settings: LayerSettings, inputs: Inputs, stage: Stage, ahead: bool
) -> Arrival:
    """Project and send a stage's queries, and its keys and values if it begins with new ones."""
    return _project_and_send(
        buffers, settings, inputs, stage, stage[0].slots if stage[0].opens else None, ahead=ahead
    )


def _project_and_send(
    buffers: StageBuffers,
    settings: LayerSettings,
    inputs: Inputs,
    stage: Stage | None,
    slots: range | None,
    *,
    ahead: bool = False,
) -> Arrival:
    """Project, normalize, rotate and send the queries of ``stage``, and the keys and values of ``slots``."""
    transfer = buffers.prepare(_sent_parts(stage, slots), ahead=ahead)
    targets, rotated = buffers.targets(transfer), []
    if stage is not None:
        rotated.append(targets.pop(0))
        buffers.heads.project_queries(stage, inputs.wq, inputs.bq, rotated[0])
        _norm(settings.norms[0], rotated[0])
    if slots is not None:
        k, v = targets
        buffers.heads.project_slots(slots, inputs.wk, inputs.bk, k)
        buffers.heads.project_slots(slots, inputs.wv, inputs.bv, v)
        _norm(settings.norms[1], k)
        rotated.append(k)
    for heads in rotated:
        rotate_(heads, inputs.cos, inputs.sin, scratch=transfer.received)
    return buffers.send(transfer)


def _sent_parts(stage: Stage | None, slots: range | None) -> slice:
    if stage is None:
        return KEYS_AND_VALUES
    return QUERIES if slots is None else ALL


def _norm(norm: nn.Module | None, heads: Tensor) -> None:
    if norm is not None:
        heads.copy_(norm(heads))


class Backward:
    """One backward pass of a layer.

    It writes dq into ``out``: a stage's columns of ``out`` are overwritten as soon as they have been read.

    ``needed`` says for x, cos, sin, the four weights, the four biases and the norms' parameters which
    gradients are asked for.
    """

    def __init__(
        self,
        settings: LayerSettings,
        x: Tensor,
        out: Tensor,
        inputs: Inputs,
        lses: list[Tensor],
        grad: Tensor,
        needed: tuple[bool, ...],
    ) -> None:
        self.settings, self.x, self.out, self.inputs, self.grad = settings, x, out, inputs, grad
        self.lses = iter(lses)
        self.needed = needed
        self.sum_dtype = accumulation_dtype(x.dtype)
        self.norm_sums = [
            [torch.zeros_like(p, dtype=self.sum_dtype) for p in norm.parameters() if p.requires_grad]
            if norm is not None
            else []
            for norm in settings.norms
        ]
        self.sums: list[Tensor] = []
        # For this rank's tokens: one tensor [b, s, m, C/replicas, D] a group of heads, in the model's order.
        self.dk: list[Tensor] = []
        self.dv: list[Tensor] = []

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, (cos, sin), the four weights, the four biases, the norms' parameters.

        A gradient that is not needed is None: no product is computed for a frozen weight, and no stage is run
        if only the output projection's gradients are needed.
        """
        inputs = self.inputs
        of_x, _, _, *of_w = self.needed[:7]
        of_b, of_norms = self.needed[7:11], self.needed[11:]
        grad, out, x = (t.flatten(0, 1) for t in (self.grad, self.out, self.x))
        dwo = grad.T @ out if of_w[3] else None
        dbo = grad.sum(0) if of_b[3] else None
        if not any((of_x, *of_w[:3], *of_b[:3], *of_norms)):
            return *(None,) * 6, dwo, *(None,) * 3, dbo, *(None for _ in of_norms)
        self._stages()
        grads = (out, _joined(self.dk), _joined(self.dv))
        dw = [g.T @ x if wanted else None for g, wanted in zip(grads, of_w[:3], strict=True)]
        db = [g.sum(0) if wanted else None for g, wanted in zip(grads, of_b[:3], strict=True)]
        dx = None
        if of_x:
            dx = grads[0] @ inputs.wq
            dx = dx.addmm_(grads[1], inputs.wk).addmm_(grads[2], inputs.wv).view_as(self.x)
        return dx, None, None, *dw, dwo, *db, dbo, *self._norm_grads()

    def _norm_grads(self) -> Iterator[Tensor | None]:
        """The gradients of the norms' parameters, each sum rounded once."""
        for norm, sums in zip(self.settings.norms, self.norm_sums, strict=True):
            totals = iter(sums)
            for parameter in norm.parameters() if norm is not None else ():
                yield next(totals).to(parameter.dtype) if parameter.requires_grad else None

    def _stages(self) -> None:
        buffers = StageBuffers(self.settings.plan, self.settings.group, self.x, self.settings.head_dim)
        for stage, (_, dout, out) in _stages_with_inputs(self.settings, partial(self._send, buffers)):
            for i, heads in enumerate(stage):
                if i and heads.opens:
                    arrive = _project_and_send(buffers, self.settings, self.inputs, None, heads.slots)
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
        """Send what a stage's backward needs: q, k and v; dout, computed from dy; out."""
        yield _send_stage(buffers, self.settings, self.inputs, stage, ahead)
        dout = buffers.acquire()
        buffers.heads.project_grad(stage, self.grad, self.inputs.wo, buffers.by_sequence(dout))
        yield buffers.to_heads(dout, ahead=ahead)
        out = buffers.acquire()
        buffers.heads.read_columns(self.out, stage, buffers.by_sequence(out))
        yield buffers.to_heads(out, ahead=ahead)

    def _attend(self, buffers: StageBuffers, heads: HeadRange, q: Tensor, dout: Tensor, out: Tensor) -> None:
        """Run attention's backward for one head range, [b, heads, S, D].

        ``q`` is overwritten with dq; dk and dv are added to the sums of their group.
        """
        buffers.free()
        dq, *dk_dv = self.settings.kernel.backward(
            dout, q, buffers.keys, buffers.values, out, next(self.lses), scale=self.settings.scale
        )
        q.copy_(dq)
        del dq
        if heads.opens:
            # A group's sum over its stages is kept in the accumulation dtype; a range that is a whole
            # group needs no sum.
            self.sums = [g if heads.closes else g.to(self.sum_dtype) for g in dk_dv]
        else:
            for total, more in zip(self.sums, dk_dv, strict=True):
                total.add_(more)

    def _send_gradients_back(self, buffers: StageBuffers, stage: Stage | None, slots: range | None) -> None:
        """Send dq of ``stage`` and the sums of dk and dv of ``slots`` back to their tokens' ranks."""
        inputs, settings = self.inputs, self.settings
        buffers.free()  # so that the memory of this transfer does not add to that of the stage's buffers
        with self._sending_back(buffers, stage, slots) as (parts, scratch):
            if stage is not None:
                dq = parts.pop(0)
                rotate_(dq, inputs.cos, inputs.sin, transposed=True, scratch=scratch)
                if settings.norms[0] is not None:
                    raw = buffers.by_sequence(scratch[: dq.numel()])
                    buffers.heads.project_queries(stage, inputs.wq, inputs.bq, raw)
                    dq.copy_(self._norm_backward(0, raw, dq))
                buffers.heads.write_columns(self.out, stage, dq)
            if slots is not None:
                raw = buffers.by_sequence(scratch[: parts[0].numel()])
                dk, dv = (buffers.heads.sum_replicas(t) for t in parts)
                rotate_(dk, inputs.cos, inputs.sin, transposed=True, scratch=scratch)
                if settings.norms[1] is not None:
                    buffers.heads.project_slots(slots, inputs.wk, inputs.bk, raw)
                    dk.copy_(self._norm_backward(1, buffers.heads.first_replicas(raw), dk))
                for parts_of_layer, grad in ((self.dk, dk), (self.dv, dv)):
                    parts_of_layer.append(
                        grad.permute(1, 2, 3, 0, 4).clone(memory_format=torch.contiguous_format)
                    )

    def _sending_back(
        self, buffers: StageBuffers, stage: Stage | None, slots: range | None
    ) -> AbstractContextManager[tuple[list[Tensor], Tensor]]:
        """Call ``send_back`` so that it holds the only references to the sums."""
        sums: list[Tensor] = []
        if slots is not None:
            sums, self.sums = self.sums, sums
        return buffers.send_back(_sent_parts(stage, slots), *sums)

    def _norm_backward(self, which: int, raw: Tensor, grad: Tensor) -> Tensor:
        """Run the module's own norm again with gradients; add its parameters' gradients to their sums."""
        norm = self.settings.norms[which]
        assert norm is not None
        with torch.enable_grad(), parameter_aliases(norm) as aliases:
            leaf = raw.detach().requires_grad_()
            grads = torch.autograd.grad(norm(leaf), (leaf, *aliases), grad)
        for total, more in zip(self.norm_sums[which], grads[1:], strict=True):
            total.add_(more)
        return grads[0]


def _joined(parts: list[Tensor]) -> Tensor:
    """[b, s, m, C/replicas, D] of each group of heads -> [b*s, K*D]; clears the list of parts."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    parts.clear()
    return whole.flatten(2).flatten(0, 1)
