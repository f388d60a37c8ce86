"""`%%ranks`: one line for each different output, names that stay, and failures as those of `apply`."""

from pathlib import Path

import nbformat
import papermill
import pytest
from IPython.core.interactiveshell import InteractiveShell

from cluster import load_ipython_extension
from cluster.errors import ClusterError, RankError
from cluster.magic import merge_output
from cluster.ranks import Cluster

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("_fresh_ranks")]


@pytest.fixture
def shell(ranks4: Cluster) -> InteractiveShell:
    shell = InteractiveShell()
    load_ipython_extension(shell)
    shell.user_ns["cluster"] = ranks4
    return shell


def test_the_same_line_is_printed_once_with_whose_it_is(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = (
        "x = torch.ones(3) * rank\ndist.all_reduce(x)\nprint('sum', x.sum().item())\nprint(rank // 3)\nranks"
    )
    shell.run_cell_magic("ranks", "", cell)
    assert capsys.readouterr().out.splitlines() == [
        "all ranks: sum 18.0",
        "ranks 0-2: 0",
        "rank 3: 1",
        "all ranks: 4",
    ]
    shell.run_cell_magic(
        "ranks", "cluster", "print('no end', end='')\nif rank != 2: print(x.tolist()[0])\nNone"
    )
    assert capsys.readouterr().out.splitlines() == ["ranks 0, 1, 3: no end6.0", "rank 2: no end"]


def test_a_failure_names_the_rank_and_the_cells_line_after_what_was_printed(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match=r"^rank 1 failed first: ZeroDivisionError") as caught:
        shell.run_cell_magic("ranks", "", "print('here')\nif rank == 1:\n    rank / 0\ndist.barrier()")
    assert capsys.readouterr().out == "all ranks: here\n"
    text = str(caught.value)
    assert 'File "<ranks>", line 3, in <module>\n    rank / 0' in text
    assert "magic.py" not in text
    assert "ranks 0, 2, 3 failed after it, in barrier, at <ranks>:4" in text


def test_what_cannot_run_is_refused_here(shell: InteractiveShell) -> None:
    with pytest.raises(ClusterError, match=r"'other' holds no cluster; other = lab\.Cluster"):
        shell.run_cell_magic("ranks", "other", "1")
    with pytest.raises(SyntaxError):
        shell.run_cell_magic("ranks", "", "rank =")


def test_lines_of_unequal_number() -> None:
    printed = {0: ["a", "b"], 1: ["a"], 2: ["c", "b", "d"]}
    assert list(merge_output(printed, 3)) == ["ranks 0, 1: a", "rank 2: c", "ranks 0, 2: b", "rank 2: d"]
    assert list(merge_output({0: ["one"]}, 1)) == ["rank 0: one"]
    assert list(merge_output({0: []}, 1)) == []


def test_under_papermill(tmp_path: Path) -> None:
    cells = [
        "import lab\n%load_ext cluster\nfew = lab.Cluster(ranks=2).start()",
        "%%ranks few\nimport time\ntime.sleep(0.3 * (1 - rank))\nprint('rank', rank)\nprint('both')",
        "try:\n    get_ipython().run_cell_magic('ranks', 'few', 'if rank: 1/0')\nexcept Exception as error:\n"
        "    print(str(error).splitlines()[0])",
        "few.stop()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "in.ipynb")
    done = papermill.execute_notebook(
        str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), kernel_name="python3", progress_bar=False
    )
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in done.cells]
    assert printed[1] == "rank 0: rank 0\nrank 1: rank 1\nall ranks: both\n"
    assert printed[2] == "rank 1 failed first: ZeroDivisionError: division by zero\n"
