"""Random models, recipes and lengths, drawn by Hypothesis.

A draw is right if the loss and all gradients are those of transformers' own model in one process, and if the
planned peaks, on the device and on the host, are the highest peaks that a rank measures, and if the closed
form is near the plan. If a recipe is refused, the suggestions of the errors must lead to a recipe that is
right.
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
from lab.planning.closed_form import estimate
from lab.planning.plan import plan
from lab.recipe.recipe import Recipe, parse_knobs
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import loss, make_optimizer, train_step

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

    from cluster.ranks import Cluster

RANKS = (1, 2, 4)
"""The sizes of the clusters on which draws are tried."""

TOLERANCES = {None: 1e-9, "float64": 1e-9, "float32": 1e-3, "bfloat16": None}
"""The largest relative error of the loss and of a gradient, by compute dtype, with fp64 parameters. In bf16
only the bytes are checked."""

NEAR, NEAR_FP64, NEAR_BYTES = 0.05, 0.1, 1024
"""How far the closed form may be from the plan: a part of the plan's peak (another if it is
computed in fp64), or bytes, if that is more."""


@dataclass(frozen=True)
class Draw:
    """A model, a recipe and a length, as plain values, so that a failure can be replayed from JSON."""

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
        return asdict(self)

    def config(self) -> PretrainedConfig:
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
        """Return the model in fp64, with random parameters."""
        return reference.build(self.config())

    def token_ids(self) -> torch.Tensor:
        """Return the batch [rows, tokens]."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocabulary, (self.rows, self.tokens), generator=generator)


