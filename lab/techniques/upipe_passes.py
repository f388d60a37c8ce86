"""The two passes of a UPipe layer: forward stage by stage, and backward from the output and the LSEs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.techniques.attention import Kernel
from lab.techniques.precision import wider
from lab.techniques.rope import rotate_
from lab.techniques.stand_ins import standing_in
from lab.techniques.upipe_schedule import Run, Schedule
from lab.techniques.upipe_stage import Bench


@dataclass(frozen=True)
class Job:
    """What a layer's passes need besides tensors; ``norms`` are q_norm and k_norm, if there are any."""

    plan: Schedule
    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    head_dim: int
    norms: tuple[nn.Module | None, nn.Module | None]


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
    for stage in job.plan.stages:
        q = _make_queries(bench, job, stage, given)
        for run, part in zip(stage, bench.runs(q, stage), strict=True):
            if run.opens:
                _make_keys_and_values(bench, job, run.slots, given)
            bench.clear()
            attended, lse = job.kernel.forward(part, bench.keys, bench.values, scale=job.scale)
            part.copy_(attended)
            del attended
            lses.append(lse)
        q = bench.to_sequence(q)
        bench.write_columns(out, stage, q)
        bench.give(q)
    bench.close()
    return out, lses


def _make_queries(bench: Bench, job: Job, stage: tuple[Run, ...], given: Inputs) -> Tensor:
    """The stage's queries, normed and rotated: a buffer by heads."""
    send = bench.take()
    q = bench.project_queries(stage, given.wq, given.bq, send)
    if job.norms[0] is not None:
        q.copy_(job.norms[0](q))
    scratch = bench.take()
    rotate_(q, given.cos, given.sin, scratch=scratch)
    bench.give(scratch)
    return bench.to_heads(send)


def _make_keys_and_values(bench: Bench, job: Job, slots: range, given: Inputs) -> None:
    """The keys and values of ``slots``, by heads in ``bench.keys`` and ``bench.values``."""
    send = bench.take()
    k = bench.project_slots(slots, given.wk, given.bk, send)
    if job.norms[1] is not None:
        k.copy_(job.norms[1](k))
    rotate_(k, given.cos, given.sin, scratch=bench.v)  # the values' room is still free
    bench.kv_to_heads(send, bench.k)
    bench.project_slots(slots, given.wv, given.bv, send)
    bench.kv_to_heads(send, bench.v)
    bench.give(send)


