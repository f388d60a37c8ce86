"""How many bytes a rank's file of streamed layers needs, by the plan of the step."""

from __future__ import annotations

from pathlib import Path

from lab.errors import HostFileError
from lab.planning.plan import plan_job
from lab.recipe.jobs import Disk, Job, Machine
from lab.techniques.host_file import HostFolder
from lab.units import parse_path


def check_host_dir(job: Job, host_dir: str | Path | None) -> Path | None:
    """Return the absolute path of a folder for the long tensors of streamed layers; None if none is given.

    Raises:
        HostFileError: It is no path; the job's recipe streams nothing.
    """
    if host_dir is None:
        return None
    folder = parse_path(host_dir, HostFileError).absolute()
    if job.recipe.stream is None:
        raise HostFileError(
            f"host_dir={str(host_dir)!r} with a recipe without stream: nothing would lie there; use the "
            "recipe streamed or long, or leave host_dir out"
        )
    return folder


def planned_folder(job: Job, folder: Path | None) -> HostFolder | None:
    """Plan the job, and return the folder with the bytes of each rank's file; None if there is no folder.

    Raises:
        LabError: See ``plan_job``.
    """
    if folder is None:
        return None
    return HostFolder(folder, file_bytes(job))


def file_bytes(job: Job) -> int:
    """Return the bytes that each rank of a job has in its file at most, by the plan.

    Raises:
        LabError: See ``plan_job``.
    """
    return plan_job(job, Machine(workspace=False, disk=Disk())).disk_peak
