"""The step of a whole model on fake tensors, from that of a few of its layers where they repeat."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lab import decoder, models
from lab.planning.answers import Answer, Facts
from lab.planning.extrapolation import depths_to_walk, extrapolate
from lab.planning.fake_step import fake_step
from lab.planning.micro_batches import WALKED, with_micro_batches
from lab.planning.scaling import Step
from lab.planning.start import adam_bytes, start_of
from lab.recipe.jobs import Job
from lab.shape import Shape
from lab.step.kernel_limits import attention_dtype
from lab.step.one_rank import ring_ranks
from lab.techniques.document_lengths import last_longer
from lab.techniques.ring import row_padding
from lab.torch_private import PlanningMode


def walk(job: Job, *, workspace: bool) -> Answer:
    """Return the steps of a job, at each of the ring ranks of which one holds the most device bytes."""
    skeleton = fake_model(job)
    shape, lengths = decoder.shape_of(skeleton.config), map(len, skeleton.parameters())
    padding = row_padding(job.tokens, job.recipe.ulysses, job.recipe.ring)
    documents = None if job.documents is None else last_longer((job.documents,), padding)[0]
    ranks = tuple(ring_ranks(job.recipe, lengths, documents, shape.windows))
    facts = Facts(
        shape=shape,
        state=_state(job, skeleton),
        start=start_of(job, skeleton, workspace=workspace),
        adam=adam_bytes(job, skeleton),
        attention_dtype=_name(attention_dtype(job.recipe, skeleton.dtype)),
        ring_ranks=ranks,
    )
    with _without_collector():
        steps = (whole_step(job, skeleton, rank, workspace=workspace) for rank in ranks)
        return Answer(facts, tuple(steps))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let Python's garbage collector rest, which takes a fourth of the time of a plan.

    It frees reference cycles, and whether and when depends on all that the process holds.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def shape_of_model(model: models.ModelLike, dtype: str | None = None) -> Shape:
    """Return the shape of a config, or of the model that a callable makes without a byte of its parameters.

    Raises:
        LabError: See ``lab.models.shape_of``.
    """
    if callable(model) and not isinstance(model, PretrainedConfig) and dtype is None:
        with PlanningMode(allow_non_fake_inputs=True):
            return models.shape_of(models.build(model).config)
    return models.shape_of(model, dtype)


def fake_model(job: Job) -> PreTrainedModel:
    """The job's model, with its adapters, without a byte of its parameters."""
    with PlanningMode(allow_non_fake_inputs=True):
        return models.build(job.model, dtype=job.dtype, lora=job.lora, weights=False)


def _state(job: Job, skeleton: PreTrainedModel) -> str:
    """The dtypes of the parameters and of what training adds to them, and where they come from."""
    trained, frozen = (
        " and ".join(sorted({_name(p.dtype) for p in skeleton.parameters() if p.requires_grad is kind}))
        for kind in (True, False)
    )
    held = f"{trained} parameters, gradients and optimizer state"
    if frozen:
        held = f"{frozen} frozen parameters; {trained} trained ones, gradients and optimizer state"
    dequantized = ", as if dequantized" if job.dequantized else ""
    return f"{held} ({models.dtype_source(job.model, job.dtype)}{dequantized})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole_step(job: Job, skeleton: PreTrainedModel, ring_rank: int, *, workspace: bool) -> Step:
    """Return the step of the whole model, as the first rank of ``ring_rank``; ``skeleton`` is the model."""
    if job.accumulate > WALKED:
        few = whole_step(replace(job, accumulate=WALKED), skeleton, ring_rank, workspace=workspace)
        step = with_micro_batches(few, job.accumulate)
        if step is not None:
            return step
    layers: nn.ModuleList = skeleton.model.layers
    alike = len({tuple(_shapes(layer)) for layer in layers}) == 1
    step = None
    if alike:
        step = _extrapolated(job, decoder.kinds_of(skeleton), ring_rank, workspace=workspace)
    return step or fake_step(job, len(layers), workspace=workspace, ring_rank=ring_rank)


def _extrapolated(job: Job, kinds: Sequence[Hashable], ring_rank: int, *, workspace: bool) -> Step | None:
    """The step of layers of these kinds, from those of fewer layers; None if it cannot be had so."""
    segment, layers = job.recipe.segment, len(kinds)
    depths = depths_to_walk(kinds, segment)
    if layers <= depths.shallow + depths.deep:
        return None
    # A layer that is a segment for itself at the end keeps its input, as without segments.
    of_few = replace(job, recipe=replace(job.recipe, segment=1)) if layers % segment == 1 else job
    shallow = fake_step(of_few, depths.shallow, workspace=workspace, ring_rank=ring_rank)
    deep = fake_step(job, depths.deep, workspace=workspace, ring_rank=ring_rank)
    return extrapolate(shallow, deep, depths)


def _shapes(module: nn.Module) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    return ((name, p.shape, p.dtype) for name, p in module.named_parameters())
