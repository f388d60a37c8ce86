"""Cases in which techniques, families and batches meet in pairs, each run once on four ranks.

A case is right if on every rank the loss, every gradient and every parameter after a step of AdamW are those
of transformers' own model in one process, if the peaks, categories, holders and collectives of the plan are
those of the first rank, and if no rank holds more.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel

from cluster.ranks import Cluster
from lab import models
from lab.bench.table import Row, Say
from lab.decoder import FAMILIES
from lab.errors import LabError
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.models.lora import parse_lora
from lab.planning.plan import plan_job
from lab.recipe.jobs import Job, Machine, make_job
from lab.recipe.recipe import KNOBS, Recipe
from lab.shape import Shape
from lab.step.batches import shard_batch
from lab.step.compose import start
from lab.step.training_step import loss, train_step
from lab_tests.support import reference
from lab_tests.support.documents import mean_loss
from lab_tests.support.parity import whole

RANKS, LEARNING_RATE = 4, 1e-3

MODELS = (
    ("llama", 24, 24), ("llama", 24, 1), *((kind, *family.heads) for kind, family in FAMILIES.items()),
)  # fmt: skip
"""The family, the query heads and the key/value heads of each model. The first allows all degrees."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": MODELS,
    "stages": (None, 4, 2),
    **{knob.name: knob.tried for knob in KNOBS if knob.tried},
    "documents": (None, (5, 11, 1, 11)),
    "lora": (None, "r=4,alpha=6"),
    "batch": ((1, 1), (3, 1), (1, 2)),
}
"""Of any two of these, every two values meet. Stages are those of UPipe, and a batch has rows and
micro-batches."""

OFFLOADED = {"checkpoint": True, "offload": "inputs"}
STEPPED = "after a step"


def tolerance(name: str, job: Job) -> float:
    """Return the largest relative error that is right. In bf16 only the bytes are compared.

    AdamW divides a gradient by its size: one that is only rounding error moves a parameter as far as a large
    one.
    """
    dtype = job.recipe.compute_dtype
    if dtype == "bfloat16":
        return math.inf
    if dtype == "float32" or (job.lora and name.endswith(STEPPED)):
        return 1e-3
    # Adapters are fp32.
    return 1e-5 if job.lora else 1e-9


@dataclass(frozen=True)
class Case:
    """A model, a recipe and a batch.

    Attributes:
        family: The family of the model.
        heads: H, its query heads.
        kv_heads: K, its key/value heads.
        knobs: The recipe's.
        tokens: S, the tokens of a row.
        rows: The rows of a micro-batch.
        accumulate: The micro-batches of the step.
        documents: The lengths of the documents of each row; None for one.
        lora: The adapters that are trained; None for all parameters.
        fields: Further fields of the model's config.
    """

    family: str = "llama"
    heads: int = 24
    kv_heads: int = 6
    knobs: dict[str, Any] = field(default_factory=dict)
    tokens: int = 28
    rows: int = 1
    accumulate: int = 1
    documents: tuple[int, ...] | None = None
    lora: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> dict[str, Any]:
        """What is planned besides the recipe and the tokens."""
        return {name: getattr(self, name) for name in ("rows", "accumulate", "documents", "lora")}

    def __str__(self) -> str:
        told = {name: value for name, value in self.batch.items() if value not in (1, None)} | self.fields
        words = (self.family, f"{self.heads}/{self.kv_heads}", Recipe(**self.knobs).summary)
        return " ".join([*words, *(f"{name}={value}" for name, value in told.items())])

    def config(self) -> PretrainedConfig:
        return reference.config(self.family, self.heads, self.kv_heads, **self.fields)

    def shape(self) -> Shape:
        return _shape(self.family, self.heads, self.kv_heads, tuple(self.fields.items()))

    def save(self, folder: Path) -> str:
        """Save a checkpoint of transformers in fp64 below ``folder``, unless it is there; return its path."""
        path = folder / "-".join(map(str, (self.family, self.heads, self.kv_heads, *self.fields.values())))
        if not path.exists():
            models.save(reference.build(self.config()), path)
        return str(path)

    def plain(self, path: str) -> PreTrainedModel:
        """Return transformers' own model with the same parameters."""
        if self.lora is None:
            return reference.build(self.config())
        model = models.build(path, lora=parse_lora(self.lora))
        model.set_attn_implementation(FAMILIES[self.family].attention)
        model.config._experts_implementation = "eager"
        fill(model)
        return model

    def job(self, path: str) -> Job:
        """Return what is planned, and run on the ranks.

        Raises:
            LabError: The case is refused.
        """
        recipe, shape = Recipe(**self.knobs), self.shape()
        return make_job(path, recipe, tokens=self.tokens, ranks=RANKS, shape=shape, **self.batch)

    def token_ids(self) -> Tensor:
        """Return the tokens of the micro-batches [accumulate, rows, tokens]."""
        size = (self.accumulate, self.rows, self.tokens)
        return torch.randint(0, self.shape().V, size, generator=torch.Generator().manual_seed(0))


