"""Ulysses: each rank has a part of the sequence, and during attention the whole sequence of some heads."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from lab.decoder import decoder_of
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.kernel import Kernel
from lab.techniques.exchange import heads_from_sequence, rank_in, sequence_from_heads, size_of
from lab.techniques.ulysses_degrees import check_degree


def apply_ulysses(model: nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """Shard the sequence over the ranks of ``group``, in contiguous parts and in the order of the ranks.

    Rank c has the hidden state [b, s, E] of tokens c*s to (c+1)*s, and ``position_ids`` must be those. An
    all-to-all exchanges q, k and v of all heads and s tokens for those of H/C heads and S tokens. Attention
    runs on the whole sequence, and another all-to-all returns its output. All other modules of a decoder work
    on each token alone, so they do not change. If K < C, each key/value head goes to C/K ranks.

    Letters: C ranks in the group, b rows, S tokens, s = S/C tokens of one rank, E hidden size, H query heads,
    K key/value heads, D head_dim, w bytes per element.

    Args:
        model: The model.
        group: The C ranks. None is a group of one rank.

    Saves:
        Activations of s instead of S tokens, in every layer.
    Costs:
        4 all-to-alls per layer in forward and 4 in backward, which send w*b*s*D*(2H + 2*max(K, C)) bytes in
        each pass (for the same s, a larger C does not send more); and a second copy of q, k, v and the output
        in each layer.
    Source:
        DeepSpeed-Ulysses (arXiv 2309.14509), section 3.
    Composes with:
        Ring attention (``apply_ring`` on the same model, applied before or after; the ring runs inside the
        exchange), checkpointing, tiling, FSDP2. UPipe replaces it where attention needs too much memory.

    Raises:
        RecipeError: C does not divide H, or neither of C and K divides the other; or see
            ``apply_attention``.
    """
    apply_attention(model)
    decoder = decoder_of(model)
    check_degree(decoder.shape.H, decoder.shape.K, size_of(group))
    for module in decoder.attentions:
        module.lab_attention = partial(ulysses_attention, group=group)  # type: ignore[assignment]
        module.lab_ranks = (size_of(group), rank_in(group))  # type: ignore[assignment]


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    kernel: Kernel = FLASH,
) -> Tensor:
    """Compute causal attention of a sharded sequence.

    The shapes of q: [b, H, s, D] -> [b, s, H, D] -> all-to-all -> [b, S, H/C, D] -> [b, H/C, S, D]. Attention
    runs on these, and its output goes the same way back.

    After forward it holds w*s*D*(4H + 2K + 2*max(K, C)) + 4*s*H bytes, for b = 1: q, k and v before and after
    the exchange, the output before and after it, and the LSE. At its peak it holds one more output. The
    letters are those of ``apply_ulysses``.

    Args:
        q: [b, H, s, D].
        k: [b, K, s, D].
        v: [b, K, s, D].
        group: The C ranks. None is a group of one rank.
        scale: Multiplies the scores; by default 1/sqrt(D).
        kernel: Computes attention on one rank.

    Returns:
        [b, H, s, D].
    """
    q, k, v = (heads_from_sequence(t.transpose(1, 2), group).transpose(1, 2) for t in (q, k, v))
    out = attention(q, k, v, scale=scale, kernel=kernel)
    return sequence_from_heads(out.transpose(1, 2), group).transpose(1, 2)
