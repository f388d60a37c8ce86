"""UPipe: attention in stages of a few heads, in which every stage reuses the buffers of the stage before."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lab.decoder import Patch, check_hooks, decoder_of, effective_weight, has_cache
from lab.errors import RecipeError
from lab.techniques.attention.documents import Documents
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.saved_results import ResultCache, Results, no_cache
from lab.techniques.exchange import size_of
from lab.techniques.upipe.passes import backward_pass, forward_pass
from lab.techniques.upipe.schedule import schedule
from lab.techniques.upipe.settings import Inputs, LayerSettings, inputs_of


def apply_upipe(
    model: nn.Module, *, head_chunk: int, group: dist.ProcessGroup | None, overlap: bool = False
) -> None:
    """Replace every attention of ``model`` by H/U stages of U query heads over the ranks of ``group``.

    The sequence is sharded as by ``apply_ulysses``, which this function replaces; an attention maps
    x [b, s, E] to [b, s, E]. A stage projects its query heads from x, rotates them, exchanges sequence for
    heads, attends, and writes its columns of the output. Keys and values are sent once, and stay in memory
    for all stages that attend to them. The key/value heads that are in memory together are a *head group*:
    it has U_kv heads, and a layer has g head groups. Backward needs x, the output and the log-sum-exps
    (LSEs) of attention. It computes q, k and v again, but not the attention.

    q_proj, k_proj, v_proj and o_proj are used as weights; with a LoRA adapter or a parametrization, see
    ``effective_weight``. q_norm and k_norm (QK-norm) are called as modules. No gradient is computed for a
    frozen weight.

    With ``overlap``, the inputs of the next stage are projected and sent before a stage attends, and travel
    during its attention. Each of them needs two more buffers: one to send from, and one to receive in. All
    exchanges are then hidden behind attention, except those of the first stage and those that return
    results. If U = H there is no next stage, and if C = 1 nothing is sent. In these cases ``overlap`` changes
    nothing, and with U = H the peak is lower than that of U = H/2 with ``overlap``.

    Letters: b rows, s tokens of one rank, E hidden size, H query heads, K key/value heads, G = H/K, D
    head_dim, C ranks of ``group``, n = U/C query heads of a rank in a stage, U_kv = C times the schedule's
    ``slots_in_flight``, g head groups, w bytes per element, f = 4 bytes per element of a sum (8 in fp64). dy
    and dout are the gradients of the layer's output and of attention's output. Bytes of tensors, for b = 1:
    A = w*s*E for x, h = w*s*D for one head; dWq, dWk, dWv and dWo for the gradients of the weights.

    Args:
        model: The model.
        head_chunk: U, the query heads of a stage, summed over the ranks: a multiple of C that divides H.
        group: The C ranks. None is a group of one rank.
        overlap: Whether the inputs of a stage are sent during the stage before it.

    Saves:
        Most of the memory of q, k, v and their copies, which ``apply_ulysses`` holds for all heads. With
        UPipe an attention holds, in bytes:

        - for backward, in addition to x: h*H + f*s*H, the output and the LSEs.
        - at the peak of forward, including x: A + h*H + f*s*H + max(h*(2U + 4*U_kv) - l, A). This is while q,
          k and v are sent, when the LSEs of their head group, l = f*s*H*U_kv/max(K, C), do not exist yet.
        - at the peak of backward: 2A + h*H + f*s*H + dWo + max(stage, end), of which 2A is x and dy, with
          stage = h*(4U + 4*U_kv) + sums and end = 2*h*K + max(A + dWq + dWk + dWv, h*K if g > 1).
          sums = 2*h*U_kv*f/w (only if a head group has several stages) + 2*h*K*(1 - 1/g).

        A larger U never needs less. If neither of n and G divides the other, the peaks are slightly lower.
        QK-norm adds the memory of the norm for U heads.
    Costs:
        2*H/U all-to-alls in forward: q (with k and v in the first stage of a head group), and the output.
        4*H/U in backward: q (with k and v), dout, the output, and dq (with dk and dv). If neither of n and G
        divides the other, 1 more in forward and 2 more in backward for each head group that begins within a
        stage. Tensors that are sent together are copied once after their arrival. q, k and v are projected
        again in backward (twice with QK-norm, or where they are clipped). A smaller U means products of
        smaller matrices.

        ``overlap`` raises the peaks. In forward, h*(2U + 4*U_kv) - l becomes h*(4U + 2*U_kv) - f*s*U if
        g = 1, else h*(4U + 6*U_kv) - l. In backward, stage grows by h*6U, and if g > 1 by
        h*4*U_kv - 2*h*K/g more; by slightly less if g = 1 and there are two stages.
    Source:
        Untied Ulysses (arXiv 2602.21196). Two things need less memory here: o_proj is a part of the stages,
        so dout exists for one stage at a time, and dq is written over the output.
    Composes with:
        Ring attention (``apply_ring`` on the same model; the ring is the attention of each stage),
        checkpointing, tiling, and FSDP2, applied after.

    Raises:
        RecipeError: C does not divide U; U does not divide H; or the heads do not allow C. See also
            ``apply_attention``.
    """
    decoder = decoder_of(model)
    stages = schedule(decoder.shape.H, decoder.shape.K, size_of(group), head_chunk)
    apply_attention(model)
    for layer in decoder.layers:
        forward = partial(upipe_forward, LayerSettings(layer, stages, group, overlap))
        layer.attention.forward = Patch(forward, layer.attention.forward)


def upipe_forward(
    settings: LayerSettings,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    lab_cache: ResultCache = no_cache,
    lab_documents: Documents | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer in stages: its ``forward`` after ``apply_upipe``.

    Args:
        settings: The settings of the layer.
        hidden_states: x, [b, s, E].
        position_embeddings: Cosines and sines, [b, s, D] or [1, s, D] each.
        attention_mask: Must be None.
        lab_cache: Stores the outputs of the heads and the LSEs, so that a recomputation runs only o_proj.
        lab_documents: The documents of the rows; None if each row is one.
        **keywords: Other keywords of transformers, which are not used. A key/value cache must be None.

    Returns:
        The output [b, s, E], and None in the place of attention weights.

    Raises:
        RecipeError: There is a mask or a key/value cache; there is a hook on a projection or a norm; a weight
            is quantized.
    """
    if attention_mask is not None or has_cache(keywords):
        raise RecipeError(
            "UPipe with a mask or a cache is not supported: pass no attention_mask, and use_cache=False"
        )
    parts = settings.parts
    attention: Any = parts.attention
    output = effective_weight(attention.o_proj, "UPipe")
    cos, sin = (t.to(hidden_states.dtype) for t in position_embeddings)
    inputs = inputs_of(parts, (cos, sin), "UPipe", output)
    norms = [norm for norm in parts.head_norms if norm is not None]
    for norm in norms:
        check_hooks(norm, "UPipe")
    out = _UPipe.apply(  # type: ignore[no-untyped-call]
        replace(settings, documents=lab_documents),
        lab_cache,
        hidden_states,
        *inputs,
        *(parameter for norm in norms for parameter in norm.parameters()),
    )
    return out, None


class _UPipe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: LayerSettings, cache: ResultCache, x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        inputs, _ = Inputs.split_from(tensors)

        def compute() -> Results:
            out, lses = forward_pass(settings, x, inputs)
            return out, *lses

        out, *lses = cache(compute)
        ctx.settings, ctx.out_is_overwritten = settings, False
        ctx.save_for_backward(x, out, *inputs, *lses)
        assert inputs.wo is not None
        return linear(out, inputs.wo, inputs.bo)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.out_is_overwritten:
            raise RecipeError(
                "a second backward through UPipe: the first one wrote dq over the output; call backward "
                "once, without retain_graph, or set head_chunk=None"
            )
        ctx.out_is_overwritten = True
        x, out, *rest = ctx.saved_tensors
        inputs, lses = Inputs.split_from(rest)
        _, _, x_needed, *others = ctx.needs_input_grad
        needed = Inputs.split_from(others)
        dout = grads[0].contiguous()
        return None, None, *backward_pass(ctx.settings, x, out, inputs, lses, dout, x_needed, *needed)
