"""UPipe: attention a few heads at a time; every stage uses the buffers of the one before."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lab.decoder import Patch, check_hooks, decoder_of, effective_weight
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.saved_results import ResultCache, Results, no_cache
from lab.techniques.exchange import size_of
from lab.techniques.upipe.passes import Backward, Inputs, LayerSettings, forward_pass
from lab.techniques.upipe.schedule import Schedule, schedule


def apply_upipe(
    model: nn.Module, *, head_chunk: int, group: dist.ProcessGroup | None, overlap: bool = False
) -> None:
    """Replace every attention of ``model`` by H/U stages of U = ``head_chunk`` heads over ``group``.

    The sequence is sharded as for ``apply_ulysses``, whose place this takes: [b, s, E] -> [b, s, E]. A stage
    projects its U query heads from x, rotates them, exchanges sequence for heads, attends, and writes into
    its slice of the output; keys and values are sent once, and held for the stages of their group. Backward
    keeps x, the output and the LSEs, and recomputes q, k and v but never the attention. q_proj, k_proj,
    v_proj and o_proj are used as weights, those that autograd makes of a LoRA adapter or a parametrization
    (see ``effective_weight``); q_norm and k_norm as modules. For a frozen weight no gradient is computed.

    Saves, for w bytes an element, 1 row, A = w*s*E, h = w*s*D (one head), U_kv heads in flight (C times the
    schedule's ``slots_in_flight``), and f = 4 bytes (8 in fp64) for sums:

    - held for backward, x apart: h*H + f*s*H (output and LSE)
    - forward peak, x included: A + h*H + f*s*H + max(h*(2U + 4 U_kv) - l, A), where q, k and v travel and
      the LSEs of their group, l = f*s*H*U_kv/max(K, C), are not there yet
    - backward peak: 2A + h*H + f*s*H + dWo + max(stage, end), of which the 2A are x and dy, with
      stage = h*(4U + 4 U_kv) + sums, end = 2*h*K + max(A + dWq + dWk + dWv, h*K where there are g > 1 groups
      of U_kv heads); sums = 2*h*U_kv*f/w where a group lasts several stages, + 2*h*K*(1 - 1/g)

    Neither falls as U grows. Where neither of n = U/C and G divides the other, the peaks are a little less;
    QK-norm adds what the module takes for U heads.

    ``overlap``: before a stage attends, what the next one needs is projected and sent, and it travels
    meanwhile, each thing in two buffers of its own, the one it was made in and the one it arrives in. So all
    exchanges but the first stage's and those that lead home hide behind attention, and peaks rise:

    - forward, in place of h*(2U + 4 U_kv) - l: h*(4U + 2 U_kv) - f*s*U with one group, else
      h*(4U + 6 U_kv) - l
    - backward, added to stage: h*6U; with several groups + h*4 U_kv - 2*h*K/g more; where a group is two
      stages and the only one, a little less

    Where U = H there is no next stage, and in a group of one nothing travels: there it changes nothing, and
    the peak is lower than at U = H/2.

    Costs: 2 H/U all-to-alls forward (q, with k and v where a stage opens a group; the output) and 4 H/U
    backward (q, with k and v; dout; the output; dq, with dk and dv); where neither of n and G divides the
    other, 1 and 2 more for each group that opens within a stage. What travels together is copied once on
    arrival. q, k and v are projected again in backward (twice with QK-norm); the smaller U, the smaller the
    matrices.
    Source: "Untied Ulysses" (arXiv 2602.21196). Leaner here: o_proj is inside, so that dout is made a stage
    at a time instead of being held whole, and dq is written where the output was.
    Composes with ring (``apply_ring`` on the same model: it becomes the attention of each stage),
    checkpointing, tiling, FSDP2 applied after.

    Raises:
        RecipeError: a U that C does not divide or that does not divide H, a C that the heads do not allow;
            or see ``apply_attention``.
    """
    decoder = decoder_of(model)
    plan = schedule(decoder.shape.H, decoder.shape.K, size_of(group), head_chunk)
    apply_attention(model)
    for module in decoder.attentions:
        forward = partial(upipe_forward, module, plan=plan, group=group, overlap=overlap)
        module.forward = Patch(forward, module.forward)


def upipe_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    *,
    plan: Schedule,
    group: dist.ProcessGroup | None,
    overlap: bool = False,
    lab_cache: ResultCache = no_cache,
    **_: Any,
) -> tuple[Tensor, None]:
    """What an attention module's ``forward`` is after ``apply_upipe``: x [b, s, E] -> [b, s, E].

    ``lab_cache`` stores the heads' outputs and the LSEs, so that a recomputation runs only o_proj again.

    Raises:
        RecipeError: a mask or a key/value cache; hooks on what it does not call; quantized weights.
    """
    if attention_mask is not None or past_key_values is not None:
        raise RecipeError("UPipe with a mask or a cache: give no attention_mask, and use_cache=False")
    norms = (getattr(module, "q_norm", None), getattr(module, "k_norm", None))
    kernel = getattr(module, "lab_kernel", FLASH)
    # A group of one exchanges nothing.
    overlap = overlap and plan.ranks > 1
    settings = LayerSettings(plan, group, kernel, module.scaling, module.head_dim, norms, overlap)
    weights, biases = zip(
        *(effective_weight(p, "UPipe") for p in (module.q_proj, module.k_proj, module.v_proj, module.o_proj)),
        strict=True,
    )
    for norm in norms:
        if norm is not None:
            check_hooks(norm, "UPipe")
    cos, sin = (t.to(hidden_states.dtype) for t in position_embeddings)
    out = _UPipe.apply(  # type: ignore[no-untyped-call]
        settings,
        lab_cache,
        hidden_states,
        cos,
        sin,
        *weights,
        *biases,
        *(p for norm in norms if norm is not None for p in norm.parameters()),
    )
    return out, None


class _UPipe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: LayerSettings, cache: ResultCache, x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        inputs = Inputs(*tensors[:10])  # type: ignore[arg-type]

        def compute() -> Results:
            out, lses = forward_pass(settings, x, inputs)
            return out, *lses

        out, *lses = cache(compute)
        ctx.settings, ctx.spent = settings, False
        ctx.save_for_backward(x, out, *tensors[:10], *lses)
        return linear(out, inputs.wo, inputs.bo)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RecipeError(
                "a second backward through UPipe: the first wrote dq where the output was; call backward "
                "once, without retain_graph, or set head_chunk=None"
            )
        ctx.spent = True
        x, out, *rest = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        inputs, dout = Inputs(*rest[:10]), grads[0].contiguous()
        return None, None, *Backward(ctx.settings, x, out, inputs, rest[10:], dout, needed).run()
