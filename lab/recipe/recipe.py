"""A recipe says which techniques a training step stacks; its rules are checked before a launch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from lab.errors import RecipeError
from lab.recipe.knobs import (
    COUNT,
    COUNT_OR_NONE,
    STREAMED_TILE,
    TILE,
    YES_OR_NO,
    Backend,
    Compiled,
    KernelName,
    Knob,
    LossKernel,
    Offload,
    Optimizer,
    RingExchange,
    knob,
    named,
)
from lab.shape import Shape
from lab.techniques.limits import query_limit_refusal
from lab.techniques.ulysses_degrees import check_degree, check_ring
from lab.techniques.unsupported import instead_of
from lab.techniques.upipe.schedule import schedule
from lab.units import parse_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which techniques a step uses. ``Recipe()`` is the plain model: replicated, everything kept."""

    fsdp: bool = knob(
        rung="fsdp",
        **YES_OR_NO,
        sets="sharding of parameters, gradients and optimizer state",
    )
    replicas: int = knob(
        rung="fsdp",
        **COUNT | {"searched": False},
        values="it divides the ranks, and C x R divides the ranks of a replica",
        sets="the groups of ranks that hold all shards each (HSDP); gradients are summed in a group, then "
        "between groups",
        tried=({}, {"fsdp": True, "replicas": 2}),
    )
    ulysses: int = knob(
        rung="ulysses",
        **COUNT,
        values="C: it divides the query heads, and it divides the key/value heads or is a multiple of them",
        sets="the ranks that exchange sequence for heads in attention",
    )
    ring: int = knob(
        rung="ulysses",
        **COUNT,
        values="R: C x R divides the ranks",
        sets="zigzag ring attention, alone or with Ulysses; a sequence is sharded over C x R ranks",
        tried=(
            {},
            {"ulysses": 2},
            {"ulysses": 4},
            {"ring": 2},
            {"ulysses": 2, "ring": 2},
            {"ring": 4},
            {"ulysses": 2, "ring": 2, "ring_exchange": "gather"},
            {"ring": 4, "ring_exchange": "gather"},
        ),
    )
    ring_exchange: RingExchange = knob(
        rung="ulysses",
        **named(get_args(RingExchange)),
        sets="how the ranks of a ring exchange keys and values: sent around it in steps, or all gathered at "
        "once, which holds more and also takes windows and several documents in a row",
    )
    ulysses_backend: Backend = knob(
        rung="ulysses",
        **named(get_args(Backend)),
        sets="the exchange of Ulysses: this lab's, or DeepSpeed's as a reference",
    )
    head_chunk: int | None = knob(
        rung="upipe",
        **COUNT_OR_NONE,
        values="`none`, a multiple of C that divides the heads",
        sets="U, the query heads of one UPipe stage, summed over a Ulysses group",
        label="head chunk",
        cost="U, the query heads of a UPipe stage: fewer hold less and take more, smaller exchanges",
        turned=True,
    )
    overlap: bool = knob(
        rung="upipe",
        **YES_OR_NO,
        sets="whether the next UPipe stage is sent while the current one computes, in buffers of its own",
        tried=({}, {"overlap": True}),
    )
    attention_tile: int | None = knob(
        **STREAMED_TILE,
        sets="the tile of queries and of keys in attention's backward",
        tried=({}, {"attention_tile": 7}),
    )
    checkpoint: bool = knob(
        rung="checkpoint",
        **YES_OR_NO,
        sets="activation checkpointing of every layer",
        label="checkpoint",
        cost="Keep only each layer's input: every forward runs a second time in backward",
        searched=True,
        turned=True,
    )
    offload: Offload = knob(
        rung="offload",
        **named(get_args(Offload)),
        sets="what checkpointed layers keep on the host: nothing, their inputs, or also the results of "
        "attention",
        label="offload",
        cost="What waits in host memory, and crosses the host link twice: the inputs, or with them what "
        "attention made, which then runs once forward",
        searched=True,
        turned=True,
        tried=(
            {},
            {"checkpoint": True},
            {"checkpoint": True, "offload": "inputs"},
            {"checkpoint": True, "offload": "attention"},
        ),
    )
    mlp_tile: int | None = knob(
        **TILE,
        sets="the tile of the MLPs",
        label="MLP tile",
        cost="Tokens that an MLP sees at once: fewer hold less, in more and smaller matrices",
    )
    norm_tile: int | None = knob(
        **TILE,
        sets="the tile of the norms",
        label="norm tile",
        cost="Tokens that a norm sees at once",
        tried=({}, {"norm_tile": 8}),
    )
    loss_tile: int | None = knob(
        **TILE,
        sets="the tile of the head with its loss",
        label="loss tile",
        cost="Tokens whose logits are there at once",
        tried=({}, {"loss_tile": 9}),
    )
    stream: int | None = knob(
        **STREAMED_TILE,
        sets="the tile of a streamed layer, whose long tensors are on the host; `mlp_tile` is then `none`",
    )
    segment: int = knob(
        rung="streamed",
        **COUNT,
        values="layers",
        sets="the streamed layers of which one input is kept; the others are computed again in backward",
        tried=({}, {"mlp_tile": 5}, {"stream": 9}, {"stream": 6, "segment": 2}),
    )
    compile: Compiled = knob(
        rung="tiling",
        **named(get_args(Compiled)),
        sets="what `torch.compile` fuses: the tiled norms, or also the tiled MLPs; steps that count bytes "
        "run without it",
    )
    loss_kernel: LossKernel = knob(
        rung="plain",
        **named(get_args(LossKernel)),
        sets="the head with its loss by this lab, or by Liger Kernel on a GPU",
    )
    kernel: KernelName = knob(
        rung="plain",
        **named(get_args(KernelName)),
        sets="the attention kernel, which changes no planned bytes; `lab doctor` lists those of this machine",
    )
    compute_dtype: str | None = knob(
        rung="plain",
        **named((None, "float64", "float32", "bfloat16")),
        sets="the dtype that parameters are cast to for forward and backward",
        tried=({}, {"compute_dtype": "float32"}, {"compute_dtype": "bfloat16"}),
    )
    optimizer: Optimizer = knob(
        rung="fsdp",
        **named(get_args(Optimizer)),
        sets="where sharded parameters, their gradients and optimizer state are; on the host, the CPU steps",
        searched=True,
        tried=({}, {"fsdp": True}, {"fsdp": True, "optimizer": "host"}),
    )

    def __post_init__(self) -> None:
        for row in KNOBS:
            row.check(getattr(self, row.name))
        if self.replicas > 1 and not self.fsdp:
            raise RecipeError(
                f"replicas={self.replicas} without fsdp: every rank is a replica then; set fsdp=True with "
                "it, or replicas=1"
            )
        if self.optimizer == "host" and not self.fsdp:
            raise RecipeError(
                "optimizer='host' without fsdp: every rank would keep 16 bytes per parameter on the host, "
                "and not its shard; set fsdp=True with it, or optimizer='device'"
            )
        if self.offload != "none" and not self.checkpoint:
            raise RecipeError(
                f"offload={self.offload!r} without checkpointing: a layer would keep all its activations, "
                "not its input alone; set checkpoint=True with it, or offload='none'"
            )
        if self.overlap and self.head_chunk is None:
            raise RecipeError(
                "overlap=True without UPipe: there is no next stage whose exchange could go meanwhile; "
                "set head_chunk with it, or overlap=False"
            )
        if self.compile != "none" and (
            self.norm_tile is None or not (self.mlp_tile or self.compile == "norms")
        ):
            raise RecipeError(
                f"compile={self.compile!r} with norm_tile={self.norm_tile}, mlp_tile={self.mlp_tile}: it is "
                "for what runs in tiles; set the tiles with it, or compile='none'"
            )
        if self.stream is not None:
            self._check_stream()
        elif self.segment > 1:
            raise RecipeError(
                f"segment={self.segment} without streamed layers: only they run a segment again; set stream "
                "with it, or segment=1"
            )
        if self.loss_kernel == "liger" and self.loss_tile is not None:
            raise RecipeError(
                f"loss_kernel='liger' with loss_tile={self.loss_tile}: Liger cuts the tokens itself; "
                "set loss_tile=None, or loss_kernel='lab'"
            )
        if self.ring_exchange == "gather" and self.ring == 1:
            raise RecipeError(
                "ring_exchange='gather' with ring=1: no other rank has keys that could be gathered; set ring "
                "with it, or ring_exchange='send'"
            )
        if self.ulysses_backend == "deepspeed" and (self.head_chunk or self.ring > 1):
            raise RecipeError(
                f"ulysses_backend='deepspeed' with head_chunk={self.head_chunk}, ring={self.ring}: "
                "DeepSpeed's exchange knows neither; set head_chunk=None and ring=1, or ulysses_backend='lab'"
            )

    def _check_stream(self) -> None:
        """Refuse what streamed layers do not do, or do in another way."""
        if not self.checkpoint or self.offload == "none":
            raise RecipeError(
                f"stream={self.stream} with checkpoint={self.checkpoint}, offload={self.offload!r}: a "
                "streamed layer keeps its input on the host and is computed again; set checkpoint=True and "
                "offload='inputs' or 'attention' with it, or stream=None"
            )
        if self.mlp_tile is not None:
            raise RecipeError(
                f"stream={self.stream} with mlp_tile={self.mlp_tile}: the tile of a streamed layer is also "
                "that of its MLP; set mlp_tile=None, or stream=None"
            )
        for name, works in (("ulysses_backend", "lab"), ("compile", "none"), ("loss_kernel", "lab")):
            if getattr(self, name) != works:
                raise RecipeError(
                    f"stream={self.stream} with {name}={getattr(self, name)!r}: the two are not proved "
                    f"together; set {name}={works!r}, or stream=None"
                )

    def check(self, model: PretrainedConfig | Shape, ranks: int) -> None:
        """Refuse what this recipe cannot do right with a model on ``ranks`` ranks.

        Args:
            model: The model's config, or the shape that ``lab.models.shape_of`` returned for it.
            ranks: The ranks of the process group.

        Raises:
            ModelError: a family or a config that the lab does not compute right, see ``check_config``.
            RecipeError: degrees or replicas that the heads or the ranks forbid, a ring that sends with
                windows, a head_chunk that does not divide, a rope type without exact angles. The message
                holds the rule and the values that would work.
        """
        # Imported late, because it imports torch and transformers.
        if not isinstance(model, Shape):
            from lab.models import shape_of

            model = shape_of(model)
        heads, kv_heads = model.H, model.K
        check_degree(heads, kv_heads, self.ulysses)
        if ranks % (self.ulysses * self.ring):
            works = [d for d in range(1, ranks + 1) if ranks % d == 0]
            raise RecipeError(
                f"ulysses={self.ulysses} x ring={self.ring} on {ranks} ranks: their product must divide the "
                f"ranks; these products work: {', '.join(map(str, works))}"
            )
        if ranks % (self.ulysses * self.ring * self.replicas):
            groups = ranks // (self.ulysses * self.ring)
            works = [d for d in range(1, groups + 1) if groups % d == 0]
            raise RecipeError(
                f"replicas={self.replicas} with ulysses={self.ulysses}, ring={self.ring} on {ranks} ranks: "
                "ranks that share a sequence are in one replica; these work: "
                f"{', '.join(map(str, works))}"
            )
        check_ring(model, self.ring, self.ring_exchange)
        if self.head_chunk is not None:
            schedule(heads, kv_heads, self.ulysses, self.head_chunk)

    @property
    def summary(self) -> str:
        """The knobs that are not at their default, in one line; three equal tiles are one entry."""
        knobs = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        tiles = {name: knobs[name] for name in ("mlp_tile", "norm_tile", "loss_tile") if name in knobs}
        if len(tiles) == 3 and len(set(tiles.values())) == 1:
            knobs = {name: value for name, value in knobs.items() if name not in tiles}
            knobs["tiles"] = tiles["mlp_tile"]
        return (
            " ".join(name if value is True else f"{name}={value}" for name, value in knobs.items()) or "plain"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any] | str) -> Recipe:
        """Read what ``to_json`` wrote, as a dict or as its text.

        Raises:
            RecipeError: a field no recipe has, or a value it cannot take.
        """
        knobs = json.loads(document) if isinstance(document, str) else document
        check_fields(knobs)
        return cls(**knobs)


