"""A recipe says which techniques a training step stacks; its rules are checked before a launch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from lab.errors import RecipeError
from lab.recipe.knobs import BY_NAME, KNOBS, Backend, Compiled, KernelName, LossKernel, Offload, Optimizer
from lab.shape import Shape
from lab.techniques.ulysses_degrees import check_degree, check_ring
from lab.techniques.upipe.schedule import schedule
from lab.units import parse_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which techniques a step uses. ``Recipe()`` is the plain model: replicated, everything kept.

    Attributes:
        fsdp: shard parameters, gradients and optimizer state over all ranks (FSDP2), per layer.
        ulysses: Ulysses degree C, the ranks over which a sequence is sharded outside attention and the heads
            are inside it.
        ring: ring degree R, the ranks round which keys and values travel; the sequence is sharded over C*R.
        ulysses_backend: this lab's exchange, or DeepSpeed's own.
        head_chunk: U, the query heads of a UPipe stage, summed over one Ulysses group; None for no UPipe.
        overlap: while a UPipe stage attends, what the next one needs travels, in buffers of its own; nothing
            is different where there is one stage, or one rank.
        attention_tile: tokens of queries, and of keys, that attention's backward sees at once, in pairs of
            tiles; None for all.
        checkpoint: keep only each layer's input in forward and recompute the rest in backward.
        offload: what of checkpointed layers waits for backward on the host: "none", the "inputs", or with
            them what "attention" made, which then runs once forward and not twice.
        mlp_tile, norm_tile, loss_tile: tokens that the MLPs, the norms, and the head with its loss see at
            once; None for all.
        stream: tokens of the tiles in which a whole layer runs, its long tensors on the host; None for layers
            whose tensors are on the device. It takes the place of mlp_tile.
        segment: the layers of which one input is kept: 1 keeps the input of every layer. The others are
            computed again in backward.
        compile: what torch.compile fuses inside tiles: nothing, the "norms", or with them the MLPs ("tiles").
            A step that is metered or planned runs without; those of ``lab train``, and those that a rehearsal
            times, run with it.
        loss_kernel: what computes the head with its loss: this lab's, in tiles or whole, or Liger Kernel's,
            which cuts the tokens itself.
        kernel: what computes attention: the fastest that the machine has, or one by name. A machine that has
            it not says so when the recipe is applied; a plan is the same for all.
        compute_dtype: what parameters are cast to for forward and backward, while the optimizer works on
            their own dtype; None for no cast.
        optimizer: where sharded parameters, their gradients and optimizer state are: on the "device", or on
            the "host", whose CPU then steps.
    """

    fsdp: bool = False
    ulysses: int = 1
    ring: int = 1
    ulysses_backend: Backend = "lab"
    head_chunk: int | None = None
    overlap: bool = False
    attention_tile: int | None = None
    checkpoint: bool = False
    offload: Offload = "none"
    mlp_tile: int | None = None
    norm_tile: int | None = None
    loss_tile: int | None = None
    stream: int | None = None
    segment: int = 1
    compile: Compiled = "none"
    loss_kernel: LossKernel = "lab"
    kernel: KernelName = "auto"
    compute_dtype: str | None = None
    optimizer: Optimizer = "device"

    def __post_init__(self) -> None:
        for knob in KNOBS:
            knob.check(getattr(self, knob.name))
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
            RecipeError: degrees that the heads or the ranks forbid, a ring with windows, a head_chunk that
                does not divide, a rope type without exact angles. The message holds the rule and the values
                that would work.
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
        check_ring(model, self.ring)
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


def check_fields(names: Any) -> None:
    """Refuse names that are no field of a recipe.

    Raises:
        RecipeError: the first such name, and all that are fields.
    """
    for name in names:
        if name not in BY_NAME:
            raise RecipeError(f"a recipe has no field {name!r}: its fields are {', '.join(BY_NAME)}")


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
