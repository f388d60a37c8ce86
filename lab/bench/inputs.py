"""Checks that each kind of input is computed right or refused by name; tries random models too."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack

from cluster.ranks import Cluster
from lab.bench.arrivals import outcomes
from lab.bench.draws import RANKS, Draw, draws, examine
from lab.bench.table import Row, Say
from lab.errors import LabError


def measure_inputs(number: int, seed: int, replay: str | None, say: Say) -> list[Row]:
    """One row for each thing that arrives, under two recipes on two ranks; then ``number`` random draws.

    A draw that is neither right nor refused has a row of its own, with the JSON that ``replay`` takes: with
    it that draw alone is examined.

    Raises:
        LabError: Hypothesis or PEFT is not installed; ``replay`` is not a draw.
    """
    try:
        import hypothesis  # noqa: F401
        import peft  # noqa: F401
    except ImportError as error:
        raise LabError(
            f"lab bench inputs without {error.name}: pip install -e '.[test]' brings it"
        ) from error
    if replay is not None:
        return [_replayed(replay)]
    with Cluster(ranks=2) as cluster:
        say("what arrives from outside, on two ranks")
        ranks = cluster.apply(outcomes)
    # A rank that found something wrong speaks for all.
    found = {
        key: max((rank[key] for rank in ranks), key=lambda message: message.startswith("WRONG"))
        for key in ranks[0]
    }
    rows: list[Row] = [
        {"arrives": name, "recipe": recipe, **_told(said)} for (name, recipe), said in found.items()
    ]
    return rows + (_drawn(number, seed, say) if number else [])


def _drawn(number: int, seed: int, say: Say) -> list[Row]:
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
            said = _examined(draw, clusters[draw.ranks])
            verdicts[said.partition(":")[0]] += 1
            say(f"{verdicts.total()} of {number} draws: {dict(verdicts)}")
            if said.startswith("WRONG"):
                again = f"{said}; --replay '{json.dumps(draw.to_json())}'"
                rows.append({"arrives": f"draw {verdicts.total()}", "recipe": "drawn", **_told(again)})

        each()
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return [{"arrives": f"draws, seed {seed}", "recipe": "drawn", "verdict": counts, "says": None}, *rows]


def _examined(draw: Draw, cluster: Cluster) -> str:
    """``examine``, for which an error is a finding too."""
    try:
        return examine(draw, cluster)
    except Exception as error:
        if cluster.broken:
            cluster.recover()
        return f"WRONG: {type(error).__name__}: {error}"


def _replayed(document: str) -> Row:
    try:
        draw = Draw(**json.loads(document))
    except (TypeError, ValueError) as error:
        raise LabError(
            f"--replay takes the JSON of one draw, as lab bench inputs prints it: {error}"
        ) from error
    with Cluster(ranks=draw.ranks) as cluster:
        return {"arrives": "replayed draw", "recipe": "drawn", **_told(_examined(draw, cluster))}


def _told(said: str) -> Row:
    verdict, _, message = said.partition(": ")
    return {"verdict": verdict, "says": message or None}
