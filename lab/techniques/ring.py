"""Ring attention: keys and values travel around the ranks, and each rank has two pieces of the sequence."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.kernel import Gradients, Kernel, check_causal
from lab.techniques.attention.merging import merge
from lab.techniques.exchange import Shift, size_of
from lab.techniques.precision import accumulation_dtype
from lab.techniques.ulysses_degrees import check_ring, token_multiple


def apply_ring(model: nn.Module, *, group: dist.ProcessGroup | None, kernel: Kernel = FLASH) -> None:
    """Compute attention of a sequence that is sharded over ``group``, by sending keys and values around it.

    The sequence has 2R pieces. Rank i has pieces i and 2R-1-i (see ``local_positions``), so every rank has
    the same work under a causal mask. The keys and values of each rank visit all other ranks. Each rank
    attends with its queries to the keys that arrive, and merges the results by their log-sum-exp (LSE).

    Letters: R ranks in the group, b rows, S tokens, s = S/R tokens of one rank, H query heads, K key/value
    heads, D head_dim, w bytes per element, f = 4 bytes per element of a sum (8 in fp64). Bytes of tensors:
    Q = w*b*s*H*D for queries, k = w*b*s*K*D for keys, l = f*b*s*H for an LSE.

    Args:
        model: The model.
        group: The R ranks. None is a group of one rank.
        kernel: Computes attention on one rank.

    Saves:
        Activations of s instead of S tokens, as with Ulysses. The heads do not limit R.
    Costs:
        R-1 sends of k and v in forward, of 2k bytes each; in backward R-1 such sends, and R sends of the
        gradients of k and v in fp32 (fp64 for fp64). For R > 2, the peak of attention, without its inputs,
        is at most Q + Q*f/w + 4k + 4l bytes in forward, and
        max(Q + k, Q/2 + 2k) + Q*f/w + 4k + 4k*f/w bytes in backward.
    Source:
        Ring Attention (arXiv 2310.01889), section 3. The two pieces of a rank: Llama 3 (arXiv 2407.21783),
        section 3.3.2. Gradients from the LSE over all keys: FlashAttention (arXiv 2205.14135), appendix B.4.
    Composes with:
        Ulysses or UPipe on the same model, applied before or after; each Ulysses group then has the tokens of
        one ring rank (USP, arXiv 2405.07719). Checkpointing, tiling, FSDP2.

    Raises:
        RecipeError: There are several ranks, and a layer has a window; or see ``apply_attention``.
    """
    decoder = decoder_of(model)
    check_ring(decoder.shape, size_of(group))
    apply_attention(model)
    for module in decoder.attentions:
        module.lab_kernel = ring_kernel(group, kernel)  # type: ignore[assignment]


def ring_kernel(group: dist.ProcessGroup | None, kernel: Kernel = FLASH) -> Kernel:
    """Return a kernel that attends to the whole sequence of the ring, and runs ``kernel`` at every step.

    In a group of one rank the result is ``kernel`` itself.
    """
    if group is None or size_of(group) == 1:
        return kernel
    return Kernel(
        partial(ring_forward, group=group, kernel=kernel), partial(ring_backward, group=group, kernel=kernel)
    )


# ---- the tokens of each rank -------------------------------------------------------------------------------


def row_padding(tokens: int, ulysses: int, ring: int) -> int:
    """Return how many tokens are added to a row of ``tokens`` tokens, so that it can be sharded."""
    return -tokens % token_multiple(ulysses, ring)


def local_positions(
    tokens: int, *, ulysses: int, ring: int, index: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the positions, in the whole sequence, of the tokens of one rank, in ascending order.

    The ranks with ring index i share pieces i and 2R-1-i of 2R, in this order. Its C Ulysses ranks divide
    these S/R tokens into equal, contiguous parts. With R = 1, the part of each rank is contiguous in the
    whole sequence.

    Args:
        tokens: S, the tokens of the sequence.
        ulysses: C, the Ulysses degree.
        ring: R, the ring degree.
        index: The rank's number among the C*R ranks: ring index * C + Ulysses index.
        device: The device of the result.

    Returns:
        [s] with s = S/(C*R), int64.

    Raises:
        RecipeError: S is not a multiple of ``token_multiple``. Callers add padding.
    """
    multiple = token_multiple(ulysses, ring)
    if tokens % multiple:
        raise RecipeError(
            f"{tokens} tokens over ulysses={ulysses} x ring={ring}: a multiple of {multiple} works, "
            f"such as {tokens + -tokens % multiple}"
        )
    ring_index, ulysses_index = divmod(index, ulysses)
    local = tokens // (ulysses * ring)
    # Places in the two pieces of the ring rank, one after the other.
    places = torch.arange(ulysses_index * local, (ulysses_index + 1) * local, device=device)
    if ring == 1:
        return places
    # Add the distance of each piece from there to its place in the sequence.
    piece = tokens // (2 * ring)
    first, second = ring_index * piece, (2 * ring - 2 - ring_index) * piece
    return places + torch.where(places < piece, first, second)


