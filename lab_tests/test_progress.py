"""A cell that waits for longer than a few seconds says what goes on, and a short one says nothing."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

import lab
from cluster import progress as module
from cluster.live import notify
from cluster.progress import hide_progress, progress, say
from cluster.ranks import Cluster
from lab.jupyter.executing import tidy
from lab_tests.proofs.notebooks import FACT, changed_facts


class WaitedError(Exception):
    """Ends a function after its wait."""


@pytest.fixture
def _notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "notebook_shell", object)
    monkeypatch.setattr(module, "AFTER_SECONDS", 0.05)
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.05)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Returns the texts that were written over each other, without the blanks that erase them."""
    return lambda: [text.rstrip() for text in capsys.readouterr().err.split("\r")]


def waits(*_: object, **__: object) -> None:
    time.sleep(0.4)
    raise WaitedError


@pytest.mark.usefixtures("_notebook")
def test_a_long_wait_has_one_line_that_is_erased(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("planning a model"):
        time.sleep(0.4)
    written = capsys.readouterr()
    first, *_, blank, end = written.err.split("\r")[1:]
    assert first == "planning a model (0 s)"
    assert (blank.strip(), len(blank), end) == ("", len(first), "")
    assert (written.out, "\n" in written.err) == ("", False)


@pytest.mark.usefixtures("_notebook")
def test_a_short_wait_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("planning"):
        pass
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_elsewhere_than_in_a_notebook_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "AFTER_SECONDS", 0.0)
    with progress("planning"):
        say("planning still")
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_notebook")
def test_the_outermost_speaks_and_the_text_may_change(said: Callable[[], list[str]]) -> None:
    with progress("training"), progress("2 ranks run train"):
        time.sleep(0.3)
        say("step 2 of 3")
        time.sleep(0.2)
    texts = said()
    assert texts[1].startswith("training (")
    assert texts[-3].startswith("step 2 of 3 (")
    assert not [text for text in texts if "ranks" in text]
    with progress("planning"):
        time.sleep(0.3)
    assert said()[1].startswith("planning (")


@pytest.mark.usefixtures("_notebook")
def test_a_widgets_thread_and_a_call_that_is_watched_are_silent(said: Callable[[], list[str]]) -> None:
    def watched() -> None:
        with progress("planning"):
            time.sleep(0.3)

    thread = threading.Thread(target=watched)
    thread.start()
    thread.join()
    with progress("planning"):
        hide_progress(print)
        time.sleep(0.3)
    assert said() == [""]
    # The live timeline shows nothing before the end where there is no browser.
    for unseen in (None, lab.show.live()):
        with progress("planning"):
            hide_progress(unseen)
            time.sleep(0.3)
        assert len(said()) > 1


DOORS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "plan": (lab.plan, "lab.planning.plan.make_machine", "planning"),
    "max_context": (lab.max_context, "lab.planning.max_context.make_machine", "searching the longest"),
    "fit": (lab.fit, "lab.planning.fit.make_machine", "choosing the recipes"),
    "rehearse": (lab.rehearse, "lab.rehearsing.rehearse.machine_for", "rehearsing"),
    "run": (lab.run, "lab.training.run.TrainSettings", "training"),
}


@pytest.mark.usefixtures("_notebook")
@pytest.mark.parametrize("name", DOORS)
def test_what_may_take_long_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    function, inside, text = DOORS[name]
    monkeypatch.setattr(inside, waits)
    given: dict[str, Any] = {"ranks": 4} if name != "run" else {"cluster": None}
    given |= {"tokens": 1024} if name != "max_context" else {}
    with pytest.raises(WaitedError):
        function("tiny", **given)
    assert said()[1].startswith(text)
    if name != "plan":
        with pytest.raises(WaitedError):
            function("tiny", **given, watch=print)
        assert said() == [""]


@pytest.mark.usefixtures("_notebook")
def test_the_start_of_a_cluster_says_so(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr("cluster.engines.Engines.start", waits)
    with pytest.raises(WaitedError):
        Cluster(ranks=3).start()
    assert said()[1].startswith("starting 3 ranks (")


@pytest.mark.usefixtures("_notebook")
def test_a_call_on_ranks_says_so_unless_records_are_taken(
    ranks4: Cluster, said: Callable[[], list[str]]
) -> None:
    def _train() -> None:
        time.sleep(0.5)

    ranks4.apply(_train)
    assert said()[1].startswith("4 ranks run train (")
    ranks4.apply(_train, on_record=print)
    assert said() == [""]


def test_a_note_of_a_rank_is_printed_here(ranks4: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[object] = []
    ranks4.apply(lambda: notify("waiting for a lock"), on_record=lambda _, record: records.append(record))
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"rank {rank}: waiting for a lock" for rank in range(4)
    ]
    assert records == []
    notify("waiting here")
    assert capsys.readouterr().err == "waiting here\n"


def test_what_is_said_is_no_fact_and_is_not_stored_once_it_is_erased(tmp_path: Path) -> None:
    paths = []
    for said in ("", "              \r", "rank 0: compiling\n", "              \rrank 0: compiling\n"):
        cell = nbformat.v4.new_code_cell(f"{FACT}\nprint(7)", metadata={"tags": [FACT]})
        streams = [("stdout", "7\n"), *([("stderr", said)] if said else [])]
        cell.outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in streams]
        paths.append(tmp_path / f"{len(paths)}.ipynb")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_markdown_cell("7")]), paths[-1])
    assert [changed_facts(paths[0], path) for path in paths] == [[]] * 4
    stored = []
    for path in paths:
        outputs = tidy(nbformat.read(path, as_version=4).cells[0].outputs)
        stored.append([output.name for output in outputs])
    assert stored == [["stdout"], ["stdout"], ["stdout", "stderr"], ["stdout", "stderr"]]
