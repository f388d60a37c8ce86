"""The table of the longest contexts: the best recipe of a cell, confirmed by plans, and what stops more."""

import json
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from lab.commands.cli import main
from lab.errors import LabError, RecipeError
from lab.models import config_of
from lab.planning import max_context_table as table
from lab.planning.hardware import HARDWARE
from lab.planning.max_context import RESOLUTION
from lab.planning.max_context_table import MODELS, RENTALS, Rental, longest_contexts
from lab.planning.plan import plan
from lab.show.context_table import context_table

SMALL = (Rental(2, "rtx4090", "15GiB", 2, "little"), Rental(2, "rtx5090", "16GiB", 2, "more"))

NAMES = ("ulysses", "upipe")


@pytest.fixture(scope="module")
def cells():
    said, seen = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "RECIPE_NAMES", NAMES)
        found = longest_contexts(("tiny",), SMALL, say=said.append, watch=seen.append)
    assert found == tuple(seen)
    assert len(said) <= 8 * len(SMALL) * len(NAMES)
    return found


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_cell_fits_and_little_more_does_not(cells, number):
    cell, rental = cells[number], SMALL[number]
    memory = {"device_memory": int(HARDWARE[rental.device].memory.value), "host_memory": rental.host_memory}
    longest, beyond = (
        plan("tiny", cell.recipe_name, tokens=tokens, ranks=2, ranks_per_node=2, **memory)
        for tokens in (cell.tokens, cell.tokens + cell.tokens // RESOLUTION)
    )
    assert (longest.fits, beyond.fits) == (True, False)
    assert cell.limit == beyond.limit
    assert (cell.plan.device_peak, cell.plan.recipe) == (longest.device_peak, longest.recipe)


@pytest.mark.long
def test_the_first_recipe_is_taken_whose_context_is_nearly_the_longest(cells, monkeypatch):
    for cell, rental in zip(cells, SMALL, strict=True):
        lengths = {}
        for name in NAMES:
            monkeypatch.setattr(table, "RECIPE_NAMES", (name,))
            [alone] = longest_contexts(("tiny",), (rental,))
            lengths[name] = alone.tokens
        enough = max(lengths.values()) * (1 - 1 / RESOLUTION)
        assert cell.recipe_name == next(name for name in lengths if lengths[name] >= enough)
        assert cell.tokens == lengths[cell.recipe_name]
    assert cells[0].tokens < cells[1].tokens


@pytest.mark.long
def test_the_picture_has_every_cell(cells):
    assert "tiny on 2 x RTX 4090" in context_table(cells).text
    assert context_table(cells).png.startswith(b"\x89PNG")
    with pytest.raises(LabError, match=r"^no longest contexts to draw"):
        context_table(())


@pytest.mark.parametrize(
    ("upipe", "long", "best"),
    [(1_900_000, 1_908_000, "upipe"), (1_100_000, 1_900_000, "long"), (1_900_000, 1_100_000, "upipe")],
)
def test_a_class_of_one_length_does_not_cut_a_cell_short(upipe, long, best, monkeypatch):
    """The windows of 2,047 tokens make a class of each power of two. Seen red: the cells said 1,048,576."""
    limits, tried = {"upipe": upipe, "long": long}, {"upipe": [], "long": []}

    def plan_job(job, machine):
        tried[job.recipe_name].append(job.tokens)
        limit = None if job.tokens <= limits[job.recipe_name] else "device"
        return SimpleNamespace(job=job, tokens=job.tokens, ranks=1, limit=limit)

    monkeypatch.setattr(table, "RECIPE_NAMES", tuple(limits))
    monkeypatch.setattr(table, "plan_job", plan_job)
    [cell] = longest_contexts(("phi3-mini",), RENTALS[:1])
    assert limits[best] * (1 - 1 / RESOLUTION) < cell.tokens <= limits[best]
    assert (cell.recipe_name, cell.limit) == (best, "device")
    assert (len(tried["upipe"]) == 1) is (best == "long"), "what cannot be the longest is planned once"


def test_a_length_that_fits_as_an_exception_does_not_make_a_cell_shorter(monkeypatch):
    """``upipe`` fits at what is enough, and its search ends at a shorter context."""
    found = {"upipe": 5_000, "long": 10_000}

    def longest_context(job_of, *_, **__):
        job = job_of(1024)
        return tuple(
            SimpleNamespace(job=job, tokens=found[job.recipe_name], limit=end) for end in (None, "device")
        )

    monkeypatch.setattr(table, "RECIPE_NAMES", tuple(found))
    monkeypatch.setattr(table, "plan_job", lambda job, machine: SimpleNamespace(job=job, limit=None))
    monkeypatch.setattr(table, "longest_context", longest_context)
    [cell] = longest_contexts(("tiny",), RENTALS[:1])
    assert (cell.recipe_name, cell.tokens, cell.limit) == ("long", 10_000, "device")


def test_the_machines_of_the_table():
    assert [rental.title for rental in RENTALS] == [
        "1 x RTX 4090", "1 x H100", "8 x H100", "16 x H100", "8 x B200", "1 x GH200",
    ]  # fmt: skip
    assert "tiny" not in MODELS
    two_nodes = RENTALS[3]
    assert (two_nodes.machine.ranks_per_node, two_nodes.machine.host_memory) == (8, 2 * 2**40)
    assert two_nodes.machine.device_memory == HARDWARE["h100"].memory.value


@pytest.mark.long
def test_what_stops_a_model_that_does_not_fit_at_all(monkeypatch, tmp_path):
    config = config_of("tiny")
    for name, size, limit in (("long", 10**6, "host"), ("upipe", 10**7, "device")):
        config.num_hidden_layers, config.intermediate_size = 1, size
        config.save_pretrained(tmp_path)
        monkeypatch.setattr(table, "RECIPE_NAMES", (name,))
        [cell] = longest_contexts((str(tmp_path),), SMALL[:1])
        assert (cell.plan, cell.tokens, cell.limit) == (None, 0, limit)
        assert cell.summary.startswith(f"{tmp_path} on 2 x RTX 4090: not even 1K tokens fit: ")
        assert f" GiB of {limit} memory needed, " in cell.refusal
        assert cell.to_json()["refusal"] == cell.refusal


@pytest.mark.long
def test_a_recipe_that_the_model_forbids_is_no_candidate(monkeypatch):
    kept = table.make_job

    def make_job(model, name, **sizes):
        if name == "upipe":
            raise RecipeError("no")
        return kept(model, name, **sizes)

    monkeypatch.setattr(table, "RECIPE_NAMES", ("plain", "upipe"))
    monkeypatch.setattr(table, "make_job", make_job)
    [cell] = longest_contexts(("tiny",), SMALL[:1])
    assert cell.recipe_name == "plain"


@pytest.mark.long
def test_the_command_prints_a_line_for_each_cell_and_the_assumptions(monkeypatch, tmp_path):
    monkeypatch.setattr(longest_contexts, "__defaults__", (MODELS, SMALL[:1]))
    monkeypatch.setattr(table, "RECIPE_NAMES", ("upipe",))
    command = ["max-context", "tiny", "--table"]
    said = CliRunner().invoke(main, [*command, "--figure", str(tmp_path / "table.png")])
    assert said.exit_code == 0, said.output
    line = said.stderr.splitlines()[-1]
    assert re.match(r"tiny on 2 x RTX 4090: .* tokens with upipe, stopped by host memory$", line)
    assert "2 x RTX 4090  23.6 GiB per GPU, 15GiB per host: little; " in said.stdout
    assert (tmp_path / "table.png").exists()
    [row] = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert (row["model"], row["gpus"], row["device"]) == ("tiny", 2, "rtx4090")
    assert row["tokens"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--table --ranks 8", "--table has machines and recipes of its own: leave out --ranks"),
        ("--table --device h100 --set overlap=true", ".*: leave out --device, --set"),
        ("--table --figure table.txt", r"table.txt cannot be written: .* ends in \.png"),
        ("llama3-8b --ranks 8 --figure a.png", "--figure draws the table: give --table too"),
        ("--ranks 8", "MODEL missing: lab max-context MODEL --ranks N, or --table"),
        ("", "MODEL and --ranks missing: lab max-context MODEL"),
        ("lama3-8b --table", r"unknown model 'lama3-8b' \(did you mean 'llama3-8b'\?\)"),
    ],
)
def test_what_cannot_be_asked_is_one_line(words, said):
    result = CliRunner().invoke(main, ["max-context", *words.split()])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert re.match(f"lab: {said}", result.stderr), result.stderr
