"""The tuner shows the closed form, offers a legal move for an illegal one, and copies what it shows."""

import threading
from itertools import pairwise
from pathlib import Path
from shlex import split
from typing import Any

import nbformat
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient

import lab
import lab.show
from cluster.ranks import Cluster
from lab.commands.cli import main
from lab.errors import LabError, RecipeError
from lab.models import config_of, shape_of
from lab.planning.bill import Order
from lab.planning.closed_form import estimate_job
from lab.planning.cuda_workspace import fixed_workspace
from lab.recipe.jobs import Job
from lab.recipe.ladder import RUNGS, ladder, resolve_recipe
from lab.recipe.recipe import Recipe
from lab.show.live.widget import TimelineWidget
from lab.show.tuner import widget as tuner_widget
from lab.show.tuner.choices import choices
from lab.show.tuner.estimate import Refusal, StateEstimate, _parts, estimate_state
from lab.show.tuner.scaled_down import MOST_TILES, scale_down
from lab.show.tuner.state import TILES, State
from lab.units import GiB, Ki, Mi, MiB, parse_bytes, parse_tokens


def small(recipe: str | Recipe = "upipe", **settings: Any) -> tuner_widget.Tuner:
    given = {"tokens": 1024, "ranks": 4, "device_memory": "64MiB", "workspace": False, **settings}
    return lab.show.tuner("tiny", recipe, **given)


def estimate_of(tuner: tuner_widget.Tuner) -> StateEstimate:
    assert isinstance(tuner.estimate, StateEstimate)
    return tuner.estimate


STREAMED = ("streamed", {}), ("long", {}), ("streamed", {"segment": 2, "stream": 8192}), ("tiling", {
    "mlp_tile": None, "stream": 8192, "head_chunk": 16,
})  # fmt: skip


@pytest.mark.parametrize(("rung", "knobs"), STREAMED)
def test_streamed_layers_have_their_own_bytes_and_stay_streamed_when_scaled_down(
    rung: str, knobs: dict[str, Any]
) -> None:
    tuner = lab.show.tuner("llama3-8b", rung, tokens="5M", ranks=8, workspace=False, **knobs)
    found = estimate_job(shape_of("llama3-8b"), Job("llama3-8b", tuner.recipe, 5 * Mi, 8))
    assert (estimate_of(tuner).device, estimate_of(tuner).host) == (found.device_peak, 8 * found.host_peak)
    # They need checkpointing and offload, so nothing is said of a step without.
    assert (
        {"head_chunk", "loss_tile"}
        <= set(estimate_of(tuner).saves)
        <= {"head_chunk", "norm_tile", "loss_tile"}
    )
    small_recipe = scale_down(tuner.state, 4).state.recipe
    assert small_recipe.segment == tuner.recipe.segment
    assert small_recipe.stream == 2048 // 4 // 8
    refused = estimate_state(tuner.state.with_value("mlp_tile", 4096), "mlp_tile")
    assert isinstance(refused, Refusal)
    assert [(s.name, s.value) for s in refused.suggestions] == [("mlp_tile", None)]


# ---- what is drawn -------------------------------------------------------------------------------------


def test_what_is_drawn_is_the_closed_form_and_what_cuda_takes() -> None:
    tuner = lab.show.tuner("llama3-8b", "upipe", tokens="5M", ranks=8, head_chunk=16)
    found = estimate_job(shape_of("llama3-8b"), Job("llama3-8b", tuner.recipe, 5 * Mi, 8))
    assert estimate_of(tuner).device == found.device_peak + fixed_workspace(8)
    assert estimate_of(tuner).host == 8 * found.host_peak > 0
    bar = tuner.panel.content["bars"][0]
    assert sum(bar["sizes"].values()) == estimate_of(tuner).device
    assert tuner.panel.content["limit"] == 81089 * MiB
    without = lab.show.tuner("llama3-8b", tokens="5M", ranks=8, head_chunk=16, workspace=False)
    assert estimate_of(without).device == found.device_peak
    assert "other" not in estimate_of(without).by_category


