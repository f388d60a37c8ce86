"""What would hold less: the knob for each tensor that is held at an instant."""

from __future__ import annotations

import re
from math import prod

import torch

from lab.errors import ResultError
from lab.memory.holders import Holder, Holders
from lab.memory.storages import TensorKind
from lab.memory.timeline import Timeline
from lab.recipe.jobs import Job
from lab.recipe.ladder import OTHER_RECIPES
from lab.recipe.recipe import Recipe

_IN_LAYER = re.compile(r"layers\.\d+(?:\.(?P<part>\w+))?")


def with_job(holders: Holders, timeline: Timeline, job: Job) -> Holders:
    """Return holders with their bytes in units of A, and with the knob that would shrink each.

    Args:
        holders: What is held at an instant of the timeline.
        timeline: A timeline of the job.
        job: The job.

    Raises:
        ResultError: The timeline has no embedding.
    """
    unit = hidden_state_bytes(timeline, job)
    return holders.with_knobs(unit, lambda holder: knob_for(holder, job))


def hidden_state_bytes(timeline: Timeline, job: Job) -> int:
    """Return A, the bytes of one hidden state of the rank: b x s x E elements as computed with.

    Raises:
        ResultError: The timeline has no embedding, as one without storages.
    """
    b, s = job.local_sizes
    embedding = _embedding(timeline)
    width: int = getattr(torch, job.recipe.compute_dtype or embedding.dtype).itemsize
    return b * s * embedding.shape[-1] * width


def knob_for(holder: Holder, job: Job) -> str:
    """Return the setting of a job's recipe that would remove a tensor or shrink it; empty if none would.

    Args:
        holder: The tensor.
        job: The job that holds it.
    """
    recipe, (b, s) = job.recipe, job.local_sizes
    if holder.category in ("parameters", "gradients", "optimizer"):
        # One rank alone has nothing to share.
        alone = "" if job.ranks > 1 else " on more ranks"
        # FSDP gathers parameters, and backward makes gradients, that are whole on any number of ranks.
        gathered = holder.category == "parameters" and holder.phase != "start"
        if gathered or (recipe.fsdp and holder.category == "gradients" and holder.op != "aten.empty"):
            return ""
        sharded = "more ranks" if recipe.replicas == 1 else "fewer replicas"
        return sharded if recipe.fsdp else f"fsdp=true{alone}"
    # Where ranks are data parallel, a sequence can be sharded over more of them.
    shards = recipe.ulysses * recipe.ring
    fewer_tokens = "more ranks" if shards >= job.ranks else "a larger ulysses or ring"
    # What has no axis of the rank's tokens, as the sum of a weight's gradients has none, stays as it is.
    if holder.category != "host" and prod(holder.shape[: 1 if len(holder.shape) == 2 else None]) % (b * s):
        fewer_tokens = ""
    if holder.category == "host" and (holder.name or holder.op == "lab.to_host_whole"):
        return "more ranks"
    place = _IN_LAYER.search(holder.module)
    if recipe.stream and (place or holder.category == "host"):
        return (
            _of_streamed_layer(holder, recipe, (place["part"] if place else None) or "", b, s) or fewer_tokens
        )
    if holder.category == "host":
        attended = recipe.offload == "attention" and "attn" in holder.module
        return "offload='inputs'" if attended else fewer_tokens
    if place and holder.category == "activations" and not recipe.checkpoint:
        return "checkpoint=true"
    if place and holder.category == "activations" and recipe.offload == "none" and not place["part"]:
        return "offload='inputs'"
    # The loss is computed outside of all modules, from what the head returned.
    outside = holder.module or ("loss" if holder.phase in ("forward", "backward") else "")
    part = (place["part"] or "") if place else outside
    if part == "self_attn":
        return _smaller("head_chunk", recipe.head_chunk, recipe.ulysses) or fewer_tokens
    for knob, names in (("mlp_tile", ("mlp",)), ("norm_tile", ("norm",)), ("loss_tile", ("lm_head", "loss"))):
        if any(name in part for name in names):
            tile = getattr(recipe, knob)
            of_tile = tile is None or tile >= s or _is_of_tile(holder, b, s, tile)
            return (_smaller(knob, tile, 1) if of_tile else "") or fewer_tokens
    return fewer_tokens


def _of_streamed_layer(holder: Holder, recipe: Recipe, part: str, b: int, s: int) -> str:
    """Return the setting for a tensor of a streamed layer, or for one on the host; nothing if there is none.

    Its modules see tiles; outside of them are the stages of attention, and the buffers for tiles.
    """
    if holder.category == "host":
        if recipe.offload == "attention":
            return "offload='inputs'"
        return "a larger segment" if recipe.segment < OTHER_RECIPES["long"][1]["segment"] else ""
    assert recipe.stream is not None
    buffer = holder.category == "activations" and len(holder.shape) == 1
    if part or buffer or _is_of_tile(holder, b, s, recipe.stream):
        return _smaller("stream", min(recipe.stream, s), 1)
    return _smaller("head_chunk", recipe.head_chunk, recipe.ulysses)


def _is_of_tile(holder: Holder, b: int, s: int, tile: int) -> bool:
    """Return whether a tensor has at most the tokens of a tile, and not all those of the rank."""
    # The last axis is that of the features, where a tensor has features.
    leading = prod(holder.shape[:-1])
    tokens = leading if leading > b else prod(holder.shape)
    return tokens <= b * tile and tokens < b * s


def _smaller(knob: str, value: int | None, least: int) -> str:
    """Return how a tile or a chunk becomes smaller; nothing for one that is the smallest."""
    if value is None:
        return f"set {knob}"
    return f"a smaller {knob}" if value > least else ""


def _embedding(timeline: Timeline) -> TensorKind:
    """The rank's rows of the embedding, of E columns each; a recipe may compute in its dtype."""
    for kind in timeline.storages.kinds:
        if kind.name.endswith("embed_tokens.weight") and len(kind.shape) == 2:
            return kind
    raise ResultError("this timeline has no embedding, whose columns give the size of a hidden state")
