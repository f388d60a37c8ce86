"""Ring attention: keys and values travel round the ranks, each of which holds two pieces of the sequence."""

from __future__ import annotations

from functools import partial
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH, Kernel
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.exchange import Shift, size_of
from lab.techniques.precision import accumulation_dtype


def apply_ring(model: nn.Module, *, group: dist.ProcessGroup | None, kernel: Kernel = FLASH) -> None:
    """Let attention run round ``group``, R ranks, each holding the tokens of ``local_positions``.

    The sequence is cut into 2R pieces; rank i holds piece i and piece 2R-1-i, so that under a causal mask
    every rank has the same work. Rank i's keys and values visit every other rank, and each rank merges what
    it attends to by the log-sum-exp.

    Saves: activations are s = S/R tokens' worth, as Ulysses', and R is not bound by the heads.
    Costs: R-1 sends of k and v forward (2*w*b*s*K*D bytes each), and backward as many again, with R sends of
    their gradients in fp32. For w bytes an element, Q = w*b*s*H*D, k = w*b*s*K*D, f = 4 (8 for fp64) and
    L = f*b*s*H, attention takes at its peak, beside what it is given and for R > 2, up to
    forward Q + Q*f/w + 4k + 4L, backward max(Q + k, Q/2 + 2k) + Q*f/w + 4k + 4k*f/w.
    Source: Ring Attention (arXiv 2310.01889), section 3; the two pieces: as in Llama 3's training (arXiv
    2407.21783, section 3.3.2); gradients from the global log-sum-exp: FlashAttention, appendix B.4.
    Composes with Ulysses or UPipe on the same model, in either order, each Ulysses group then holding one
    ring rank's tokens (USP, arXiv 2405.07719); checkpointing, tiling, FSDP.

    Raises:
        RecipeError: see ``apply_attention``.
    """
    apply_attention(model)
    for module in decoder_of(model).attentions:
        module.lab_kernel = ring_kernel(group, kernel)  # type: ignore[assignment]


def ring_kernel(group: dist.ProcessGroup | None, kernel: Kernel = FLASH) -> Kernel:
    """Attention over the ring's whole sequence by ``kernel`` at every step; itself in a ring of one."""
    if group is None or size_of(group) == 1:
        return kernel
    return Kernel(
        partial(ring_forward, group=group, kernel=kernel), partial(ring_backward, group=group, kernel=kernel)
    )


# ---- who holds which tokens --------------------------------------------------------------------------------


def token_multiple(ulysses: int, ring: int) -> int:
    """What S must be a multiple of: the ring's 2R pieces are equal, and so are the C*R ranks' shares."""
    return lcm(2 * ring, ulysses * ring) if ring > 1 else ulysses


