"""The table of the longest contexts: the best recipe of a cell, confirmed by plans, and what stops more."""

import json
import re

import pytest
from click.testing import CliRunner

from lab.commands.cli import main
from lab.errors import LabError
from lab.planning import max_context_table as table
from lab.planning.hardware import HARDWARE
from lab.planning.max_context import RESOLUTION
from lab.planning.max_context_table import MODELS, RENTALS, Rental, longest_contexts
from lab.planning.plan import plan
from lab.recipe.ladder import RECIPE_NAMES
from lab.show.context_table import context_table
from lab.units import Ki

SMALL = (Rental(2, "rtx4090", "15GiB", 2, "little"), Rental(2, "rtx5090", "16GiB", 2, "more"))


@pytest.fixture(scope="module")
def cells():
    said, seen = [], []
    found = longest_contexts(("tiny",), SMALL, say=said.append, watch=seen.append)
    assert found == tuple(seen)
    assert 2 <= sum("planning" in text for text in said) <= 6
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_cell_fits_and_little_more_does_not(cells, number):
    cell, rental = cells[number], SMALL[number]
    memory = {"device_memory": int(HARDWARE[rental.device].memory.value), "host_memory": rental.host_memory}
    step = 2 * max(Ki, cell.tokens // RESOLUTION)
    degrees = {"ulysses": cell.plan.recipe.ulysses, "ring": cell.plan.recipe.ring}
    longest, beyond = (
        plan("tiny", cell.recipe_name, tokens=tokens, ranks=2, ranks_per_node=2, **memory, **degrees)
        for tokens in (cell.tokens, cell.tokens + step)
    )
    assert (longest.fits, beyond.fits) == (True, False)
    assert cell.limit == beyond.limit
    assert (cell.plan.device_peak, cell.plan.recipe) == (longest.device_peak, longest.recipe)


@pytest.mark.slow
def test_the_best_recipe_is_that_of_the_longest_context_by_the_closed_form(cells):
    for cell, rental in zip(cells, SMALL, strict=True):
        lengths = {
            c.name: c.tokens
            for c in table._candidates("tiny", table.shape_of("tiny"), rental, rental.machine)
        }
        assert [*lengths] == [*RECIPE_NAMES]
        enough = max(lengths.values()) * (1 - 1 / RESOLUTION)
        assert cell.recipe_name == next(name for name in lengths if lengths[name] >= enough)
        assert cell.tokens == pytest.approx(lengths[cell.recipe_name], rel=0.05)
    assert cells[0].tokens < cells[1].tokens


@pytest.mark.slow
def test_the_picture_has_every_cell(cells):
    assert "tiny on 2 x RTX 4090" in context_table(cells).text
    assert context_table(cells).png.startswith(b"\x89PNG")
    with pytest.raises(LabError, match=r"^no longest contexts to draw"):
        context_table(())


def test_the_machines_of_the_table():
    assert [rental.title for rental in RENTALS] == [
        "1 x RTX 4090", "1 x H100", "8 x H100", "16 x H100", "8 x B200", "1 x GH200",
    ]  # fmt: skip
    assert "tiny" not in MODELS
    two_nodes = RENTALS[3]
    assert (two_nodes.machine.ranks_per_node, two_nodes.machine.host_memory) == (8, 2 * 2**40)
    assert two_nodes.machine.device_memory == HARDWARE["h100"].memory.value


def test_what_stops_a_model_that_does_not_fit_at_all(monkeypatch):
    """The optimizer state of 70B parameters is twenty times the memory: no plan is needed to know."""
    monkeypatch.setattr(table, "plan_job", None)
    [cell] = longest_contexts(("llama3-70b",), RENTALS[:1])
    assert (cell.plan, cell.tokens, cell.limit) == (None, 0, "host")
    assert cell.summary.startswith("llama3-70b on 1 x RTX 4090: not even 1K tokens fit: 1.")
    assert cell.refusal.endswith("TiB of host memory needed, 56.0 GiB given")
    assert cell.to_json()["refusal"] == cell.refusal
    # Without the optimizer on the host, it is the device that is too small.
    monkeypatch.setattr(table, "RECIPE_NAMES", ("upipe", "streamed"))
    [cell] = longest_contexts(("llama3-70b",), RENTALS[:1])
    assert (cell.plan, cell.tokens, cell.limit) == (None, 0, "device")
    assert "TiB of device memory needed, 23.6 GiB given; optimizer " in cell.refusal


def test_a_recipe_that_the_model_forbids_is_no_candidate(monkeypatch):
    kept = table._candidate

    def candidate(name, *rest):
        if name == "upipe":
            raise table.RecipeError("no")
        return kept(name, *rest)

    monkeypatch.setattr(table, "RECIPE_NAMES", ("plain", "upipe"))
    monkeypatch.setattr(table, "_candidate", candidate)
    found = table._candidates("tiny", table.shape_of("tiny"), SMALL[0], SMALL[0].machine)
    assert [candidate.name for candidate in found] == ["plain"]


def test_the_command_prints_a_line_for_each_cell_and_the_assumptions(monkeypatch, tmp_path):
    monkeypatch.setattr(longest_contexts, "__defaults__", (MODELS, RENTALS[:1]))
    command = ["max-context", "qwen3-32b", "--table"]
    said = CliRunner().invoke(main, [*command, "--figure", str(tmp_path / "table.png")])
    assert said.exit_code == 0, said.output
    assert said.stderr.startswith("qwen3-32b on 1 x RTX 4090: not even 1K tokens fit: ")
    assert (
        "1 x RTX 4090  23.6 GiB per GPU, 64GiB per host: a workstation; 56.0 GiB of it for the step\n"
        in said.stdout
    )
    assert (tmp_path / "table.png").exists()
    [row] = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert (row["model"], row["gpus"], row["device"], row["tokens"]) == ("qwen3-32b", 1, "rtx4090", 0)


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
