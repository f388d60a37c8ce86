"""The tuner shows plans, offers a legal move for an illegal one, and copies what it shows."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shlex import split
from typing import Any

import pytest
from click.testing import CliRunner

import lab
import lab.show
from cluster.ranks import Cluster
from lab.commands.cli import main
from lab.errors import LabError, RecipeError
from lab.models import config_of
from lab.planning.bill import Order
from lab.planning.plan import Plan
from lab.recipe.jobs import Job, Machine
from lab.recipe.ladder import ladder, resolve_recipe
from lab.recipe.recipe import KNOBS, Recipe
from lab.show.live.widget import TimelineWidget
from lab.show.tuner import planner
from lab.show.tuner import widget as tuner_widget
from lab.show.tuner.choices import choices
from lab.show.tuner.knobs import SLIDERS
from lab.show.tuner.prediction import parts_of
from lab.show.tuner.scaled_down import MOST_TILES, scale_down
from lab.show.tuner.state import TILES
from lab.units import Ki, Mi, MiB, format_bytes, parse_bytes, parse_tokens
from lab_tests.support.shown import execute_cell


def small(recipe: str | Recipe = "upipe", **settings: Any) -> tuner_widget.Tuner:
    given = {"tokens": 1024, "ranks": 4, "device_memory": "64MiB", "workspace": False, **settings}
    return lab.show.tuner("tiny", recipe, **given)


def plan_of(tuner: tuner_widget.Tuner) -> Plan:
    assert tuner.plan is not None
    return tuner.plan


@pytest.fixture(scope="module")
def tiny_plan() -> Plan:
    return lab.plan("tiny", "upipe", tokens=1024, ranks=4, workspace=False)


@pytest.fixture
def asked(tiny_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """One plan stands for every plan, so that none is made; the jobs that are asked for in the background."""
    jobs: list[Job] = []

    def same_plan(job: Job, machine: Machine) -> Plan:
        return replace(tiny_plan, job=job, machine=machine)

    def in_process(question: planner.Question, wanted: Callable[[], bool]) -> Plan:
        jobs.append(question[0])
        return same_plan(*question)

    monkeypatch.setattr(planner, "_kept", {})
    monkeypatch.setattr(planner, "plan_job", same_plan)
    monkeypatch.setattr(planner, "plan_in_process", in_process)
    monkeypatch.setattr(tuner_widget, "plan_in_process", in_process)
    return jobs


# ---- what is drawn -------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_number_is_of_a_plan_and_what_a_knob_saves_of_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The server of processes takes its cache from the environment.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuner = small(head_chunk=16)
    tuner.change("mlp_tile", 32)
    panel = tuner.panel.content
    assert panel["words"] == "planning tiny · upipe head_chunk=16 mlp_tile=32 · 4 ranks · 1K tokens …"
    assert (panel["verdict"], tuner.plan, panel["bar"]) == ("planning", None, None)
    tuner.wait()
    settings: dict[str, Any] = {"tokens": 1024, "ranks": 4, "workspace": False, "head_chunk": 16}
    plan = lab.plan("tiny", "upipe", mlp_tile=32, **settings)
    without = lab.plan("tiny", "upipe", mlp_tile=None, **settings)
    sizes, saves = tuner.panel.content["bar"]["sizes"], tuner.answer.saves
    assert sizes == tuner.answer.by_category
    assert sum(sizes.values()) == plan.device_peak
    assert plan_of(tuner).host_peak_per_node == plan.host_peak_per_node > 0
    assert saves["mlp_tile"] == without.device_peak - plan.device_peak > 0
    assert saves.keys() == {"head_chunk", "checkpoint", "offload", *TILES}
    assert tuner.knobs.saves["mlp_tile"].value == f"saves {format_bytes(saves['mlp_tile'])}"


@pytest.mark.long
def test_the_parts_of_a_category_add_up_to_it_at_the_start_too(tiny_plan: Plan) -> None:
    for plan in (tiny_plan, replace(tiny_plan, start=replace(tiny_plan.peak, device=2**40))):
        found = parts_of(plan)
        for category, size in plan.peak.by_category.items():
            parts = found[category]
            assert sum(parts.values()) == size
            assert plan is tiny_plan or set(parts) <= {category}
    assert set(parts_of(tiny_plan)["parameters"]) > {"mlp"}


@pytest.mark.parametrize(
    ("device", "host", "verdict", "words"),
    [
        (1, "21GiB", "fits", "fits: "),
        (0.99, "21GiB", "device", "does not fit: "),
        (1, "20481MiB", "host", "does not fit the host: 3.00 MiB of 1.00 MiB per node, which has 20.0 GiB"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_the_verdict_is_of_both_memories(
    tiny_plan: Plan, device: float, host: str, verdict: str, words: str
) -> None:
    tuner = small(device_memory=int(tiny_plan.device_peak * device), host_memory=host)
    assert tuner.panel.content["verdict"] == verdict, tuner.panel.content["words"]
    assert tuner.panel.content["words"].startswith(words)


def test_the_knob_under_the_hand_is_asked_first_and_what_is_known_is_not_asked_again(
    asked: list[Job],
) -> None:
    tuner = small()
    assert asked == []
    tuner.change("norm_tile", 32)
    tuner.wait()
    assert asked[0].recipe.norm_tile == 32
    assert asked[1].recipe.norm_tile is None
    assert len(asked) == len(set(asked)) == 7
    tuner.change("device_memory", 32 * MiB)
    assert tuner.panel.content["verdict"] == "device"
    tuner.wait()
    assert len(asked) == 7


def test_a_newer_state_ends_the_plan_that_is_made(asked: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, began, ended, quick = small(), threading.Event(), [], planner.plan_in_process

    def slow(question: planner.Question, wanted: Callable[[], bool]) -> Plan | LabError | None:
        if question[0].tokens != 2048:
            return quick(question, wanted)
        began.set()
        while wanted():
            pass
        ended.append(question)
        return None

    monkeypatch.setattr(planner, "plan_in_process", slow)
    tuner.change("tokens", 2048)
    assert began.wait(60)
    tuner.change("tokens", 4096)
    tuner.wait()
    assert len(ended) == 1
    assert {job.tokens for job in asked} == {4096}
    assert plan_of(tuner).tokens == 4096


def test_what_goes_wrong_in_a_process_is_said(asked: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = small()
    monkeypatch.setattr(planner, "plan_in_process", lambda *_: LabError("no plan today"))
    tuner.change("tokens", 2048)
    tuner.wait()
    assert (tuner.panel.content["verdict"], tuner.panel.content["words"]) == ("illegal", "no plan today")


# ---- moves ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("asked")
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


@pytest.mark.usefixtures("asked")
def test_every_choice_of_a_slider_is_shown_and_none_is_another() -> None:
    tuner = lab.show.tuner("llama3.2-3b", tokens=1000, ranks=5, device_memory="81089MiB")
    assert tuner.knobs.by_name.keys() >= {knob.name for knob in KNOBS if knob.turned}
    for name in SLIDERS:
        options = tuner.knobs.by_name[name].options
        assert len({label for label, _ in options}) == len(options) == len(choices(tuner.state, name))
    assert {8, 24} <= set(choices(tuner.state, "head_chunk"))


# ---- illegal combinations ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("asked")
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
    assert tuner.run_button.disabled
    tuner.panel._handle_custom_msg({"suggestion": 0}, [])
    assert tuner.recipe == resolve_recipe("upipe", "llama3-8b", 8, 3 * Mi, head_chunk=16)
    assert tuner.knobs.by_name["head_chunk"].value == 16
    assert not tuner.run_button.disabled


@pytest.mark.usefixtures("asked")
def test_the_knob_that_was_moved_is_mended_first() -> None:
    tuner = lab.show.tuner("llama3-8b", ranks=8)
    tuner.knobs.by_name["checkpoint"].value = False
    assert tuner.panel.content["suggestions"] == ["checkpoint on", "offload none"]
    tuner.accept(1)
    assert (tuner.recipe.checkpoint, tuner.recipe.offload) == (False, "none")
    tuner.change("offload", "inputs")
    assert tuner.panel.content["suggestions"] == ["offload none", "checkpoint on"]


@pytest.mark.long
@pytest.mark.usefixtures("asked")
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


@pytest.mark.long
@pytest.mark.usefixtures("asked")
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


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("settings", COPIED, ids=str)
def test_both_copied_texts_make_the_same_recipe(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = lab.show.tuner("tiny", **{"tokens": 2048, "ranks": 4, **settings})
    if isinstance(settings["recipe"], Recipe):
        assert tuner.recipe == settings["recipe"]
    told: list[dict[str, Any]] = []
    python, command = tuner.panel.content["texts"]

    def plan(model: str, recipe: str, **given: Any) -> Any:
        known = {"tokens", "ranks", "device_memory", "host_memory", "workspace"}
        given = {"workspace": True} | {n: v for n, v in given.items() if n not in UNSAID}
        knobs = {name: value for name, value in given.items() if name not in known}
        made = resolve_recipe(recipe, model, given["ranks"], parse_tokens(given["tokens"]), **knobs)
        assert made == tuner.recipe
        told.append({name: given[name] for name in known} | {"model": model})
        raise LabError("asked")

    monkeypatch.setattr("lab.planning.plan.plan", plan)
    with pytest.raises(LabError, match="asked"):
        eval(python, {"lab": lab})
    program, *words = split(command)
    assert program == "lab"
    answer = CliRunner().invoke(main, words)
    assert (answer.exit_code, "asked" in answer.output) == (2, True), answer.output
    said, also = told
    assert said == also
    memories = tuner.state.device_memory, tuner.state.host_memory
    assert tuple(map(parse_bytes, (said["device_memory"], said["host_memory"]))) == memories
    assert said["workspace"] is tuner.state.workspace


UNSAID = (
    "layers", "rows", "accumulate", "ranks_per_node", "device", "disk", "disk_rate", "lora", "documents",
    "dtype",
)  # fmt: skip
"""What the command line gives and a tuner does not know."""


# ---- seconds and run ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("asked")
def test_the_bill_is_made_of_a_plan_and_says_what_is_missing() -> None:
    tuner = small(tokens_total="10B")
    plan = plan_of(tuner)
    step = f"a step takes {plan.seconds_text} on {plan.device}, MFU {plan.mfu:.1%} (estimate)"
    tuner.knobs.by_name["price"].value = " 2.5"
    order = tuner.state.order
    assert order == Order(10**10, 2.5)
    assert tuner.panel.content["seconds"] == f"{plan.bill(order).text(order)}; {step}"
    assert "node hours" in tuner.panel.content["seconds"]
    assert tuner._repr_mimebundle_()["text/plain"].endswith(step)
    # What cannot be read is said in the line, and the state stays.
    for name, value, said in (
        ("price", "free", "price='free': give the money for one GPU hour, a number above 0 such as 2.5"),
        ("price", "2.5", f"; {step}"),
        ("tokens_total", "1023", "tokens_total=1023 is less than a step has: 1 rows x 1024 tokens"),
        ("tokens_total", "", "price='2.5' without tokens_total: give the tokens to be trained too"),
        ("price", "", step),
    ):
        tuner.knobs.by_name[name].value = value
        assert said in tuner.panel.content["seconds"]
    tuner.wait()


@pytest.mark.usefixtures("asked")
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


@pytest.mark.long
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
    measured, planned = tuner.status.value.split(" · measured ")[1].split(" per rank, planned ")
    assert measured == planned


# ---- without a front end -----------------------------------------------------------------------------------


@pytest.mark.long
def test_an_executed_notebook_stores_a_picture_and_a_table(tmp_path: Path) -> None:
    shown = 'lab.show.tuner("llama3-8b", tokens="5M", ranks=8)'
    (output,) = execute_cell(f"import lab.show\n{shown}", tmp_path).cells[0].outputs
    assert len(output.data["image/png"]) > 5000
    first, *rows = output.data["text/plain"].splitlines()
    answer = eval(shown, {"lab": lab}).answer
    assert first == answer.text
    assert len(rows) >= len(answer.by_category) + 3


@pytest.mark.usefixtures("asked")
def test_an_illegal_beginning_is_words_alone() -> None:
    tuner = small(head_chunk=6)
    bundle = tuner._repr_mimebundle_()
    assert "image/png" not in bundle
    assert bundle["text/plain"].startswith("illegal: head_chunk=6: ")
    assert bundle["text/plain"].endswith("would work: head chunk 4")
    assert tuner.answer.verdict == "illegal"


def test_the_ladder_below_a_rung_is_not_asked_what_the_rungs_above_allow() -> None:
    assert resolve_recipe("checkpoint", "tiny", 4, 1024, checkpoint=False).checkpoint is False
    with pytest.raises(RecipeError, match="without checkpointing"):
        ladder("tiny", 4, 1024, checkpoint=False)
