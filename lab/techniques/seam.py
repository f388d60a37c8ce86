"""The seam in transformers: one registry entry, and which models it can stand in for."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lab.errors import RecipeError
from lab.techniques.attention import FLASH, attention
from lab.techniques.keeping import Keep, kept, make

NAME = "lab"
"""What ``config._attn_implementation`` is called in transformers' two registries."""


def attention_of_module(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    lab_keep: Keep = make,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for ``"lab"``: [b, H, s, D] and twice [b, K, s, D] -> [b, s, H, D].

    The attention module's own ``lab_attention`` (an exchange of sequence for heads) and ``lab_kernel`` (a
    ring) stand around and in it where a technique has set them; else it is local and causal. What the kernel
    makes goes by ``lab_keep``.

    Raises:
        RecipeError: a mask, dropout or a window, none of which this attention has.
    """
    if attention_mask is not None or dropout or sliding_window is not None:
        raise RecipeError(
            f"attention with mask={attention_mask is not None}, dropout={dropout}, window={sliding_window}: "
            "it is causal over whole rows here; give no attention_mask, dropout 0 and no window"
        )
    if query.shape[2] != key.shape[2]:
        raise RecipeError(
            f"attention of {query.shape[2]} new tokens to a cache of keys: pass use_cache=False"
        )
    attend = getattr(module, "lab_attention", attention)
    kernel = kept(getattr(module, "lab_kernel", FLASH), lab_keep)
    out = attend(query, key, value, scale=scaling, kernel=kernel)
    return out.transpose(1, 2), None


def no_mask(*_: Any, **__: Any) -> None:
    """The mask function that belongs to it: causality is the kernel's, so no [s, S] mask is ever made."""


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_of_module)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def apply_attention(model: nn.Module) -> None:
    """Let every attention of ``model`` run through ``attention``; other models are untouched.

    The model's configs are copied before they are changed, for a config may be shared between models. The
    key/value cache is switched off in the copies: it serves generation, and would hold a second copy of k and
    v of every layer in training.

    Saves: the [s, S] masks that transformers makes from position_ids, b*s*S bytes.
    Costs: nothing. Composes with everything; ``apply_ulysses``, ``apply_upipe`` and ``apply_ring`` call it.

    Raises:
        RecipeError: see ``check_attention``; or a model whose layers are not of the Llama family.
    """
    check_attention(model.config)  # type: ignore[arg-type]
    for module in attention_modules(model):
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


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The ``self_attn`` of each layer, in order.

    Raises:
        RecipeError: a layer without the Hugging Face attribute names.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise RecipeError(f"{type(model).__name__} has no model.layers: give a decoder of the Llama family")
    modules = [getattr(layer, "self_attn", None) for layer in layers]
    for module in modules:
        missing = [n for n in ("q_proj", "k_proj", "v_proj", "o_proj") if not hasattr(module, n)]
        if missing:
            raise RecipeError(
                f"the attention of {type(model).__name__} has no {', '.join(missing)}: "
                "Llama, Qwen2, Qwen3 and Mistral have"
            )
    return modules  # type: ignore[return-value]


def check_attention(config: PretrainedConfig) -> None:
    """Refuse by name what these kernels would compute wrongly.

    Raises:
        RecipeError: a sliding or chunked window that is on, dropout in attention, a mixture of experts,
            capped scores.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    windowed = bool(kinds - {"full_attention"}) or (
        not kinds and window is not None and getattr(config, "use_sliding_window", True)
    )
    if windowed:
        named = ", ".join(sorted(kinds - {"full_attention"})) or "every layer"
        raise RecipeError(
            f"sliding_window={window} ({named}): every layer must attend to the whole past; "
            "set sliding_window=None and layer_types to full_attention, if the model was trained so"
        )
    dropout = getattr(config, "attention_dropout", None) or 0.0
    if dropout > 0:
        raise RecipeError(f"attention_dropout={dropout}: flash attention runs without it; set it to 0.0")
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        experts = getattr(config, name, None)
        if experts:
            raise RecipeError(f"{name}={experts}: a mixture of experts; take a model with a dense MLP")
    for name in ("attn_logit_softcapping", "attn_logit_softcap"):
        cap = getattr(config, name, None)
        if cap:
            raise RecipeError(f"{name}={cap}: the kernels have no capped scores; set it to None")