@pytest.mark.parametrize("rung", RUNGS)
def test_every_byte_of_every_moment_has_a_colour(rung: str) -> None:
    recipe = resolve_recipe(rung, "llama3.2-1b", 4, 64 * Ki)
    job = Job("llama3.2-1b", recipe, 64 * Ki, 4)
    for moment, parts in estimate_job(shape_of("llama3.2-1b"), job).moments.items():
        assert sum(part.size for part in _parts(parts)) == sum(
            size for held in parts.values() for size in held.values()
        )
        held = {part.name: part.size for part in _parts(parts)}
        assert held["Adam's two moments"] == 2 * held["fp32 parameters"] > 0
        if moment == "optimizer":
            assert held["gradients"] == pytest.approx(held["fp32 parameters"], abs=4)


def test_what_a_knob_saves_is_the_difference_that_it_makes() -> None:
    tuner = small()
    for name, value in (("mlp_tile", None), ("offload", "none")):
        saved = estimate_of(tuner).saves[name]
        moved = tuner.state.with_value(name, value)
        found = estimate_state(moved)
        assert isinstance(found, StateEstimate)
        assert found.device == estimate_of(tuner).device + saved
    tuner.change("mlp_tile", None)
    assert "mlp_tile" not in estimate_of(tuner).saves


@pytest.mark.parametrize(
    ("device", "host", "verdict", "words"),
    [
        (1.2, "21GiB", "fits", "fits: "),
        (1.05, "21GiB", "close", "just fits: "),
        (0.99, "21GiB", "device", "does not fit: "),
        (1.2, "20481MiB", "host", "does not fit the host: 3.00 MiB of 1.00 MiB per node, which has 20.0 GiB"),
    ],
)
def test_the_verdict_is_of_both_memories(device: float, host: str, verdict: str, words: str) -> None:
    tuner = small(device_memory=int(estimate_of(small()).device * device), host_memory=host)
    assert tuner.panel.content["verdict"] == verdict, tuner.panel.content["words"]
    assert tuner.panel.content["words"].startswith(words)


# ---- moves ---------------------------------------------------------------------------------------------


def test_a_move_draws_again_without_a_plan_or_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a move makes no plan and builds no model")

    tuner = lab.show.tuner()
    monkeypatch.setattr("lab.models.build", refuse)
    monkeypatch.setattr("lab.planning.fake_step.fake_step", refuse)
    monkeypatch.setattr(tuner_widget, "plan", refuse)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refuse)
    drawn = [tuner.panel.content]
    for name, value in (
        ("head_chunk", 16), ("mlp_tile", 64 * Ki), ("norm_tile", 0), ("loss_tile", 1024), ("offload", "none"),
        ("checkpoint", False), ("tokens", Mi), ("ranks", 16), ("device_memory", 143156 * MiB),
        ("model", "llama3-70b"), ("rung", "tiling"),
    ):  # fmt: skip
        tuner.knobs.by_name[name].value = value
        drawn.append(tuner.panel.content)
    assert all(before != after for before, after in pairwise(drawn))
    assert tuner.state == State(
        model="llama3-70b", shape=tuner.state.shape, rung="tiling", tokens=Mi, ranks=16, by_hand={},
        device_memory=143156 * MiB, host_memory=2048 * GiB, workspace=True,
    )  # fmt: skip
    assert tuner.recipe == resolve_recipe("tiling", "llama3-70b", 16, Mi)


def test_what_derives_follows_and_what_was_set_by_hand_stays() -> None:
    tuner = lab.show.tuner("llama3-8b", tokens="1M", ranks=8)
    tuner.knobs.by_name["mlp_tile"].value = 1024
    tuner.knobs.by_name["ranks"].value = 16
    assert tuner.recipe == resolve_recipe("upipe", "llama3-8b", 16, Mi, mlp_tile=1024)
    assert tuner.knobs.by_name["head_chunk"].value == tuner.recipe.head_chunk == 8
    assert tuner.recipe.ring == 2
    tuner.knobs.by_name["rung"].value = "checkpoint"
    assert tuner.recipe == resolve_recipe("checkpoint", "llama3-8b", 16, Mi)
    assert [tuner.knobs.by_name[name].value for name in ("head_chunk", *TILES)] == [0, 0, 0, 0]


def test_every_choice_of_a_slider_is_shown_and_none_is_another() -> None:
    tuner = lab.show.tuner("llama3.2-3b", tokens=1000, ranks=5, device_memory="81089MiB")
    for name in ("tokens", "ranks", "device_memory", "head_chunk", *TILES):
        options = tuner.knobs.by_name[name].options
        assert len({label for label, _ in options}) == len(options) == len(choices(tuner.state, name))
    assert {8, 24} <= set(choices(tuner.state, "head_chunk"))


