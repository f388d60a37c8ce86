"""The command `lab`: its help, its refusals in one line, and its JSON."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import click
import platformdirs
import pytest
from click.testing import CliRunner

from lab import models
from lab.commands.base import _one_line
from lab.commands.cli import main
from lab.commands.report import run_text
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.plan import plan
from lab.recipe.ladder import RUNGS
from lab.training.records import Run
from lab.units import format_bytes
from lab_tests.support.commands import answer, refusal
from lab_tests.support.few_recipes import plan_few_recipes
from lab_tests.support.long_run import mostly_long

LONG = pytest.mark.long


def test_help_is_instant_because_nothing_heavy_is_imported():
    code = """
import sys
from lab.commands.cli import main
try:
    main(["--help"])
finally:
    assert not {"torch", "ipyparallel", "numpy", "papermill"} & set(sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    for command in main.commands:
        assert f"\n  {command} " in said.stdout


@pytest.mark.first
def test_the_table_of_commands_in_the_readme_has_every_command():
    page = (Path(__file__).parents[1] / "README.md").read_text()
    table = re.search(r"\n## Commands\n(.*?)\n## ", page, re.DOTALL)[1]
    for name, command in main.commands.items():
        if name == "bench":
            entries = [f"`{below}`" for below in command.commands]
        elif isinstance(command, click.Group):
            entries = [f"`lab {name} {below}" for below in command.commands]
        else:
            entries = [f"`lab {name}"]
        assert all(entry in table for entry in entries), entries


def test_doctor_names_what_is_there_and_what_would_be_used():
    said = answer("doctor")
    lines = [
        "python",
        "cores",
        "memory",
        "participants",
        "gpu",
        "attention",
        "torch",
        "ipyparallel",
        "flash-attn",
    ]
    for line in (*lines, "shared machine others can connect to the sockets of gloo and NCCL,"):
        assert f"\n{line} " in f"\n{said}"
    assert "MISSING" not in said


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(f"open --no-browser --port {port}")
    assert said == f"port {port} is in use: close what runs there or give another with --port"


def test_run_prints_losses_and_peaks_beside_the_plan():
    # Two stages: the ladder's head_chunk on two ranks makes sixteen.
    command = "run tiny --tokens 64 --ranks 2 --steps 2 --set compute_dtype=none --set head_chunk=16 --json"
    found = json.loads(answer(command))
    assert len(found["losses"]) == len(found["seconds"]) == 2
    assert found["losses"][1] < found["losses"][0]
    assert found["device_peak"] == found["planned_device_peak"]
    assert found["host_peak"] == found["planned_host_peak"] > 0


def test_the_text_of_a_run_leaves_out_what_cuda_takes_outside_torch():
    planned = plan("tiny", "fsdp", tokens=1024, ranks=4)
    steps = {"losses": (8.25, 7.5), "seconds": (2.0, 1.5), "timelines": (planned.timeline,)}
    on_cpu = run_text(Run("tiny", None, None, **steps), planned)
    assert "step 1        loss 8.2500, 2 s\nstep 2        loss 7.5000, 1.5 s\n" in on_cpu
    inside = planned.device_peak - outside_workspace(4)
    on_gpus = run_text(Run("tiny", None, None, **steps, allocated=(inside, 7)), planned)
    assert f"planned {format_bytes(inside)}" in on_gpus
    assert "1.0000 of the measured device peak" in on_gpus


COUNT = "it takes a whole number, 1 or more"
RATE = "it takes a finite number, 0 or more, for instance 0.001"
NORM = "it takes a number above 0, for instance 1.0, or inf for no clipping"
ALONE = "tokens=1: there is no next token to predict; give 2 or more"
PLAN = "plan tiny --tokens 512 --ranks 4"
FIT = "fit tiny --tokens 512 --ranks 4"
TRAIN = "train tiny --tokens 40 --steps 2 --checkpoint new"
REHEARSE = "rehearse tiny --tokens 40 --ranks 2 --machine cpu"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plot tiny", "No such command 'plot'"),
        ("execute no_such_notebook", "unknown notebook 'no_such_notebook'"),
        ("export file out", "no checkpoint in file: give a folder that has one; "),
        ("run 00_memory_wall --tokens 1K",
         "00_memory_wall is a notebook: lab execute 00_memory_wall executes it; lab run takes a model$"),
        ("bench rehearsals tiy --ranks 1 --tokens 64", "unknown model 'tiy'"),
        ("plan lama3-8b --tokens 5M --ranks 8", r"unknown model 'lama3-8b' \(did you mean 'llama3-8b'\?\)"),
        (f"{PLAN} --tokens 5MB", "'5MB' is not a number of tokens: write 8192, 128K or 5M"),
        (f"{PLAN} --tokens 0", "'0' is not a number of tokens"),
        (f"{PLAN} --ranks 0", f"ranks=0: {COUNT}"),
        (f"{PLAN} --ranks -8", f"ranks=-8: {COUNT}"),
        (f"{PLAN} --ranks four", "Invalid value for '--ranks'"),
        ("plan tiny --ranks 4", r"Missing option '--tokens'\."),
        (f"{PLAN} --rows 0", f"rows=0: {COUNT}"),
        (f"{PLAN} --ranks-per-node 0", "ranks_per_node=0: it takes"),
        (f"{PLAN} --device-memory 80GB", "'80GB' is not an amount of memory: write"),
        (f"{PLAN} --device k80", "no device named 'k80': the table has"),
        (f"{PLAN} --recipe uppipe", "unknown recipe 'uppipe': give one of plain"),
        (f"{PLAN} --ranks 3 --set ulysses=3", "ulysses=3: .* these work: 1, 2, 4, 8, 16, 32"),
        (f"{PLAN} --set ring=2 --set ring=1", r"Invalid value for '--set': ring is given 2 times: give it"),
        (f"{TRAIN} --profile-set numa=1 --profile-set numa=0", ".*'--profile-set': numa is given 2 times"),
        ("cluster show ssh --set hosts=a --set hosts=b", ".*'--set': hosts is given 2 times: give it once"),
        (f"{PLAN} --set head_chunk", "'head_chunk' sets no knob: write name=value"),
        (f"{PLAN} --set heads=4", "a recipe has no field 'heads': its fields are"),
        (f"{PLAN} --set ulysses_backend=deepspeed --recipe ulysses",
         "ulysses_backend='deepspeed' cannot be planned"),
        (f"{PLAN} --set ring=0", f"ring=0: {COUNT}$"),
        (f"{PLAN} --set ring=false", f"ring=False: {COUNT}$"),
        (f"{PLAN} --set ulysses=1.5", f"ulysses='1.5': {COUNT}$"),
        (f"{PLAN} --set ulysses=-1", f"ulysses='-1': {COUNT}$"),
        (f"{PLAN} --set ulysses=", f"ulysses='': {COUNT}$"),
        (f"{PLAN} --set mlp_tile=0", f"mlp_tile=0: {COUNT}, or None$"),
        *((f"{words} --set {degree}=none", f"{degree}=None: {COUNT}$")
          for words in (PLAN, TRAIN, REHEARSE) for degree in ("ulysses", "ring")),
        ("ladder tiny --tokens 512 --ranks 4 --figure /nowhere/x.png", "/nowhere/x.png cannot be written"),
        (f"{FIT} --price 2.5", "price='2.5' without tokens_total: give the tokens"),
        (f"{FIT} --tokens-total 10B --price -1", "price='-1': give the money for"),
        (f"{FIT} --tokens-total 0", "'0' is not a total of tokens: write 500M, 10B"),
        (f"{FIT} --tokens-total 511", "tokens_total=511 is less than a step has"),
        (f"{REHEARSE} --tokens 1", f"{ALONE}$"),
        (f"{TRAIN} --tokens 1", f"{ALONE}$"),
        (f"{TRAIN} --steps 0", f"steps=0: {COUNT}"),
        (f"{TRAIN} --every 0", f"every=0: {COUNT}"),
        (f"{TRAIN} --keep 0", f"keep=0: {COUNT}"),
        (f"{TRAIN} --accumulate 0", f"accumulate=0: {COUNT}"),
        (f"{TRAIN} --timeout 0", "timeout=0: it takes a number of seconds from 0.01"),
        (f"{TRAIN} --timeout 1e20", r"timeout=1e\+20: it takes a number of seconds from"),
        (f"{TRAIN} --start-timeout 1e20", r"start_timeout=1e\+20: it takes a number of"),
        ("train tiny --tokens 40 --steps 2", "Missing option '--checkpoint'."),
        (f"{TRAIN} --resume", "no checkpoint in .*/new: give a folder that has one;"),
        (f"{TRAIN} --checkpoint file", "no checkpoints can be kept in .*/file: File exists"),
        (f"{TRAIN} --set heads=4", "a recipe has no field 'heads'"),
        (f"{TRAIN} --text nowhere", "no text at 'nowhere'"),
        (f"{TRAIN} --validate nowhere", "no text at 'nowhere'"),
        (f"{TRAIN} --validate one", "validate='one' has one token: give a text of 2"),
        (f"{TRAIN} --warmup 3", "warmup=3: it takes a whole number of steps from 0 to the"),
        (f"{TRAIN} --warmup -1", "warmup=-1: it takes a whole number of steps from 0 to"),
        (f"{TRAIN} --schedule linear", "schedule='linear': it takes constant or cosine"),
        (f"{TRAIN} --weight-decay nan", "weight_decay=nan: it takes a finite number, 0 or"),
        (f"{TRAIN} --weight-decay -1", "weight_decay=-1.0: it takes a finite number, 0 or"),
        (f"{TRAIN} --clip-norm nan", f"clip_norm=nan: {NORM}$"),
        (f"{TRAIN} --clip-norm 0", f"clip_norm=0.0: {NORM}$"),
        (f"{TRAIN} --clip-norm -1", f"clip_norm=-1.0: {NORM}$"),
        (f"{TRAIN} --clip-norm -inf", f"clip_norm=-inf: {NORM}$"),
        (f"{TRAIN} --lr nan", f"learning_rate=nan: {RATE}$"),
        (f"{TRAIN} --lr inf", f"learning_rate=inf: {RATE}$"),
        (f"{TRAIN} --lr -0.1", f"learning_rate=-0.1: {RATE}$"),
        (f"{TRAIN} --profile moon", "profile 'moon' is not known"),
        (f"{TRAIN} --ranks 0", "ranks=0: a whole number of ranks is needed"),
    ],
)  # fmt: skip
def test_a_command_refuses_in_one_line_before_it_starts_ranks(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr("cluster.ranks.Cluster.start", lambda self: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "one").write_text("1")
    assert re.match(said, found := refusal(words)), found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "one"]


