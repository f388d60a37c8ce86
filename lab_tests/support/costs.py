"""A plan's costs at sizes that all differ, so that a formula with a wrong size gives a wrong number.

L layers, E hidden size, I hidden size of the MLP, H query heads, K key/value heads, D head_dim, V vocabulary,
S tokens.
"""

from typing import Any

from transformers import LlamaConfig, PretrainedConfig

import lab
from lab.memory.timeline import Timeline
from lab.planning.costs import Costs
from lab.planning.fake_step import fake_step
from lab.planning.hardware import hardware
from lab.recipe.jobs import Job, Machine
from lab.recipe.recipe import Recipe
from lab_tests.support.models import small_config

L, E, I, H, K, D, V = 3, 48, 72, 24, 4, 10, 104  # noqa: E741
S, RANKS, FP32 = 160, 4, 4

ATTENTION = 2 * S * S * H * D
"""Operations of one layer's attention: scores and outputs, half of each behind the mask."""


def model_config(family: type[PretrainedConfig] = LlamaConfig) -> PretrainedConfig:
    return small_config(
        family, hidden_size=E, intermediate_size=I, num_hidden_layers=L, num_attention_heads=H,
        num_key_value_heads=K, head_dim=D, vocab_size=V,
    )  # fmt: skip


def planned_costs(
    ranks: int = RANKS,
    ranks_per_node: int = 8,
    device: str = "h100",
    rows: int = 1,
    family: type[PretrainedConfig] = LlamaConfig,
    **knobs: Any,
) -> Costs:
    return lab.plan(
        model_config(family), Recipe(**knobs), tokens=S, ranks=ranks, rows=rows, device=device,
        ranks_per_node=ranks_per_node,
    ).costs  # fmt: skip


def walked(job: Job, machine: Machine, layers: int, **of_ring: int) -> tuple[Timeline, Costs]:
    """A step of so many layers, walked in full, on a machine."""
    return fake_step(job, layers, workspace=machine.workspace, **of_ring).priced(
        hardware(machine.device), machine, job.ranks
    )
