"""The presets: the configs of published models by name, and of a tiny model with as many heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Cohere2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _llama3_2_rope() -> dict[str, Any]:
    """The scaling of Llama 3.2, from 8K tokens to 128K: low frequencies are divided by 32."""
    return _rope(
        500_000.0, rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip


def _tiny() -> LlamaConfig:
    """The 32 query and 8 key/value heads of Llama3-8B at head_dim 8, so that it allows the same degrees.

    The vocabulary is larger than the 256 tokens of plain bytes, because in published models the logits are
    wider than the hidden state, and a lesson about memory needs that: V/E is 31 in Llama3-8B, and 16 here.
    """
    return LlamaConfig(
        hidden_size=256, intermediate_size=896, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, head_dim=8, vocab_size=4096, max_position_embeddings=2**23,
        rope_parameters=_rope(500_000.0),
    )  # fmt: skip


def _llama3_8b() -> LlamaConfig:
    """The shape of Meta-Llama-3-8B (its published config.json)."""
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5, max_position_embeddings=8192,
        rope_parameters=_rope(500_000.0),
    )  # fmt: skip


def _llama3_70b() -> LlamaConfig:
    """The shape of Meta-Llama-3-70B (its published config.json)."""
    return LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5, max_position_embeddings=8192,
        rope_parameters=_rope(500_000.0),
    )  # fmt: skip


def _llama3_2_1b() -> LlamaConfig:
    """The shape of Llama-3.2-1B (its published config.json): head_dim 64, and the head is tied."""
    return LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, rms_norm_eps=1e-5,
        max_position_embeddings=131072, rope_parameters=_llama3_2_rope(), tie_word_embeddings=True,
    )  # fmt: skip


def _llama3_2_3b() -> LlamaConfig:
    """The shape of Llama-3.2-3B (its published config.json): 24 query heads; the head is tied."""
    return LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, rms_norm_eps=1e-5,
        max_position_embeddings=131072, rope_parameters=_llama3_2_rope(), tie_word_embeddings=True,
    )  # fmt: skip


def _qwen3_8b() -> Qwen3Config:
    """The shape of Qwen3-8B (its published config.json)."""
    return Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, rms_norm_eps=1e-6,
        max_position_embeddings=40960, rope_parameters=_rope(1_000_000.0),
    )  # fmt: skip


def _qwen3_32b() -> Qwen3Config:
    """The shape of Qwen3-32B (its published config.json): 64 heads of 128 are wider than its hidden state."""
    return Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, rms_norm_eps=1e-6,
        max_position_embeddings=40960, rope_parameters=_rope(1_000_000.0),
    )  # fmt: skip


def _mistral_7b() -> MistralConfig:
    """The shape of Mistral-7B-v0.3 (its published config.json), which has no sliding window."""
    return MistralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32768, rms_norm_eps=1e-5, max_position_embeddings=32768,
        rope_parameters=_rope(1_000_000.0), sliding_window=None,
    )  # fmt: skip


def _gemma3_27b() -> Gemma3TextConfig:
    """The shape of the text model of gemma-3-27b (its published config.json).

    Five of six layers have a window of 1024 tokens. The head is tied.
    """
    return Gemma3TextConfig(
        hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, vocab_size=262208, rms_norm_eps=1e-6,
        max_position_embeddings=131072, sliding_window=1024, query_pre_attn_scalar=168,
        rope_parameters={
            "full_attention": _rope(1_000_000.0, rope_type="linear", factor=8.0),
            "sliding_attention": _rope(10_000.0),
        },
    )  # fmt: skip


def _olmo2_7b() -> Olmo2Config:
    """The shape of OLMo-2-1124-7B (its published config.json): norms after attention and MLP."""
    return Olmo2Config(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=100352, rms_norm_eps=1e-6, max_position_embeddings=4096,
        rope_parameters=_rope(500_000.0),
    )  # fmt: skip


def _phi3_mini() -> Phi3Config:
    """The shape of Phi-3-mini-4k-instruct (its published config.json): a window of 2047 tokens."""
    return Phi3Config(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32064, rms_norm_eps=1e-5, max_position_embeddings=4096,
        rope_parameters=_rope(10_000.0), sliding_window=2047,
    )  # fmt: skip


def _mixtral_8x7b() -> MixtralConfig:
    """The shape of Mixtral-8x7B-v0.1 (its published config.json): 8 experts, two of them for each token."""
    return MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
        rms_norm_eps=1e-5, max_position_embeddings=32768, rope_parameters=_rope(1_000_000.0),
        router_aux_loss_coef=0.02, sliding_window=None,
    )  # fmt: skip


def _qwen3_30b_a3b() -> Qwen3MoeConfig:
    """The shape of Qwen3-30B-A3B (its published config.json): 128 experts, eight of them for each token."""
    # The class does not declare head_dim, which its model reads.
    return Qwen3MoeConfig(  # type: ignore[call-arg]
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, vocab_size=151936, rms_norm_eps=1e-6, max_position_embeddings=40960,
        rope_parameters=_rope(1_000_000.0), use_sliding_window=False,
    )  # fmt: skip


def _gpt_oss_20b() -> GptOssConfig:
    """The shape of gpt-oss-20b (its published config.json): 32 experts, four of them for each token.

    Every other layer, the first among them, has a window of 128 tokens. Each query head has a sink.
    """
    return GptOssConfig(
        hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088,
        rms_norm_eps=1e-5, max_position_embeddings=131072, sliding_window=128, swiglu_limit=7.0,
        rope_parameters=_rope(
            150_000.0, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
        router_aux_loss_coef=0.9,
    )  # fmt: skip


def _command_r7b() -> Cohere2Config:
    """The shape of c4ai-command-r7b-12-2024 (its published config.json).

    Three of four layers have a window of 4096 tokens, and rotary positions. The head is tied.
    """
    return Cohere2Config(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=256000, layer_norm_eps=1e-5, max_position_embeddings=132096,
        rope_parameters=_rope(50_000.0), sliding_window=4096, logit_scale=0.25,
    )  # fmt: skip


PRESETS: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny": _tiny,
    "llama3-8b": _llama3_8b,
    "llama3-70b": _llama3_70b,
    "llama3.2-1b": _llama3_2_1b,
    "llama3.2-3b": _llama3_2_3b,
    "qwen3-8b": _qwen3_8b,
    "qwen3-32b": _qwen3_32b,
    "mistral-7b": _mistral_7b,
    "gemma3-27b": _gemma3_27b,
    "olmo2-7b": _olmo2_7b,
    "phi3-mini": _phi3_mini,
    "mixtral-8x7b": _mixtral_8x7b,
    "qwen3-30b-a3b": _qwen3_30b_a3b,
    "gpt-oss-20b": _gpt_oss_20b,
    "command-r7b": _command_r7b,
}