def draws() -> SearchStrategy[Draw]:
    """Return a strategy whose draws are mostly legal."""
    from hypothesis import strategies as st

    tiles = st.none() | st.integers(1, 300)

    @st.composite
    def make_draw(draw: DrawFn) -> Draw:
        ranks = draw(st.sampled_from(RANKS))
        kv_heads, group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
        heads = kv_heads * group
        degrees = [d for d in RANKS if d <= ranks]
        checkpoint = draw(st.booleans())
        chunk = draw(st.none() | st.integers(1, heads))
        ring = draw(st.sampled_from(degrees))
        offload = draw(st.sampled_from(("none", "inputs", "attention"))) if checkpoint else "none"
        # A streamed layer keeps its input on the host, and its tile is also that of its MLP.
        streamed = offload != "none" and draw(st.booleans())
        knobs = {
            "fsdp": draw(st.booleans()),
            "ulysses": draw(st.sampled_from(degrees)),
            "ring": ring,
            "head_chunk": chunk,
            "overlap": draw(st.booleans()) and chunk is not None,
            # Tiles of one token would be tens of thousands of calls.
            "attention_tile": draw(tiles.map(lambda tile: tile and max(tile, 8))),
            "checkpoint": checkpoint,
            "offload": offload,
            "mlp_tile": None if streamed else draw(tiles),
            "norm_tile": draw(tiles),
            "loss_tile": draw(tiles),
            "stream": draw(st.integers(1, 300)) if streamed else None,
            "segment": draw(st.integers(1, 4)) if streamed else 1,
            "compute_dtype": draw(st.sampled_from((None, None, "float64", "float32", "bfloat16"))),
            # A plan is of the rank with the most device bytes. In a ring, another one may have larger shards.
            "optimizer": draw(st.sampled_from(("device", "host"))) if ring == 1 else "device",
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

    return make_draw()


@reference.exact_modules()
def examine(draw: Draw, cluster: Cluster) -> str:
    """Return "right", "refused" or "WRONG: ..." for a draw, on a cluster of its ranks.

    If the recipe is refused, the recipe that the errors suggest is examined.
    """
    legal = follow_suggestions(draw)
    if isinstance(legal, str):
        return legal
    recipe, refused = legal
    settings: dict[str, Any] = {"tokens": draw.tokens, "ranks": draw.ranks, "rows": draw.rows}
    planned = plan(draw.model, recipe, workspace=False, **settings)
    by_rank = cluster.apply(measure_on_rank, draw, recipe)
    error, tolerance = by_rank[0][0], TOLERANCES[recipe.compute_dtype]
    if tolerance is not None and not error < tolerance:
        return f"WRONG: a gradient or the loss is off by {error:.1e}"
    for name, expected, peaks in (
        ("device", planned.timeline.device_peak, [device for _, device, _ in by_rank]),
        ("host", planned.timeline.host_peak, [host for _, _, host in by_rank]),
    ):
        if max(peaks) != expected:
            return f"WRONG: {name} peak planned {expected}, measured {peaks}"
    return examine_closed_form(draw, recipe) or ("refused" if refused else "right")


def examine_closed_form(draw: Draw, recipe: Recipe) -> str | None:
    """Return "WRONG: closed form ..." if an estimated peak is not near the planned one, else None.

    The closed form is for fp32 parameters, so this plan is, too.
    """
    settings: dict[str, Any] = {"tokens": draw.tokens, "ranks": draw.ranks, "rows": draw.rows}
    planned = plan(draw.config(), recipe, workspace=False, **settings)
    estimated = estimate(draw.config(), recipe, **settings)
    part = NEAR_FP64 if recipe.compute_dtype == "float64" else NEAR
    for name, expected, found in (
        ("device", planned.timeline.device_peak, estimated.device_peak),
        ("host", planned.timeline.host_peak, estimated.host_peak),
    ):
        # A small model's device holds little without the state of training.
        both = planned.timeline.device_peak + planned.timeline.host_peak
        of = both if recipe.optimizer == "host" else expected
        if abs(found - expected) > max(part * of, NEAR_BYTES):
            return f"WRONG: closed form, {name} peak estimated {found}, planned {expected}"
    return None


@reference.exact_modules()
def measure_on_rank(draw: Draw, recipe: Recipe) -> tuple[float, int, int]:
    """Return the largest relative error (0 on ranks other than 0), and the device and host peak of a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = draw.model()
    apply_recipe(model, recipe, mesh)
    value = loss(model, shard_batch(draw.token_ids(), recipe, mesh))
    value.backward()
    gradients, error = whole_gradients(model), 0.0
    if dist.get_rank() == 0:
        plain_model = reference.exact_rotary(draw.model())
        ids = draw.token_ids()
        logits = plain_model(input_ids=ids, use_cache=False).logits
        mean = reference.loss_of(logits[:, :-1], ids[:, 1:]) / (draw.rows * (draw.tokens - 1))
        mean.backward()
        error = max(
            abs(value.item() / mean.item() - 1), _gradient_error(gradients, reference.gradients(plain_model))
        )
    del value, gradients
    model.zero_grad()
    meter = Meter()
    batch = shard_batch(draw.token_ids(), recipe, mesh)
    train_step(model, make_optimizer(model, learning_rate=1e-3), batch, meter=meter)
    timeline = meter.timeline()
    return error, timeline.device_peak, timeline.host_peak


def _gradient_error(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error of a gradient. A norm counts as at least 1e-6 of the largest norm."""
    least = 1e-6 * max(float(gradient.norm()) for gradient in expected.values())
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name] - gradient).norm()) / max(float(gradient.norm()), least)
        for name, gradient in expected.items()
    )


# ---- the suggestions of errors -----------------------------------------------------------------------------


def follow_suggestions(draw: Draw) -> tuple[Recipe, bool] | str:
    """Return the legal recipe to which the suggestions of errors lead, and whether there was an error.

    If they do not lead to one, return "WRONG: ..." with the error.
    """
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
    """Return the knobs that an error suggests; nothing if it suggests none."""
    if match := re.search(r"these products work: ([\d, ]+)", refusal):
        return {"ulysses": 1, "ring": max(map(int, match[1].split(",")))}
    if match := re.search(r"^(\w+)=.* these work: ([\d, ]+)", refusal):
        return {match[1]: min(map(int, match[2].split(",")), key=lambda n: abs(n - knobs[match[1]]))}
    settings = re.findall(r"\b(?:set|or) (\w+=[\w']+)", refusal)
    return parse_knobs(setting.replace("'", "") for setting in settings[:1])
