"""The command `lab`: its help, its refusals in one line, and its JSON."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import platformdirs
import pytest
from click.testing import CliRunner

from lab import models
from lab.commands.cli import main
from lab.commands.report import run_text
from lab.planning.closed_form import estimate
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.plan import plan
from lab.recipe.ladder import RUNGS
from lab.training.records import Run
from lab.units import format_bytes


def two_candidates(base, shape, ranks, tokens):
    return [base, replace(base, head_chunk=32)]


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
    said = CliRunner().invoke(main, ["doctor"])
    assert said.exit_code == 0
    lines = ("python", "cores", "memory", "gpu", "attention", "torch", "ipyparallel", "flash-attn")
    for line in (*lines, "shared machine others can connect to the sockets of gloo and NCCL,"):
        assert f"\n{line} " in f"\n{said.stdout}"
    assert "MISSING" not in said.stdout


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = CliRunner().invoke(main, ["open", "--no-browser", "--port", str(port)])
    assert said.exit_code == 2
    assert said.stderr == (f"lab: port {port} is in use: close what runs there or give another with --port\n")


def test_run_prints_losses_and_peaks_beside_the_plan():
    # Two stages: the ladder's head_chunk on two ranks makes sixteen.
    command = "run tiny --tokens 64 --ranks 2 --steps 2 --set compute_dtype=none --set head_chunk=16 --json"
    said = CliRunner().invoke(main, command.split())
    assert said.exit_code == 0, said.output
    answer = json.loads(said.stdout)
    assert len(answer["losses"]) == len(answer["seconds"]) == 2
    assert answer["losses"][1] < answer["losses"][0]
    assert answer["device_peak"] == answer["planned_device_peak"]
    assert answer["host_peak"] == answer["planned_host_peak"] > 0


def test_the_text_of_a_run_leaves_out_what_cuda_takes_outside_torch():
    planned = plan("tiny", "fsdp", tokens=1024, ranks=4)
    steps = {"losses": (8.25, 7.5), "seconds": (2.0, 1.5), "timelines": (planned.timeline,)}
    on_cpu = run_text(Run("tiny", None, None, **steps), planned)
    assert "step 1        loss 8.2500, 2 s\nstep 2        loss 7.5000, 1.5 s\n" in on_cpu
    inside = planned.device_peak - outside_workspace(4)
    on_gpus = run_text(Run("tiny", None, None, **steps, allocated=(inside, 7)), planned)
    assert f"planned {format_bytes(inside)}" in on_gpus
    assert "1.0000 of the measured device peak" in on_gpus


def test_run_takes_a_model_and_names_the_command_for_a_notebook():
    said = CliRunner().invoke(main, ["run", "00_memory_wall", "--tokens", "1K"])
    assert said.exit_code == 2
    assert said.stderr == (
        "lab: 00_memory_wall is a notebook: lab execute 00_memory_wall executes it; lab run takes a model\n"
    )


def test_bad_input_is_one_line_and_exit_code_2():
    said = CliRunner().invoke(main, ["execute", "no_such_notebook"])
    assert said.exit_code == 2
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("lab: unknown notebook 'no_such_notebook'")
    assert CliRunner().invoke(main, ["open", "--port", "70000"]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan lama3-8b --tokens 5M --ranks 8", r"unknown model 'lama3-8b' \(did you mean 'llama3-8b'\?\)"),
        ("plan tiny --tokens 5MB --ranks 4", "'5MB' is not a number of tokens: write 8192, 128K or 5M"),
        ("plan tiny --tokens 0 --ranks 4", "'0' is not a number of tokens"),
        ("plan tiny --tokens 512 --ranks 0", "ranks=0: it takes a whole number, 1 or more"),
        ("plan tiny --tokens 512 --ranks -8", "ranks=-8: it takes a whole number, 1 or more"),
        ("plan tiny --tokens 512 --ranks four", "Invalid value for '--ranks'"),
        ("plan tiny --ranks 4", r"Missing option '--tokens'\."),
        ("plan tiny --tokens 512 --ranks 4 --rows 0", "rows=0: it takes a whole number, 1 or more"),
        ("plan tiny --tokens 512 --ranks 4 --ranks-per-node 0", "ranks_per_node=0: it takes"),
        ("plan tiny --tokens 512 --ranks 4 --device-memory 80GB", "'80GB' is not an amount of memory: write"),
        ("plan tiny --tokens 512 --ranks 4 --quick --device k80", "no device named 'k80': the table has"),
        ("plan tiny --tokens 512 --ranks 4 --device k80", "no device named 'k80': the table has"),
        ("plan tiny --tokens 512 --ranks 4 --recipe uppipe", "unknown recipe 'uppipe': give one of plain"),
        ("plan tiny --tokens 512 --ranks 3 --set ulysses=3", "ulysses=3: .* these work: 1, 2, 4, 8, 16, 32"),
        ("plan tiny --tokens 512 --ranks 4 --set head_chunk", "'head_chunk' sets no knob: write name=value"),
        ("plan tiny --tokens 512 --ranks 4 --set heads=4", "a recipe has no field 'heads': its fields are"),
        ("plan tiny --tokens 512 --ranks 4 --set ulysses_backend=deepspeed --recipe ulysses",
         "ulysses_backend='deepspeed' cannot be planned"),
        ("ladder tiny --tokens 512 --ranks 4 --figure /nowhere/x.png", "/nowhere/x.png cannot be written"),
        ("max-context tiny --ranks 4 --device-memory 1MiB", "not even 1K tokens fit"),
        ("fit tiny --tokens 512 --ranks 4 --price 2.5", "price='2.5' without tokens_total: give the tokens"),
        ("fit tiny --tokens 512 --ranks 4 --tokens-total 10B --price -1", "price='-1': give the money for"),
        ("fit tiny --tokens 512 --ranks 4 --tokens-total 0", "'0' is not a total of tokens: write 500M, 10B"),
        ("fit tiny --tokens 512 --ranks 4 --tokens-total 511", "tokens_total=511 is less than a step has"),
        ("plot tiny", "No such command 'plot'"),
    ],
)  # fmt: skip
def test_a_planning_command_refuses_in_one_line(words, said):
    check_refusal(words, said)


def test_a_fit_without_a_recipe_that_fits_names_the_leanest(tmp_path):
    """The leanest recipe has a stage for each head: a model of few heads is planned in a second."""
    small = models.config_of("tiny")
    small.num_hidden_layers, small.num_attention_heads, small.num_key_value_heads = 1, 4, 2
    small.save_pretrained(tmp_path)
    words = f"fit {tmp_path} --tokens 64 --ranks 1 --device-memory 1MiB"
    check_refusal(words, "no recipe fits 64 tokens on 1 ranks: the leanest needs")


def check_refusal(words, said):
    run = CliRunner().invoke(main, words.split())
    assert run.exit_code == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert re.match(f"lab: {said}", run.stderr), run.stderr


WITHOUT_TORCH = """
import json, sys
from click.testing import CliRunner
from lab.commands.cli import main
runs = [CliRunner().invoke(main, words.split()) for words in sys.argv[1:]]
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps([(run.exit_code, run.stdout) for run in runs]))
"""


def saved_answers(commands):
    """What another process prints for each command; it imports neither torch nor transformers."""
    cache = platformdirs.user_cache_path("any").parent
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    assert [code for code, _ in answers] == [0] * len(commands)
    return [text for _, text in answers]


@pytest.mark.slow
def test_planning_commands_print_json_and_save_their_answers(monkeypatch):
    answers = {}

    def asked(words):
        run = CliRunner().invoke(main, [*words.split(), "--json"])
        assert run.exit_code == 0, run.stderr
        answers[words] = run.stdout
        return json.loads(run.stdout)

    made = asked("plan tiny --tokens 1K --ranks 4 --recipe checkpoint --set ulysses=2 --no-workspace")
    assert made["fits"] is True
    assert made["limit"] is None
    assert made["recipe"]["ulysses"] == 2
    assert made["peak"].keys() == {"op", "shapes", "module", "phase"}
    assert sum(made["by_category"].values()) == made["device_peak"]
    quick = asked("plan tiny --tokens 1K --ranks 4 --quick --no-workspace --device-memory 1GiB")
    assert (quick["closed_form"], quick["fits"]) == (True, True)
    assert quick["device_peak"] == estimate("tiny", "upipe", tokens=1024, ranks=4).device_peak
    assert sum(quick["parts"].values()) == quick["device_peak"]
    # Of a model whose shape is saved, what was never asked needs neither torch nor transformers.
    [another] = saved_answers(["plan tiny --tokens 3K --ranks 2 --recipe tiling --quick"])
    assert another.startswith("tiny · tiling · 2 ranks")
    rungs = asked("ladder tiny --tokens 1K --ranks 4 --device-memory 64MiB --set head_chunk=32")
    assert [rung["name"] for rung in rungs] == list(RUNGS)
    assert all(rung.keys() == {"name", "state", "device_peak", "host_peak", "fits"} for rung in rungs)
    small = "--ranks 4 --device-memory 64MiB --host-memory 21GiB --no-workspace"
    longest = asked(f"max-context tiny --recipe checkpoint {small}")
    assert {"tokens", "limit", "device_peak", "host_peak"} <= longest.keys()
    monkeypatch.setattr("lab.planning.fit.candidates", two_candidates)
    fitting = asked(f"fit tiny --tokens 1K {small}")
    assert len(fitting) == 2
    assert all(
        f.keys() == {"recipe", "state", "device_peak", "host_peak", "disk_peak", "step_seconds", "mfu"}
        for f in fitting
    )
    ordered = asked(f"fit tiny --tokens 1K {small} --tokens-total 10B --price 2.5")
    assert [f | {"bill": None} for f in fitting] == [f | {"bill": None} for f in ordered]
    assert ordered[0]["bill"].keys() == {"steps", "days", "node_hours", "gpu_hours", "money"}
    assert ordered[0]["bill"]["steps"] == 9765625
    assert ordered[0]["bill"]["money"] == 2.5 * ordered[0]["bill"]["gpu_hours"]
    assert saved_answers([f"{words} --json" for words in answers]) == list(answers.values())
    assert all(text.startswith("tiny") for text in saved_answers(answers))