@pytest.mark.parametrize(
    ("words", "said"),
    mostly_long(
        [
            ("max-context {} --ranks 1", "not even 1K tokens fit"),
            ("fit {} --tokens 64 --ranks 1", "no recipe fits 64 tokens on 1 ranks: the leanest needs"),
        ],
        0,
    ),
)
def test_the_exit_code_is_3_if_nothing_fits(words, said, tmp_path):
    """The leanest recipe has a stage for each head: a model of few heads is planned in a second.

    Seen red: 2, as for an argument that is refused.
    """
    small = models.config_of("tiny")
    small.num_hidden_layers, small.num_attention_heads, small.num_key_value_heads = 1, 4, 2
    small.save_pretrained(tmp_path)
    assert refusal(f"{words.format(tmp_path)} --device-memory 1MiB", code=3).startswith(said)
    assert refusal(f"{words.format(tmp_path)} --device-memory none").startswith("'none' is not an amount")


WITHOUT_TORCH = """
import json, sys
from click.testing import CliRunner
from lab.commands.cli import main
runs = [CliRunner().invoke(main, words.split()) for words in sys.argv[1:]]
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps([(run.exit_code, run.stdout) for run in runs]))
"""


def saved_answers(commands, cache=None):
    """What another process prints for each command; it imports neither torch nor transformers."""
    cache = cache or platformdirs.user_cache_path("any").parent
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    assert [code for code, _ in answers] == [0] * len(commands)
    return [text for _, text in answers]


