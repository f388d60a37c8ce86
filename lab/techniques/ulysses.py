"""Ulysses: each rank holds a piece of the sequence, except inside attention, where it holds some heads."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from lab.decoder import decoder_of
from lab.techniques.attention.flash import FLASH, Kernel, attention
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.exchange import check_degree, heads_from_sequence, sequence_from_heads, size_of


def apply_ulysses(model: nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """Shard the sequence over ``group``, contiguously and in rank order; C is the size of the group.

    The hidden state of rank c is [b, s, E], tokens c*s to (c+1)*s; ``position_ids`` must say so. q, k and v
    go from [b, s, H, D] to [b, S, H/C, D] by all-to-all, attention runs on whole sequences, and its output
    goes back. Everything else in a decoder works on single tokens and does not notice. K < C key/value heads
    are given to C/K ranks each.

    Saves: activations are s = S/C tokens' worth, 1/C of the plain model's in every layer and kind.
    Costs: 4 all-to-alls a layer forward and 4 backward, w*b*s*D*(2H + 2*max(K, C)) bytes sent each way (no
    more for larger C at the same s), and a second copy of q, k, v and out in each layer.
    Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3.
    Composes with ring (``apply_ring`` on the same model, in either order: the ring runs inside the exchange),
    checkpointing, tiling, FSDP; UPipe takes its place where attention's own memory is too much.

    Raises:
        RecipeError: C does not divide H, or of C and K neither divides the other; see ``apply_attention``.
    """
    apply_attention(model)
    decoder = decoder_of(model)
    check_degree(decoder.shape.H, decoder.shape.K, size_of(group))
    for module in decoder.attentions:
        module.lab_attention = partial(ulysses_attention, group=group)  # type: ignore[assignment]


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    kernel: Kernel = FLASH,
) -> Tensor:
    """Causal attention of a sharded sequence: ``q`` [b, H, s, D], ``k, v`` [b, K, s, D] -> [b, H, s, D].

    [b, H, s, D] -> [b, s, H, D] -> all-to-all [b, S, H/C, D] -> [b, H/C, S, D] -> attention -> and back.

    With Kr = max(K, C), w bytes an element and b = 1, it holds w*s*D*(4H + 2K + 2Kr) + 4*s*H bytes after
    forward (q, k, v before and after the exchange, out after and before, LSE), and at its peak one out more.
    """
    q, k, v = (heads_from_sequence(t.transpose(1, 2), group).transpose(1, 2) for t in (q, k, v))
    out = attention(q, k, v, scale=scale, kernel=kernel)
    return sequence_from_heads(out.transpose(1, 2), group).transpose(1, 2)