@cache
def _shape(family: str, heads: int, kv_heads: int, fields: tuple[tuple[str, Any], ...]) -> Shape:
    return models.shape_of(reference.config(family, heads, kv_heads, **dict(fields)))


def chunk_of(heads: int, ulysses: int, stages: int | None) -> int | None:
    """Return the largest chunk of heads with at least so many stages; None for None."""
    works = [u for u in range(ulysses, heads + 1, ulysses) if heads % u == 0]
    return None if stages is None else max([u for u in works if heads >= stages * u], default=works[0])


Values = dict[str, Any]
"""Values of some of the factors, by name. Every other factor has its first value."""


def case_of(values: Values) -> Case:
    of = {name: some[0] for name, some in FACTORS.items()} | values
    (family, heads, kv_heads), (rows, accumulate) = of["model"], of["batch"]
    knobs = {name: value for row in KNOBS if row.tried for name, value in of[row.name].items()}
    knobs["head_chunk"] = chunk_of(heads, knobs.get("ulysses", 1), of["stages"])
    batch = {"rows": rows, "accumulate": accumulate, "documents": of["documents"], "lora": of["lora"]}
    return Case(family, heads, kv_heads, knobs, **batch)


def is_legal(values: Values) -> bool:
    try:
        case_of(values).job("")
    except LabError:
        return False
    return True


def completed(pair: Values) -> Values | None:
    """Return a pair of values with those that it may need; None if it is refused with any."""
    stages, keep = {"stages": 4}, {"offload": OFFLOADED}
    needs = ({}, stages, keep, stages | keep)
    return next((values for more in needs if is_legal(values := more | pair)), None)


def pairs_in(values: Values) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(((name, str(values[name])) for name in FACTORS if name in values), 2))


def proved_by(row: Values) -> set[tuple[tuple[str, str], ...]]:
    """Return the pairs that a case proves: in bf16 it says nothing of gradients."""
    pairs = pairs_in(row)
    if row.get("compute_dtype") != {"compute_dtype": "bfloat16"}:
        return pairs
    return {pair for pair in pairs if "compute_dtype" in dict(pair)}


def rows() -> list[Values]:
    """Return values of all factors in which every two that are not refused meet.

    Each row begins with a pair that no row before has, and takes of each further factor the value that has
    the most such pairs, as AETG does (Cohen et al., 1997).
    """
    left: dict[tuple[tuple[str, str], ...], Values] = {}
    for first, second in combinations(FACTORS, 2):
        for one, other in product(FACTORS[first], FACTORS[second]):
            pair = {first: one, second: other}
            if (values := completed(pair)) is not None:
                left[next(iter(pairs_in(pair)))] = values
    made = []
    while left:
        row = next(iter(left.values()))
        for name in [name for name in FACTORS if name not in row]:
            legal = [values for value in FACTORS[name] if is_legal(values := row | {name: value})]
            row = max(legal, key=lambda values: len(proved_by(values) & left.keys()))
        made.append(row)
        for pair in proved_by(row):
            left.pop(pair, None)
    return made


OWN = (
    Case("llama", 28, 4, {"ulysses": 4, "head_chunk": 4, "fsdp": True}, fields={"tie_word_embeddings": True}),
    Case("llama", 40, 8, {"ulysses": 4, "head_chunk": 20, "checkpoint": True, "loss_tile": 9}),
    Case("llama", 24, 1, {"ulysses": 4, "head_chunk": 12, "fsdp": True, "norm_tile": 8}),
    Case("llama", 24, 2, {"ulysses": 4, "head_chunk": 8, "fsdp": True, "mlp_tile": 5}),
    Case("llama", 24, 24, {"ulysses": 2, "ring": 2, "head_chunk": 6, "fsdp": True, "mlp_tile": 5}),
    Case("llama", 24, 6, {"ulysses": 2, "ring": 2, "head_chunk": 24, "overlap": True}),
    Case("llama", 24, 6, {"ulysses": 2}, tokens=3, fields={"num_hidden_layers": 1}),
    Case("qwen2", 3, 1, {"fsdp": True, "mlp_tile": 100}, tokens=101, rows=2, fields={"head_dim": 2}),
    Case(
        "qwen3", 24, 2, {"fsdp": True, **OFFLOADED, "stream": 40, "segment": 3},
        fields={"num_hidden_layers": 7},
    ),
)  # fmt: skip
"""Head counts, sizes and lengths that the pairs have not."""


def cases() -> list[Case]:
    return [*OWN, *map(case_of, rows())]


# ---- how a case is run -------------------------------------------------------------------------------------


