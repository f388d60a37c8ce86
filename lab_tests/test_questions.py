"""What asks the reader: the field for a guess, and the questions at the end of a notebook."""

import re

import nbformat
import pytest

from lab import show
from lab.errors import NotebookError
from lab.jupyter.notebook_files import FOLDER
from lab.show.questions import read

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def test_a_guess_is_noted_and_compared():
    guess = show.guess("peak", unit="MiB")
    assert guess.value is None
    assert guess.compare(50).data == "peak: measured **50 MiB** (no prediction was made)"
    guess._field.value = " 84,5 "  # as typed, followed by Enter
    assert guess.value == 84.5
    assert guess._note.value == "noted: 84.5 MiB ✓"
    assert guess.compare(42.25).data == "peak: predicted 84.5 MiB, measured **42.25 MiB**, ratio 2.00"
    assert guess.compare(0, how="planned").data == "peak: predicted 84.5 MiB, planned **0 MiB**"
    compared = guess.compare(42.25, missed="the gradients do not exist yet.").data
    assert compared.endswith("\n\n*What most people miss:* the gradients do not exist yet.")


def test_a_guess_that_is_no_number_is_said_and_not_kept():
    guess = show.guess("peak", unit="MiB")
    guess.value = 7
    guess._field.value = "<b>much"
    assert guess.value is None
    assert guess._note.value == "'&lt;b&gt;much' is not a number: 84 or 84.5 would work"
    for endless in ("nan", "1e400"):
        guess._field.value = endless
        assert (guess.value, guess._note.value[-31:]) == (None, "a number: 84 or 84.5 would work")
    guess._field.value = ""
    assert (guess.value, guess._note.value) == (None, "")
    guess._field.value = "0"
    assert guess.compare(2).data.startswith("peak: predicted 0 MiB")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_ends_with_three_to_five_questions_of_one_right_answer(name):
    asked = read(name)["question"]
    assert 3 <= len(asked) <= 5
    for question in asked:
        texts, whys = ([choice[part] for choice in question["choice"]] for part in ("text", "why"))
        assert question["text"].endswith("?")
        assert 3 <= len(set(texts)) == len(texts) <= 4
        assert all(why.endswith(".") for why in whys)
    rights = [[choice.get("right", False) for choice in question["choice"]] for question in asked]
    assert {right.count(True) for right in rights} == {1}
    assert len({right.index(True) for right in rights}) > 1  # the right answer is not always at one place


def test_a_choice_opens_to_say_whether_it_is_right_and_why():
    shown = show.questions("00_memory_wall").data
    asked = read("00_memory_wall")["question"]
    assert shown.count("<details") == sum(len(question["choice"]) for question in asked)
    assert shown.count("✓ Right. ") == len(asked)
    right = re.search(r"<summary>The time of attention</summary><p [^>]*>(.*?)</p>", shown)
    assert right[1].startswith("✓ Right. Every token is still compared")
    assert "<summary>The logits</summary>" in shown
    assert 'x="' not in shown


def test_a_notebook_without_questions_names_those_that_have_some():
    with pytest.raises(
        NotebookError, match=r"no questions for '00'; these notebooks have some: 00_memory_wall, 01"
    ):
        show.questions("00")


def test_a_match_says_what_was_chosen_and_what_is_right() -> None:
    which = show.match("which hook", "ABC", ["kept", "fp32 copy", "list"])
    assert which._repr_mimebundle_()["text/plain"] == "Your prediction: which hook"
    which.choose("A", "list")
    which.choose("C", "fp32 copy")
    assert which.compare({"A": "list", "B": "fp32 copy", "C": "kept"}).data.splitlines() == [
        "which hook: 1 of 3 right",
        "",
        "- A: right, it is **list**",
        "- B: nothing was chosen, and it is **fp32 copy**",
        "- C: you chose *fp32 copy*, and it is **kept**",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_most_people_miss_is_not_in_the_notebook(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    calls = re.findall(r'missed=lab\.show\.missed\("(\w+)"(?:, (\d))?\)', "\n".join(c.source for c in cells))
    assert [(of, int(number or 1)) for of, number in calls] == [(name, n + 1) for n in range(len(calls))]
    sentences = {show.missed(name, int(number or 1)) for _, number in calls}
    assert len(sentences) == len(calls)
    for said in sentences:
        assert said.endswith(".")
        assert not any(said in cell.source for cell in cells)
    with pytest.raises(NotebookError, match=rf"^no prediction {len(calls) + 1} in {name}, which has"):
        show.missed(name, len(calls) + 1)