KNOBS: tuple[Knob, ...] = tuple(replace(one.metadata["knob"], name=one.name) for one in fields(Recipe))
"""One row for each field of ``Recipe``, in the order of its fields."""

BY_NAME: Mapping[str, Knob] = {row.name: row for row in KNOBS}

_attributes = "\n".join(f"        {row.name}: {row.sets}." for row in KNOBS)
Recipe.__doc__ = f"{Recipe.__doc__}\n\n    Attributes:\n{_attributes}\n    "


def check_fields(names: Any) -> None:
    """Refuse names that are no field of a recipe.

    Raises:
        RecipeError: the first such name, and all that are fields.
    """
    for name in names:
        if name not in BY_NAME:
            known = instead_of(name) or f": its fields are {', '.join(BY_NAME)}"
            raise RecipeError(f"a recipe has no field {name!r}{known}")


def parse_knobs(settings: Iterable[str]) -> dict[str, Any]:
    """Read knobs as they are written on a command line: ``head_chunk=16``, ``mlp_tile=none``.

    Raises:
        RecipeError: not ``name=value``, or a name that is no field.
    """
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    knobs: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"{setting!r} sets no knob: write name=value, for instance head_chunk=16")
        check_fields([name])
        # "none" is a value of some knobs, such as offload; for the others it means that they have no value.
        if value not in BY_NAME[name].choices and value.lower() in words:
            knobs[name] = words[value.lower()]
        else:
            # A plain number is judged by the knob's own rule, whose message names the knob.
            number = int(value) if re.fullmatch(r"[0-9]{1,400}", value) else value
            knobs[name] = parse_tokens(value) if re.fullmatch(r"[0-9]+[KM]", value) else number
    return knobs


def torch_refusal(recipe: Recipe, shape: Shape, tokens: int, longest: int | None = None) -> str | None:
    """Return why torch's CUDA kernel refuses a step of so many tokens; None where it takes the step.

    ``longest`` are those of the longest document, if rows have several.
    """
    heads = (recipe.head_chunk or shape.H) // recipe.ulysses
    # A gather has the queries of one of its two pieces in a call.
    parts = recipe.ring * (2 if recipe.ring_exchange == "gather" else 1)
    return query_limit_refusal(min(-(-tokens // parts), longest or tokens), heads, shape.D)
