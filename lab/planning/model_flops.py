"""The operations that a model needs for a step, and the share of the GPUs' peak that they are: MFU."""

from __future__ import annotations

from lab.recipe.jobs import Job
from lab.shape import Shape

PASSES = 3
"""A matrix product of forward has two of the same size in backward: for its input, and for its weight."""

MFU_LEGEND = (
    "MFU = operations of the model / (seconds x ranks x the GPU's peak in dense bf16);\nattention counts the "
    "causal half of the scores, and nothing counts twice because it is computed again"
)


def model_flops(shape: Shape, job: Job) -> int:
    """Return the floating-point operations that a step of all ranks needs, whatever the recipe.

    A multiplication and an addition are two. Only matrix products are counted: those with weights, and in
    attention those of the queries and keys that see each other: half of the square of a document's tokens,
    or a window's share of it. Backward has twice those of forward. What is computed again is not counted:
    neither the forward of checkpointing nor the scores in flash attention's backward.

    With adapters, backward has no product for the frozen weights' gradients.
    """
    tokens = job.step_rows * job.tokens
    documents = job.documents or (job.tokens,)
    attention = job.step_rows * sum(_attention(shape, length) for length in documents)
    weights = sum(_matrices(shape, sparse=sparse) for sparse in shape.sparse) + shape.E * shape.V
    if job.lora is None:
        return PASSES * (2 * weights * tokens + attention)
    sizes = [shape.projections[name] for name in job.lora.targets_in(shape)]
    adapters = shape.L * job.lora.r * sum(map(sum, sizes))
    return (PASSES - 1) * 2 * weights * tokens + PASSES * (2 * adapters * tokens + attention)


def _attention(shape: Shape, tokens: int) -> int:
    """Two products of queries and keys in the forward of all layers, for a document of so many tokens."""
    flops = 0
    for window in shape.windows:
        seen = min(window or tokens, tokens)
        # The first queries see all before them, half of seen x seen. The others see as many keys as a window.
        flops += 2 * shape.H * shape.D * seen * (2 * tokens - seen)
    return flops


def _matrices(shape: Shape, *, sparse: bool) -> int:
    """The weights of a layer's matrices that compute a token; biases and norms multiply no matrix."""
    attention = sum(inputs * outputs for inputs, outputs in shape.attention_projections.values())
    if not sparse:
        return attention + shape.matrices * shape.E * shape.I
    router, chosen = shape.experts, shape.experts_per_token
    return attention + shape.E * router + chosen * 3 * shape.E * shape.expert_width
