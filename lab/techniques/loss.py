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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from lab.decoder import Decoder, Patch, check_hooks, decoder_of
from lab.errors import RecipeError
from lab.techniques.gradient_sums import GradientSums
from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.precision import accumulation_dtype
from lab.techniques.slices import slices
from lab.techniques.tiling import check_tile

_BLOCKS = 16
"""The number of blocks into which the rows of a tile's logits are divided.

The logits of a tile are in the model's dtype. Their softmax is computed in fp32 or wider, one block at a
time.
"""

IGNORED = -100
"""The label at a place where nothing is predicted: padding, or the last token of a text."""


def apply_loss(model: nn.Module) -> None:
    """Make ``model(input_ids=..., labels=...).loss`` a sum over shifted labels, from whole logits [b, s, V].

    The loss of transformers shifts the labels itself, and returns the mean over the local labels. Both are
    wrong on a rank that has a part of the sequence.

    It saves no memory. It is the reference with which ``apply_tiled_loss`` is compared.
    """
    model.loss_function = summed_cross_entropy  # type: ignore[assignment]


def summed_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Return the sum of the cross-entropies of the labels, in fp32 or wider.

    A transformers model calls this as its ``loss_function``.

    Args:
        logits: [b, s, V].
        labels: Shifted labels, [b, s].
        vocab_size: V.
        **_: Further arguments that transformers passes, such as ``num_items_in_batch``. A sum needs none.
    """
    wide = logits.to(accumulation_dtype(logits.dtype)).view(-1, vocab_size)
    return F.cross_entropy(wide, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def apply_tiled_loss(model: nn.Module, *, tile: int) -> None:
    """Compute the head and the loss for ``tile`` tokens at a time, so that whole logits never exist.

    The b*s tokens of all rows are one sequence here. For each tile of t tokens:

    1. Forward calls the head, which returns logits [t, V].
    2. It computes the losses in fp32 or wider, a block of ceil(t/16) tokens at a time. Logits that the model
       caps are capped there. The gradient of their sum overwrites the logits, block by block, and is rounded
       once.
    3. The backward of the head gives the gradients of the hidden state and of the weight. The weight's
       gradient is summed over tiles in fp32 or wider.

    Backward multiplies both gradients by the gradient of the loss, in place, so it can run only once. Without
    labels, the model behaves as before. If no gradient is needed, forward computes the losses alone.

    Args:
        model: The model.
        tile: The number of tokens in a tile, at least 1.

    Saves:
        The plain loss keeps b*s*V*W bytes (a log-softmax) from forward to backward, and backward peaks at
        3*b*s*V*W bytes. The tiled loss keeps two gradients: b*s*E*w bytes of the hidden state, and V*E*W
        bytes of the head. Forward peaks at V*(t*w + E*(w + W)) bytes: the logits of a tile, the gradient of
        the head from that tile, and the sum over tiles. Backward rounds the sum, which takes V*E*(w + W)
        bytes. For w = 4 or more, it rounds nothing and takes V*E*w bytes.
    Costs:
        Three matrix products with the head, as in the plain loss. The loss is the last part of forward and
        the first part of backward, so what it keeps from forward to backward is not held while a layer runs.
    Source:
        Liger Kernel (arXiv 2410.10989), fused linear loss with gradients from forward; ALST (arXiv
        2506.13996), tiled logits.
    Composes with:
        A scaled loss; accumulation over batches; tiles whose labels are all ignored; tied heads (the
        gradients of head and embedding add up); FSDP2, applied after, with the head in the root's group: the
        root does not reshard after forward, so the head is whole in both passes.

    Raises:
        RecipeError: ``tile`` is less than 1. In forward: there is a hook on the head. In backward: it is the
            second one through the same loss.
    """
    check_tile("loss_tile", tile)
    decoder = decoder_of(model)

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        for module in decoder.head.modules():
            check_hooks(module, "loss_tile")
        parameters = [p for p in decoder.head.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
            total: Tensor = _TiledLoss.apply(decoder, tile, labels, hidden, *parameters)  # type: ignore[no-untyped-call]
            return total
        return torch.cat(
            [
                _losses(
                    decoder, decoder.logits(hidden.narrow(0, start, length)), labels.narrow(0, start, length)
                )
                for start, length in slices(hidden.shape[0], tile)
            ]
        ).sum()

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


class _TiledLoss(Function):
    """The sum of the losses of hidden states [n, E] and labels [n], with gradients from forward."""

    @staticmethod
    def forward(
        ctx: Any, decoder: Decoder, tile: int, labels: Tensor, hidden: Tensor, *_: nn.Parameter
    ) -> Tensor:
        needs_grad: bool = ctx.needs_input_grad[3]
        dhidden = torch.empty_like(hidden) if needs_grad else None
        losses = hidden.new_empty(labels.shape, dtype=accumulation_dtype(hidden.dtype))
        with parameter_aliases(decoder.head) as parameters:
            sums = GradientSums(parameters)
            for start, length in slices(hidden.shape[0], tile):
                x = hidden.narrow(0, start, length).detach().requires_grad_(needs_grad)
                with torch.enable_grad():
                    logits = decoder.logits(x)
                dlogits = logits.detach()
                losses.narrow(0, start, length).copy_(
                    _losses(decoder, dlogits, labels.narrow(0, start, length), gradient=True)
                )
                gradients = sums.differentiate([logits], [dlogits], [x] if needs_grad else [])
                del logits, dlogits
                if dhidden is not None:
                    dhidden.narrow(0, start, length).copy_(gradients.pop())
        ctx.tile, ctx.dhidden, ctx.sums = tile, dhidden, sums
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise RecipeError(
                "a second backward through a tiled loss: the first one multiplied the gradients in place; "
                "call backward once, without retain_graph, or set loss_tile=None"
            )
        dhidden, sums = ctx.dhidden, ctx.sums
        ctx.dhidden = ctx.sums = None
        if dhidden is not None:
            for start, length in slices(dhidden.shape[0], ctx.tile):
                # In the dtype of a narrow gradient, the factor would be rounded too.
                part = dhidden.narrow(0, start, length)
                part.copy_(part.to(dloss.dtype).mul_(dloss))
        sums.multiply(dloss)
        return None, None, None, dhidden, *sums.round()


def _losses(decoder: Decoder, logits: Tensor, labels: Tensor, *, gradient: bool = False) -> Tensor:
    """Return the cross-entropies [t] of logits [t, V] and labels [t], which nothing may use afterwards.

    The logits are those of ``Decoder.logits``. If the decoder has a cap, the cross-entropies are those of
    cap * tanh(logits / cap), whose derivative is 1 - tanh(logits / cap)**2.

    With ``gradient``, the gradient of the sum of the losses overwrites the logits. Without, logits in fp32 or
    wider are overwritten by intermediate values.
    """
    cap = decoder.logits_cap
    losses = logits.new_empty(labels.shape, dtype=accumulation_dtype(logits.dtype))
    for start, length in slices(labels.shape[0], -(-labels.shape[0] // _BLOCKS)):
        block, classes = logits.narrow(0, start, length), labels.narrow(0, start, length)
        counts = classes != IGNORED
        index = torch.where(counts, classes, 0)[:, None]
        wide, tanh = block.to(losses.dtype), None
        if cap is not None:
            tanh = wide.div_(cap).tanh_()
            wide = tanh * cap if gradient else tanh.mul_(cap)
        target = wide.gather(-1, index).squeeze(-1)
        top = wide.amax(-1)
        total = wide.sub_(top[:, None]).exp_().sum(-1)
        losses.narrow(0, start, length).copy_(torch.where(counts, total.log() + top - target, 0.0))
        if gradient:
            wide.div_(total[:, None]).scatter_add_(-1, index, wide.new_full(index.shape, -1.0))
            if tanh is not None:
                wide.mul_(tanh.square_().neg_().add_(1.0))
            block.copy_(wide.masked_fill_(~counts[:, None], 0.0))
        # Free this block before the next one is computed.
        del wide, tanh
    return losses
