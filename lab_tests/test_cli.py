import socket
import subprocess
import sys

from click.testing import CliRunner

from lab.cli import main


def test_help_is_instant_because_nothing_heavy_is_imported():
    code = """
import sys
from lab.cli import main
try:
    main(["--help"])
finally:
    assert not {"torch", "ipyparallel", "numpy", "papermill"} & set(sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    for command in ("open", "run", "doctor"):
        assert f"\n  {command} " in said.stdout


def test_doctor_names_what_is_there_and_what_would_be_used():
    said = CliRunner().invoke(main, ["doctor"])
    assert said.exit_code == 0
    for line in ("python", "cores", "memory", "gpu", "attention", "torch", "ipyparallel", "flash-attn"):
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


def test_bad_input_is_one_line_and_exit_code_2():
    said = CliRunner().invoke(main, ["run", "no_such_notebook"])
    assert said.exit_code == 2
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("lab: unknown notebook 'no_such_notebook'")
    assert CliRunner().invoke(main, ["open", "--port", "70000"]).exit_code == 2
