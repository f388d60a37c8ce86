"""``lab bench inputs``: runs the cases of ``input_cases``, and random draws."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack

from cluster.ranks import Cluster
from lab.bench.draws import RANKS, Draw, draws, examine
from lab.bench.input_cases import outcomes
from lab.bench.table import Row, Say
from lab.errors import LabError


def measure_inputs(number: int, seed: int, replay: str | None, say: Say) -> list[Row]:
    """Return a row for each input case and recipe, run on two ranks, and the counts of random draws.

    A draw that is neither right nor refused has a row of its own, with the JSON for ``replay``.

    Args:
        number: How many random draws to examine.
        seed: The seed of the draws.
        replay: The JSON of a draw; only this draw is examined.
        say: Shows what is measured now.

    Raises:
        LabError: Hypothesis or PEFT is not installed, or ``replay`` is not a draw.
    """
    try:
        import hypothesis  # noqa: F401
        import peft  # noqa: F401
    except ImportError as error:
        raise LabError(
            f"lab bench inputs needs {error.name}: pip install -e '.[test]' installs it"
        ) from error
    if replay is not None:
        return [_replay(replay)]
    with Cluster(ranks=2) as cluster:
        say("inputs from outside, on two ranks")
        ranks = cluster.apply(outcomes)
    # An outcome that is wrong on any rank counts.
    worst = {
        key: max((rank[key] for rank in ranks), key=lambda message: message.startswith("WRONG"))
        for key in ranks[0]
    }
    rows: list[Row] = [
        {"input": name, "recipe": recipe, **_verdict(outcome)} for (name, recipe), outcome in worst.items()
    ]
    return rows + (_examine_draws(number, seed, say) if number else [])


def _examine_draws(number: int, seed: int, say: Say) -> list[Row]:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    rows: list[Row] = []
    verdicts: Counter[str] = Counter()
    with ExitStack() as stack:
        clusters = {ranks: stack.enter_context(Cluster(ranks=ranks)) for ranks in RANKS}

        @seeded(seed)
        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(draws())
        def each(draw: Draw) -> None:
            outcome = _examine(draw, clusters[draw.ranks])
            verdicts[outcome.partition(":")[0]] += 1
            say(f"{verdicts.total()} of {number} draws: {dict(verdicts)}")
            if outcome.startswith("WRONG"):
                text = f"{outcome}; --replay '{json.dumps(draw.to_json())}'"
                rows.append({"input": f"draw {verdicts.total()}", "recipe": "drawn", **_verdict(text)})

        each()
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return [{"input": f"draws, seed {seed}", "recipe": "drawn", "verdict": counts, "says": None}, *rows]


def _examine(draw: Draw, cluster: Cluster) -> str:
    """Return the result of ``examine``; an error counts as wrong."""
    try:
        return examine(draw, cluster)
    except Exception as error:
        if cluster.broken:
            cluster.recover()
        return f"WRONG: {type(error).__name__}: {error}"


def _replay(document: str) -> Row:
    try:
        draw = Draw(**json.loads(document))
    except (TypeError, ValueError) as error:
        raise LabError(
            f"--replay takes the JSON of one draw, as lab bench inputs prints it: {error}"
        ) from error
    with Cluster(ranks=draw.ranks) as cluster:
        return {"input": "replayed draw", "recipe": "drawn", **_verdict(_examine(draw, cluster))}


def _verdict(outcome: str) -> Row:
    verdict, _, message = outcome.partition(": ")
    return {"verdict": verdict, "says": message or None}
