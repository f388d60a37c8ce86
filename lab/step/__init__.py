"""One training step: the recipe applied to a model, batches, the step itself, one rank in place of many."""

from lab.step import data
from lab.step.batches import Batch, shard_batch
from lab.step.compose import apply_recipe
from lab.step.on_ranks import make_rank_state
from lab.step.token_source import write_tokens
from lab.step.training_step import loss, train_step

__all__ = [
    "Batch",
    "apply_recipe",
    "data",
    "loss",
    "make_rank_state",
    "shard_batch",
    "train_step",
    "write_tokens",
]
