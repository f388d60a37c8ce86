"""This lab's Ulysses and UPipe compared with DeepSpeed's Ulysses, on the same model and tokens."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from transformers import LlamaConfig

from cluster.live import publish
from cluster.ranks import Cluster
from lab.bench.table import Row, Say
from lab.bench.timing import rounds
from lab.memory.meter import Meter
from lab.recipe.jobs import Job, TrainSettings, make_job
from lab.recipe.recipe import Recipe
from lab.step.batches import Batch
from lab.step.on_ranks import RankState, make_rank_state
from lab.step.training_step import NoMeter, train_step

REPEATS = 9
TOKENS = 8192
"""A step of a rank takes about a second, on any number of ranks. On two ranks, attention has the same share
of a step as in Llama3-8B at 128K tokens: the tokens over the hidden size are 32 in both."""


def measure_upipe_vs_deepspeed(say: Say) -> list[Row]:
    """Run ``compare_attentions`` on as many ranks as this process may use cores, and at least two."""
    with Cluster(ranks=max(2, len(os.sched_getaffinity(0)))) as cluster:
        return compare_attentions(cluster, say)


def compare_attentions(
    cluster: Cluster, say: Say, *, tokens: int = TOKENS, head_dim: int = 16, repeats: int = REPEATS
) -> list[Row]:
    """Compare seconds of a step and peak bytes of attention with those of DeepSpeed's Ulysses.

    All ranks are one Ulysses group of degree C. The model has one layer with 8*C query heads and 2*C
    key/value heads, in fp32, without checkpointing and without sharding. In a round, each attention makes one
    whole step: forward, backward and optimizer. All ranks begin a step together, and it ends with the last of
    them. A ratio is the median of the ratios of the rounds, so that a machine that slows down slows both.

    The bytes of attention are those that the meter counts while only the attention module of the layer runs
    forward and backward: the input, the gradient of the output, the output until the layer takes it, and all
    that the module allocates, including the gradients of the input and of the weights. The weights and the
    rotary tables are not counted.

    Args:
        cluster: The ranks.
        say: Shows what is measured now.
        tokens: The tokens of a sequence.
        head_dim: The head_dim of the model.
        repeats: The number of rounds.

    Returns:
        A row for each attention.

    Raises:
        RankError: DeepSpeed is not installed, or its communication operator cannot be compiled here. The
            cause is a RecipeError.
    """
    degree = cluster.ranks
    config = LlamaConfig(
        hidden_size=8 * degree * head_dim, intermediate_size=16 * degree * head_dim, num_hidden_layers=1,
        num_attention_heads=8 * degree, num_key_value_heads=2 * degree, head_dim=head_dim, vocab_size=256,
    )  # fmt: skip
    ours = Recipe(ulysses=degree)
    recipes = {
        "DeepSpeed's Ulysses": replace(ours, ulysses_backend="deepspeed"),
        "Ulysses": ours,
        "UPipe, U = C": replace(ours, head_chunk=degree),
        "UPipe, U = C, overlap": replace(ours, head_chunk=degree, overlap=True),
        "UPipe, U = 2C": replace(ours, head_chunk=2 * degree),
        "UPipe, U = H": replace(ours, head_chunk=8 * degree),
    }
    jobs = [make_job(config, recipe, tokens=tokens, ranks=degree) for recipe in recipes.values()]
    say(f"{len(jobs)} attentions on {degree} ranks, warming up")
    results = cluster.apply(_measure_on_rank, jobs, repeats, on_record=lambda _, record: say(str(record)))
    times, peaks, threads = results[0]
    return [
        {
            "attention": name,
            "ranks": degree,
            "threads": threads,
            "tokens": tokens,
            "seconds": median(seconds[i] for seconds in times),
            "bytes": peaks[i],
            "seconds / DeepSpeed's": median(seconds[i] / seconds[0] for seconds in times),
            "bytes / DeepSpeed's": peaks[i] / peaks[0],
        }
        for i, name in enumerate(recipes)
    ]


def _measure_on_rank(jobs: list[Job], repeats: int) -> tuple[list[list[float]], list[int], int]:
    """Return the seconds by round and attention, the bytes by attention, and the threads."""
    states = [make_rank_state(job, TrainSettings(steps=1)) for job in jobs]
    steps = [partial(_step, state, state.batch(0)) for state in states]
    rounds(1, *steps)
    times = []
    for number in range(1, repeats + 1):
        if dist.get_rank() == 0:
            publish(f"round {number} of {repeats}")
        times += rounds(1, *steps)
    return times, [_attention_bytes(state) for state in states], torch.get_num_threads()


def _step(state: RankState, batch: Batch) -> None:
    """Run a whole step, which ends with the last rank's."""
    train_step(state.model, state.optimizer, batch, meter=NoMeter())
    dist.barrier()


def _attention_bytes(state: RankState) -> int:
    module: Any = state.model.model.layers[0].self_attn
    shape = (1, state.job.tokens // dist.get_world_size())
    x = torch.zeros(*shape, module.config.hidden_size, device=state.device, requires_grad=True)
    tables = tuple(torch.zeros(*shape, module.head_dim, device=state.device) for _ in range(2))
    parameters = list(module.parameters())
    meter = Meter()
    with meter.measure(module), meter.phase("attention"):
        y, _ = module(hidden_states=x, position_embeddings=tables, attention_mask=None)
        # The layer adds the residual to y and frees y, so in backward only the gradient of y exists.
        edge, dy = get_gradient_edge(y), torch.zeros_like(y)
        del y
        torch.autograd.grad(edge, [x, *parameters], dy)
    not_counted: int = sum(t.nbytes for t in (*parameters, *tables))
    return meter.timeline().device_peak - not_counted