def local_positions(
    tokens: int, *, ulysses: int, ring: int, index: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The global positions [s] that rank ``index`` of C*R holds, ascending.

    ``index`` is ring index * C + Ulysses index. Ring index i has pieces i and 2R-1-i of 2R, in this order,
    S/R tokens; its C Ulysses ranks split these evenly and contiguously. With R = 1 each rank's part of the
    sequence is contiguous.

    Raises:
        RecipeError: S is not a multiple of ``token_multiple``; callers pad.
    """
    multiple = token_multiple(ulysses, ring)
    if tokens % multiple:
        raise RecipeError(
            f"{tokens} tokens over ulysses={ulysses} x ring={ring}: a multiple of {multiple} works, "
            f"such as {tokens + -tokens % multiple}"
        )
    of_ring, of_ulysses = divmod(index, ulysses)
    local = tokens // (ulysses * ring)
    held = torch.arange(of_ulysses * local, (of_ulysses + 1) * local, device=device)
    if ring == 1:
        return held
    # From the place among the two pieces to the place in the sequence.
    piece = tokens // (2 * ring)
    first, second = of_ring * piece, (2 * ring - 2 - of_ring) * piece
    return held + torch.where(held < piece, first, second)


# ---- the maths ---------------------------------------------------------------------------------------------


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
    """Causal attention of this rank's queries to the ring's keys.

    ``q`` [b, h, s, D], ``k, v`` [b, h/G, s, D] -> out [b, h, s, D] in q's dtype, lying in memory as q does,
    and the LSE over all keys [b, h, s].

    Of the keys that come from rank j, rank i's queries see: j < i: the first piece, with both of its own;
    j > i: both pieces, with the second of its own; j = i: what lies before. Partial results are merged in
    fp32, or fp64 for fp64.

    Raises:
        ValueError: not causal.
    """
    _check(causal)
    wide = accumulation_dtype(q.dtype)
    travelling = torch.stack((k, v))
    out, lse = torch.empty(0), torch.empty(0)
    for step in range(size_of(group)):
        more = Shift(travelling, group) if step < size_of(group) - 1 else None
        rows, keys = _seen(q.shape[2], step, group)
        k_here, v_here = travelling[:, :, :, keys].unbind()
        part, part_lse = kernel.forward(q[:, :, rows], k_here, v_here, causal=step == 0, scale=scale)
        if step == 0:
            out, lse = part.to(wide), part_lse
        else:
            _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        # Names hold memory: none may keep alive what has left for the next rank.
        del part, part_lse, k_here, v_here
        if more is not None:
            travelling = more.wait()
    del travelling
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``ring_forward``: shapes as there, dq like q, dk and dv like this rank's own k.

    The LSE is that over all keys, so each step's share is exact and shares add up. Keys and values go round
    again; the sum of their gradients, fp32 or fp64, follows them and makes one step more, which leads home.

    Raises:
        ValueError: not causal.
    """
    _check(causal)
    wide = accumulation_dtype(q.dtype)
    travelling = torch.stack((k, v))
    sums, dq = torch.empty(0), torch.empty(0)
    coming: Shift | None = None
    for step in range(size_of(group)):
        more = Shift(travelling, group) if step < size_of(group) - 1 else None
        rows, keys = _seen(q.shape[2], step, group)
        k_here, v_here = travelling[:, :, :, keys].unbind()
        more_dq, *more_dk_dv = kernel.backward(
            grad_out[:, :, rows],
            q[:, :, rows],
            k_here,
            v_here,
            out[:, :, rows],
            lse[:, :, rows],
            causal=step == 0,
            scale=scale,
        )
        if coming is None:
            dq, sums = more_dq.to(wide), k.new_zeros((2, *k.shape), dtype=wide)
        else:
            dq[:, :, rows].add_(more_dq)
            sums = coming.wait()
        _add(sums[:, :, :, keys], more_dk_dv)
        del more_dq, more_dk_dv, k_here, v_here
        coming = Shift(sums, group)
        if more is not None:
            travelling = more.wait()
    del travelling, sums
    assert coming is not None
    dk, dv = coming.wait().to(k.dtype).unbind()
    return dq.to(q.dtype), dk, dv


def _check(causal: bool) -> None:
    if not causal:
        raise ValueError("a ring of two pieces a rank is balanced for causal attention, and does no other")


def _seen(tokens: int, step: int, group: dist.ProcessGroup) -> tuple[slice, slice]:
    """Which of this rank's s queries meet which of the s keys that are here at this step."""
    half, everything = tokens // 2, slice(None)
    if step == 0:
        return everything, everything
    if step <= dist.get_rank(group):  # the keys' owner is ``step`` ranks before this one
        return everything, slice(None, half)
    return slice(half, None), everything


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention to more keys, in place: outputs weigh by their share of the softmax's denominator."""
    kept = torch.sigmoid(lse - part_lse)[..., None]
    out.mul_(kept).addcmul_(part, 1 - kept)
    lse.copy_(torch.logaddexp(lse, part_lse))


def _add(sums: Tensor, shares: list[Tensor]) -> None:
    for total, share in zip(sums.unbind(), shares, strict=True):
        total.add_(share)
