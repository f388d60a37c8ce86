"""How long a collective may take: the defaults, the check of a timeout, and setting it on a rank."""

import math
from datetime import timedelta

from cluster.errors import ClusterError
from cluster.torch_private import set_default_timeout

# In seconds, by the type of the device. gloo counts from the moment that a rank starts to wait. NCCL's
# watchdog counts from the moment that the host enqueued the collective, and the host may run a layer's
# kernels ahead of the device.
DEFAULT_SECONDS = {"cpu": 60.0, "cuda": 600.0}


def check_timeout(seconds: float | None) -> None:
    """Check the timeout of a collective.

    Args:
        seconds: The timeout. None stands for the default and is accepted.

    Raises:
        ClusterError: The timeout is not a finite number above 0.
    """
    if seconds is not None and not 0 < seconds < math.inf:
        raise ClusterError(
            f"timeout={seconds:g}: a collective takes a finite number of seconds above 0; "
            f"{DEFAULT_SECONDS['cuda']:g} would work"
        )


def set_timeout(seconds: float) -> None:
    """Let each collective of this rank take `seconds`.

    The timeout applies to the default process group, and to groups that are made without a timeout.
    """
    set_default_timeout(timedelta(seconds=seconds))