# ---- illegal combinations ----------------------------------------------------------------------------------


def test_an_illegal_head_chunk_says_why_and_the_nearest_legal_one_is_a_click_away() -> None:
    tuner = lab.show.tuner("llama3-8b", ranks=8)
    tuner.knobs.by_name["head_chunk"].value = 24
    with pytest.raises(RecipeError) as refused:
        _ = tuner.recipe
    panel = tuner.panel.content
    assert (panel["verdict"], panel["words"]) == ("illegal", str(refused.value))
    assert "these work: 8, 16, 32" in panel["words"]
    assert panel["suggestions"] == ["head chunk 16"]
    assert panel["texts"] == ["", ""]
    assert tuner.plan_button.disabled
    assert tuner.run_button.disabled
    tuner.panel._handle_custom_msg({"suggestion": 0}, [])
    assert tuner.recipe == resolve_recipe("upipe", "llama3-8b", 8, 3 * Mi, head_chunk=16)
    assert tuner.knobs.by_name["head_chunk"].value == 16
    assert not tuner.plan_button.disabled


def test_the_knob_that_was_moved_is_mended_first() -> None:
    tuner = lab.show.tuner("llama3-8b", ranks=8)
    tuner.knobs.by_name["checkpoint"].value = False
    assert tuner.panel.content["suggestions"] == ["checkpoint on", "offload none"]
    tuner.accept(1)
    assert (tuner.recipe.checkpoint, tuner.recipe.offload) == (False, "none")
    tuner.change("offload", "inputs")
    assert tuner.panel.content["suggestions"] == ["offload none", "checkpoint on"]


def test_a_move_that_no_state_has_is_refused_and_moves_nothing() -> None:
    tuner = small()
    tuner.change("tokens", "2K")
    tuner.change("ulysses", 2)
    before = tuner.state
    assert (before.tokens, tuner.recipe.ulysses, tuner.recipe.head_chunk) == (2048, 2, 2)
    for name, value, said in (
        ("rank", 2, "a recipe has no field 'rank'"),
        ("ranks", 0, "ranks=0: it takes a whole number"),
        ("model", config_of("tiny"), "a tuner writes its model as text"),
        ("rung", "top", "unknown recipe 'top'"),
        ("device_memory", "much", "'much' is not an amount of memory"),
    ):
        with pytest.raises(LabError, match=said):
            tuner.change(name, value)
    assert tuner.state == before


def test_ranks_that_a_degree_by_hand_forbids_are_mended_to_others() -> None:
    tuner = lab.show.tuner("llama3-8b", Recipe(fsdp=True, ulysses=4, head_chunk=8), ranks=8)
    tuner.change("ranks", 6)
    assert "on 6 ranks" in tuner.panel.content["words"]
    assert tuner.panel.content["suggestions"] == ["ranks 4"]
    tuner.accept(0)
    assert tuner.recipe.ulysses == tuner.state.ranks == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "fish"}, "unknown recipe 'fish'"),
        ({"tokens": "many"}, "not a number of tokens"),
        ({"ranks": 0}, "ranks=0"),
        ({"head_chunk": -8}, "head_chunk=-8"),
        ({"fish": 3}, "no field 'fish'"),
        ({"model": lambda: None}, "a tuner writes its model as text"),
    ],
)
def test_what_does_not_exist_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        lab.show.tuner(**{"model": "tiny", **settings})


# ---- copy ------------------------------------------------------------------------------------------------

COPIED = [
    {"recipe": "upipe", "head_chunk": 16, "mlp_tile": 64, "loss_tile": None},
    {"recipe": "checkpoint", "checkpoint": False},
    {"recipe": "plain", "workspace": False, "device_memory": 123_457, "tokens": 1000},
    {"recipe": "tiling", "offload": "none", "ring": 2},
    {"recipe": Recipe(fsdp=True, ulysses=2, checkpoint=True, offload="inputs", loss_tile=300)},
    {"recipe": Recipe(ulysses=2, ulysses_backend="deepspeed", compute_dtype="bfloat16", norm_tile=128)},
]


