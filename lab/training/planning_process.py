"""Plans in a process of their own, for ranks: a plan joins a process group, and a rank has joined one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from cluster.placement import import_path
from cluster.watchdog import watched
from lab.errors import LabError
from lab.training.first_rank import from_first_rank


def answer_on_all_ranks(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that plans, for rank 0 in another process; every rank of the process group calls this.

    Args:
        what: What the plan says, for the message of an error.
        function: The function. It returns what JSON can hold.
        arguments: Its arguments.

    Returns:
        What the function returned, on every rank.

    Raises:
        LabError: the plan failed on rank 0.
    """

    def answer() -> Any:
        found = _in_a_process(function, *arguments)
        if "error" in found:
            raise LabError(f"the plan that says {what} failed: {found['error']}")
        return found["value"]

    return from_first_rank(answer)


def _in_a_process(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Call a function in another process; return its "value", or its "error" as a text.

    The process sees no GPU, so that it takes no memory of this rank's, and ends with this one. It can import
    what this process can, because a job may name a function that makes the model.
    """
    process = subprocess.run(
        watched("lab.training.planning_process"),
        input=cloudpickle.dumps((function, arguments)),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": ""},
    )
    if process.returncode:
        return {"error": f"its process ended with code {process.returncode}"}
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Read a pickled function and its arguments from stdin; print its answer as a line of JSON."""
    function, arguments = cloudpickle.loads(sys.stdin.buffer.read())
    try:
        answer: dict[str, Any] = {"value": function(*arguments)}
    except LabError as error:
        answer = {"error": str(error)}
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