# ---- forward and backward ----------------------------------------------------------------------------------


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup,
    kernel: Kernel = FLASH,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of this rank's queries to all keys of the ring.

    At each step, the queries of rank i attend to keys and values of one rank j. If j < i, all queries attend
    to the first piece of rank j. If j > i, the second piece of queries attends to both pieces of rank j. If
    j = i, attention is causal. Results are merged in the wider of fp32 and the dtype of ``q``.

    Letters: b rows, h query heads, G query heads per key/value head, s tokens of one rank, D head_dim.

    Args:
        q: [b, h, s, D].
        k: [b, h/G, s, D].
        v: [b, h/G, s, D].
        group: The ranks of the ring.
        kernel: Computes attention to the keys of one rank.
        causal: Must be True.
        scale: Multiplies the scores; by default 1/sqrt(D).

    Returns:
        The output [b, h, s, D], with the dtype and the memory layout of ``q``, and the LSE over all keys
        [b, h, s].

    Raises:
        ValueError: ``causal`` is False.
    """
    check_causal("ring attention", causal)
    sum_dtype = accumulation_dtype(q.dtype)
    keys_values = torch.stack((k, v))
    out, lse = torch.empty(0), torch.empty(0)
    for step in range(size_of(group)):
        shift = Shift(keys_values, group) if step < size_of(group) - 1 else None
        rows, columns = _visible(q.shape[2], step, group)
        k_step, v_step = keys_values[:, :, :, columns].unbind()
        part, part_lse = kernel.forward(q[:, :, rows], k_step, v_step, causal=step == 0, scale=scale)
        if step == 0:
            out, lse = part.to(sum_dtype), part_lse
        else:
            merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        # A variable would keep tensors alive that the next rank has now.
        del part, part_lse, k_step, v_step
        if shift is not None:
            keys_values = shift.wait()
    del keys_values
    return out.to(q.dtype), lse


def ring_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    group: dist.ProcessGroup,
    kernel: Kernel = FLASH,
    causal: bool = True,
    scale: float | None = None,
) -> Gradients:
    """Compute the gradients of ``ring_forward``.

    The LSE is that over all keys, so each step computes an exact part of the gradients, and the parts add up.
    Keys and values travel around the ring again. The sums of their gradients, in the wider of fp32 and the
    dtype of ``q``, travel with them, and make one more step, which returns them to the rank of the keys.

    Args:
        grad_out: The gradient of the output, [b, h, s, D].
        q: As in ``ring_forward``; so are ``k``, ``v``, ``group``, ``kernel``, ``causal`` and ``scale``.
        k: [b, h/G, s, D].
        v: [b, h/G, s, D].
        out: The output of ``ring_forward``, [b, h, s, D].
        lse: The LSE of ``ring_forward``, [b, h, s].
        group: The ranks of the ring.
        kernel: Computes the backward of attention to the keys of one rank.
        causal: Must be True.
        scale: Multiplies the scores; by default 1/sqrt(D).

    Returns:
        The gradients of ``q``, ``k`` and ``v`` of this rank, in their shapes and dtypes.

    Raises:
        ValueError: ``causal`` is False.
    """
    check_causal("ring attention", causal)
    sum_dtype = accumulation_dtype(q.dtype)
    keys_values = torch.stack((k, v))
    sums, dq = torch.empty(0), torch.empty(0)
    sums_shift: Shift | None = None
    for step in range(size_of(group)):
        shift = Shift(keys_values, group) if step < size_of(group) - 1 else None
        rows, columns = _visible(q.shape[2], step, group)
        k_step, v_step = keys_values[:, :, :, columns].unbind()
        dq_step, *dk_dv_step = kernel.backward(
            grad_out[:, :, rows],
            q[:, :, rows],
            k_step,
            v_step,
            out[:, :, rows],
            lse[:, :, rows],
            causal=step == 0,
            scale=scale,
        )
        if sums_shift is None:
            dq, sums = dq_step.to(sum_dtype), k.new_zeros((2, *k.shape), dtype=sum_dtype)
        else:
            dq[:, :, rows].add_(dq_step)
            sums = sums_shift.wait()
        _add(sums[:, :, :, columns], dk_dv_step)
        del dq_step, dk_dv_step, k_step, v_step
        sums_shift = Shift(sums, group)
        if shift is not None:
            keys_values = shift.wait()
    del keys_values, sums
    assert sums_shift is not None
    dk, dv = sums_shift.wait().to(k.dtype).unbind()
    return dq.to(q.dtype), dk, dv


def _visible(tokens: int, step: int, group: dist.ProcessGroup) -> tuple[slice, slice]:
    """Return which of this rank's s queries attend at this step, and to which of the s keys of this step."""
    half, everything = tokens // 2, slice(None)
    if step == 0:
        return everything, everything
    if step <= dist.get_rank(group):  # the keys belong to the rank that is ``step`` ranks before this one
        return everything, slice(None, half)
    return slice(half, None), everything


def _add(sums: Tensor, parts: list[Tensor]) -> None:
    for total, part in zip(sums.unbind(), parts, strict=True):
        total.add_(part)
