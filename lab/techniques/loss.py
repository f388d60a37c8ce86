"""The loss: summed over this rank's labels, and in tiles with its head, so that the logits never exist whole.

The contract of both forms, for a caller that divides by the number of labels of the global batch:
``model(input_ids=[b, s], labels=[b, s], ...).loss`` is the sum of the cross-entropies of the labels that are
not -100, in fp32 or the model's dtype, whichever is wider. Labels are shifted already: the label at place i
is the token that follows place i, because a rank that holds a slice of the sequence cannot shift it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from lab.decoder import Patch, check_hooks, decoder_of
from lab.techniques.precision import accumulation_dtype
from lab.techniques.slices import slices
from lab.techniques.tiling import check_tile, tiled

IGNORED = -100
"""The label of a token that is not to be predicted (padding, the last of a text)."""

BLOCKS = 16
"""Parts in which the softmax of a tile is taken in fp32: a tile's logits are held in the model's dtype."""


def apply_loss(model: nn.Module) -> None:
    """Make ``model(input_ids=..., labels=...).loss`` the sum over shifted labels, logits made whole.

    ``[b, s]`` labels, ``[b, s, V]`` logits. The loss of transformers shifts labels itself and takes the mean
    of the local ones: both wrong on a rank that holds a slice of the sequence. Saves nothing; the baseline
    that ``apply_tiled_loss`` is held against.
    """
    model.loss_function = summed_cross_entropy  # type: ignore[assignment]


def summed_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Sum the cross-entropies of ``[b, s, V]`` logits and ``[b, s]`` shifted labels, in fp32 or wider.

    What a transformers model calls as its ``loss_function``; its further arguments are about means.
    """
    wide = logits.to(accumulation_dtype(logits.dtype)).view(-1, vocab_size)
    return F.cross_entropy(wide, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def apply_tiled_loss(model: nn.Module, *, tile: int) -> None:
    """Compute head and loss over ``tile`` tokens at a time, of all b*s: no logits are ever held for more.

    The flow, per tile of t tokens:
    1. Forward: logits ``[t, V]`` from the head itself; log-sum-exp in fp32, an eighth of the tile's bytes at
       a time; one loss a token; the logits are dropped.
    2. Backward: logits again; their gradient overwrites them, in fp32 block by block and rounded once; the
       head's own backward makes the hidden state's gradient and the weight's, which is summed in fp32 or
       wider over tiles.

    Saves: of w bytes an element and W = max(w, 4), the plain loss keeps b*s*V*W bytes (a log-softmax) from
    forward to backward, where it peaks at 3*b*s*V*W. The tiled one keeps the hidden state, as the plain one
    does, and nothing more. Its forward peaks at V*(t*w + ceil(t/16)*W); its backward at V*(t*w + E*(w + W)):
    a tile's logits, the head's gradient of the tile and the sum of them.
    Costs: the logits once more. At long context the head is a small share of a step; gradients made in the
    forward pass would spare it, and hold the head's V*E*4 from there on, under every scaling twice.
    Composes with: a scaled loss, accumulation over batches, labels ignored by the tile, tied heads (the
    head's gradient adds to the embedding's), FSDP2 (applied after, and with the head in the root's group:
    the root does not reshard after forward, so the head is whole in both passes).
    Source: ALST (arXiv 2506.13996), its tiled logits; Liger Kernel (arXiv 2410.10989), its fused linear loss.

    Without labels the model answers as before.

    Raises:
        RecipeError: ``tile`` is less than 1.
    """
    check_tile("loss_tile", tile)
    decoder = decoder_of(model)
    head = decoder.head

    def token_losses(hidden: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = _TokenLoss.apply(decoder.logits(hidden), labels)  # type: ignore[no-untyped-call]
        return losses

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        for module in head.modules():
            check_hooks(module, "loss_tile")
        return tiled(token_losses, head, hidden[None], labels[None], tile=tile).sum()

    apply_head_loss(model, summed)


def apply_head_loss(model: nn.Module, summed: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let ``summed`` stand for the head and its loss: hidden ``[n, E]`` and labels ``[n]`` -> a scalar.

    The rows of a batch are independent there: they are given as one sequence of n = b*s tokens. Without
    labels the model answers as before.
    """
    plain: Callable[..., Any] = model.forward

    def forward(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain(*args, **kwargs)
        hidden = model.model(*args, **kwargs).last_hidden_state  # type: ignore[operator]
        return CausalLMOutputWithPast(loss=summed(hidden.flatten(0, 1), labels.flatten()))

    model.forward = Patch(forward, plain)


class _TokenLoss(Function):
    """Cross-entropy of each token, ``[b, t, V]`` logits and ``[b, t]`` labels -> ``[b, t]``.

    Backward writes the gradient over the logits, which are the caller's only copy; autograd refuses a second
    backward through them by itself.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows, classes = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        losses = rows.new_empty(rows.shape[0], dtype=accumulation_dtype(rows.dtype))
        scale = torch.empty_like(losses)
        for start, length in _blocks(rows):
            block, (kept, index) = rows.narrow(0, start, length), _targets(classes.narrow(0, start, length))
            wide = block.to(losses.dtype, copy=True)
            top = wide.amax(-1)
            log_sum = wide.sub_(top[:, None]).exp_().sum(-1).log_().add_(top)
            target = block.gather(-1, index).squeeze(-1)
            losses.narrow(0, start, length).copy_(torch.where(kept, log_sum - target, 0.0))
            scale.narrow(0, start, length).copy_(log_sum)
            # Or the next block would be computed with this one still held.
            del wide
        ctx.save_for_backward(logits, labels, scale)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None]:
        logits, labels, scale = ctx.saved_tensors
        rows, classes, dlosses = logits.view(-1, logits.shape[-1]), labels.reshape(-1), dlosses.reshape(-1)
        for start, length in _blocks(rows):
            block, (kept, index) = rows.narrow(0, start, length), _targets(classes.narrow(0, start, length))
            wide = block.to(scale.dtype)
            wide.sub_(scale.narrow(0, start, length)[:, None]).exp_()
            wide.scatter_add_(-1, index, wide.new_full(index.shape, -1.0))
            wide.mul_(torch.where(kept, dlosses.narrow(0, start, length), 0.0)[:, None])
            block.copy_(wide)
            del wide
        return logits, None


def _targets(classes: Tensor) -> tuple[Tensor, Tensor]:
    """Which of ``[n]`` labels count, and an index ``[n, 1]`` that is in range for the others too."""
    kept = classes != IGNORED
    return kept, torch.where(kept, classes, 0)[:, None]


def _blocks(rows: Tensor) -> Any:
    return slices(rows.shape[0], -(-rows.shape[0] // BLOCKS))