@reference.exact_modules()
def wrong(case: Case, cluster: Cluster, folder: Path) -> list[str]:
    """Return what is wrong with a case; nothing if it is right. Checkpoints are below ``folder``."""
    path = case.save(folder)
    job, right = case.job(path), computed(case, case.plain(path))
    plan = plan_job(job, Machine(workspace=False))
    planned, recipe = answers(plan.timeline), job.recipe
    found = []
    first = plan.ring_rank * recipe.ulysses
    for rank, (errors, measured) in enumerate(cluster.apply(measure, case, job, right)):
        wide = {name: error for name, error in errors.items() if not error < tolerance(name, job)}
        found += [f"rank {rank}: {name} is off by {error:.1e}" for name, error in wide.items()]
        # The first rank of a ring rank has the largest shards. Others may hold less.
        if rank == first or (recipe.ring == 1 and not recipe.fsdp):
            found += [f"rank {rank}: {told}" for told in differences(planned, measured)]
        most = {"device": planned["device"], "host": max(planned["host"], plan.host_of_others)}
        more = [memory for memory in most if measured[memory] > most[memory]]
        found += [f"rank {rank}: more bytes on the {memory} than planned" for memory in more]
    return found


def differences(planned: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Return a line for each answer that is another one."""
    told = []
    for name, (plan, of_rank) in {name: (planned[name], measured[name]) for name in planned}.items():
        if isinstance(plan, Counter):
            plan, of_rank = dict(plan - of_rank), dict(of_rank - plan)
        if plan != of_rank:
            told.append(f"{name} planned {plan}, measured {of_rank}")
    return told


def answers(timeline: Timeline) -> dict[str, Any]:
    """Return what a plan and a rank must have in common."""
    names = [op.name for op in timeline.ops]
    return {
        "device": timeline.device_peak,
        "host": timeline.host_peak,
        "op": timeline.peak.op,
        "module": timeline.peak.module,
        "categories": timeline.peak.by_category,
        "collectives": Counter(names[op] for op in timeline.op if names[op].startswith("c10d.")),
        "holders": Counter(
            (h.bytes, h.category, h.shape, h.dtype, h.name, h.op, h.module, h.phase)
            for memory in ("device", "host")
            for h in timeline.holders(memory=memory)
        ),
    }


def fill(model: nn.Module) -> None:
    """Set the matrices B of adapters, whose first values of 0 would let no gradient through to A.

    Not to one number: the gradients that a layer norm lets through add up to 0.
    """
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            value = torch.linspace(-0.2, 0.3, parameter.numel()).reshape(parameter.shape)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.detach().copy_(value)


def computed(case: Case, model: nn.Module) -> dict[str, Tensor]:
    """Return what transformers' own model computes in one process: each document of a row alone."""
    ids = case.token_ids().flatten(0, 1)
    total = mean_loss(model, ids, [case.documents or (case.tokens,)] * len(ids))
    total.backward()
    found = {"loss": total.detach()} | gradients(model)
    nn.utils.clip_grad_norm_(trained(model).values(), 1.0)
    torch.optim.AdamW(trained(model).values(), lr=LEARNING_RATE).step()
    return found | parameters(model)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {f"gradient of {name}": whole(p.grad).clone() for name, p in trained(model).items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {f"{name} {STEPPED}": whole(p.detach()).clone() for name, p in trained(model).items()}


@reference.exact_modules()
def measure(case: Case, job: Job, right: dict[str, Tensor]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the relative errors of a step, and what its meter says; runs on each rank.

    The meter is around the first step, as in a plan. The parameters have their first values again for the
    gradients, which a step drops.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    applied = start(job.model, job.recipe, mesh, lora=job.lora)
    model, documents = applied.model, case.documents and [case.documents] * case.rows
    fill(model)
    optimizer = applied.make_optimizer(learning_rate=LEARNING_RATE, weight_decay=0.01)
    batches = [shard_batch(ids, job.recipe, mesh, documents=documents) for ids in case.token_ids()]
    first = [parameter.detach().clone() for parameter in model.parameters()]
    meter = Meter()
    found = {"loss": train_step(model, optimizer, *batches, meter=meter)} | parameters(model)
    told = answers(meter.timeline())
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first, strict=True):
            parameter.copy_(value)
    for batch in batches:
        loss(model, batch, label_count=sum(batch.label_count for batch in batches)).backward()
    found |= gradients(model)
    assert found.keys() == right.keys()
    return {name: relative(found[name], x) for name, x in right.items()}, told


def relative(actual: Tensor, expected: Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - expected).norm() / expected.norm())


def measure_cases(say: Say) -> list[Row]:
    """Return a row for each case: "right", or what is wrong."""
    rows: list[Row] = []
    with Cluster(ranks=RANKS) as cluster, TemporaryDirectory() as folder:
        for case in cases():
            say(str(case))
            verdict = "; ".join(wrong(case, cluster, Path(folder))) or "right"
            rows.append({"case": str(case), "verdict": verdict})
    return rows
