"""How long a collective may take: the defaults, and the check of a timeout."""

from cluster.errors import ClusterError

# In seconds, by the type of the device. gloo counts from the moment that a rank starts to wait. NCCL's
# watchdog counts from the moment that the host enqueued the collective, and the host may run a layer's
# kernels ahead of the device.
DEFAULT_SECONDS = {"cpu": 60.0, "cuda": 600.0}
# What torch, Python's locks and the polling of this package can keep to.
SHORTEST_SECONDS, LONGEST_SECONDS = 0.01, 30 * 24 * 3600.0


def check_timeout(seconds: object, name: str = "timeout") -> None:
    """Check a timeout.

    Args:
        seconds: The timeout.
        name: The name of the argument, for the error.

    Raises:
        ClusterError: The timeout is no number, or lies outside of SHORTEST_SECONDS and LONGEST_SECONDS.
    """
    # bool is a subclass of int.
    if (
        not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
        or not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS
    ):
        shown = f"{seconds:g}" if isinstance(seconds, float) else repr(seconds)
        raise ClusterError(
            f"{name}={shown}: it takes a number of seconds from {SHORTEST_SECONDS:g} to "
            f"{LONGEST_SECONDS:.0f}, which is 30 days; {DEFAULT_SECONDS['cuda']:g} would work"
        )
