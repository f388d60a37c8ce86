"""Results as lines of JSON: a row is whole once it is written, and only a line that was cut off is lost."""

import json

import pytest
from click.testing import CliRunner

from lab.bench.lines import append_lines, read_lines
from lab.commands.cli import main
from lab.errors import LabError

FIRST, SECOND = {"name": "é", "seconds": 1.5}, {"name": "b", "failed": None}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "rows.jsonl"


def test_a_row_is_on_the_disk_when_append_returns(file):
    with append_lines(file, pytest.fail) as append:
        append(FIRST)
        assert read_lines(file, pytest.fail) == [FIRST]
        append(SECOND)
        assert read_lines(file, pytest.fail) == [FIRST, SECOND]


@pytest.mark.parametrize("cut", range(1, len(json.dumps(SECOND))))
def test_a_line_that_was_cut_off_is_dropped_with_a_note(file, cut):
    file.write_text(json.dumps(FIRST) + "\n" + json.dumps(SECOND)[:cut])
    notes = []
    assert read_lines(file, notes.append) == [FIRST]
    assert notes == [f"{file}:2 is not a whole line of JSON: it is left out"]
    with append_lines(file, notes.append) as append:
        append(SECOND)
    assert notes[1:] == [f"{file} ends within a line: that line is removed"]
    assert read_lines(file, pytest.fail) == [FIRST, SECOND]


def test_a_last_line_that_lacks_its_end_alone_is_kept(file):
    file.write_text(json.dumps(FIRST))
    with append_lines(file, pytest.fail) as append:
        append(SECOND)
    assert read_lines(file, pytest.fail) == [FIRST, SECOND]


def test_a_line_in_the_middle_that_is_no_row_is_left_out_and_stays(file):
    file.write_text("[1]\n\n" + json.dumps(FIRST) + "\n")
    notes = []
    assert read_lines(file, notes.append) == [FIRST]
    assert len(notes) == 1
    with append_lines(file, pytest.fail) as append:
        append(SECOND)
    assert file.read_text().startswith("[1]\n")


def test_a_file_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    with pytest.raises(LabError, match=r"cannot be read: No such file"):
        read_lines(tmp_path / "none", pytest.fail)
    said = CliRunner().invoke(main, f"bench attention --tokens 8 --out {tmp_path}/none/rows".split())
    assert said.exit_code == 2
    assert said.stderr == f"lab: {tmp_path}/none/rows cannot be written: No such file or directory\n"


def test_the_bench_of_attention_writes_its_rows(file):
    said = CliRunner().invoke(main, f"bench attention --tokens 33 --tokens 8 --json --out {file}".split())
    assert said.exit_code == 0, said.output
    assert read_lines(file, pytest.fail) == json.loads(said.stdout)


def test_a_second_process_that_appends_is_refused(file):
    with (
        append_lines(file, pytest.fail),
        pytest.raises(LabError, match=r"another process writes .*rows.jsonl now: wait for its end") as error,
        append_lines(file, pytest.fail),
    ):
        pass
    assert "\n" not in str(error.value)
    with append_lines(file, pytest.fail) as append:
        append(FIRST)
    assert read_lines(file, pytest.fail) == [FIRST]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"name": [1], "machine": "CPU"}', "'name' is not a text"),
        ('{"name": "a", "machine": {}}', "'machine' is not a text"),
        ('{"name": "a", "seconds": "3"}', "'seconds' is not a number"),
        ('{"name": "a", "device_peak": true}', "'device_peak' is not a number"),
    ],
)
def test_json_that_is_no_row_is_left_out_with_a_note(file, line, wrong):
    file.write_text(json.dumps(FIRST) + "\n" + line + "\n")
    notes = []
    assert read_lines(file, notes.append) == [FIRST]
    assert notes == [f"{file}:2 is not a row of results, because its {wrong}: it is left out"]
