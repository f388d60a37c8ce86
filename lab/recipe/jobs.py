"""What every verb is asked: a job, the machine it is for, and how it is trained; texts are read here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lab import models
from lab.errors import LabError
from lab.models.lora import Lora, check_takes_adapters, parse_lora
from lab.models.unread import left_out, wrapper_of
from lab.recipe.ladder import resolve_recipe
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.document_lengths import check_documents, several_or_none
from lab.techniques.host_memory import PINNABLE_SHARE, reserve
from lab.units import (
    LARGEST,
    abbreviate,
    check_counts,
    format_tokens,
    parse_tokens,
)

if TYPE_CHECKING:
    from lab.models import ModelLike


Documents = str | Sequence[int | str] | None
"""How documents are asked for: lengths, or a text such as "1M,512K,512K"; None for one document per row."""

MAX_RANKS = 65536
"""The most ranks of a job. A plan makes the groups of all ranks: of a million it would take minutes."""

MAX_TOKENS, MAX_STEP = 2**30, 2**40
"""The most tokens of a row, and of a step. The elements of a tensor are then a number of 64 bits."""


@dataclass(frozen=True)
class Job:
    """A training step that is asked for.

    Attributes:
        model: A preset's name, a directory, a config, or a callable that returns a model.
        recipe: The techniques, checked against the model and the ranks.
        tokens: S, the tokens of a row.
        ranks: P, the ranks of the process group.
        rows: The rows of the global batch; of each micro-batch where there are several.
        recipe_name: The name that the recipe was asked for by, if it has one.
        accumulate: The micro-batches of a step, whose gradients are summed before the optimizer steps.
        lora: The adapters that are trained in place of the model's parameters; None if there are none.
        documents: The tokens of each document of a row, the same in all rows; None if a row is one document.
        dtype: The dtype that was asked for, of the parameters and with them of their gradients and optimizer
            state; None for the model's own.
        dequantized: Whether the model's config says that its weights are quantized. The job is then that of
            the same model with plain weights.
    """

    model: ModelLike
    recipe: Recipe
    tokens: int
    ranks: int
    rows: int = 1
    recipe_name: str | None = None
    accumulate: int = 1
    lora: Lora | None = None
    documents: tuple[int, ...] | None = None
    dtype: str | None = None
    dequantized: bool = False

    @property
    def step_rows(self) -> int:
        """The rows of a step: those of all its micro-batches."""
        return self.rows * self.accumulate

    @property
    def local_sizes(self) -> tuple[int, int]:
        """The rows of a rank's batch, and the tokens of each that are on the rank."""
        ring = self.recipe.ring
        degree = self.recipe.ulysses * ring
        padded = math.lcm(degree, 2 * ring if ring > 1 else 1)
        return -(-self.rows * degree // self.ranks), -(-self.tokens // padded) * padded // degree

    @property
    def shards(self) -> int:
        """The ranks over which the parameters are sharded."""
        return self.ranks // self.recipe.replicas if self.recipe.fsdp else 1

    @property
    def title(self) -> str:
        """One line that names the step: model, recipe, ranks, tokens."""
        recipe = self.recipe_name or _settings(self.recipe)
        return " · ".join((self._model, recipe, self._size))

    @property
    def subject(self) -> str:
        """The title without the recipe."""
        return f"{self._model} · {self._size}"

    @property
    def _model(self) -> str:
        if isinstance(self.model, str | Path):
            wrapper = wrapper_of(self.model)
            name = Path(self.model).name + (f" ({left_out(wrapper)})" if wrapper else "")
        else:
            # A config; its class is not imported, because saved answers are read without transformers.
            family = getattr(self.model, "model_type", None)
            name = f"{getattr(self.model, 'num_hidden_layers', '')}-layer {family}" if family else "model"
        name += "" if self.dtype is None else f" in {self.dtype}"
        name += " as if dequantized" if self.dequantized else ""
        return name if self.lora is None else f"{name} with LoRA {self.lora}"

    @property
    def _size(self) -> str:
        several = "" if self.documents is None else f" in {len(self.documents)} documents"
        batches = "" if self.accumulate == 1 else f" x {self.accumulate} micro-batches"
        return f"{self.ranks} ranks · {format_tokens(self.tokens)} tokens{several}{batches}"

    @property
    def longest_document(self) -> int:
        """The most tokens that attend to each other."""
        return self.tokens if self.documents is None else max(self.documents)


def make_job(
    model: ModelLike,
    recipe: str | Recipe,
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    accumulate: int = 1,
    lora: Lora | str | None = None,
    documents: Documents = None,
    dtype: str | None = None,
    shape: Shape | None = None,
    **knobs: Any,
) -> Job:
    """Read the sizes and the adapters, make the recipe, and check all of it against the model and the ranks.

    Args:
        model: As ``Job.model``.
        recipe: A recipe, or the name of one.
        tokens: A number, or a text such as "5M".
        ranks: The ranks of the process group.
        rows: The rows of the global batch.
        accumulate: As ``Job.accumulate``.
        lora: Adapters, or a text such as "r=16".
        documents: The lengths of the documents of each row, or a text such as "1M,512K,512K".
        dtype: As ``Job.dtype``.
        shape: The model's shape, for a caller that has it: that of a callable is found by making a model.
        knobs: Fields of the recipe that are set by hand.

    Raises:
        LabError: a model, recipe, size, adapters or documents that cannot work.
    """
    length = parse_tokens(tokens)
    check_counts({"ranks": ranks, "rows": rows, "accumulate": accumulate})
    if ranks > MAX_RANKS:
        raise LabError(f"ranks={ranks}: the lab plans and runs up to {MAX_RANKS} ranks")
    if length > MAX_TOKENS or length * rows * accumulate > MAX_STEP:
        raise LabError(
            f"a step of tokens={length}, rows={rows}, accumulate={accumulate}: the lab plans and runs rows "
            f"of up to {MAX_TOKENS} tokens, and steps of up to {MAX_STEP} tokens in all"
        )
    adapters = parse_lora(lora)
    check_takes_adapters(model, adapters)
    shape = shape or models.shape_of(model, dtype)
    chosen = resolve_recipe(recipe, model, ranks, length, shape=shape, **knobs)
    if adapters is not None:
        adapters.targets_in(shape)
    name = recipe if isinstance(recipe, str) else None
    of_row = parse_documents(documents, length, chosen)
    dequantized = dtype is not None and models.is_quantized(model)
    return Job(model, chosen, length, ranks, rows, name, accumulate, adapters, of_row, dtype, dequantized)


def parse_documents(given: Documents, tokens: int, recipe: Recipe) -> tuple[int, ...] | None:
    """Return the lengths of the documents of a row of tokens; None if the row is one document.

    Args:
        given: Lengths, or a text such as "1M,512K,512K"; None for one document.
        tokens: S, the tokens of a row.
        recipe: The recipe, which must have no ring that sends with several documents.

    Raises:
        LabError: a text that is no length, lengths that do not add up, or a ring that sends.
    """
    if given is None:
        return None
    lengths = check_documents([parse_lengths(given)], 1, tokens)
    several = several_or_none(lengths, recipe.ring, recipe.ring_exchange)
    return None if several is None else several[0]


def parse_lengths(given: str | Sequence[int | str]) -> list[int]:
    """Return the lengths of documents that a text such as "1M,512K,512K", or a list, means.

    Raises:
        LabError: one is no number of tokens.
    """
    return [parse_tokens(part) for part in (given.split(",") if isinstance(given, str) else given)]


Limit = Literal["device", "host", "disk"]
"""A memory that may be too small."""


def memory_name(memory: Limit) -> str:
    """Return the name of a memory: "device memory", "host memory" or "disk"."""
    return "disk" if memory == "disk" else f"{memory} memory"


@dataclass(frozen=True)
class Disk:
    """The disk of a node, on which the long tensors of streamed layers lie in place of host memory.

    Attributes:
        nbytes: Its bytes; None for no limit.
        rate: Bytes per second that it reads, and that it writes; None for those of the hardware table. The
            ranks of a node share them.
    """

    nbytes: int | None = None
    rate: int | None = None


@dataclass(frozen=True)
class Machine:
    """The hardware that a step is planned for.

    Attributes:
        device: The name of the GPU in the hardware table.
        device_memory: Bytes of a device; None for no limit.
        host_memory: Bytes of a node's host memory; None for no limit.
        ranks_per_node: The ranks of a node.
        workspace: Whether the bytes that CUDA takes outside torch's view are counted. Without them the bytes
            are those that CPU ranks measure.
        disk: The disk of a node, for streamed layers; None for host memory alone.
    """

    device: str = "h100"
    device_memory: int | None = None
    host_memory: int | None = None
    ranks_per_node: int = 8
    workspace: bool = True
    disk: Disk | None = None

    @property
    def disk_bytes(self) -> int | None:
        """Bytes of a node's disk; None for no limit, or no disk."""
        return None if self.disk is None else self.disk.nbytes

    def available(self, memory: Limit, ranks: int) -> int | None:
        """Return the bytes that a step on ``ranks`` ranks may take of a memory; None for no limit.

        They are all of a device and of a node's disk. Of a node's host memory they are what is left without
        ``lab.techniques.host_memory.reserve``.
        """
        if memory == "host" and self.host_memory is not None:
            return max(self.host_memory - reserve(self.node_ranks(ranks)), 0)
        return {"device": self.device_memory, "host": None, "disk": self.disk_bytes}[memory]

    def limit(self, ranks: int, *, device: int, host: int, disk: int) -> Limit | None:
        """Return the memory that is too small for the bytes that a rank needs; None if all hold them."""
        node = self.node_ranks(ranks)
        needs: dict[Limit, int] = {"device": device, "host": host * node, "disk": disk * node}
        for memory, needed in needs.items():
            available = self.available(memory, ranks)
            if available is not None and needed > available:
                return memory
        return None

    def pinnable(self, ranks: int) -> int | None:
        """Return the bytes of host memory that each of ``ranks`` ranks may pin; None for no limit."""
        if self.host_memory is None:
            return None
        return int(PINNABLE_SHARE * self.host_memory) // self.node_ranks(ranks)

    def node_ranks(self, ranks: int) -> int:
        """Return how many of ``ranks`` ranks are on a node."""
        return min(ranks, self.ranks_per_node)


def check_host_memory(host_memory: int | str | None) -> None:
    """Refuse host memory that is not given, for a question that has no answer without it.

    Raises:
        LabError: It is None.
    """
    if host_memory is None:
        raise LabError("host_memory=None: give the memory of a node, such as 2TiB")


Schedule = Literal["constant", "cosine"]
"""What the learning rate does after the warm-up: it stays, or falls to 0 along half a cosine."""

WEIGHT_DECAY = 0.01
"""The default of torch's AdamW."""


@dataclass(frozen=True)
class TrainSettings:
    """How a job is trained.

    Attributes:
        steps: Optimizer steps.
        text: A file or a folder of text, or a file of tokens; None for the Python standard library's sources.
        tokenizer: A local directory; None for bytes as tokens.
        learning_rate: The highest learning rate of AdamW; ``learning_rate_of`` gives that of a step.
        clip_norm: Gradients are scaled so that their global norm is at most this.
        seed: The seed of the first values of the parameters, where the model has no weights: 0 to 2^63-1.
        warmup: The first steps, in which the learning rate rises linearly.
        schedule: What the learning rate does after them.
        weight_decay: That of AdamW, for every parameter, norms and biases among them.
        validate: A text as ``text``, whose loss is computed without gradients at each checkpoint; None for
            none.

    Raises:
        LabError: numbers with which an update would make parameters NaN, or go the wrong way, or a seed that
            torch does not take.
    """

    steps: int
    text: str | Path | None = None
    tokenizer: str | Path | None = None
    learning_rate: float = 1e-3
    clip_norm: float = 1.0
    seed: int = 0
    warmup: int = 0
    schedule: Schedule = "constant"
    weight_decay: float = WEIGHT_DECAY
    validate: str | Path | None = None

    def __post_init__(self) -> None:
        check_counts({"steps": self.steps})
        if type(self.seed) is not int or not 0 <= self.seed <= LARGEST:
            raise LabError(f"seed={self.seed!r}: it takes a whole number from 0 to {LARGEST}")
        for name, example in (("learning_rate", 0.001), ("weight_decay", 0.1)):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < math.inf):
                raise LabError(
                    f"{name}={value!r}: it takes a finite number, 0 or more, for instance {example}"
                )
        if not (_is_number(self.clip_norm) and self.clip_norm > 0):
            raise LabError(
                f"clip_norm={self.clip_norm!r}: it takes a number above 0, for instance 1.0, or inf for no "
                "clipping"
            )
        if type(self.warmup) is not int or not 0 <= self.warmup <= self.steps:
            raise LabError(
                f"warmup={abbreviate(repr(self.warmup))}: it takes a whole number of steps from 0 to the "
                f"{self.steps} of the training"
            )
        if self.schedule not in get_args(Schedule):
            raise LabError(
                f"schedule={abbreviate(repr(self.schedule))}: it takes {' or '.join(get_args(Schedule))}"
            )

    def learning_rate_of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1; nothing else than the settings determines it.

        The first of W warm-up steps has 1/W of ``learning_rate``, and the last has all of it. The last of all
        steps has 0 with the schedule "cosine".
        """
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _settings(recipe: Recipe) -> str:
    """The fields in which a recipe differs from the plain one; of more than three, the first two."""
    plain = Recipe().to_json()
    differing = [field for field, value in recipe.to_json().items() if value != plain[field]]
    if len(differing) > 3:
        differing = [*differing[:2], f"{len(differing) - 2} more"]
    return " + ".join(differing) or "plain"
