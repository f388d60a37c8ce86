"""The closed form at a tuner's state: bytes by category, whether they fit, and what each knob saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.errors import RecipeError
from lab.planning.closed_form import Estimate, estimate_job
from lab.planning.closed_form_products import with_products
from lab.planning.closed_form_terms import Parts
from lab.planning.cuda_workspace import NODE, fixed_workspace
from lab.planning.fit import MARGIN
from lab.recipe.jobs import Job
from lab.recipe.recipe import Recipe
from lab.show.palette import COLOURS
from lab.show.tuner.choices import Suggestion, suggest
from lab.show.tuner.state import ADJUSTABLE, NEUTRAL, State, recipe_of
from lab.show.tuner.text import LABELS
from lab.units import format_bytes

STATE = {"parameters": "fp32 parameters", "optimizer": "Adam's two moments", "gradients": "gradients"}
"""The names of what the closed form calls the model state, by category."""

Verdict = Literal["fits", "close", "device", "host", "illegal"]
"""Whether a step fits. "close": it fits, but with less than the closed form's margin of error. "device" and
"host": that memory is too small."""


@dataclass(frozen=True)
class Part:
    """A part of the bytes that a rank holds at the estimated peak."""

    category: str
    name: str
    size: int


@dataclass(frozen=True)
class StateEstimate:
    """The estimate for a legal state.

    Attributes:
        recipe: The recipe of the state.
        parts: The parts of the device peak; their sum is ``device``.
        device: The peak of a rank in bytes.
        host: The peak of a node's host memory in bytes.
        moment: The moment of the step at which the device peak is.
        verdict: Whether the step fits.
        text: The verdict in a sentence.
        saves: For each knob in use, how many bytes higher the device peak would be without it.
    """

    recipe: Recipe
    parts: tuple[Part, ...]
    device: int
    host: int
    moment: str
    verdict: Verdict
    text: str
    saves: dict[str, int]

    @property
    def by_category(self) -> dict[str, int]:
        """The device peak in bytes by category; categories without bytes are left out."""
        sizes = {name: sum(part.size for part in self.parts if part.category == name) for name in COLOURS}
        return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True)
class Refusal:
    """The error of an illegal state, and the changes that make it legal."""

    text: str
    suggestions: tuple[Suggestion, ...]
    verdict: Verdict = "illegal"


def estimate_state(state: State, changed: str = "") -> StateEstimate | Refusal:
    """Return the estimate for a state, or its error.

    Args:
        state: The state.
        changed: The knob that the reader has changed; its suggestion comes first.
    """
    try:
        recipe = state.recipe
    except RecipeError as error:
        return Refusal(str(error), tuple(suggest(state, changed)))
    step = _estimate(state, recipe)
    outside = fixed_workspace(state.ranks) if state.workspace else 0
    device, host = step.device_peak + outside, step.host_peak * min(state.ranks, NODE)
    verdict = _verdict(state, device, host)
    return StateEstimate(
        recipe=recipe,
        parts=_parts({**step.moments[step.moment], "workspace": {"other": outside}}),
        device=device,
        host=host,
        moment=step.moment,
        verdict=verdict,
        text=_verdict_text(state, verdict, device, host, step.moment),
        saves=_saves(state, step.device_peak),
    )


def _parts(moment: Parts) -> tuple[Part, ...]:
    """Return the parts of a moment that have bytes, in the order of their categories."""
    parts = [
        Part(category, STATE[category] if name == "model state" else name, size)
        for name, held in moment.items()
        for category, size in held.items()
        if size
    ]
    order = list(COLOURS)
    return tuple(sorted(parts, key=lambda part: order.index(part.category)))


def _verdict(state: State, device: int, host: int) -> Verdict:
    if device > state.device_memory:
        return "device"
    if host > state.host_available:
        return "host"
    return "close" if device * MARGIN > state.device_memory else "fits"


def _verdict_text(state: State, verdict: Verdict, device: int, host: int, moment: str) -> str:
    of_device = f"{format_bytes(device)} of {format_bytes(state.device_memory)}"
    if verdict == "device":
        return f"does not fit: {of_device}, in {moment}"
    if verdict == "host":
        return (
            f"does not fit the host: {format_bytes(host)} of {format_bytes(state.host_available)} per node, "
            f"which has {format_bytes(state.host_memory)}"
        )
    return (
        f"fits: {of_device}" if verdict == "fits" else f"just fits: {of_device}; Plan computes the exact peak"
    )


def _saves(state: State, peak: int) -> dict[str, int]:
    saves, fields = {}, state.fields
    for name in ADJUSTABLE:
        without = fields | NEUTRAL[name]
        if without != fields:
            try:
                recipe = recipe_of(without, state)
            except RecipeError:
                continue  # Another knob of the rung needs it: streamed layers are checkpointed and offloaded.
            saves[name] = _estimate(state, recipe).device_peak - peak
    return saves


def _estimate(state: State, recipe: Recipe) -> Estimate:
    """Return the closed form of a step, with attention by matrix products if CUDA's workspace is counted."""
    job = Job(state.model, recipe, state.tokens, state.ranks)
    step = estimate_job(state.shape, job)
    return with_products(step, state.shape, job) if state.workspace else step


def estimate_text(result: StateEstimate | Refusal) -> str:
    """Return the estimate or the error as lines of text, for a page that runs no widgets."""
    if isinstance(result, Refusal):
        suggestions = [f"would work: {suggestion.text}" for suggestion in result.suggestions]
        return "\n".join([f"illegal: {result.text}", *suggestions])
    rows = [(name, format_bytes(size)) for name, size in result.by_category.items()]
    rows += [("device peak", format_bytes(result.device)), ("host, a node", format_bytes(result.host))]
    rows += [(f"{LABELS[name]} saves", format_bytes(size)) for name, size in result.saves.items()]
    return "\n".join([result.text, *(f"  {name:<18}{size:>12}" for name, size in rows)])