@pytest.mark.parametrize("settings", COPIED, ids=str)
def test_both_copied_texts_make_the_same_recipe(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = lab.show.tuner("tiny", **{"tokens": 2048, "ranks": 4, **settings})
    if isinstance(settings["recipe"], Recipe):
        assert tuner.recipe == settings["recipe"]
    asked: list[dict[str, Any]] = []

    def plan(model: str, recipe: str, **given: Any) -> Any:
        known = {"tokens", "ranks", "device_memory", "host_memory", "workspace"}
        given = {"workspace": True} | {n: v for n, v in given.items() if n not in UNSAID}
        knobs = {name: value for name, value in given.items() if name not in known}
        made = resolve_recipe(recipe, model, given["ranks"], parse_tokens(given["tokens"]), **knobs)
        assert made == tuner.recipe
        asked.append({name: given[name] for name in known} | {"model": model})
        raise LabError("asked")

    monkeypatch.setattr("lab.planning.plan.plan", plan)
    with pytest.raises(LabError, match="asked"):
        eval(tuner.python, {"lab": lab})
    program, *words = split(tuner.command)
    assert program == "lab"
    answer = CliRunner().invoke(main, words)
    assert (answer.exit_code, "asked" in answer.output) == (2, True), answer.output
    said, told = asked
    assert said == told
    memories = tuner.state.device_memory, tuner.state.host_memory
    assert tuple(map(parse_bytes, (said["device_memory"], said["host_memory"]))) == memories
    assert said["workspace"] is tuner.state.workspace


UNSAID = ("rows", "ranks_per_node", "device", "disk", "disk_rate", "lora", "documents", "dtype")
"""What the command line gives and a tuner does not know."""


# ---- plan and run ------------------------------------------------------------------------------------------


def test_a_plan_is_made_in_the_background_and_stands_beside_the_closed_form() -> None:
    tuner = small(head_chunk=32)
    tuner.plan_button.click()
    tuner.wait()
    assert tuner.planned is not None
    assert tuner.planned.recipe == tuner.recipe
    closed, planned = tuner.panel.content["bars"]
    assert sum(planned["sizes"].values()) == tuner.planned.device_peak
    assert sum(closed["sizes"].values()) == pytest.approx(tuner.planned.device_peak, rel=0.01)
    assert not planned["stale"]
    assert "Planned: " in tuner.panel.content["note"]
    assert not tuner.plan_button.disabled


def test_the_bill_is_made_of_a_plan_and_says_what_is_missing() -> None:
    tuner = small(head_chunk=32, tokens_total="10B")
    assert tuner.panel.content["bill"].startswith("Plan estimates the seconds of a step")
    tuner.plan()
    tuner.wait()
    assert tuner.planned is not None
    mfu = f"MFU {tuner.planned.mfu:.1%} (estimate)"
    tuner.knobs.by_name["price"].value = " 2.5"
    order = tuner.state.order
    assert order == Order(10**10, 2.5)
    assert tuner.panel.content["bill"] == f"{tuner.planned.bill(order).text(order)}; {mfu}"
    assert "node hours" in tuner.panel.content["bill"]
    assert tuner._repr_mimebundle_()["text/plain"].endswith(mfu)
    # What cannot be read is said in the line, and the state stays.
    for name, value, said in (
        ("price", "free", "price='free': give the money for one GPU hour, a number above 0 such as 2.5"),
        ("price", "2.5", f"; {mfu}"),
        ("tokens_total", "1023", "tokens_total=1023 is less than a step has: 1 rows x 1024 tokens"),
        ("tokens_total", "", "price='2.5' without tokens_total: give the tokens to be trained too"),
        ("price", "", mfu),
    ):
        tuner.knobs.by_name[name].value = value
        assert said in tuner.panel.content["bill"]
        assert estimate_of(tuner).device
    tuner.change("head_chunk", 8)
    assert tuner.panel.content["bill"] == ""


def test_a_plan_of_an_earlier_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, made, go = small(head_chunk=32), threading.Event(), threading.Event()
    plan = tuner_widget.plan

    def slow(*args: Any, **settings: Any) -> Any:
        made.set()
        assert go.wait(60)
        return plan(*args, **settings)

    monkeypatch.setattr(tuner_widget, "plan", slow)
    tuner.plan()
    assert made.wait(60)
    # The kernel is free: while it is planned the reader moves on.
    tuner.change("head_chunk", 8)
    # A second click, that the page sent before it heard that the buttons are off, starts nothing.
    assert tuner.plan_button.disabled
    tuner.run()
    go.set()
    tuner.wait()
    assert tuner.ran is None
    planned = tuner.panel.content["bars"][1]
    assert planned["stale"]
    assert planned["name"].startswith("plan of an earlier setting")
    assert "Planned: " not in tuner.panel.content["note"]
    # Back where it was made for it holds again; another device has no part in a plan.
    tuner.change("head_chunk", 32)
    tuner.change("device_memory", 32 * MiB)
    assert not tuner.panel.content["bars"][1]["stale"]


def test_what_goes_wrong_in_the_background_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **settings: Any) -> None:
        raise LabError("no <fish> today")

    monkeypatch.setattr(tuner_widget, "plan", fails)
    tuner = small()
    tuner.plan()
    tuner.wait()
    assert tuner.status.value == "LabError: no &lt;fish&gt; today"
    assert not tuner.plan_button.disabled


