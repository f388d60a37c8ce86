"""What others train with and the lab does not have, and what to use instead. It imports no torch.

The table of ``lab/techniques/README.md`` is made from these rows.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Unsupported(NamedTuple):
    """A technique that the lab does not have.

    Attributes:
        name: Its name in a sentence.
        instead: What to use instead.
        words: What it is called where it is asked for, in small letters and digits.
    """

    name: str
    instead: str
    words: tuple[str, ...]


UNSUPPORTED = (
    Unsupported(
        "ZeRO-1 and ZeRO-2",
        "`fsdp=true`, which is ZeRO-3 and holds less; with `replicas`, a layer is gathered within a replica",
        ("zero", "zero1", "zero2", "reshardafterforward", "distributedoptimizer"),
    ),
    Unsupported(
        "tensor parallelism",
        "`fsdp=true` for the parameters, `ulysses` and `head_chunk` for attention, `mlp_tile` for the MLPs",
        ("tp", "tensorparallel", "tensormodelparallel"),
    ),
    Unsupported(
        "pipeline parallelism",
        "`fsdp=true`, with `replicas` where gathers between nodes take too long",
        ("pp", "pipelineparallel", "pipelinemodelparallel"),
    ),
    Unsupported(
        "expert parallelism",
        "`fsdp=true`, which shards the experts too",
        ("ep", "expertparallel", "expertmodelparallel"),
    ),
    Unsupported(
        "float8",
        "`compute_dtype=bfloat16`",
        ("float8", "fp8", "float8e4m3fn", "float8e5m2", "mxfp8", "nvfp4"),
    ),
    Unsupported(
        "4-bit and 8-bit weights",
        "weights in bfloat16 with adapters (`--dtype bfloat16 --lora r=16,dtype=bfloat16`), and `fsdp=true`",
        (
            "4bit",
            "int4",
            "nf4",
            "fp4",
            "int8",
            "loadin4bit",
            "loadin8bit",
            "qlora",
            "quantize",
            "quantization",
        ),
    ),
    Unsupported(
        "8-bit AdamW",
        "`optimizer=host`, or state in bfloat16 (`--dtype bfloat16`)",
        ("8bit", "adam8bit", "adamw8bit", "pagedadamw8bit", "optimizerstate"),
    ),
    Unsupported(
        "torch.compile of the whole model",
        "`compile=tiles`",
        ("torchcompile", "compilemodel"),
    ),
    Unsupported(
        "FPDT", "the recipe `streamed` or `long`, whose layers have their long tensors on the host", ("fpdt",)
    ),
    Unsupported(
        "selective checkpointing",
        "`checkpoint=true` with `offload=attention`, which runs attention's forward once",
        ("selective", "sac", "selectiveac", "selectivecheckpoint", "selectivecheckpointing"),
    ),
    Unsupported(
        "an optimizer step in backward",
        "`fsdp=true` on more ranks, or `optimizer=host`",
        ("inbackward", "optimizerinbackward", "optimizerinbwd"),
    ),
)


def instead_of(asked: object) -> str:
    """Return the end of a message that refuses something: what to use instead; empty for other names.

    Args:
        asked: The name, such as ``tp``, ``tensor_parallel_size`` or ``float8_e4m3fn``.
    """
    word = re.sub("[^a-z0-9]", "", str(asked).lower())
    plain = re.sub("(size|degree|stage|optimization)$", "", word)
    for row in UNSUPPORTED:
        if word in row.words or plain in row.words:
            return f"; the lab has no {row.name.replace(' and ', ' or ')}: use {row.instead.replace('`', '')}"
    return ""
