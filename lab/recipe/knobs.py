"""The knobs of a recipe, one row each: its values, the rung that introduces it, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lab.errors import RecipeError
from lab.units import abbreviate, check_counts

Backend = Literal["lab", "deepspeed"]
Offload = Literal["none", "inputs", "attention"]
Compiled = Literal["none", "norms", "tiles"]
LossKernel = Literal["lab", "liger"]
Optimizer = Literal["device", "host"]
KernelName = Literal["auto", "torch", "cudnn", "flash-attn-2", "flash-attn-3", "flash-attn-4"]


@dataclass(frozen=True)
class Knob:
    """One field of a recipe, as data.

    Attributes:
        name: the field of ``Recipe``.
        rung: the rung of the ladder that introduces it.
        neutral: the value that changes nothing, which is the field's default.
        choices: all values that it takes; for a count, those that it takes in addition to counts.
        count: whether it takes integers from 1 on.
        values: its values in words, with the rule between them and the model.
        sets: what it sets, in words.
        label: its name next to a slider.
        cost: what less of it, or more, costs; in a line.
        searched: whether ``lab.fit`` tries its values.
        turned: whether the tuner has a control for it.
    """

    name: str
    rung: str
    neutral: Any
    values: str
    sets: str
    choices: tuple[Any, ...] = ()
    count: bool = False
    label: str = ""
    cost: str = ""
    searched: bool = False
    turned: bool = False

    def check(self, value: object) -> None:
        """Check a single value; rules between two knobs are in ``Recipe``.

        Raises:
            RecipeError: the knob does not take it; the message names the values that it takes.
        """
        # 1 == True, but a knob that says 1 where a yes or no is wanted means something else.
        if any(value is choice or (isinstance(choice, str) and value == choice) for choice in self.choices):
            return
        if self.count:
            check_counts({self.name: value}, RecipeError, or_none=None in self.choices)
            return
        allowed = " or ".join(repr(choice) for choice in self.choices)
        raise RecipeError(f"{self.name}={abbreviate(repr(value))}: it takes {allowed}")


YES_OR_NO: dict[str, Any] = {"choices": (True, False), "values": "`true`, `false`"}
TILE: dict[str, Any] = {
    "rung": "tiling",
    "neutral": None,
    "choices": (None,),
    "count": True,
    "values": "`none`, a number of tokens",
    "searched": True,
    "turned": True,
}


def _named(choices: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "choices": choices,
        "values": ", ".join("`none`" if choice is None else f"`{choice}`" for choice in choices),
    }


KNOBS: tuple[Knob, ...] = (
    Knob(
        "fsdp",
        rung="fsdp",
        neutral=False,
        **YES_OR_NO,
        sets="sharding of parameters, gradients and optimizer state",
    ),
    Knob(
        "ulysses",
        rung="ulysses",
        neutral=1,
        count=True,
        values="C: it divides the query heads, and it divides the key/value heads or is a multiple of them",
        searched=True,
        sets="the ranks that exchange sequence for heads in attention",
    ),
    Knob(
        "ring",
        rung="ulysses",
        neutral=1,
        count=True,
        values="R: C x R divides the ranks",
        searched=True,
        sets="zigzag ring attention, alone or with Ulysses; a sequence is sharded over C x R ranks",
    ),
    Knob(
        "ulysses_backend",
        rung="ulysses",
        neutral="lab",
        **_named(get_args(Backend)),
        sets="the exchange of Ulysses: this lab's, or DeepSpeed's as a reference",
    ),
    Knob(
        "head_chunk",
        rung="upipe",
        neutral=None,
        choices=(None,),
        count=True,
        values="`none`, a multiple of C that divides the heads",
        sets="the query heads of one UPipe stage, summed over a Ulysses group",
        label="head chunk",
        cost="U, the query heads of a UPipe stage: fewer hold less and take more, smaller exchanges",
        searched=True,
        turned=True,
    ),
    Knob(
        "overlap",
        rung="upipe",
        neutral=False,
        **YES_OR_NO,
        sets="whether the next UPipe stage is sent while the current one computes, in buffers of its own",
    ),
    Knob(
        "attention_tile",
        rung="streamed",
        neutral=None,
        choices=(None,),
        count=True,
        values="`none`, a number of tokens",
        sets="the tile of queries and of keys in attention's backward",
        label="attention tile",
        cost="Tokens of queries and of keys that attention's backward sees at once: fewer hold less, in more "
        "and shorter calls of the kernel",
        searched=True,
    ),
    Knob(
        "checkpoint",
        rung="checkpoint",
        neutral=False,
        **YES_OR_NO,
        sets="activation checkpointing of every layer",
        label="checkpoint",
        cost="Keep only each layer's input: every forward runs a second time in backward",
        searched=True,
        turned=True,
    ),
    Knob(
        "offload",
        rung="offload",
        neutral="none",
        **_named(get_args(Offload)),
        sets="what checkpointed layers keep on the host: nothing, their inputs, or also the results of "
        "attention",
        label="offload",
        cost="What waits in host memory, and crosses the host link twice: the inputs, or with them what "
        "attention made, which then runs once forward",
        searched=True,
        turned=True,
    ),
    Knob(
        "mlp_tile",
        **TILE,
        sets="the tile of the MLPs",
        label="MLP tile",
        cost="Tokens that an MLP sees at once: fewer hold less, in more and smaller matrices",
    ),
    Knob(
        "norm_tile",
        **TILE,
        sets="the tile of the norms",
        label="norm tile",
        cost="Tokens that a norm sees at once",
    ),
    Knob(
        "loss_tile",
        **TILE,
        sets="the tile of the head with its loss",
        label="loss tile",
        cost="Tokens whose logits are there at once",
    ),
    Knob(
        "stream",
        **{**TILE, "rung": "streamed", "turned": False},
        sets="the tile of a streamed layer, whose long tensors are on the host; `mlp_tile` is then `none`",
        label="layer tile",
        cost="Tokens of a tile in which a whole layer runs, its long tensors on the host",
    ),
    Knob(
        "segment",
        rung="streamed",
        neutral=1,
        count=True,
        values="layers",
        sets="the streamed layers of which one input is kept; the others are computed again in backward",
        label="segment",
        cost="The layers of which one input is kept: more hold less on the host, and run forward again",
        searched=True,
    ),
    Knob(
        "compile",
        rung="tiling",
        neutral="none",
        **_named(get_args(Compiled)),
        sets="what `torch.compile` fuses: the tiled norms, or also the tiled MLPs; steps that count bytes "
        "run without it",
    ),
    Knob(
        "loss_kernel",
        rung="plain",
        neutral="lab",
        **_named(get_args(LossKernel)),
        sets="the head with its loss by this lab, or by Liger Kernel on a GPU",
    ),
    Knob(
        "kernel",
        rung="plain",
        neutral="auto",
        **_named(get_args(KernelName)),
        sets="the attention kernel; `lab doctor` lists those of this machine",
    ),
    Knob(
        "compute_dtype",
        rung="plain",
        neutral=None,
        **_named((None, "float64", "float32", "bfloat16")),
        sets="the dtype that parameters are cast to for forward and backward",
    ),
    Knob(
        "optimizer",
        rung="fsdp",
        neutral="device",
        **_named(get_args(Optimizer)),
        sets="where sharded parameters, their gradients and optimizer state are; on the host, the CPU steps",
        label="optimizer",
        cost="Where sharded parameters, gradients and Adam's state are: on the host they cross the host link "
        "each step, and the CPU steps",
        searched=True,
    ),
)
"""One row for each field of ``Recipe``, in the order of its fields."""

BY_NAME: Mapping[str, Knob] = {knob.name: knob for knob in KNOBS}
