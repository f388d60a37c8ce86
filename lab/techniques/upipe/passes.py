"""The two passes of a UPipe layer: forward stage by stage, and backward from the output and the LSEs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.techniques.attention.flash import Kernel
from lab.techniques.parameter_aliases import standing_in
from lab.techniques.precision import wider
from lab.techniques.rope import rotate_
from lab.techniques.upipe.buffers import ALL, KEYS_AND_VALUES, QUERIES, Bench, Landing
from lab.techniques.upipe.schedule import Run, Schedule, Stage


@dataclass(frozen=True)
class Job:
    """What a layer's passes need besides tensors; ``norms`` are q_norm and k_norm, if there are any."""

    plan: Schedule
    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    head_dim: int
    norms: tuple[nn.Module | None, nn.Module | None]
    overlap: bool


@dataclass(frozen=True)
class Inputs:
    """What q, k and v are made from, and made again: weights as ``nn.Linear`` has them, [out, in]."""

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


def forward_pass(job: Job, x: Tensor, given: Inputs) -> tuple[Tensor, list[Tensor]]:
    """x [b, s, E] -> the heads' outputs in model order [b, s, H*D], and an LSE [b, n, S] for each run."""
    bench, lses = Bench(job.plan, job.group, x, job.head_dim), []
    out = x.new_empty(*x.shape[:2], job.plan.heads * job.head_dim)
    for stage, _ in _arriving(job, lambda stage, ahead: [_of_stage(bench, job, given, stage, ahead)]):
        for i, (run, part) in enumerate(zip(stage, bench.runs(bench.q, stage), strict=True)):
            if i and run.opens:
                land = _made(bench, job, given, None, run.slots)
                land()
            bench.clear()
            attended, lse = job.kernel.forward(part, bench.keys, bench.values, scale=job.scale)
            part.copy_(attended)
            del attended
            lses.append(lse)
        with bench.home(QUERIES) as ((heads,), _):
            bench.heads.write_columns(out, stage, heads)
    bench.close()
    return out, lses


def _arriving(
    job: Job, send: Callable[[Stage, bool], Iterable[Landing]]
) -> Iterator[tuple[Stage, list[Tensor]]]:
    """Every stage, with what ``send`` sent for it; with overlap, the next stage's is under way by then.

    Without, each thing is sent when its stage begins, and has landed before the next is made.
    """
    stages, ahead = job.plan.stages, list[Landing]()
    for i, stage in enumerate(stages):
        there = [land() for land in ahead or send(stage, False)]
        ahead = list(send(stages[i + 1], True)) if job.overlap and i + 1 < len(stages) else []
        # Should the stage fail, what is under way keeps its buffers by itself until it has arrived.
        yield stage, there


def _of_stage(bench: Bench, job: Job, given: Inputs, stage: Stage, ahead: bool) -> Landing:
    """A stage's queries; and keys and values, if it begins with new ones."""
    return _made(bench, job, given, stage, stage[0].slots if stage[0].opens else None, ahead=ahead)


def _made(
    bench: Bench, job: Job, given: Inputs, stage: Stage | None, slots: range | None, *, ahead: bool = False
) -> Landing:
    """Queries of ``stage``, keys and values of ``slots``: projected, normed, rotated, sent."""
    load = bench.load(_which(stage, slots), ahead=ahead)
    targets, rotated = bench.targets(load), []
    if stage is not None:
        rotated.append(targets.pop(0))
        bench.heads.project_queries(stage, given.wq, given.bq, rotated[0])
        _norm(job.norms[0], rotated[0])
    if slots is not None:
        k, v = targets
        bench.heads.project_slots(slots, given.wk, given.bk, k)
        bench.heads.project_slots(slots, given.wv, given.bv, v)
        _norm(job.norms[1], k)
        rotated.append(k)
    for heads in rotated:
        rotate_(heads, given.cos, given.sin, scratch=load.received)
    return bench.send(load)


def _which(stage: Stage | None, slots: range | None) -> slice:
    if stage is None:
        return KEYS_AND_VALUES
    return QUERIES if slots is None else ALL


def _norm(norm: nn.Module | None, heads: Tensor) -> None:
    if norm is not None:
        heads.copy_(norm(heads))


