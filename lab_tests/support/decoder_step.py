"""One step of a small decoder in this process: its loss, its gradients and its timeline."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.offload import apply_offload
from lab_tests.support.models import small_config, small_decoder

LAYERS, BATCH, TOKENS, VOCAB, HIDDEN = 3, 2, 40, 67, 48
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"head_dim": None}),
    "qwen3": (Qwen3Config, {}),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-6}


def decoder(
    family: str = "llama", dtype: torch.dtype = torch.float64, layers: int = LAYERS
) -> PreTrainedModel:
    kind, further = FAMILIES[family]
    config = small_config(
        kind, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=88, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=3, use_cache=False, **further,
    )  # fmt: skip
    return small_decoder(config, dtype)


def batch(tokens: int = TOKENS, rows: int = BATCH) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randint(0, VOCAB, (rows, tokens)) for name in ("input_ids", "labels")}


def step(model: nn.Module) -> dict[str, Tensor]:
    """Returns the loss and every gradient by name; it is an error if a parameter has no gradient."""
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    return {"loss": loss.detach(), **gradients}


def checkpoint_and_offload(model: PreTrainedModel, **knobs: Any) -> PreTrainedModel:
    apply_checkpointing(model)
    apply_offload(model, **knobs)
    return model


def step_timeline(model: nn.Module, inputs: dict[str, Tensor]) -> Timeline:
    meter = Meter()
    with meter.measure(model):
        with meter.phase("forward"):
            loss = model(**inputs).loss
        with meter.phase("backward"):
            loss.backward()
    return meter.timeline()


def rows_of(timeline: Timeline, phase: str) -> list[int]:
    """Returns the numbers of the rows of a phase."""
    return [row for row in range(len(timeline)) if timeline.phases[timeline.phase[row]] == phase]
