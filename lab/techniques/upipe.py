"""UPipe: attention a few heads at a time, every stage in the memory of the one before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lab.errors import RecipeError
from lab.techniques.attention import FLASH, Kernel, apply_attention, attention_modules
from lab.techniques.exchange import size_of
from lab.techniques.rope import rotate_
from lab.techniques.upipe_schedule import Run, Schedule, schedule
from lab.techniques.upipe_stage import Bench


def apply_upipe(model: nn.Module, *, head_chunk: int, group: dist.ProcessGroup | None) -> None:
    """Replace every attention of ``model`` by H/U stages of U = ``head_chunk`` heads over ``group``.

    The sequence is sharded as for ``apply_ulysses``, whose place this takes: [b, s, E] -> [b, s, E]. A stage
    projects its U query heads from x, rotates them, exchanges sequence for heads, attends, and writes into
    its slice of the output; keys and values are sent once, and held for the stages of their group. Backward
    keeps x, the output and the LSEs, and recomputes q, k and v but never the attention. q_proj, k_proj,
    v_proj and o_proj are used as weights (hooks on them do not run), q_norm and k_norm as modules.

    Saves, for w bytes an element, 1 row, A = w*s*E, h = w*s*D (one head), U_kv heads in flight (C times the
    schedule's ``slots_in_flight``), and f = 4 bytes (8 in fp64) for sums:

    - held for backward, x apart: h*H + f*s*H (output and LSE)
    - forward peak, x included: A + h*H + f*s*H + max(h*(2U + 2 U_kv), A)
    - backward peak: 2A + h*H + f*s*H + dWo + max(stage, end), of which the 2A are x and dy, with
      stage = h*(4U + 4 U_kv) + sums, end = A + 2*h*K + dWq + dWk + dWv;
      sums = 2*h*U_kv*f/w where a group of heads lasts several stages, + 2*h*K where there are several groups

    It never falls as U grows. Where neither of n = U/C and G divides the other, the peaks are a little less;
    QK-norm adds what the module takes for U heads.

    Costs: 2 H/U + 2 (sends of keys) all-to-alls forward, twice as many backward; q, k and v are projected
    again in backward (twice with QK-norm); the smaller U, the smaller the matrices.
    Source: "Untied Ulysses" (arXiv 2602.21196). Leaner here: o_proj is inside, so that dout is made a stage
    at a time instead of being held whole, and dq is written where the output was.
    Composes with ring (``apply_ring`` on the same model: it becomes the attention of each stage),
    checkpointing, tiling, FSDP2 applied after.

    Raises:
        RecipeError: a U that C does not divide or that does not divide H, a C that the heads do not allow;
            or see ``apply_attention``.
    """
    config: Any = model.config
    plan = schedule(config.num_attention_heads, config.num_key_value_heads, size_of(group), head_chunk)
    apply_attention(model)
    for module in attention_modules(model):
        module.forward = partial(upipe_forward, module, plan=plan, group=group)


def upipe_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    *,
    plan: Schedule,
    group: dist.ProcessGroup | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What an attention module's ``forward`` is after ``apply_upipe``: x [b, s, E] -> [b, s, E].

    Raises:
        RecipeError: a mask or a key/value cache.
    """
    if attention_mask is not None or past_key_values is not None:
        raise RecipeError("UPipe with a mask or a cache: give no attention_mask, and use_cache=False")
    norms = (getattr(module, "q_norm", None), getattr(module, "k_norm", None))
    job = _Job(plan, group, getattr(module, "lab_kernel", FLASH), module.scaling, module.head_dim, norms)
    projections = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    cos, sin = (t.to(hidden_states.dtype) for t in position_embeddings)
    out = _UPipe.apply(  # type: ignore[no-untyped-call]
        job,
        hidden_states,
        cos,
        sin,
        *(p.weight for p in projections),
        *(p.bias for p in projections),
        *(p for norm in norms if norm is not None for p in norm.parameters()),
    )
    return out, None


@dataclass(frozen=True)
class _Job:
    plan: Schedule
    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    head_dim: int
    norms: tuple[nn.Module | None, nn.Module | None]


@dataclass(frozen=True)
class _Inputs:
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


class _UPipe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, x: Tensor, *tensors: Tensor | None) -> Tensor:
        given = _Inputs(*tensors[:10])  # type: ignore[arg-type]
        out, lses = _forward(job, x, given)
        ctx.job, ctx.spent = job, False
        ctx.save_for_backward(x, out, *tensors[:10], *lses)
        return linear(out, given.wo, given.bo)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("UPipe's backward ran already, and wrote dq where the output was")
        ctx.spent = True
        x, out, *rest = ctx.saved_tensors
        found = _Backward(ctx.job, x, out, _Inputs(*rest[:10]), rest[10:], grads[0].contiguous()).run()
        needed = ctx.needs_input_grad
        return tuple(g if n else None for g, n in zip((None, *found), needed, strict=True))


def _forward(job: _Job, x: Tensor, given: _Inputs) -> tuple[Tensor, list[Tensor]]:
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


def _make_queries(bench: Bench, job: _Job, stage: tuple[Run, ...], given: _Inputs) -> Tensor:
    """The stage's queries, normed and rotated: a buffer by heads."""
    send = bench.take()
    q = bench.project_queries(stage, given.wq, given.bq, send)
    if job.norms[0] is not None:
        q.copy_(job.norms[0](q))
    scratch = bench.take()
    rotate_(q, given.cos, given.sin, scratch=scratch)
    bench.give(scratch)
    return bench.to_heads(send)


def _make_keys_and_values(bench: Bench, job: _Job, slots: range, given: _Inputs) -> None:
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


class _Backward:
    """One backward pass of a layer. ``out`` becomes dq, a stage's columns as soon as they have been read."""

    def __init__(
        self, job: _Job, x: Tensor, out: Tensor, given: _Inputs, lses: list[Tensor], grad: Tensor
    ) -> None:
        self.job, self.x, self.out, self.given, self.grad = job, x, out, given, grad
        self.lses = iter(lses)
        self.wide = torch.promote_types(x.dtype, torch.float32)
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
        with torch.enable_grad():
            leaf = raw.detach().requires_grad_()
            wanted = [p for p in norm.parameters() if p.requires_grad]
            found = torch.autograd.grad(norm(leaf), (leaf, *wanted), grad)
        sums = [s for s, p in zip(self.norm_sums[which], norm.parameters(), strict=True) if p.requires_grad]
        for total, more in zip(sums, found[1:], strict=True):
            total.add_(more)
        return found[0]