def test_a_length_that_was_never_planned_follows_from_those_that_come_with_the_lab(tmp_path):
    recipes = ("tiling", "upipe", "streamed", "long")
    said = saved_answers([f"plan tiny --tokens 80K --ranks 2 --recipe {name}" for name in recipes], tmp_path)
    for name, text in zip(recipes, said, strict=True):
        assert text.startswith(f"tiny · {name} · 2 ranks · 80K tokens")


def test_the_exit_code_follows_the_verdict():
    """Of the answer that is made, and of the one that was saved. Seen red: 0 for all; 3 for the second."""
    step = plan("tiny", "fsdp", tokens=4096, ranks=4)
    expandable, fixed = step.reserved_peak(), step.reserved_peak(expandable=False)
    not_at_all = expandable - 1, 3, "does not fit"
    for memory, code, verdict in (
        (fixed, 0, "fits"), (expandable, 0, "fits with expandable segments"), not_at_all, not_at_all,
    ):  # fmt: skip
        words = f"plan tiny --tokens 4K --ranks 4 --recipe fsdp --device-memory {memory} --json"
        done = CliRunner().invoke(main, words.split())
        assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (code, verdict)


@pytest.mark.long
def test_planning_commands_print_json_and_save_their_answers(monkeypatch):
    answers = {}

    def asked(words):
        answers[words] = answer(f"{words} --json")
        return json.loads(answers[words])

    made = asked("plan tiny --tokens 1K --ranks 4 --recipe checkpoint --set ulysses=2 --no-workspace")
    assert made["fits"] is True
    assert made["limit"] is None
    assert made["recipe"]["ulysses"] == 2
    assert made["peak"].keys() == {"op", "shapes", "module", "phase"}
    assert sum(made["by_category"].values()) == made["device_peak"]
    rungs = asked("ladder tiny --tokens 1K --ranks 4 --device-memory 64MiB --set head_chunk=32")
    assert [rung["name"] for rung in rungs] == list(RUNGS)
    assert all(
        rung.keys() == {"name", "state", "device_peak", "host_peak", "fits", "verdict"} for rung in rungs
    )
    small = "--ranks 4 --device-memory 64MiB --host-memory 21GiB --no-workspace"
    longest = asked(f"max-context tiny --recipe checkpoint {small}")
    assert {"tokens", "limit", "device_peak", "host_peak"} <= longest.keys()
    plan_few_recipes(monkeypatch, "ulysses", "tiling")
    fitting = asked(f"fit tiny --tokens 1K {small}")
    assert len(fitting) == 2
    keys = {
        "recipe", "state", "device_peak", "reserved_peak", "reserved_peak_fixed_segments", "host_peak",
        "disk_peak", "verdict", "step_seconds", "mfu",
    }  # fmt: skip
    assert all(each.keys() == keys for each in fitting)
    ordered = asked(f"fit tiny --tokens 1K {small} --tokens-total 10B --price 2.5")
    assert [f | {"bill": None} for f in fitting] == [f | {"bill": None} for f in ordered]
    assert ordered[0]["bill"].keys() == {"steps", "days", "node_hours", "gpu_hours", "money"}
    assert ordered[0]["bill"]["steps"] == 9765625
    assert ordered[0]["bill"]["money"] == 2.5 * ordered[0]["bill"]["gpu_hours"]
    assert saved_answers([f"{words} --json" for words in answers]) == list(answers.values())
    assert all(text.removeprefix("MaxContext of ").startswith("tiny") for text in saved_answers(answers))


