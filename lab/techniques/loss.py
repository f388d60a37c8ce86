"""The loss: a sum over this rank's labels, computed from whole logits or in tiles together with the head.

Both forms have one contract. ``model(input_ids=..., labels=..., ...).loss``, with tokens and labels [b, s],
is the sum of the cross-entropies of all labels except -100, in the wider of fp32 and the model's dtype. The
caller divides it by the number of labels of the global batch. Labels are shifted before the call: the label
at place i is the token that follows place i. A rank that has a part of the sequence cannot shift them,
because the token after its last one is on another rank.

Letters: b rows, s tokens of one rank, t tokens of a tile, E hidden size, V vocabulary size, w bytes per
element, W = max(w, 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from lab.decoder import Patch, check_hooks, decoder_of
from lab.techniques.loss_blocks import BLOCKS
from lab.techniques.precision import accumulation_dtype
from lab.techniques.slices import slices
from lab.techniques.tiling import check_tile, run_in_tiles

IGNORED = -100
"""The label at a place where nothing is predicted: padding, or the last token of a text."""


def apply_loss(model: nn.Module) -> None:
    """Make ``model(input_ids=..., labels=...).loss`` a sum over shifted labels, from whole logits [b, s, V].

    The loss of transformers shifts the labels itself, and returns the mean over the local labels. Both are
    wrong on a rank that has a part of the sequence.

    This function saves nothing. ``apply_tiled_loss`` is compared with it.
    """
    model.loss_function = summed_cross_entropy  # type: ignore[assignment]


def summed_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Return the sum of the cross-entropies of the labels, in fp32 or wider.

    A transformers model calls this as its ``loss_function``.

    Args:
        logits: [b, s, V].
        labels: Shifted labels, [b, s].
        vocab_size: V.
        **_: Further arguments of transformers, which matter only for means.
    """
    wide = logits.to(accumulation_dtype(logits.dtype)).view(-1, vocab_size)
    return F.cross_entropy(wide, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def apply_tiled_loss(model: nn.Module, *, tile: int) -> None:
    """Compute the head and the loss for ``tile`` tokens at a time, so that whole logits never exist.

    The b*s tokens of all rows are one sequence here. For each tile of t tokens:

    1. Forward calls the head, which returns logits [t, V]. It computes the log-sum-exp in fp32, a block of
       ceil(t/16) tokens at a time, and one loss per token. Then it drops the logits.
    2. Backward computes the logits again. Their gradient overwrites them, computed in fp32 block by block and
       rounded once. The backward of the head gives the gradients of the hidden state and of the weight. The
       weight's gradient is summed over tiles in fp32 or wider.

    Without labels, the model behaves as before.

    Args:
        model: The model.
        tile: The number of tokens in a tile, at least 1.

    Saves:
        The plain loss keeps b*s*V*W bytes (a log-softmax) from forward to backward, and backward peaks at
        3*b*s*V*W bytes. The tiled loss keeps the hidden state, as the plain loss does, and nothing else.
        Its forward peaks at V*(t*w + ceil(t/16)*W) bytes. Its backward peaks at V*(t*w + E*(w + W)) bytes:
        the logits of a tile, the gradient of the head from that tile, and the sum over tiles.
    Costs:
        The logits are computed twice. At long context the head is a small part of a step. If forward
        computed the gradients (as ``apply_liger_loss`` does), the logits would be computed once, but the
        head's gradient, V*E*4 bytes, would be held from forward to backward, and twice while it is scaled.
    Source:
        ALST (arXiv 2506.13996), tiled logits; Liger Kernel (arXiv 2410.10989), fused linear loss.
    Composes with:
        A scaled loss; accumulation over batches; tiles whose labels are all ignored; tied heads (the
        gradients of head and embedding add up); FSDP2, applied after, with the head in the root's group: the
        root does not reshard after forward, so the head is whole in both passes.

    Raises:
        RecipeError: ``tile`` is less than 1. In forward: there is a hook on the head.
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
        return run_in_tiles(token_losses, head, hidden[None], labels[None], tile=tile).sum()

    apply_head_loss(model, summed)


def apply_head_loss(model: nn.Module, summed: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the head and the loss of ``model`` by one function.

    Without labels, the model behaves as before.

    Args:
        model: The model.
        summed: Takes hidden states [n, E] and labels [n], with n = b*s, and returns the sum of the
            cross-entropies. The rows of a batch are independent in the head, so they form one sequence.
    """
    plain: Callable[..., Any] = model.forward

    def forward(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain(*args, **kwargs)
        hidden = model.model(*args, **kwargs).last_hidden_state  # type: ignore[operator]
        return CausalLMOutputWithPast(loss=summed(hidden.flatten(0, 1), labels.flatten()))

    model.forward = Patch(forward, plain)


class _TokenLoss(Function):
    """The cross-entropy of each token: logits [b, t, V] and labels [b, t] -> [b, t].

    Backward overwrites the logits with their gradient. Nothing else may use the logits. Autograd itself
    refuses a second backward, because the version of the logits has changed.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows, classes = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        losses = rows.new_empty(rows.shape[0], dtype=accumulation_dtype(rows.dtype))
        log_sums = torch.empty_like(losses)
        for start, length in _blocks(rows):
            block, (counts, index) = rows.narrow(0, start, length), _targets(classes.narrow(0, start, length))
            wide = block.to(losses.dtype, copy=True)
            top = wide.amax(-1)
            log_sum = wide.sub_(top[:, None]).exp_().sum(-1).log_().add_(top)
            target = block.gather(-1, index).squeeze(-1)
            losses.narrow(0, start, length).copy_(torch.where(counts, log_sum - target, 0.0))
            log_sums.narrow(0, start, length).copy_(log_sum)
            # Free this block before the next one is computed.
            del wide
        ctx.save_for_backward(logits, labels, log_sums)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None]:
        logits, labels, log_sums = ctx.saved_tensors
        rows, classes, dlosses = logits.view(-1, logits.shape[-1]), labels.reshape(-1), dlosses.reshape(-1)
        for start, length in _blocks(rows):
            block, (counts, index) = rows.narrow(0, start, length), _targets(classes.narrow(0, start, length))
            wide = block.to(log_sums.dtype)
            wide.sub_(log_sums.narrow(0, start, length)[:, None]).exp_()
            wide.scatter_add_(-1, index, wide.new_full(index.shape, -1.0))
            wide.mul_(torch.where(counts, dlosses.narrow(0, start, length), 0.0)[:, None])
            block.copy_(wide)
            del wide
        return logits, None


def _targets(classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the labels [n] are not ignored, and an index [n, 1] with 0 for the ignored ones."""
    counts = classes != IGNORED
    return counts, torch.where(counts, classes, 0)[:, None]


def _blocks(rows: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each block of rows."""
    return slices(rows.shape[0], -(-rows.shape[0] // BLOCKS))