def test_what_is_scaled_down_keeps_its_proportions_and_is_said() -> None:
    state = lab.show.tuner("llama3-8b", tokens="4M", ranks=8, head_chunk=16, mlp_tile=256 * Ki).state
    found = scale_down(state, 4)
    small_, big = found.state.recipe, state.recipe
    assert (found.state.model, found.state.ranks, found.state.tokens) == ("tiny", 4, 2048)
    assert small_.head_chunk == big.head_chunk  # of as many heads
    # Half of a rank's tokens, as it was; and the fewest that a tile may have.
    assert (small_.mlp_tile, small_.norm_tile) == (256, 512 // MOST_TILES)
    assert (small_.checkpoint, small_.offload, small_.fsdp) == (True, "inputs", True)
    said = {"model llama3-8b → tiny", "ranks 8 → 4", "context 4M → 2K", "MLP tile 256K → 256"}
    assert said <= {*found.changes}
    # A third of 24 heads: of 32 the nearest that divides them.
    assert scale_down(lab.show.tuner("llama3.2-3b", ranks=8).state, 2).state.recipe.head_chunk == 8
    as_it_stands = small().state
    assert scale_down(as_it_stands, 4).state.recipe == as_it_stands.recipe
    assert scale_down(as_it_stands, 4).changes == ()


@pytest.mark.slow
def test_run_trains_a_small_step_of_the_same_recipe_and_leaves_its_timeline(ranks4: Cluster) -> None:
    # Two tiles and two stages: of the ladder's there would be eight and four.
    few: dict[str, Any] = {"head_chunk": 16, **dict.fromkeys(TILES, 64 * Ki)}
    tuner = lab.show.tuner("llama3-8b", tokens="1M", ranks=8, cluster=ranks4, **few)
    tuner.run_button.click()
    assert tuner.run_button.disabled
    tuner.wait()
    assert tuner.ran is not None, tuner.status.value
    assert tuner.ran.job.recipe == scale_down(tuner.state, 4).state.recipe
    assert tuner.ran.complete
    assert "model llama3-8b → tiny, ranks 8 → 4, context 1M → 2K" in tuner.status.value
    (shown,) = tuner.run_box.children
    assert isinstance(shown, TimelineWidget)
    said = estimate_state(scale_down(tuner.state, 4).state)
    assert isinstance(said, StateEstimate)
    assert tuner.ran.timelines[0].device_peak == pytest.approx(said.device, rel=0.01)


# ---- without a front end -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_executed_notebook_stores_a_picture_and_a_table(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
import lab.show
lab.show.tuner("llama3-8b", tokens="5M", ranks=8)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    (output,) = notebook.cells[0].outputs
    assert len(output.data["image/png"]) > 5000
    first, *rows = output.data["text/plain"].splitlines()
    tuner = lab.show.tuner("llama3-8b", tokens="5M", ranks=8)
    assert first == estimate_of(tuner).text
    assert len(rows) == len(estimate_of(tuner).by_category) + 2 + len(estimate_of(tuner).saves)


def test_an_illegal_beginning_is_words_alone() -> None:
    tuner = small(head_chunk=6)
    bundle = tuner._repr_mimebundle_()
    assert "image/png" not in bundle
    assert bundle["text/plain"].startswith("illegal: head_chunk=6: ")
    assert bundle["text/plain"].endswith("would work: head chunk 4")
    assert isinstance(tuner.estimate, Refusal)


def test_the_ladder_below_a_rung_is_not_asked_what_the_rungs_above_allow() -> None:
    assert resolve_recipe("checkpoint", "tiny", 4, 1024, checkpoint=False).checkpoint is False
    with pytest.raises(RecipeError, match="without checkpointing"):
        ladder("tiny", 4, 1024, checkpoint=False)
