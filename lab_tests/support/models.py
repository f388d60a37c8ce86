"""Small decoders: every size differs from every other, so that a wrong layout of heads changes a result."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from lab import models
from lab.decoder import FAMILIES
from lab.techniques.loss import apply_loss


def small_config(family: type[PretrainedConfig] = LlamaConfig, **fields: Any) -> PretrainedConfig:
    """Makes the config of a small decoder.

    Args:
        family: The class of the config.
        **fields: Fields that replace a size below or that the family has beside them. With
            ``head_dim=None`` the family chooses the size of a head itself.
    """
    sizes = {
        "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": 6, "head_dim": 10, "vocab_size": 101, **fields,
    }  # fmt: skip
    if sizes["head_dim"] is None:
        del sizes["head_dim"]
    return family(**sizes)


def quick_config(layers: int = 1) -> PretrainedConfig:
    """Makes ``tiny`` with fewer heads and layers, so that a plan takes a second."""
    config = models.config_of("tiny")
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = layers, 4, 2
    config.head_dim = 64
    return config


def small_decoder(config: PretrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Makes a decoder with transformers' sdpa, or gpt-oss's eager attention, and the lab's untiled loss.

    Noise is added to every parameter: an error would not show in biases of 0 and norms of 1.
    """
    torch.manual_seed(0)
    attention = FAMILIES[config.model_type].attention
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    apply_loss(model)
    return model


def tiny_with_infinite_head() -> PreTrainedModel:
    """Makes the preset ``tiny`` with a head whose every weight is infinite: the loss is not a number."""
    model = models.build("tiny")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    return model
