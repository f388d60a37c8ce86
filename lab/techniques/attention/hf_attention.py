"""The attention function and the mask function that the lab registers in transformers."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.attention.saved_results import ResultCache, no_cache, with_cache

NAME = "lab"
"""What ``config._attn_implementation`` is called in transformers' two registries."""


def hf_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    lab_cache: ResultCache = no_cache,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for ``"lab"``: [b, H, s, D] and twice [b, K, s, D] -> [b, s, H, D].

    Attention is local and causal, unless a technique has set an attribute of the module: ``lab_attention``
    exchanges sequence for heads around the kernel, and ``lab_kernel`` replaces the kernel (a ring does).
    ``lab_cache`` stores the kernel's results for a recomputation.

    Raises:
        RecipeError: a mask, dropout, a window or attention to the future, none of which this attention has;
            a key/value cache.
    """
    if attention_mask is not None or dropout or sliding_window is not None or is_causal is False:
        raise RecipeError(
            f"attention with mask={attention_mask is not None}, dropout={dropout}, window={sliding_window}, "
            f"is_causal={is_causal is not False}: it is causal over whole rows here; give no attention_mask, "
            "dropout 0 and no window"
        )
    if query.shape[2] != key.shape[2]:
        raise RecipeError(
            f"attention of {query.shape[2]} new tokens to a cache of keys: pass use_cache=False"
        )
    attend = getattr(module, "lab_attention", attention)
    kernel = with_cache(getattr(module, "lab_kernel", FLASH), lab_cache)
    out = attend(query, key, value, scale=scaling, kernel=kernel)
    return out.transpose(1, 2), None


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """The mask function for ``"lab"``: it makes no [s, S] mask, because the kernel is causal.

    Raises:
        RecipeError: there is an ``attention_mask``.
    """
    if attention_mask is not None:
        raise RecipeError(
            "an attention_mask reached the model, and attention here is causal over whole rows: give it to "
            "lab.shard_batch, which takes padding at the end of rows"
        )


ALL_ATTENTION_FUNCTIONS.register(NAME, hf_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def apply_attention(model: nn.Module) -> None:
    """Make every attention of ``model`` call ``hf_attention_forward``; other models do not change.

    The model's configs are copied before they are changed, for a config may be shared between models. The
    key/value cache is switched off in the copies: it serves generation, and would hold a second copy of k and
    v of every layer in training.

    Saves: the [s, S] masks that transformers makes from position_ids, b*s*S bytes.
    Costs: nothing. Composes with everything; ``apply_ulysses``, ``apply_upipe`` and ``apply_ring`` call it.

    Raises:
        ModelError: see ``decoder_of``.
        RecipeError: an attention module that is not causal.
    """
    for module in decoder_of(model).attentions:
        if getattr(module, "is_causal", True) is False:
            raise RecipeError("attention that is not causal: the techniques here are for decoders")
    copies: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and config._attn_implementation != NAME:
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                copies[id(config)]._attn_implementation = NAME
                copies[id(config)].use_cache = False
            module.config = copies[id(config)]  # type: ignore[assignment]
