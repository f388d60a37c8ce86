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
from lab.techniques.attention.documents import Documents
from lab.techniques.attention.flash import attention
from lab.techniques.attention.saved_results import ResultCache, no_cache, with_cache
from lab.techniques.attention.sinks import sink_kernel
from lab.techniques.attention.window import kernel_of

NAME = "lab"
"""The name of both functions in transformers' registries, which ``config._attn_implementation`` refers to."""


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
    s_aux: Tensor | None = None,
    lab_cache: ResultCache = no_cache,
    lab_documents: Documents | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention; transformers calls this function for the implementation ``"lab"``.

    A technique may set attributes of the attention module. ``lab_attention`` is a function that exchanges
    sequence for heads before and after the kernel; without it, attention uses this rank's tokens only.
    ``lab_ranks`` is a pair for that function: the number of ranks that share the heads, and this rank's place
    among them. For the kernel, see ``kernel_of``.

    Args:
        module: The attention module.
        query: [b, H, s, D]: b rows, H query heads, s tokens of this rank, head_dim D.
        key: [b, K, s, D], with K key/value heads.
        value: [b, K, s, D].
        attention_mask: Must be None.
        scaling: Multiplies the scores; by default 1/sqrt(D).
        dropout: Must be 0.
        sliding_window: The module's window, which ``apply_attention`` noted.
        is_causal: Must not be False.
        s_aux: The sinks of all query heads, [H]; None if attention has none.
        lab_cache: Stores the kernel's results for a recomputation.
        lab_documents: The documents of the rows; None if each row is one.
        **_: Other keywords of transformers, which are not used.

    Returns:
        The output [b, s, H, D], and None in the place of attention weights.

    Raises:
        RecipeError: There is a mask, dropout, another window, attention to later tokens, or a key/value
            cache.
    """
    if attention_mask is not None or dropout or is_causal is False:
        raise RecipeError(
            f"attention with mask={attention_mask is not None}, dropout={dropout}, "
            f"is_causal={is_causal is not False}: the lab's attention is causal over whole rows; give no "
            "attention_mask and dropout 0"
        )
    window = getattr(module, "lab_window", None)
    if sliding_window != window:
        raise RecipeError(
            f"attention with a window of {sliding_window} keys, where the model had {window} when the recipe "
            "was applied: set config.sliding_window and config.layer_types before"
        )
    if query.shape[2] != key.shape[2]:
        raise RecipeError(
            f"attention of {query.shape[2]} new tokens to a cache of keys: pass use_cache=False"
        )
    attend = getattr(module, "lab_attention", attention)
    kernel = kernel_of(module, lab_documents)
    if s_aux is not None:
        ranks, place = getattr(module, "lab_ranks", (1, 0))
        kernel = sink_kernel(kernel, s_aux.chunk(ranks)[place])
    kernel = with_cache(kernel, lab_cache)
    out = attend(query, key, value, scale=scaling, kernel=kernel)
    return out.transpose(1, 2), None


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Make no mask: transformers calls this function for ``"lab"``, whose kernels are causal without a mask.

    Raises:
        RecipeError: There is an ``attention_mask``.
    """
    if attention_mask is not None:
        raise RecipeError(
            "an attention_mask reached the model, whose attention is causal over whole rows: give the mask "
            "to lab.shard_batch, which takes padding at the end of rows"
        )


ALL_ATTENTION_FUNCTIONS.register(NAME, hf_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def apply_attention(model: nn.Module) -> None:
    """Make every attention of ``model`` call ``hf_attention_forward``; other models do not change.

    Models may share a config, so the configs of this model are copied before they are changed. The copies
    turn the key/value cache off. The cache is for generation; in training it would hold a second copy of k
    and v of every layer.

    Saves:
        The masks [b, s, S] that transformers computes from ``position_ids``: b*s*S bytes, with b rows, s
        tokens of one rank and S tokens of the sequence.
    Costs:
        Nothing.
    Source:
        The attention interface of transformers (``ALL_ATTENTION_FUNCTIONS``).
    Composes with:
        Everything. ``apply_ulysses``, ``apply_upipe`` and ``apply_ring`` call it.

    Raises:
        ModelError: See ``decoder_of``.
        RecipeError: An attention module is not causal.
    """
    for layer in decoder_of(model).layers:
        module = layer.attention
        module.lab_window = layer.window  # type: ignore[assignment]
        if getattr(module, "is_causal", True) is False:
            raise RecipeError(
                "an attention module with is_causal=False is not supported: the techniques are for causal "
                "decoders"
            )
    copies: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and config._attn_implementation != NAME:
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                copies[id(config)]._attn_implementation = NAME
                copies[id(config)].use_cache = False
            module.config = copies[id(config)]  # type: ignore[assignment]