class Backward:
    """One backward pass of a layer. ``out`` becomes dq, a stage's columns as soon as they have been read."""

    def __init__(
        self, job: Job, x: Tensor, out: Tensor, given: Inputs, lses: list[Tensor], grad: Tensor
    ) -> None:
        self.job, self.x, self.out, self.given, self.grad = job, x, out, given, grad
        self.lses = iter(lses)
        self.wide = wider(x.dtype)
        self.norm_sums = [
            [torch.zeros_like(p, dtype=self.wide) for p in norm.parameters()] if norm is not None else []
            for norm in job.norms
        ]
        self.sums: list[Tensor] = []
        self.dk_dv: tuple[Tensor, Tensor] | None = None

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, (cos, sin), the four weights, the four biases, the norms' parameters."""
        given = self.given
        grad, out, x = (t.flatten(0, 1) for t in (self.grad, self.out, self.x))
        dwo = grad.T @ out
        self._stages()
        assert self.dk_dv is not None
        grads = (out, *(t.flatten(0, 1) for t in self.dk_dv))
        dw = [g.T @ x for g in grads]
        biases = (given.bq, given.bk, given.bv, given.bo)
        db = [None if b is None else g.sum(0) for g, b in zip((*grads, grad), biases, strict=True)]
        dx = grads[0] @ given.wq
        dx.addmm_(grads[1], given.wk).addmm_(grads[2], given.wv)
        norms = (
            total.to(p.dtype)
            for norm, sums in zip(self.job.norms, self.norm_sums, strict=True)
            if norm is not None
            for total, p in zip(sums, norm.parameters(), strict=True)
        )
        return dx.view_as(self.x), None, None, *dw, dwo, *db, *norms

    def _stages(self) -> None:
        bench = Bench(self.job.plan, self.job.group, self.x, self.job.head_dim)
        for stage in self.job.plan.stages:
            q = _make_queries(bench, self.job, stage, self.given)
            dout = bench.take()
            bench.project_grad(stage, self.grad, self.given.wo, dout)
            dout = bench.to_heads(dout)
            out = bench.take()
            bench.read_columns(self.out, stage, out)
            out = bench.to_heads(out)
            for i, run in enumerate(stage):
                self._attend(bench, run, *(bench.runs(t, stage)[i] for t in (q, dout, out)))
                if run.closes and i < len(stage) - 1:
                    self._close(bench, run.slots)
            bench.give(dout, out)
            del dout, out
            if stage[-1].closes:
                bench.clear()  # what is sent home now is not to stand beside the stage's own buffers
                self._close(bench, stage[-1].slots)
            q = bench.to_sequence(q)
            self._unrotate_queries(bench, stage, q)
            bench.write_columns(self.out, stage, q)
            bench.give(q)
        bench.close()

    def _attend(self, bench: Bench, run: Run, q: Tensor, dout: Tensor, out: Tensor) -> None:
        """One run's attention backward, [b, heads, S, D]; q becomes dq, dk and dv join their group's."""
        if run.opens:
            _make_keys_and_values(bench, self.job, run.slots, self.given)
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

    def _unrotate_queries(self, bench: Bench, stage: tuple[Run, ...], buffer: Tensor) -> None:
        """The gradient of the rotated, normed queries -> that of the projected ones, in place."""
        scratch, given = bench.take(), self.given
        dq = rotate_(bench.by_sequence(buffer), given.cos, given.sin, transposed=True, scratch=scratch)
        if self.job.norms[0] is not None:
            raw = bench.project_queries(stage, given.wq, given.bq, scratch)
            dq.copy_(self._norm_backward(0, raw, dq))
        bench.give(scratch)

    def _close(self, bench: Bench, slots: range) -> None:
        """Send the gradients of a group's keys and values home; the keys' and values' room is free by now."""
        given, norm = self.given, self.job.norms[1]
        if self.dk_dv is None:
            shape = (*self.x.shape[:2], self.job.plan.kv_heads * self.job.head_dim)
            self.dk_dv = (self.x.new_empty(shape), self.x.new_empty(shape))
        dk, dv = self.sums
        grad = bench.kv_to_sequence(dk, bench.k, len(slots))
        rotate_(grad, given.cos, given.sin, transposed=True, scratch=bench.v)
        if norm is not None:
            scratch = bench.take()
            raw = bench.first_replicas(bench.project_slots(slots, given.wk, given.bk, scratch))
            grad.copy_(self._norm_backward(1, raw, grad))
            bench.give(scratch)
        bench.write_slots(self.dk_dv[0], slots, grad)
        bench.write_slots(self.dk_dv[1], slots, bench.kv_to_sequence(dv, bench.v, len(slots)))
        self.sums = []

    def _norm_backward(self, which: int, raw: Tensor, grad: Tensor) -> Tensor:
        """Run the module's own norm again, with gradients; its parameters' are summed wide."""
        norm = self.job.norms[which]
        assert norm is not None
        with torch.enable_grad(), standing_in(norm) as wanted:
            leaf = raw.detach().requires_grad_()
            found = torch.autograd.grad(norm(leaf), (leaf, *wanted), grad)
        sums = [s for s, p in zip(self.norm_sums[which], norm.parameters(), strict=True) if p.requires_grad]
        for total, more in zip(sums, found[1:], strict=True):
            total.add_(more)
        return found[0]
