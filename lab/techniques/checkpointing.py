"""Activation checkpointing: a decoder layer saves only its input and runs its forward again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lab.decoder import Patch, decoder_of, has_cache
from lab.errors import RecipeError


def apply_checkpointing(model: nn.Module) -> None:
    """Make every decoder layer of ``model`` save one tensor for backward: its input.

    A layer maps its input [b, s, E] to an output [b, s, E]. All tensors that it saves inside (of the norms,
    q, k, v, the attention and the MLP) are dropped after its forward. When backward reaches the layer, they
    are computed again, and the recomputation stops at the last one.

    Letters: b rows, s tokens of one rank, E hidden size, L layers, w bytes per element.

    Saves:
        Between forward and backward, L layers hold L*b*s*E*w bytes, instead of L times all that one layer
        saves. Backward adds the tensors of one layer, while that layer runs. Published for Llama3-8B at 3M
        tokens on 8 ranks: 126 GiB instead of 960 GiB.
    Costs:
        One more forward of every layer per step, including its attention and its all-to-alls.
    Source:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), section 4, with one
        segment per layer. The implementation is the non-reentrant ``torch.utils.checkpoint``.
    Composes with:
        Every technique that replaces a forward inside the layer (UPipe, tiled MLPs and norms), applied
        before; the recomputation then runs that technique. Offload, applied after; it sends the saved tensor
        to the host, and can avoid the second run of attention. FSDP2 for each layer, applied last; its hooks
        stay outside, so the recomputation does not gather the parameters again.

    Raises:
        RecipeError: This function or transformers already checkpoints the layers. In forward: there is a
            key/value cache, to which a layer that runs twice would append twice.
    """
    for layer in decoder_of(model).layers:
        module = layer.module
        if getattr(module, "gradient_checkpointing", False):
            raise RecipeError(
                "checkpoint=True on a model whose own gradient checkpointing is on: a layer would be "
                "recomputed twice; call model.gradient_checkpointing_disable() first"
            )
        if getattr(module.forward, "checkpointed", False):
            raise RecipeError("checkpoint=True on a model that is checkpointed already: apply it once")
        module.forward = _checkpointed(module.forward)


def _checkpointed(inner: Callable[..., Any]) -> Patch:
    """Wrap the forward of a layer, and mark the wrapper; ``apply_offload`` looks for the mark."""

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden_states, *args, **kwargs)
        if has_cache(kwargs):
            raise RecipeError(
                "checkpoint=True with a key/value cache: the recomputation would append to it a second time; "
                "pass use_cache=False"
            )
        # The other arguments (masks, positions, cos and sin) are shared by all layers. The closure holds them
        # and not the checkpoint, so the hidden state is the only tensor that the checkpoint saves.
        # No RNG state is saved: dropout is refused, so nothing random runs in a layer.
        return checkpoint(
            lambda h: inner(h, *args, **kwargs), hidden_states, use_reentrant=False, preserve_rng_state=False
        )

    patch = Patch(forward, inner)
    patch.checkpointed = True
    return patch
