"""A name, a Hugging Face directory, a config or a callable -> a transformers decoder; no downloads."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from lab.errors import ModelError

ModelLike: TypeAlias = str | Path | PretrainedConfig | Callable[[], PreTrainedModel]
"""A preset's name, a directory in the Hugging Face layout, a config, or a callable that returns a model."""


def _tiny() -> LlamaConfig:
    """Llama3-8B's 32 query and 8 key/value heads at head_dim 8, so every quotient of the real model exists.

    The vocabulary is larger than the 256 byte tokens need, because in real models the logits are wider than
    the hidden state (V/E is 31 in Llama3-8B, 16 here) and no lesson about memory can leave that out.
    """
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=8,
        vocab_size=4096,
        max_position_embeddings=2**23,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


def _llama3_8b() -> LlamaConfig:
    """The shape of Meta-Llama-3-8B (its published config.json)."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


PRESETS: dict[str, Callable[[], PretrainedConfig]] = {"tiny": _tiny, "llama3-8b": _llama3_8b}


def config_of(model: ModelLike) -> PretrainedConfig:
    """The config behind anything that ``build`` takes; a callable is called for it.

    Raises:
        ModelError: an unknown name, or a directory without a readable config.json.
    """
    if isinstance(model, PretrainedConfig):
        return model
    if isinstance(model, str) and model in PRESETS:
        return PRESETS[model]()
    if callable(model):
        return _called(model).config
    if (Path(model) / "config.json").is_file():
        try:
            config = AutoConfig.from_pretrained(str(model), local_files_only=True)
        except (ValueError, OSError, KeyError) as error:
            raise ModelError(f"{model}/config.json is not a config transformers can read: {error}") from error
        assert isinstance(config, PretrainedConfig)
        return config
    close = get_close_matches(str(model), PRESETS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ModelError(
        f"unknown model {str(model)!r}{hint}: give one of {', '.join(PRESETS)}, "
        "or a directory that holds a config.json"
    )


def build(model: ModelLike, *, seed: int = 0) -> PreTrainedModel:
    """Make the model: a directory's own weights where it has them, else random ones, the same for a seed.

    Parameters are fp32 unless the directory's config says otherwise. The caller's random state is kept.

    Raises:
        ModelError: as ``config_of``; or a callable that returns no transformers model.
    """
    if callable(model) and not isinstance(model, PretrainedConfig):
        return _called(model)
    config = config_of(model)
    if isinstance(model, str | Path) and any(Path(model).glob("*.safetensors*")):
        built = AutoModelForCausalLM.from_pretrained(
            str(model), local_files_only=True, dtype="auto", attn_implementation="sdpa"
        )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    built.config.use_cache = False
    assert isinstance(built, PreTrainedModel)
    return built


def _called(model: Callable[[], object]) -> PreTrainedModel:
    built = model()
    if not isinstance(built, PreTrainedModel):
        raise ModelError(f"the callable returned {type(built).__name__}, not a transformers model")
    return built
