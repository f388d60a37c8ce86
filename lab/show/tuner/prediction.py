"""What is known of a tuner's state: what a rank holds at the peak, whether it fits, what each knob saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lab.errors import LabError
from lab.memory.holders import LAYER, Holder
from lab.planning.plan import Plan
from lab.recipe.jobs import Limit
from lab.show.tuner.choices import Suggestion, suggest
from lab.show.tuner.planner import Question, known
from lab.show.tuner.state import ADJUSTABLE, State
from lab.show.tuner.text import LABELS, step_text
from lab.units import format_bytes, format_operator

Verdict = Limit | Literal["fits", "illegal", "planning"]
"""Whether a step fits: the memory that is too small, or that nothing is said yet."""

MOST_PARTS, LEAST_SHARE = 4, 0.01
"""So many parts of a category have a name, if they are at least this share of it. The others are one part."""


@dataclass(frozen=True)
class Prediction:
    """What is known of a state.

    Attributes:
        verdict: Whether the step fits.
        text: The verdict in a sentence, or the error.
        plan: The plan; None while it is being made, and of a state that cannot be planned.
        saves: For each knob in use whose plan is known, how many bytes higher the device peak is without it.
        suggestions: The changes that make an illegal state legal.
    """

    verdict: Verdict
    text: str
    plan: Plan | None = None
    saves: Mapping[str, int] = field(default_factory=dict)
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def by_category(self) -> dict[str, int]:
        """The device peak in bytes by category; categories without bytes are left out."""
        peak = self.plan.peak.by_category if self.plan else {}
        return {name: size for name, size in peak.items() if size}


def parts_of(plan: Plan) -> dict[str, dict[str, int]]:
    """Return the bytes of each category at the device peak by part, the largest first.

    A part has the tensors of one part of a layer, or of one module outside of layers, which the parameter
    belongs to or which made the tensor. The parts of a category add up to it.
    """
    sizes = {category: Counter[str]() for category in plan.peak.by_category}
    # The start of the training has no tensors, only bytes by category.
    for holder in plan.holders() if plan.peak is not plan.start else ():
        sizes[holder.category][_short_name(holder)] += holder.bytes
    found = {}
    for category, total in plan.peak.by_category.items():
        largest = sizes[category].most_common(MOST_PARTS)
        parts = {name: size for name, size in largest if size >= LEAST_SHARE * total}
        rest = total - sum(parts.values())
        found[category] = parts | ({f"other {category}" if parts else category: rest} if rest else {})
    return found


def predict(state: State, changed: str = "") -> tuple[Prediction, list[Question]]:
    """Return what is known of a state, and the plans to be made, the most wanted first.

    Args:
        state: The state.
        changed: The knob that the reader has changed; its suggestion, and what it saves, come first.
    """
    try:
        question = question_of(state)
    except LabError as error:
        return Prediction("illegal", str(error), suggestions=tuple(suggest(state, changed))), []
    plan, saves, missing = known(question), {}, []
    if isinstance(plan, LabError):
        return Prediction("illegal", str(plan)), []
    for name in sorted(ADJUSTABLE, key=lambda name: name != changed):
        try:
            without = question_of(state.without(name))
        except LabError:
            continue  # Another knob of the rung needs it: streamed layers are checkpointed and offloaded.
        if without == question:
            continue
        higher = known(without)
        if higher is None:
            missing.append(without)
        elif plan is not None and isinstance(higher, Plan):
            saves[name] = higher.device_peak - plan.device_peak
    if plan is None:
        return Prediction("planning", f"planning {step_text(state)} …"), [question, *missing]
    plan = replace(plan, machine=state.machine)
    return Prediction(plan.limit or "fits", _verdict_text(plan), plan, saves), missing


def question_of(state: State) -> Question:
    """Return what a state's plan is asked for.

    Raises:
        LabError: The combination is illegal, or the step is larger than the lab plans.
    """
    return state.job, replace(state.machine, device_memory=None)


def _verdict_text(plan: Plan) -> str:
    of_device = f"{format_bytes(plan.device_peak)} of {format_bytes(plan.machine.device_memory or 0)}"
    if plan.limit is None:
        return f"{plan.fit}: {of_device}"
    if plan.limit == "device" and plan.tensors_fit:
        reserved = format_bytes(plan.device_need)
        return f"does not fit: {of_device}, and {reserved} with what the allocator keeps"
    if plan.limit == "device":
        return f"does not fit: {of_device}"
    return (
        f"does not fit the host: {format_bytes(plan.host_peak_per_node)} of "
        f"{format_bytes(plan.available('host') or 0)} per node, which has "
        f"{format_bytes(plan.machine.host_memory or 0)}"
    )


def _short_name(holder: Holder) -> str:
    """Return the part of the layer, such as "mlp"; outside of layers, the last word of the module's path."""
    words = LAYER.sub("*", holder.name.removesuffix(".weight") or holder.module).split(".")
    if "*" in words:
        inside = [word for word in words[words.index("*") + 1 :] if word != "*"]
        return inside[0] if inside else "layer"
    return words[-1] or format_operator(holder.op)


def prediction_text(answer: Prediction) -> str:
    """Return what is known as lines of text, for a page that runs no widgets."""
    if answer.verdict == "illegal":
        suggestions = [f"would work: {suggestion.text}" for suggestion in answer.suggestions]
        return "\n".join([f"illegal: {answer.text}", *suggestions])
    if answer.plan is None:
        return answer.text
    sizes = answer.by_category | {
        "device peak": answer.plan.device_peak,
        "host, a node": answer.plan.host_peak_per_node,
        **{f"{LABELS[name]} saves": size for name, size in answer.saves.items()},
    }
    return "\n".join(
        [answer.text, *(f"  {name:<18}{format_bytes(size):>12}" for name, size in sizes.items())]
    )
