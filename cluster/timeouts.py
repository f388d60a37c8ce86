"""How long a collective may take: by the device where nobody says, and for all groups of one call."""

import math
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cluster.errors import ClusterError

# gloo counts from when a rank waits. NCCL's watchdog counts from when the host enqueued the collective, and
# the host may run a layer's kernels ahead of the device.
DEFAULT_SECONDS = {"cpu": 60.0, "cuda": 600.0}


def check_timeout(seconds: float | None) -> None:
    """Raise ClusterError unless a collective can take so many seconds; None stands for the default."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise ClusterError(
            f"timeout={seconds:g}: a collective takes a finite number of seconds above 0; "
            f"{DEFAULT_SECONDS['cuda']:g} would work"
        )


def set_timeout(seconds: float) -> None:
    """Let collectives take `seconds`: those of the default group, and of groups made without a timeout."""
    limit = timedelta(seconds=seconds)
    torchs: Any = dist.distributed_c10d
    torchs._set_pg_timeout(limit)
    # Read whenever a group is made, whether by new_group, split_group or a DeviceMesh, which takes none.
    torchs.default_pg_timeout = limit
    torchs.default_pg_nccl_timeout = limit
