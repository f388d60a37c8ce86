"""Our Ulysses and our UPipe over DeepSpeed's Ulysses, on the same model and tokens: seconds and bytes."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from transformers import LlamaConfig

from cluster.live import publish
from cluster.ranks import Cluster
from lab.bench.table import Row, Say
from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.recipe.jobs import Job, TrainSettings, make_job
from lab.recipe.recipe import Recipe
from lab.step.on_ranks import RankState, make_rank_state
from lab.step.training_step import NoMeter, train_step

REPEATS = 9
TOKENS = 8192
"""A core is busy with them for about a second, whatever the ranks. Of two ranks' step attention is as much as
of Llama3-8B's at 128K tokens: S/E is 32 in both."""


def measure_upipe_vs_deepspeed(say: Say) -> list[Row]:
    """``race`` of as many ranks as this process may use cores, at least two."""
    with Cluster(ranks=max(2, len(os.sched_getaffinity(0)))) as cluster:
        return race(cluster, say)


def race(
    cluster: Cluster, say: Say, *, tokens: int = TOKENS, head_dim: int = 16, repeats: int = REPEATS
) -> list[Row]:
    """One row an attention: median seconds of a step, peak bytes of attention, and both over DeepSpeed's.

    All ranks are one Ulysses group of degree C; the model has one layer, H = 8C and G = 4, in fp32; nothing
    is checkpointed or sharded, for anyone. A round is one whole step (forward, backward, optimizer) of each:
    all ranks begin it together, and it ends with the last of them. A ratio is the median of the rounds'
    ratios, so that a machine that slows down slows both.

    Attention's bytes are what the meter counts while the layer's attention module alone runs forward and
    backward: its input x and the gradient dy from above, A = w*s*E bytes each and the same for everyone; its
    output, until the layer takes it; all that it makes and keeps, to the gradients of x and of its weights.
    The weights and the rotary tables are not counted.

    Raises:
        RecipeError: DeepSpeed is missing, or its communication operator cannot be compiled here.
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
    measured = cluster.apply(_race, jobs, repeats, on_record=lambda _, record: say(str(record)))[0]
    if isinstance(measured, str):
        raise RecipeError(f"no race without DeepSpeed's Ulysses: {measured.partition('; ')[0]}")
    rounds, peaks, threads = measured
    return [
        {
            "attention": name,
            "ranks": degree,
            "threads": threads,
            "tokens": tokens,
            "seconds": median(seconds[i] for seconds in rounds),
            "bytes": peaks[i],
            "seconds / DeepSpeed's": median(seconds[i] / seconds[0] for seconds in rounds),
            "bytes / DeepSpeed's": peaks[i] / peaks[0],
        }
        for i, name in enumerate(recipes)
    ]


def _race(jobs: list[Job], repeats: int) -> tuple[list[list[float]], list[int], int] | str:
    """On each rank: seconds by round and attention, bytes by attention, threads; or why not."""
    try:
        states = [make_rank_state(job, TrainSettings(steps=1)) for job in jobs]
    except RecipeError as error:
        return str(error)
    for each in states:
        _seconds_of_a_step(each)
    rounds = []
    for number in range(1, repeats + 1):
        if dist.get_rank() == 0:
            publish(f"round {number} of {repeats}")
        rounds.append([_seconds_of_a_step(each) for each in states])
    return rounds, [_bytes_of_attention(each) for each in states], torch.get_num_threads()


def _seconds_of_a_step(state: RankState) -> float:
    batch = state.batch(0)
    dist.barrier()
    start = time.perf_counter()
    train_step(state.model, state.optimizer, batch, meter=NoMeter())
    dist.barrier()
    return time.perf_counter() - start


def _bytes_of_attention(state: RankState) -> int:
    module: Any = state.model.model.layers[0].self_attn
    shape = (1, state.job.tokens // dist.get_world_size())
    x = torch.zeros(*shape, module.config.hidden_size, device=state.device, requires_grad=True)
    tables = tuple(torch.zeros(*shape, module.head_dim, device=state.device) for _ in range(2))
    parameters = list(module.parameters())
    meter = Meter()
    with meter.measure(module), meter.phase("attention"):
        y, _ = module(hidden_states=x, position_embeddings=tables, attention_mask=None)
        # The layer adds its residual to y and lets go of it: backward has its gradient alone.
        edge, dy = get_gradient_edge(y), torch.zeros_like(y)
        del y
        torch.autograd.grad(edge, [x, *parameters], dy)
    given: int = sum(t.nbytes for t in (*parameters, *tables))
    return meter.timeline().device_peak - given
