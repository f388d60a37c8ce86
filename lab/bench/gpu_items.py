"""The items that ``lab bench gpu`` measures, in the order of what they settle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from lab.planning.plan_cache import sources_hash
from lab.recipe.knobs import KernelName
from lab.units import Ki, Mi, format_tokens

Kind = Literal["attention", "compile", "copies", "edges", "gradients", "hidden", "hollow", "rehearse"]

_ATTENTION = (
    "bench/attention.py", "bench/slice_check.py", "bench/timing.py", "techniques/attention",
    "torch_private.py",
)  # fmt: skip
_STEP = (
    "decoder", "memory", "models", "recipe", "rehearsing", "shape.py", "step", "techniques",
    "torch_private.py",
)  # fmt: skip
_SOURCES: dict[Kind, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "compile": ("bench/compiled.py", *_STEP),
    "copies": ("bench/copies.py", "bench/timing.py"),
    "edges": ("bench/edge_cases.py", "techniques/experts.py", *_ATTENTION),
    "gradients": ("bench/gradients.py", *_STEP),
    "hidden": ("bench/hidden_copies.py", *_STEP),
    "hollow": ("bench/hollow.py", *_STEP),
    "rehearse": _STEP,
}
"""The files and folders of the lab in which a change makes an item of this kind be measured anew."""

RANKS = 8
"""The ranks of which a rehearsal is one."""

DIGITS = 12
"""How many digits of the hash of the lab's sources are printed."""

START_SECONDS = 3
"""The seconds of a rehearsal before its steps: the start of CUDA, the plans from the cache, the model."""

SMALL_SECONDS = 60.0
"""The expected seconds of an item at the size of ``tiny``, on two busy cores."""


