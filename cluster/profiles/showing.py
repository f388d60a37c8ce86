"""A profile as text: its fields, the environment variables of rank 0, and the command that would run."""

import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields

from cluster.capacity import visible_devices
from cluster.environment import Variable, rank_environment
from cluster.errors import ClusterError
from cluster.host import near_cores, own_cores
from cluster.placement import Placement
from cluster.profiles.base import Profile
from cluster.profiles.slurm import Slurm

WIDTH = 110


def describe(profile: Profile, ranks: int) -> str:
    """Return a text that describes a profile. Nothing is started, and no other host is asked.

    Args:
        profile: The profile.
        ranks: The number of ranks.
    """
    rows = [(f.name, repr(getattr(profile, f.name)), f.metadata["why"]) for f in fields(profile)]
    parts = [
        f"{profile.name} · {ranks} ranks · {profile.where}\n\n{table(rows)}",
        f"the environment variables of rank 0, on a host like this one\n\n"
        f"{table(environment(profile, ranks))}",
    ]
    try:
        profile.check(ranks)
        runs = textwrap.indent(launch_command(profile, ranks), "  ")
        parts.append(f"the command that would run, of rank 0 where each rank has its own\n\n{runs}")
    except ClusterError as error:
        parts.append(f"nothing would run: {error}")
    return "\n\n".join(parts)


def environment(profile: Profile, ranks: int) -> list[Variable]:
    """Return the environment variables of rank 0, on a host like this one."""
    try:
        per_host = profile.ranks_on_first_host(ranks)
    except ClusterError:
        per_host = 1
    devices = visible_devices()
    cores = near_cores(devices, per_host) if profile.numa else [own_cores()] * per_host
    # An address that is given may be that of another machine.
    address = getattr(profile, "address", None) or profile.controller_address()
    place = Placement(0, 0, per_host)
    return [*rank_environment(place, devices[:per_host], cores, address), *profile.settings()]


def launch_command(profile: Profile, ranks: int) -> str:
    """Return the command line of rank 0 or of mpiexec, or the batch script."""
    if isinstance(profile, Slurm):
        return profile.script(ranks, f"{profile.log_folder()}/cluster-.../log/job.log")
    return shlex.join(profile.command(ranks, 0))


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return a text with columns for name, value and reason. Long values and reasons are wrapped."""
    entries = list(rows)
    names = max(len(row[0]) for row in entries)
    values = min(max(len(row[1]) for row in entries), 30)
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH) - names - values - 6
    lines = []
    for name, value, why in entries:
        parts = textwrap.wrap(value, values) or [""]
        reasons = textwrap.wrap(why, max(width, 20), break_on_hyphens=False)
        for line in range(max(len(parts), len(reasons))):
            value, why = (column[line] if line < len(column) else "" for column in (parts, reasons))
            lines.append(f"  {name * (not line):<{names}}  {value:<{values}}  {why}".rstrip())
    return "\n".join(lines)