@pytest.mark.parametrize("encoding", ["latin-1", "cp437"])
def test_a_terminal_gets_a_sign_that_it_has(encoding):
    said = CliRunner(charset=encoding).invoke(main, ["plan", "tiny", "--tokens", "512", "--ranks", "2"])
    assert said.exit_code == 0, said.exception
    assert ("#####" in said.stdout) == (encoding == "latin-1")
    assert ("█████" in said.stdout) == (encoding == "cp437")
    assert "?" not in said.stdout


def test_a_home_that_cannot_be_written_is_said_with_what_helps(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, _: path != str(tmp_path))

    def said(path):
        return _one_line(PermissionError(13, "Permission denied", path))

    kept = f"{tmp_path}/.local/x"
    assert said(kept) == (f"{kept}: Permission denied; set HOME to a folder that you can write", 2)
    # HOME does not move these: the second begins as the home does.
    for other in ("/etc/x", f"{tmp_path}2/.local/x", f"{tmp_path}/x"):
        assert said(other)[0] == f"{other}: Permission denied"
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(os, "access", lambda path, _: path != "/")
    assert said("/etc/x")[0] == "/etc/x: Permission denied"
    assert said("/.local/x")[0].endswith("you can write")
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert said(kept)[0] == f"{kept}: Permission denied"


def test_scripts_of_widgets_are_read_whatever_the_locale():
    code = "from lab.show.page import join_files; join_files('live/holders.js')"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **locale}, check=True)
