"""A profile as text: its fields, what rank 0 finds in its environment, and what would run, with reasons."""

import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields

from cluster.capacity import visible_devices
from cluster.environment import Variable, rank_environment
from cluster.errors import ClusterError
from cluster.host import near_cores, own_cores
from cluster.network import LOOPBACK
from cluster.places import Place
from cluster.profiles.base import Profile, ReachingProfile
from cluster.profiles.slurm import Slurm
from cluster.watchdog import this_process

WIDTH = 110


def describe(profile: Profile, ranks: int) -> str:
    """Return `profile` with `ranks` ranks, printed: nothing is started, and nothing on other hosts asked."""
    rows = [(f.name, repr(getattr(profile, f.name)), f.metadata["why"]) for f in fields(profile)]
    parts = [
        f"{profile.name} · {ranks} ranks · {profile.where}\n\n{table(rows)}",
        f"rank 0's environment, as its own host works it out; on a host like this one\n\n"
        f"{table(environment(profile, ranks))}",
    ]
    try:
        profile.check(ranks)
        runs = textwrap.indent(what_runs(profile, ranks), "  ")
        parts.append(f"what would run, for rank 0 where each rank has a command of its own\n\n{runs}")
    except ClusterError as error:
        parts.append(f"nothing would run: {error}")
    return "\n\n".join(parts)


def environment(profile: Profile, ranks: int) -> list[Variable]:
    """Return the variables of rank 0, were its host like this one."""
    per_host = ranks
    if isinstance(profile, ReachingProfile):
        try:
            per_host = profile.ranks_on_first_host(ranks)
        except ClusterError:
            per_host = 1
    devices = visible_devices()
    cores = near_cores(devices, per_host) if profile.numa else [own_cores()] * per_host
    address = LOOPBACK
    if isinstance(profile, ReachingProfile):
        address = profile.address or profile.controller_address()
    found = rank_environment(Place(0, 0, per_host), devices[:per_host], cores, address, profile.settings())
    reasons = profile.reasons()
    return [variable._replace(why=reasons.get(variable.name, variable.why)) for variable in found]


def what_runs(profile: Profile, ranks: int) -> str:
    """Return the command line of rank 0, the one of mpiexec, or the batch script."""
    engine = profile.start(ranks, 0, this_process()).command(profile.interpreter())
    if isinstance(profile, Slurm):
        return profile.script(ranks, engine, f"{profile.log_folder()}/cluster-.../log/job.log")
    return shlex.join(profile.command(ranks, 0, engine))


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of name, value and reason in columns; a long value or reason goes on under itself."""
    made = list(rows)
    names = max(len(row[0]) for row in made)
    values = min(max(len(row[1]) for row in made), 30)
    room = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH) - names - values - 6
    lines = []
    for name, value, why in made:
        shown = textwrap.wrap(value, values) or [""]
        reasons = textwrap.wrap(why, max(room, 20))
        for place in range(max(len(shown), len(reasons))):
            value, why = (column[place] if place < len(column) else "" for column in (shown, reasons))
            lines.append(f"  {name * (not place):<{names}}  {value:<{values}}  {why}".rstrip())
    return "\n".join(lines)
