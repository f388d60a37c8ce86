"""The loss by Liger Kernel on a GPU: the same sum, fused with the head, its gradients made in forward."""

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

Fused = Callable[..., Tensor]
"""Called as ``liger_fused_linear_cross_entropy`` is; returns the loss."""


def apply_liger_loss(model: nn.Module, *, fused: Fused) -> None:
    """Compute head and loss by ``fused``, Liger's function (``liger_fused``), as ``tiled_loss.py`` promises.

    It cuts the tokens by itself, into pieces whose logits weigh about as much as the hidden state (a power of
    two of tokens, so up to twice that), and makes the gradients of hidden state and head with them, in
    forward; backward only scales them.

    Saves: beside ``apply_loss``, the logits, b*s*V*W bytes and more (see ``apply_tiled_loss``). Beside the
    tiled loss, the logits are computed once and not twice.
    Costs: from forward to backward it holds the gradients of the hidden state, A, and of the head, V*E*w;
    while it makes them V*E*(W + w) and a piece's logits, from A to 2A: more than tiles of a fixed length, the
    more so the longer the context. It waits for the device once a step, to count the labels.
    Source: Liger Kernel (arXiv 2410.10989), section 3.
    Composes with: a scaled loss, ignored labels, tied heads, FSDP2 (applied after: the head is whole in the
    root's forward). Not with loss_tile, not with a second backward through one graph, not with a plan.
    """
    decoder = decoder_of(model)

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        weight, bias = effective_weight(decoder.head, "loss_kernel='liger'")
        # Dividing the head's input divides its logits, which are never whole.
        divided = hidden if decoder.logits_divisor == 1 else hidden / decoder.logits_divisor
        return fused(
            divided,
            weight,
            labels,
            bias=bias,
            ignore_index=IGNORED,
            reduction="sum",
            accum_dtype=accumulation_dtype(hidden.dtype),
        )

    apply_head_loss(model, summed)


def liger_fused(model: nn.Module) -> Fused:
    """Liger's function, for a model that is on a GPU.

    Raises:
        RecipeError: it cannot run here, or is missing, or is too old to sum gradients in fp32.
    """
    parameter, instead = next(model.parameters()), "loss_kernel='lab' works everywhere, with a loss_tile"
    if isinstance(parameter, FakeTensor):
        raise RecipeError(
            "loss_kernel='liger' cannot be planned: its kernels want real tensors; "
            "plan with loss_kernel='lab', whose tiles hold less"
        )
    if parameter.device.type != "cuda":
        raise RecipeError(f"loss_kernel='liger': it needs a GPU, and this model is on the CPU; {instead}")
    return found(instead)


def found(instead: str) -> Fused:
    """The function where it is installed; else what would work ``instead``."""
    try:
        fused: Fused = import_module(MODULE).liger_fused_linear_cross_entropy
    # Triton, which it brings, fails in many ways.
    except Exception as error:
        raise RecipeError(
            f"loss_kernel='liger': {MODULE} cannot be imported ({error}): install liger-kernel; {instead}"
        ) from error
    if "accum_dtype" not in signature(fused).parameters:
        raise RecipeError(
            f"loss_kernel='liger': this release sums in bf16: install 0.6.2 or later; {instead}"
        )
    return fused
