"""A quick plan: the closed form's answer to what ``lab.plan`` is asked. No step is planned.

This module imports neither torch nor transformers; a model whose shape is not saved does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from lab import models
from lab.models.lora import Lora
from lab.planning.closed_form import Estimate
from lab.planning.closed_form_disk import estimate_on, fits_node
from lab.planning.closed_form_terms import WIDTHS
from lab.planning.cuda_workspace import fixed_workspace, matrix_products_note
from lab.planning.hardware import make_machine
from lab.planning.plan_cache import cached, model_identity
from lab.recipe.jobs import Job, Limit, Machine, make_job
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.attention.flash_limits import flash_takes


@dataclass(frozen=True)
class QuickPlan:
    """A job on a machine, with its estimate.

    Attributes:
        job: What is estimated.
        shape: The sizes of the job's model.
        machine: The hardware that it is estimated for.
        estimate: The closed form's peaks, without what CUDA takes outside torch's view.
    """

    job: Job
    shape: Shape
    machine: Machine
    estimate: Estimate

    @property
    def device_peak(self) -> int:
        """Device bytes of a rank; what CUDA takes outside torch's view is counted where the machine says."""
        return self.estimate.device_peak + self.machine.workspace * fixed_workspace(self.job.ranks)

    @property
    def by_category(self) -> dict[str, int]:
        """The device peak by category, as a plan gives it."""
        held = self.estimate.by_category
        return held | {"other": held["other"] + self.device_peak - self.estimate.device_peak}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known before this job runs on a GPU; a model without compute_dtype is in fp32."""
        dtype = self.job.recipe.compute_dtype
        if not self.machine.workspace or flash_takes(WIDTHS[dtype], self.shape.D):
            return ()
        return (matrix_products_note(dtype or "float32", self.shape.D),)

    @property
    def host_peak_per_node(self) -> int:
        """Host bytes of a node."""
        return self.estimate.host_peak * min(self.job.ranks, self.machine.ranks_per_node)

    @property
    def disk_peak_per_node(self) -> int:
        """Bytes of a node on its disk."""
        return self.estimate.disk_peak * min(self.job.ranks, self.machine.ranks_per_node)

    @property
    def fits(self) -> bool | None:
        """Whether all peaks are below the limits; None where there is no limit."""
        if all(self.machine.available(memory, self.job.ranks) is None for memory in get_args(Limit)):
            return None
        limit = self.machine.device_memory
        on_device = limit is None or self.device_peak <= limit
        return on_device and fits_node(self.machine, self.estimate, self.job.ranks)

    def to_json(self) -> dict[str, Any]:
        """The answers as plain values."""
        return {
            "closed_form": True,
            "recipe": self.job.recipe.to_json(),
            "tokens": self.job.tokens,
            "ranks": self.job.ranks,
            "weights": self.shape.weights,
            "active_weights": self.shape.active_weights,
            "device_peak": self.device_peak,
            "host_peak": self.estimate.host_peak,
            "host_peak_per_node": self.host_peak_per_node,
            "disk_peak": self.estimate.disk_peak,
            "disk_peak_per_node": self.disk_peak_per_node,
            "fits": self.fits,
            "notes": list(self.notes),
            "moment": self.estimate.moment,
            "by_category": self.by_category,
            "parts": self.estimate.parts,
        }


def quick_plan(
    model: str,
    recipe: str | Recipe,
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    lora: Lora | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ranks_per_node: int = 8,
    device: str = "h100",
    workspace: bool = True,
    disk: int | str | None = None,
    disk_rate: int | str | None = None,
    **knobs: Any,
) -> QuickPlan:
    """Answer as ``lab.plan`` does, from the closed form alone.

    The model is a name or a directory. Its shape is saved, so that the next quick plan of the same model
    imports neither torch nor transformers.

    Raises:
        LabError: a model, recipe, size or device that cannot work.
    """
    machine = make_machine(
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        ranks_per_node=ranks_per_node,
        workspace=workspace,
        disk=disk,
        disk_rate=disk_rate,
    )
    shape = cached(
        "shapes",
        {"model": model_identity(model)},
        lambda: models.shape_of(model),
        encode=asdict,
        decode=_shape,
    )
    job = make_job(model, recipe, tokens=tokens, ranks=ranks, rows=rows, lora=lora, shape=shape, **knobs)
    return QuickPlan(job, shape, machine, estimate_on(machine, shape, job))


def _shape(document: dict[str, Any]) -> Shape:
    """Return a shape from JSON, which has lists in the place of tuples."""
    sizes: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in document.items()}
    return Shape(**sizes)
