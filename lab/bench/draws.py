"""Random models, recipes and lengths: each draw is right, in numbers and in bytes, or refused with what
works.

Hypothesis draws them. A draw is right where the loss and every gradient are those of transformers' own model
in one process, and the planned peaks are the highest that any rank measures, on the device and on the host.
Where a recipe is refused, the refusal's own suggestion must lead to one that is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel

from lab.bench import reference
from lab.bench.parity import whole_gradients
from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.planning.plan import plan
from lab.recipe.recipe import Recipe, parse_knobs
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import loss, make_optimizer, train_step

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

    from cluster.ranks import Cluster

RANKS = (1, 2, 4)
"""The clusters that draws are tried on."""

TOLERANCES = {None: 1e-9, "float64": 1e-9, "float32": 1e-3, "bfloat16": None}
"""Of the loss and each gradient, by compute dtype, for fp64 parameters; bf16 is held to its bytes alone."""


@dataclass(frozen=True)
class Draw:
    """One model, recipe and length. Plain values, so that a failure is replayed from its JSON."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int
    tied: bool
    tokens: int
    rows: int
    ranks: int
    knobs: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)

    def config(self) -> PretrainedConfig:
        """The config of the model."""
        return reference.config(
            self.family,
            self.heads,
            self.kv_heads,
            self.layers,
            hidden_size=self.hidden,
            head_dim=self.head_dim,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
        )

    def model(self) -> PreTrainedModel:
        """The model in fp64, every parameter random."""
        return reference.build(self.config())

    def token_ids(self) -> torch.Tensor:
        """The batch, [rows, tokens]."""
        draw = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocabulary, (self.rows, self.tokens), generator=draw)


def draws() -> SearchStrategy[Draw]:
    """Draws, most of them legal."""
    from hypothesis import strategies as st

    tiles = st.none() | st.integers(1, 300)

    @st.composite
    def one(draw: DrawFn) -> Draw:
        ranks = draw(st.sampled_from(RANKS))
        kv_heads, group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
        heads = kv_heads * group
        degrees = [d for d in RANKS if d <= ranks]
        checkpoint = draw(st.booleans())
        chunk = draw(st.none() | st.integers(1, heads))
        knobs = {
            "fsdp": draw(st.booleans()),
            "ulysses": draw(st.sampled_from(degrees)),
            "ring": draw(st.sampled_from(degrees)),
            "head_chunk": chunk,
            "overlap": draw(st.booleans()) and chunk is not None,
            "checkpoint": checkpoint,
            "offload": draw(st.sampled_from(("none", "inputs", "attention"))) if checkpoint else "none",
            "mlp_tile": draw(tiles),
            "norm_tile": draw(tiles),
            "loss_tile": draw(tiles),
            "compute_dtype": draw(st.sampled_from((None, None, "float64", "float32", "bfloat16"))),
        }
        return Draw(
            family=draw(st.sampled_from(sorted(reference.FAMILIES))),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=2 * draw(st.integers(1, 6)),
            hidden=heads * draw(st.integers(1, 4)),
            inner=draw(st.integers(4, 90)),
            layers=draw(st.sampled_from((1, 2, 3, 7))),
            vocabulary=draw(st.integers(11, 130)),
            tied=draw(st.booleans()),
            tokens=draw(st.integers(2, 256)),
            rows=draw(st.integers(1, 3)),
            ranks=ranks,
            knobs=knobs,
        )

    return one()


def examine(draw: Draw, cluster: Cluster) -> str:
    """ "right", "refused", or "WRONG: ..." for one draw, on a cluster of its ranks.

    Of a draw that is refused, the recipe that the refusals suggest is held to the same.
    """
    followed = legal(draw)
    if isinstance(followed, str):
        return followed
    recipe, refused = followed
    settings: dict[str, Any] = {"tokens": draw.tokens, "ranks": draw.ranks, "rows": draw.rows}
    planned = plan(draw.model, recipe, workspace=False, **settings)
    found = cluster.apply(measured, draw, recipe)
    error, tolerance = found[0][0], TOLERANCES[recipe.compute_dtype]
    if tolerance is not None and not error < tolerance:
        return f"WRONG: a gradient or the loss is off by {error:.1e}"
    for name, wanted, peaks in (
        ("device", planned.device_peak, [device for _, device, _ in found]),
        ("host", planned.host_peak, [host for _, _, host in found]),
    ):
        if max(peaks) != wanted:
            return f"WRONG: {name} peak planned {wanted}, measured {peaks}"
    return "refused" if refused else "right"


def measured(draw: Draw, recipe: Recipe) -> tuple[float, int, int]:
    """On each rank: the worst relative error (rank 0 alone), and a step's device peak and host peak."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = draw.model()
    apply_recipe(model, recipe, mesh)
    value = loss(model, shard_batch(draw.token_ids(), recipe, mesh))
    value.backward()
    gradients, error = whole_gradients(model), 0.0
    if dist.get_rank() == 0:
        right = reference.exact_rotary(draw.model())
        ids = draw.token_ids()
        logits = right(input_ids=ids, use_cache=False).logits
        mean = reference.loss_of(logits[:, :-1], ids[:, 1:]) / (draw.rows * (draw.tokens - 1))
        mean.backward()
        error = max(abs(value.item() / mean.item() - 1), _error(gradients, reference.gradients(right)))
    del value, gradients
    model.zero_grad()
    meter = Meter()
    batch = shard_batch(draw.token_ids(), recipe, mesh)
    train_step(model, make_optimizer(model, learning_rate=1e-3), batch, meter=meter)
    timeline = meter.timeline()
    return error, timeline.device_peak, timeline.host_peak


def _error(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """The worst error of any gradient over its norm; a norm near zero counts as 1e-6 of the largest."""
    least = 1e-6 * max(float(gradient.norm()) for gradient in right.values())
    assert found.keys() == right.keys()
    return max(
        float((found[name] - gradient).norm()) / max(float(gradient.norm()), least)
        for name, gradient in right.items()
    )


# ---- what a refusal suggests -------------------------------------------------------------------------------


def legal(draw: Draw) -> tuple[Recipe, bool] | str:
    """The recipe to which the suggestions of refusals lead, and whether there was one; or "WRONG: ..."."""
    knobs, seen, config = dict(draw.knobs), list[str](), draw.config()
    while True:
        try:
            recipe = Recipe(**knobs)
            recipe.check(config, draw.ranks)
        except RecipeError as refusal:
            if str(refusal) in seen:
                return f"WRONG: following {refusal} leads back to it"
            seen.append(str(refusal))
            suggested = suggestion(str(refusal), knobs)
            if not suggested:
                return f"WRONG: no suggestion in {refusal}"
            knobs |= suggested
        else:
            return recipe, bool(seen)


def suggestion(refusal: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs that a refusal says would work."""
    if found := re.search(r"these products work: ([\d, ]+)", refusal):
        return {"ulysses": 1, "ring": max(map(int, found[1].split(",")))}
    if found := re.search(r"^(\w+)=.* these work: ([\d, ]+)", refusal):
        return {found[1]: min(map(int, found[2].split(",")), key=lambda n: abs(n - knobs[found[1]]))}
    settings = re.findall(r"\b(?:set|or) (\w+=[\w']+)", refusal)
    return parse_knobs(setting.replace("'", "") for setting in settings[:1])