@dataclass(frozen=True)
class Item:
    """Something to measure in a process of its own.

    Attributes:
        kind: What to measure. A "rehearse" item rehearses as one rank of 8. A "hollow" item does so with an
            attention that computes a small part, for bytes alone. A "hidden" item profiles a step of such a
            rank for the share of its copies that is hidden behind kernels. The others measure an attention
            kernel, small calls of all kernels ("edges"), copies, torch.compile, or gradients.
        seconds: The expected seconds of the process on an H100.
        model: The model.
        tokens: The context.
        layers: How many of the first layers to take; None for all.
        recipe: The recipe of a rank.
        knobs: The fields set on the recipe; the kernel and the heads of an attention; the size of copies.
        steps: The timed steps of a rehearsal, after one under the meter; with 0 that one is timed, and its
            seconds include the pinning of host memory, the first call of each kernel, and the meter. For an
            attention, its repeats.
        expandable: Whether the segments of CUDA's allocator can grow.
        device_memory: The memory of a smaller GPU, for which a rehearsal's stands; None for all of it.
    """

    kind: Kind
    seconds: float
    model: str = "llama3-8b"
    tokens: int = 0
    layers: int | None = None
    recipe: str = ""
    knobs: tuple[tuple[str, Any], ...] = ()
    steps: int = 1
    expandable: bool = True
    device_memory: str | None = None

    @property
    def name(self) -> str:
        """A name that no other item has, also in the files of results."""
        model = self.model if self.recipe or self.kind == "gradients" else ""
        layers = f"layers={self.layers}" if self.layers else ""
        tokens = format_tokens(self.tokens) if self.tokens else ""
        knobs = (f"{name}={value}" for name, value in self.knobs)
        segments = "" if self.expandable else "fixed-segments"
        memory = f"device_memory={self.device_memory}" if self.device_memory else ""
        words = (self.kind, model, tokens, self.recipe, layers, *knobs, segments, memory)
        return " ".join(word for word in words if word)

    @property
    def sources(self) -> str:
        """The hash of the lab's sources on which the figures depend."""
        return sources_hash(*_SOURCES[self.kind])[:DIGITS]

    def small(self) -> Item:
        """Return the same item at a size for a CPU: with ``tiny``, and with torch's kernel."""
        for_cpu = {"kernel": "torch", "gib": 1 / 64}
        return replace(
            self,
            seconds=SMALL_SECONDS,
            model="tiny",
            tokens=max(256, self.tokens // (2 * Ki)),
            layers=self.layers and min(self.layers, 2),
            knobs=tuple((name, for_cpu.get(name, value)) for name, value in self.knobs),
        )


def _attention(
    seconds: float, kernel: str, heads: int, kv_heads: int, tokens: int, repeats: int, **more: Any
) -> Item:
    knobs = (("kernel", kernel), ("heads", heads), ("kv_heads", kv_heads), *more.items())
    return Item("attention", seconds, tokens=tokens, knobs=knobs, steps=repeats)


def _rehearse(
    seconds: float, tokens: int, layers: int | None, recipe: str, kind: Kind = "rehearse", *,
    model: str = Item.model, steps: int = 1, expandable: bool = True, device_memory: str | None = None,
    **knobs: Any,
) -> Item:  # fmt: skip
    return Item(
        kind, seconds + START_SECONDS, model, tokens, layers, recipe, tuple(knobs.items()), steps, expandable,
        device_memory,
    )  # fmt: skip


FIRST = (
    # Gradients of cuDNN where "auto" takes it, and at the edges of what kernels take.
    _attention(4, "cudnn", 4, 1, 64 * Ki, 5, heads_first=True),
    Item("edges", 17),
    # 5M tokens and 3M tokens at full width, as one rank of 8.
    _rehearse(258, 5 * Mi, 1, "upipe", steps=0),
    _rehearse(95, 3 * Mi, 1, "upipe", steps=0),
    # Copies of a rank with four and eight tiles; by default it has two.
    *(_rehearse(8, 256 * Ki, 3, "streamed", "hidden", stream=tile) for tile in (8192, 4096)),
    # Reserved bytes by stream and pool, where 200 MiB were not planned.
    *(_rehearse(4, 128 * Ki, 2, rung) for rung in ("streamed", "long")),
    # Bytes at 5M tokens.
    *(_rehearse(18, 5 * Mi, 2, rung, "hollow", steps=0) for rung in ("upipe", "streamed", "tiling", "fast")),
)
"""The items of the first command on a GPU: at most 520 seconds."""

SECOND = (
    *(_attention(15, "flash-attn-4", 4, 1, tokens, 5) for tokens in (64 * Ki, 256 * Ki)),
    # A rank has eight tiles of 1M tokens, and two of 256K.
    _rehearse(50, Mi, 2, "streamed", "hidden"),
    # The first call builds a graph.
    _attention(28, "cudnn", 4, 1, Mi, 1),
    # Seconds between 128K tokens and 1M.
    *(_rehearse(13, 512 * Ki, 2, rung) for rung in ("upipe", "streamed")),
    # Gradients equal to those of simpler recipes.
    Item("gradients", 33, tokens=64 * Ki, layers=3),
    # An allocator whose segments cannot grow.
    *(
        _rehearse(6, 2 * Mi, 1, rung, "hollow", steps=0, expandable=False)
        for rung in ("upipe", "fast", "streamed")
    ),
    # A GPU with 1 GiB more than the planned peak of this step: the allocator has to give its cache back.
    _rehearse(18, 5 * Mi, 2, "upipe", "hollow", steps=0, device_memory="54.6GiB"),
    _rehearse(16, 5 * Mi, 2, "long", "hollow", steps=0),
)
"""The items of the second command: at most 260 seconds."""

LATER = (
    # Host memory and the rates of copies; the kernels.
    Item("copies", 8, knobs=(("gib", 4),)),
    *(
        _attention(seconds, kernel, 4, 1, tokens, 5)
        for tokens, seconds in ((64 * Ki, 4), (256 * Ki, 6))
        for kernel in ("cudnn", "torch")
    ),
    # Planned over measured bytes of every named recipe.
    *(_rehearse(1, 16 * Ki, 2, rung) for rung in ("plain", "fsdp")),
    *(
        _rehearse(3, 128 * Ki, 2, rung)
        for rung in ("ulysses", "checkpoint", "offload", "tiling", "upipe", "fast")
    ),
    # The share of copies behind kernels. Of three layers, the inputs of two move.
    *(_rehearse(6, 256 * Ki, 3, recipe, "hidden") for recipe in ("offload", "fast", "streamed")),
    _rehearse(6, 256 * Ki, 3, "upipe", "hidden", overlap=True),
    *(
        _rehearse(seconds, Mi, 2, recipe)
        for recipe, seconds in (("fast", 35), ("streamed", 46), ("tiling", 44), ("upipe", 44))
    ),
    _rehearse(70, Mi, 2, "upipe", kernel="torch"),
    _rehearse(39, Mi, 2, "upipe", overlap=True),
    # Operations a second by kernel, and kernels past 2^31 elements. Beyond 1M tokens a call takes so long
    # that it is not repeated.
    _attention(40, "torch", 4, 1, Mi, 1),
    *(_attention(60, kernel, 1, 1, 5 * Mi, 0) for kernel in ("cudnn", "torch")),
    *(_attention(45, kernel, 32, 8, 640 * Ki, 0) for kernel in ("cudnn", "torch")),
    _rehearse(6, 2 * Mi, 1, "tiling", "hollow", steps=0, expandable=False),
    # A family with QK-norm; what compiling is worth.
    _rehearse(30, Mi, 2, "upipe", model="qwen3-8b", steps=0),
    Item("compile", 60),
    # All layers: is what two of them are extrapolated to right?
    _rehearse(80, 256 * Ki, None, "upipe"),
    _rehearse(70, 256 * Ki, None, "fast"),
    _rehearse(140, 256 * Ki, None, "upipe", compile="tiles"),
    _rehearse(210, 512 * Ki, None, "upipe"),
    *(
        _rehearse(seconds, 5 * Mi, 1, recipe, steps=0)
        for recipe, seconds in (("fast", 195), ("tiling", 235), ("streamed", 245))
    ),
)
"""The items that need more time."""

RATES = {
    "cuda": (
        Item("copies", 8, knobs=(("gib", 4),)),
        *(
            _attention(seconds, kernel, 4, 1, tokens, 5)
            for tokens, seconds in ((64 * Ki, 4), (256 * Ki, 6))
            for kernel in get_args(KernelName)
            if kernel != "auto"
        ),
        _attention(28, "cudnn", 4, 1, Mi, 1),
    ),
    "cpu": (
        Item("copies", SMALL_SECONDS, knobs=(("gib", 1 / 8),)),
        # The heads of ``tiny``.
        *(_attention(SMALL_SECONDS, "torch", 32, 8, tokens, 3, head_dim=8) for tokens in (256, Ki, 4 * Ki)),
    ),
}
"""The items of ``lab bench machine``. A kernel whose package is missing fails at once."""

ITEMS = (*FIRST, *SECOND, *LATER)
"""All items. Their seconds are those of an H100 where it has measured them, and else are estimates."""
