"""Compiled tiles have the plain model's loss and gradients, and a meter still observes every operator."""

import json
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from click.testing import CliRunner

import lab
from lab import models
from lab.bench.compiled import measure_tiles
from lab.bench.software import versions
from lab.commands.cli import main
from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.memory.stopwatch import Stopwatch
from lab.recipe.ladder import ladder, resolve_recipe
from lab.recipe.recipe import Recipe, parse_knobs
from lab.step.one_rank import one_rank
from lab.techniques.compiling import apply_compiled
from lab.techniques.tiling import apply_tiled_mlp, apply_tiled_norms
from lab_tests.support.reference import build, config, error, gradients, loss_of, tokens

# Torch's compiler imports a part of torch that uses another, deprecated part; and asks every tensor for its
# gradient, the warning of which it hides where warnings are shown, and not where they are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _reset_compiler():
    yield
    torch.compiler.reset()


def loss_and_gradients(model):
    ids = tokens(2, 20)
    value = loss_of(model(input_ids=ids, use_cache=False).logits, ids)
    value.backward()
    return value.item(), gradients(model)


@pytest.mark.long
def test_loss_and_gradients_are_the_plain_models():
    cfg = config()
    right_value, right = loss_and_gradients(build(cfg))
    model = build(cfg)
    apply_compiled(model, mlps=True)
    apply_tiled_mlp(model, tile=8)  # tiles of 8, 8 and 4
    apply_tiled_norms(model, tile=20)
    names = list(model.state_dict())
    value, found = loss_and_gradients(model)
    # Norms go through fp32, where the order of a sum shows.
    assert value == pytest.approx(right_value, rel=1e-6)
    assert error(found, right) < 1e-5
    assert list(model.state_dict()) == names
    compiled_frames = torch._dynamo.utils.counters["frames"]
    assert 0 < compiled_frames["ok"] == compiled_frames["total"]


class CompilerStandIn:
    """Stands for torch's compiler: what it was given, and how often that ran."""

    def __init__(self):
        self.given, self.ran = [], 0

    def __call__(self, forward, *, options):
        self.given.append(forward.__self__)

        def run(x):
            self.ran += 1
            return forward(x)

        return run


@pytest.mark.parametrize(("mlps", "given"), [(False, 5), (True, 7)])
def test_a_metered_step_runs_the_modules_own_forward(monkeypatch, mlps, given):
    compiler = CompilerStandIn()
    monkeypatch.setattr(torch, "compile", compiler)
    model, meter = build(config()), Meter()
    apply_compiled(model, mlps=mlps)
    assert len(compiler.given) == given
    assert (model.model.layers[1].mlp in compiler.given) == mlps
    with meter.measure(model), meter.phase("step"):
        loss_and_gradients(model)
    assert compiler.ran == 0
    loss_and_gradients(model)
    assert compiler.ran == given


def gradients_of_step(recipe):
    """The gradients of rank 0 of two after a step that nobody watches, and the frames that were compiled."""
    torch.manual_seed(0)
    model = models.build("tiny")
    before = torch._dynamo.utils.counters["frames"]["ok"]
    with one_rank(recipe, 2, "loopback") as mesh:
        lab.apply_recipe(model, recipe, mesh)
        ids = torch.randint(0, 256, (1, 96), generator=torch.Generator().manual_seed(1))
        lab.loss(model, lab.shard_batch(ids, recipe, mesh)).backward()
        found = {name: grad.to_local() for name, grad in gradients(model).items()}
    return found, torch._dynamo.utils.counters["frames"]["ok"] - before


@pytest.mark.long
def test_under_everything_in_bf16_what_is_compiled_is_as_far_from_fp32():
    recipe = Recipe(
        fsdp=True, ulysses=2, head_chunk=8, overlap=True, checkpoint=True, offload="attention", mlp_tile=20,
        norm_tile=20, loss_tile=20,
    )  # fmt: skip
    truth, nothing = gradients_of_step(recipe)
    recipe = replace(recipe, compute_dtype="bfloat16")
    (eager, _), (fused, frames) = (
        gradients_of_step(recipe),
        gradients_of_step(replace(recipe, compile="tiles")),
    )
    assert nothing == 0 < frames
    assert error(fused, eager) > 0
    assert error(fused, truth) < 1.2 * error(eager, truth) < 0.1


@pytest.mark.long
def test_a_rehearsal_times_compiled_steps_and_measures_the_others(monkeypatch):
    compiled_in_steps = []

    class Watching(Stopwatch):
        @contextmanager
        def measure(self, *step):
            before = torch._dynamo.utils.counters["frames"]["ok"]
            with super().measure(*step):
                yield
            compiled_in_steps.append(torch._dynamo.utils.counters["frames"]["ok"] - before)

    monkeypatch.setattr(import_module("lab.rehearsing.rehearse"), "Stopwatch", Watching)
    plain, fused = (
        lab.rehearse(
            config(vocab_size=260), "tiling", tokens=96, ranks=2, steps=1, compile=what, compute_dtype=None
        )
        for what in ("none", "norms")
    )
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert compiled_in_steps == [0, 0], "what compiles is not timed"
    assert (plain.timed_steps, fused.timed_steps) == (1, 1)
    assert fused.plan_over_measured == 1
    assert fused.device_peak == plain.device_peak
    assert fused.loss == plain.loss


@pytest.mark.long
def test_compiling_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RecipeError, match=r"needs a C\+\+ compiler, none of c\+\+, .* or set compile='none'"):
        apply_compiled(build(config()), mlps=False)
    # A plan compiles nothing.
    lab.plan("tiny", "tiling", tokens=512, ranks=4, compile="tiles")


def test_compiling_is_for_tiles():
    assert Recipe(norm_tile=4, compile="norms").mlp_tile is None
    for knobs in ({"compile": "norms"}, {"compile": "tiles", "norm_tile": 4}, {"compile": "tiles"}):
        with pytest.raises(
            RecipeError, match=r"what runs in tiles; set the tiles with it, or compile='none'"
        ):
            Recipe(**knobs)
    with pytest.raises(RecipeError, match="compile=True: it takes 'none' or 'norms' or 'tiles'"):
        Recipe(compile=True)
    rungs = ladder("tiny", 4, 4096, compile="tiles", overlap=True)
    assert [rungs[name].compile for name in ("offload", "tiling", "upipe")] == ["none", "tiles", "tiles"]
    assert [rungs[name].overlap for name in ("tiling", "upipe")] == [False, True]
    assert parse_knobs(["compile=none", "head_chunk=none"]) == {"compile": "none", "head_chunk": None}
    assert resolve_recipe("fast", "tiny", 4, 4096, compile="norms").compile == "norms"


@pytest.mark.long
def test_the_bench_of_a_tile():
    said = []
    rows = measure_tiles("tiny", said.append, tile=64, dtype=torch.float32, device="cpu", repeats=1)
    assert [row["tile of"] for row in rows] == ["norm", "MLP"]
    for row in rows:
        assert row["compiled / not"] == pytest.approx(row["compiled"] / row["seconds"])
        assert row["first time"] > row["compiled"] > 0
        assert row["machine"] == f"CPU, {versions()}"
    assert "compile" in CliRunner().invoke(main, ["bench", "--help"]).output
    assert json.dumps(rows)
    assert said == ["a tile of norm", "a tile of MLP"]
