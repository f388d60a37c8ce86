"""The loss by Liger Kernel on a GPU: the head and its loss in one function, with gradients from forward."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature

from torch import Tensor, nn

from lab.decoder import decoder_of, effective_weight
from lab.errors import RecipeError
from lab.techniques.loss import IGNORED, apply_head_loss
from lab.techniques.precision import accumulation_dtype
from lab.torch_private import FakeTensor

MODULE = "liger_kernel.transformers.functional"
"""The module from which Liger's function is imported."""

FusedLoss = Callable[..., Tensor]
"""A function with the signature of ``liger_fused_linear_cross_entropy``, which returns the loss."""

_ALTERNATIVE = "loss_kernel='lab' works everywhere, with a loss_tile"


def apply_liger_loss(model: nn.Module, *, fused: FusedLoss) -> None:
    """Compute the head and the loss by Liger's function, with the contract of ``lab.techniques.loss``.

    Liger divides the tokens into pieces by itself. The logits of a piece are about as large as the hidden
    state; the length of a piece is a power of two, so they may be up to twice as large. Forward computes the
    loss and also the gradients of the hidden state and of the head. Backward only scales these gradients.

    Letters: b rows, s tokens of one rank, E hidden size, V vocabulary size, w bytes per element,
    W = max(w, 4), A = b*s*E*w bytes of the hidden state.

    Args:
        model: The model.
        fused: Liger's function, see ``liger_fused``.

    Saves:
        Compared with ``apply_loss``: the whole logits, b*s*V*W bytes and more (see ``apply_tiled_loss``).
        Compared with ``apply_tiled_loss``: passes over the logits, which its kernel makes in one.
    Costs:
        From forward to backward, the gradients of the hidden state, A bytes, and of the head, V*E*w bytes.
        While forward computes them, V*E*(W + w) bytes and the logits of a piece, A to 2A bytes. This is more
        than tiles of a fixed length need, and it grows with the context. The host waits for the device once
        per step, to count the labels.
    Source:
        Liger Kernel (arXiv 2410.10989), section 3.
    Composes with:
        A scaled loss, ignored labels, tied heads, and FSDP2, applied after (the head is whole in the root's
        forward). Not with ``loss_tile``, a second backward through one graph, or a plan.
    """
    decoder = decoder_of(model)

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        weight, bias = effective_weight(decoder.head, "loss_kernel='liger'")
        # The whole logits do not exist, so the multiplier of the logits is applied to the head's input.
        scaled = hidden if decoder.logits_multiplier == 1 else hidden * decoder.logits_multiplier
        return fused(
            scaled,
            weight,
            labels,
            bias=bias,
            ignore_index=IGNORED,
            reduction="sum",
            softcap=decoder.logits_cap,
            accum_dtype=accumulation_dtype(hidden.dtype),
        )

    apply_head_loss(model, summed)


def liger_fused(model: nn.Module) -> FusedLoss:
    """Return Liger's function for a model on a GPU.

    Raises:
        RecipeError: The model's tensors are fake or on the CPU; or see ``import_liger``.
    """
    parameter = next(model.parameters())
    if isinstance(parameter, FakeTensor):
        raise RecipeError(
            "loss_kernel='liger' cannot be planned: its kernels want real tensors; "
            "plan with loss_kernel='lab', whose tiles hold less"
        )
    if parameter.device.type != "cuda":
        raise RecipeError(
            f"loss_kernel='liger': it needs a GPU, and this model is on the CPU; {_ALTERNATIVE}"
        )
    return import_liger()


def import_liger() -> FusedLoss:
    """Import Liger's function.

    Raises:
        RecipeError: Liger is not installed, fails to import, or is too old to sum gradients in fp32.
    """
    try:
        fused: FusedLoss = import_module(MODULE).liger_fused_linear_cross_entropy
    # Liger imports Triton, which raises errors of many classes.
    except Exception as error:
        raise RecipeError(
            f"loss_kernel='liger': {MODULE} cannot be imported ({error}): install liger-kernel; "
            f"{_ALTERNATIVE}"
        ) from error
    if "accum_dtype" not in signature(fused).parameters:
        raise RecipeError(
            f"loss_kernel='liger': this release sums in bf16: install 0.6.2 or later; {_ALTERNATIVE}"
        )
    return fused
