"""The presets: the configs of published models by name, and of a tiny model with as many heads."""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from lab.decoder import SIZES


def preset_config(name: str) -> PretrainedConfig:
    """Return a new config of a preset."""
    config: PretrainedConfig = AutoConfig.for_model(**copy.deepcopy(PRESETS[name]))
    return config


def _preset(
    model_type: str, sizes: tuple[int, ...], positions: int, rope: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return the fields of a config.

    Args:
        model_type: The family.
        sizes: The values of ``SIZES``: the query and the key/value heads, the hidden size, the inner width of
            the MLP, the layers, and the vocabulary.
        positions: The longest context for which the model was made.
        rope: The parameters of the rotary positions.
        **more: Further fields.
    """
    fields = {"max_position_embeddings": positions, "rope_parameters": rope, **more}
    return {"model_type": model_type, **dict(zip(SIZES, sizes, strict=True)), **fields}


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


_LLAMA3_2_ROPE = _rope(
    5e5, rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
"""The scaling of Llama 3.2, from 8K tokens to 128K: low frequencies are divided by 32."""

PRESETS: dict[str, dict[str, Any]] = {
    # The 32 query and 8 key/value heads of Llama3-8B at head_dim 8, so that it allows the same degrees. The
    # vocabulary is larger than the 256 tokens of plain bytes, because in published models the logits are
    # wider than the hidden state, and a lesson about memory needs that: V/E is 31 in Llama3-8B, and 16 here.
    "tiny": _preset("llama", (32, 8, 256, 896, 4, 4096), 2**23, _rope(5e5), head_dim=8),
    # Meta-Llama-3-8B, as all further ones in the shape of its published config.json.
    "llama3-8b": _preset("llama", (32, 8, 4096, 14336, 32, 128256), 8192, _rope(5e5), rms_norm_eps=1e-5),
    # Meta-Llama-3-70B.
    "llama3-70b": _preset("llama", (64, 8, 8192, 28672, 80, 128256), 8192, _rope(5e5), rms_norm_eps=1e-5),
    # Llama-3.2-1B: head_dim 64, and the head is tied.
    "llama3.2-1b": _preset(
        "llama", (32, 8, 2048, 8192, 16, 128256), 131072, _LLAMA3_2_ROPE, head_dim=64, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    # Llama-3.2-3B: 24 query heads; the head is tied.
    "llama3.2-3b": _preset(
        "llama", (24, 8, 3072, 8192, 28, 128256), 131072, _LLAMA3_2_ROPE, head_dim=128, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    # Qwen3-8B.
    "qwen3-8b": _preset(
        "qwen3", (32, 8, 4096, 12288, 36, 151936), 40960, _rope(1e6), head_dim=128, rms_norm_eps=1e-6
    ),
    # Qwen3-32B: 64 heads of 128 are wider than its hidden state.
    "qwen3-32b": _preset(
        "qwen3", (64, 8, 5120, 25600, 64, 151936), 40960, _rope(1e6), head_dim=128, rms_norm_eps=1e-6
    ),
    # Mistral-7B-v0.3, which has no sliding window.
    "mistral-7b": _preset(
        "mistral", (32, 8, 4096, 14336, 32, 32768), 32768, _rope(1e6), rms_norm_eps=1e-5, sliding_window=None,
    ),
    # The text model of gemma-3-27b: five of six layers have a window of 1024 tokens. The head is tied.
    "gemma3-27b": _preset(
        "gemma3_text", (32, 16, 5376, 21504, 62, 262208), 131072,
        {"full_attention": _rope(1e6, rope_type="linear", factor=8.0), "sliding_attention": _rope(1e4)},
        head_dim=128, rms_norm_eps=1e-6, sliding_window=1024, query_pre_attn_scalar=168,
    ),
    # OLMo-2-1124-7B: norms after attention and MLP.
    "olmo2-7b": _preset("olmo2", (32, 32, 4096, 11008, 32, 100352), 4096, _rope(5e5), rms_norm_eps=1e-6),
    # Phi-3-mini-4k-instruct: a window of 2047 tokens.
    "phi3-mini": _preset(
        "phi3", (32, 32, 3072, 8192, 32, 32064), 4096, _rope(1e4), rms_norm_eps=1e-5, sliding_window=2047,
    ),
    # Mixtral-8x7B-v0.1: 8 experts, two of them for each token.
    "mixtral-8x7b": _preset(
        "mixtral", (32, 8, 4096, 14336, 32, 32000), 32768, _rope(1e6), head_dim=128,
        num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, router_aux_loss_coef=0.02,
        sliding_window=None,
    ),
    # Qwen3-30B-A3B: 128 experts, eight of them for each token. Its class does not declare head_dim, which
    # its model reads.
    "qwen3-30b-a3b": _preset(
        "qwen3_moe", (32, 4, 2048, 6144, 48, 151936), 40960, _rope(1e6), head_dim=128,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        rms_norm_eps=1e-6, use_sliding_window=False,
    ),
    # gpt-oss-20b: 32 experts, four of them for each token. Every other layer, the first among them, has a
    # window of 128 tokens. Each query head has a sink.
    "gpt-oss-20b": _preset(
        "gpt_oss", (64, 8, 2880, 2880, 24, 201088), 131072,
        _rope(
            1.5e5, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
        head_dim=64, num_local_experts=32, num_experts_per_tok=4, rms_norm_eps=1e-5, sliding_window=128,
        swiglu_limit=7.0, router_aux_loss_coef=0.9,
    ),
    # c4ai-command-r7b-12-2024: three of four layers have a window of 4096 tokens, and rotary positions. The
    # head is tied.
    "command-r7b": _preset(
        "cohere2", (32, 8, 4096, 14336, 32, 256000), 132096, _rope(5e4), layer_norm_eps=1e-5,
        sliding_window=4096, logit_scale=0.25,
    ),
}  # fmt: skip
"""The fields of each preset's config. All but those of ``tiny`` are those of a published config.json."""
