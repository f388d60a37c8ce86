"""Activation checkpointing: a decoder layer keeps its input and runs its forward again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lab.decoder import Patch, decoder_of
from lab.errors import RecipeError


def apply_checkpointing(model: nn.Module) -> None:
    """Make every decoder layer of ``model`` keep one tensor for backward: its input.

    Layer i, hidden state x ``[b, s, E]`` -> ``[b, s, E]``. What the layer saves inside (norms, q, k, v, the
    attention, the MLP) is dropped after its forward and computed again when backward reaches it, up to the
    last saved tensor and not further.

    Saves: of w bytes an element, L layers hold L * b*s*E*w between forward and backward instead of
    L * (what one layer saves); backward adds one layer's worth while that layer runs.
    Costs: one more forward of every layer, its attention and its all-to-alls included (2 attention forwards
    a layer and step; published as 126 GiB instead of 960 for Llama3-8B at 3M tokens on 8 ranks).
    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174, section 4), one
    segment a layer; ``torch.utils.checkpoint`` non-reentrant.
    Composes with: every technique that replaces a forward inside the layer, applied before (UPipe, tiled MLP
    and norms: what runs again is theirs); offload, applied after, which sends the one saved tensor to the
    host, and can spare attention its second run; FSDP2 per layer, applied last: its hooks are the module's
    and stay outside, so the recomputation does not gather the parameters a second time.

    Raises:
        RecipeError: the layers are checkpointed already, by this function or by transformers. In forward: a
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
    """Wrap the forward of a layer; the wrapper is marked, for offload asks whether there is one."""

    def forward(hidden_states: torch.Tensor, *args: Any, **rest: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden_states, *args, **rest)
        if rest.get("past_key_values") is not None:
            raise RecipeError(
                "checkpoint=True with a key/value cache: the recomputation would append to it a second time; "
                "pass use_cache=False"
            )
        # The closure, not the checkpoint, holds the other arguments (masks, positions, cos and sin): they are
        # shared by all layers, and so the hidden state is the one tensor that is saved.
        # No RNG state is kept, because nothing random runs in a layer: dropout is refused.
        return checkpoint(
            lambda h: inner(h, *args, **rest), hidden_states, use_reentrant=False, preserve_rng_state=False
        )

    patch = Patch(forward, inner)
    patch.checkpointed = True
    return patch
