"""What the closed form says of a tuner's state: bytes by category, whether they fit, what each knob saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.errors import RecipeError
from lab.planning.closed_form import Parts, estimate_job
from lab.planning.fit import MARGIN
from lab.planning.hardware import NODE, fixed_workspace
from lab.recipe.jobs import Job
from lab.recipe.recipe import Recipe
from lab.show.palette import COLOURS
from lab.show.tuner.choices import Mend, mends
from lab.show.tuner.state import NEUTRAL, TURNED, State, checked
from lab.show.tuner.text import LABELS
from lab.units import format_bytes

CATEGORY_OF = {
    "parameters": "parameters", "gradients": "gradients", "gradients in flight": "gradients",
    "head and embedding": "gradients", "inputs": "activations", "residual": "activations",
    "norms": "activations", "attention": "activations", "mlp": "activations", "loss": "activations",
    "tokens": "other", "workspace": "workspace",
}  # fmt: skip
"""What the closed form's parts are counted as; the model state is split."""

Verdict = Literal["fits", "close", "device", "host", "illegal"]


@dataclass(frozen=True)
class Part:
    """Bytes of one rank at the predicted peak."""

    category: str
    name: str
    size: int


@dataclass(frozen=True)
class Predicted:
    """What is said of a legal state.

    ``parts`` sum up to ``device`` bytes a rank, held in ``moment``; ``host`` is bytes a node. ``saves`` has
    for each knob in use how many bytes the peak would be higher without it.
    """

    recipe: Recipe
    parts: tuple[Part, ...]
    device: int
    host: int
    moment: str
    verdict: Verdict
    words: str
    saves: dict[str, int]

    @property
    def by_category(self) -> dict[str, int]:
        """Device bytes by the names that have colours, those that hold any."""
        found = {name: sum(part.size for part in self.parts if part.category == name) for name in COLOURS}
        return {name: size for name, size in found.items() if size}


@dataclass(frozen=True)
class Refused:
    """What is said of an illegal state: why, and the moves that mend it."""

    words: str
    mends: tuple[Mend, ...]
    verdict: Verdict = "illegal"


def predict(state: State, moved: str = "") -> Predicted | Refused:
    """The closed form at this state, or why there is none; ``moved`` is the knob to be mended first."""
    try:
        recipe = state.recipe
    except RecipeError as error:
        return Refused(str(error), tuple(mends(state, moved)))
    found = estimate_job(state.config, Job(state.model, recipe, state.tokens, state.ranks))
    outside = fixed_workspace(state.ranks) if state.workspace else 0
    device, host = found.device_peak + outside, found.host_peak * min(state.ranks, NODE)
    verdict = _verdict(state, device, host)
    return Predicted(
        recipe=recipe,
        parts=tuple(
            part for part in _parts(found.moment, {**found.parts, "workspace": outside}) if part.size
        ),
        device=device,
        host=host,
        moment=found.moment,
        verdict=verdict,
        words=_words(state, verdict, device, host, found.moment),
        saves=_saves(state, found.device_peak),
    )


def _parts(moment: str, parts: Parts) -> list[Part]:
    """Of the model state's bytes a parameter 4 are it and 8 Adam's; where it steps 4 more its gradient."""
    found = [Part(CATEGORY_OF[name], name, size) for name, size in parts.items() if name != "model state"]
    state = parts.get("model state", 0)
    one = state // (4 if moment == "optimizer" else 3)
    found.append(Part("parameters", "fp32 parameters", one))
    found.append(Part("optimizer", "Adam's two moments", 2 * one))
    found.append(Part("gradients", "gradients", state - 3 * one))
    order = list(COLOURS)
    return sorted(found, key=lambda part: order.index(part.category))


def _verdict(state: State, device: int, host: int) -> Verdict:
    if device > state.device_memory:
        return "device"
    if host > state.host_memory:
        return "host"
    return "close" if device * MARGIN > state.device_memory else "fits"


def _words(state: State, verdict: Verdict, device: int, host: int, moment: str) -> str:
    of_device = f"{format_bytes(device)} of {format_bytes(state.device_memory)}"
    if verdict == "device":
        return f"does not fit: {of_device}, in {moment}"
    if verdict == "host":
        return f"does not fit the host: {format_bytes(host)} of {format_bytes(state.host_memory)} a node"
    return f"fits: {of_device}" if verdict == "fits" else f"just fits: {of_device}; Plan says it exactly"


def _saves(state: State, peak: int) -> dict[str, int]:
    found, fields = {}, state.fields
    for name in TURNED:
        without = fields | NEUTRAL[name]
        if without != fields:
            recipe = checked(without, state)
            found[name] = (
                estimate_job(state.config, Job(state.model, recipe, state.tokens, state.ranks)).device_peak
                - peak
            )
    return found


# ---- where no front end is ---------------------------------------------------------------------------------


def table(said: Predicted | Refused) -> str:
    """The same as lines of text."""
    if isinstance(said, Refused):
        works = [f"would work: {mend.words}" for mend in said.mends]
        return "\n".join([f"illegal: {said.words}", *works])
    rows = [(name, format_bytes(size)) for name, size in said.by_category.items()]
    rows += [("device peak", format_bytes(said.device)), ("host, a node", format_bytes(said.host))]
    rows += [(f"{LABELS[name]} saves", format_bytes(size)) for name, size in said.saves.items()]
    return "\n".join([said.words, *(f"  {name:<18}{size:>12}" for name, size in rows)])
