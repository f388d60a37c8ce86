"""Refusal of a model whose modules are not as its config says: they were changed after it was made."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lab.decoder.modules import ACTIVATIONS, class_of, facts_of
from lab.errors import ModelError

_HONORED = {
    "attention_scaling", "eps", "gradient_checkpointing", "max_seq_len_cached", "original_max_seq_len",
    "padding_idx", "router_aux_loss_coef", "scaling", "variance_epsilon", "vocab_size",
}  # fmt: skip
"""Attributes of modules that may differ from the config: the techniques read them from the module, another
check covers them, or they change nothing in training."""

_HEAD_NORMS = (".q_norm", ".k_norm")
_ATTENTION = ".self_attn"


@dataclass(frozen=True)
class _Given:
    """A class of models and a config. They are compared by the config's text."""

    kind: type[PreTrainedModel]
    text: str
    config: PretrainedConfig = field(compare=False)


@dataclass(frozen=True)
class _Module:
    """A module of a new model: its class, its attributes, and the names of its children."""

    kind: type
    facts: dict[str, object]
    children: frozenset[str]


def check_attributes(model: PreTrainedModel) -> None:
    """Refuse a model with a module that is not as the model's config says.

    The techniques read most of what they compute from the config, and a module's own forward reads it from
    the module.

    Raises:
        ModelError: The model has more layers than its config says; a module has a config of its own
            that differs; an attribute, an activation, or a norm of q and k was changed after the model was
            made; an attention has other children; or its scale is not above 0.
    """
    config, decoder = model.config, model.model
    if len(decoder.layers) > config.num_hidden_layers:
        raise ModelError(
            f"a model of {len(decoder.layers)} layers, and num_hidden_layers={config.num_hidden_layers} in "
            "its config: set the config before the model is made"
        )
    text = repr(config.to_dict())
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = vars(module).get("config")
        if isinstance(own, PretrainedConfig) and own is not config and repr(own.to_dict()) != text:
            raise ModelError(
                f"{name} has a config of its own, which differs from the model's: set the config before the "
                "model is made"
            )
    for name, new in _modules(_Given(class_of(model), text, config)).items():
        # A model may have fewer layers, as where its head is computed alone.
        if name.rpartition(".")[0] in modules:
            _check_module(name or "the model", modules.get(name), new)


def _check_module(name: str, module: nn.Module | None, new: _Module) -> None:
    fixed = new.kind.__module__ in ACTIVATIONS or name.endswith((*_HEAD_NORMS, _ATTENTION))
    kind = None if module is None else class_of(module)
    if kind is not new.kind or module is None:
        if fixed:
            found = "is no module" if kind is None else f"is a {kind.__name__}"
            raise ModelError(
                f"{name} {found}, and the model's config gives it a {new.kind.__name__}: set the config "
                "before the model is made"
            )
        return
    facts = facts_of(module)
    for attribute, expected in new.facts.items():
        if facts.get(attribute) != expected:
            raise ModelError(
                f"{name} has {attribute}={facts.get(attribute)}, and its config gives it {expected}: set the "
                "config before the model is made"
            )
    if name.endswith(_ATTENTION):
        other = new.children.symmetric_difference(name for name, _ in module.named_children())
        if other:
            raise ModelError(
                f"{name} has other modules than the config gives it ({', '.join(sorted(other))}): give the "
                "model as transformers makes it"
            )
        scale = vars(module).get("scaling")
        # Fused kernels on CPUs compute a scale that is not above 0 wrongly, without an error.
        if not isinstance(scale, int | float) or not 0 < scale < inf:
            raise ModelError(
                f"{name} has scaling={scale}: it multiplies the scores of attention; give a number above 0"
            )


@lru_cache(maxsize=8)
def _modules(given: _Given) -> dict[str, _Module]:
    """Return the modules of a new model of the family and those of its activations, by their names."""
    config: Any = copy.deepcopy(given.config)
    config._attn_implementation = "eager"  # every family has it
    # A tokenizer may have set a padding token after the model was made, which is outside the vocabulary.
    config.pad_token_id = None
    with torch.device("meta"):
        new = given.kind(config)
    return {
        name: _Module(
            type(module),
            {attribute: value for attribute, value in facts_of(module).items() if attribute not in _HONORED},
            frozenset(child for child, _ in module.named_children()),
        )
        for name, module in new.named_modules()
        if type(module).__module__ in (given.kind.__module__, *ACTIVATIONS)
    }