class Backward:
    """One backward pass of a layer. ``out`` becomes dq, a stage's columns as soon as they have been read.

    ``needed`` says for x, cos, sin, the four weights, the four biases and the norms' parameters which
    gradients are asked for.
    """

    def __init__(
        self,
        job: Job,
        x: Tensor,
        out: Tensor,
        given: Inputs,
        lses: list[Tensor],
        grad: Tensor,
        needed: tuple[bool, ...],
    ) -> None:
        self.job, self.x, self.out, self.given, self.grad = job, x, out, given, grad
        self.lses = iter(lses)
        self.needed = needed
        self.wide = wider(x.dtype)
        self.norm_sums = [
            [torch.zeros_like(p, dtype=self.wide) for p in norm.parameters() if p.requires_grad]
            if norm is not None
            else []
            for norm in job.norms
        ]
        self.sums: list[Tensor] = []
        # At home, of each group of heads [b, s, m, C/replicas, D], in the order of the model's heads.
        self.dk: list[Tensor] = []
        self.dv: list[Tensor] = []

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, (cos, sin), the four weights, the four biases, the norms' parameters.

        None for those that are not needed: of a frozen weight no product is run, and where the output's
        weight and bias alone are needed, no stage.
        """
        given = self.given
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
            dx = grads[0] @ given.wq
            dx = dx.addmm_(grads[1], given.wk).addmm_(grads[2], given.wv).view_as(self.x)
        return dx, None, None, *dw, dwo, *db, dbo, *self._norm_grads()

    def _norm_grads(self) -> Iterator[Tensor | None]:
        """The sums for the norms' parameters, rounded once."""
        for norm, sums in zip(self.job.norms, self.norm_sums, strict=True):
            totals = iter(sums)
            for parameter in norm.parameters() if norm is not None else ():
                yield next(totals).to(parameter.dtype) if parameter.requires_grad else None

    def _stages(self) -> None:
        bench = Bench(self.job.plan, self.job.group, self.x, self.job.head_dim)
        for stage, (_, dout, out) in _arriving(self.job, partial(self._send, bench)):
            for i, run in enumerate(stage):
                if i and run.opens:
                    land = _made(bench, self.job, self.given, None, run.slots)
                    land()
                self._attend(bench, run, *(bench.runs(t, stage)[i] for t in (bench.q, dout, out)))
                if run.closes and i < len(stage) - 1:
                    self._bring_home(bench, None, run.slots)
            bench.give(dout, out)
            last = stage[-1]
            self._bring_home(bench, stage, last.slots if last.closes else None)
        bench.close()

    def _send(self, bench: Bench, stage: Stage, ahead: bool) -> Iterator[Landing]:
        """What a stage works with: q, k and v; dout, made from dy; out."""
        yield _of_stage(bench, self.job, self.given, stage, ahead)
        dout = bench.take()
        bench.heads.project_grad(stage, self.grad, self.given.wo, bench.by_sequence(dout))
        yield bench.to_heads(dout, ahead=ahead)
        out = bench.take()
        bench.heads.read_columns(self.out, stage, bench.by_sequence(out))
        yield bench.to_heads(out, ahead=ahead)

    def _attend(self, bench: Bench, run: Run, q: Tensor, dout: Tensor, out: Tensor) -> None:
        """One run's attention backward, [b, heads, S, D]; q becomes dq, dk and dv join their group's."""
        bench.clear()
        dq, *dk_dv = self.job.kernel.backward(
            dout, q, bench.keys, bench.values, out, next(self.lses), scale=self.job.scale
        )
        q.copy_(dq)
        del dq
        if run.opens:
            # A group's sum over its stages is wide; a run that is a whole group needs no sum.
            self.sums = [g if run.closes else g.to(self.wide) for g in dk_dv]
        else:
            for total, more in zip(self.sums, dk_dv, strict=True):
                total.add_(more)

    def _bring_home(self, bench: Bench, stage: Stage | None, slots: range | None) -> None:
        """Send home dq of ``stage``, and the sums of dk and dv of ``slots``; put them where they belong."""
        given, job = self.given, self.job
        bench.clear()  # what is sent home now is not to stand beside the stage's own buffers
        with self._sent_home(bench, stage, slots) as (parts, scratch):
            if stage is not None:
                dq = parts.pop(0)
                rotate_(dq, given.cos, given.sin, transposed=True, scratch=scratch)
                if job.norms[0] is not None:
                    raw = bench.by_sequence(scratch[: dq.numel()])
                    bench.heads.project_queries(stage, given.wq, given.bq, raw)
                    dq.copy_(self._norm_backward(0, raw, dq))
                bench.heads.write_columns(self.out, stage, dq)
            if slots is not None:
                raw = bench.by_sequence(scratch[: parts[0].numel()])
                dk, dv = (bench.heads.sum_replicas(t) for t in parts)
                rotate_(dk, given.cos, given.sin, transposed=True, scratch=scratch)
                if job.norms[1] is not None:
                    bench.heads.project_slots(slots, given.wk, given.bk, raw)
                    dk.copy_(self._norm_backward(1, bench.heads.first_replicas(raw), dk))
                for arrived, grad in ((self.dk, dk), (self.dv, dv)):
                    arrived.append(grad.permute(1, 2, 3, 0, 4).clone(memory_format=torch.contiguous_format))

    def _sent_home(
        self, bench: Bench, stage: Stage | None, slots: range | None
    ) -> AbstractContextManager[tuple[list[Tensor], Tensor]]:
        """``bench.home``, which is the only one to hold the sums from now on."""
        sums: list[Tensor] = []
        if slots is not None:
            sums, self.sums = self.sums, sums
        return bench.home(_which(stage, slots), *sums)

    def _norm_backward(self, which: int, raw: Tensor, grad: Tensor) -> Tensor:
        """Run the module's own norm again, with gradients; its parameters' are summed wide."""
        norm = self.job.norms[which]
        assert norm is not None
        with torch.enable_grad(), standing_in(norm) as wanted:
            leaf = raw.detach().requires_grad_()
            found = torch.autograd.grad(norm(leaf), (leaf, *wanted), grad)
        for total, more in zip(self.norm_sums[which], found[1:], strict=True):
            total.add_(more)
        return found[0]


def _joined(parts: list[Tensor]) -> Tensor:
    """[b, s, m, C/replicas, D] of each group of heads -> [b*s, K*D]; lets go of the parts."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    parts.clear()
    return whole.flatten(2).flatten(0, 1)
