"""The environment variables of one rank, each with its reason. They are computed on the rank's own host."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from cluster import limits
from cluster.errors import ClusterError
from cluster.network import ADDRESS_VARIABLE, LOOPBACK, interface_of
from cluster.placement import Placement


class Variable(NamedTuple):
    """An environment variable and why it is set."""

    name: str
    value: str
    why: str


def share_of_cores(placement: Placement, cores: Sequence[Set[int]]) -> int:
    """Return how many threads a rank gets: its share of the cores, and of their quota in a container.

    Args:
        placement: The rank.
        cores: The cores that each rank of the host may use, by local rank. Ranks with the same cores share
            them.
    """
    own = cores[placement.local_rank]
    share = len(own) // sum(other == own for other in cores)
    return max(1, int(min(share, limits.core_quota() / placement.local_ranks)))


def device_of(placement: Placement, devices: Sequence[str]) -> str | None:
    """Return the device of a rank, None where the host has no devices.

    Args:
        placement: The rank.
        devices: The visible devices of its host.

    Raises:
        ClusterError: The host has fewer devices than ranks.
    """
    if not devices:
        return None
    if len(devices) == 1:
        # A scheduler that binds GPUs to tasks shows to each rank only its own one. Two ranks cannot share a
        # GPU by mistake, because NCCL refuses that with an error that says so.
        return devices[0]
    if placement.local_rank >= len(devices):
        raise ClusterError(
            f"rank {placement.rank} is number {placement.local_rank + 1} of {placement.local_ranks} on its "
            f"host and sees {len(devices)} GPUs; {len(devices)} ranks on a host would work"
        )
    return devices[placement.local_rank]


def rank_environment(
    placement: Placement, devices: Sequence[str], cores: Sequence[Set[int]], address: str
) -> list[Variable]:
    """Return the environment variables of a rank.

    Args:
        placement: The rank.
        devices: The visible devices of its host.
        cores: The cores that each rank of the host may use, by local rank.
        address: The address at which the other ranks reach this one.

    Raises:
        ClusterError: The host has fewer devices than ranks.
    """
    threads = str(share_of_cores(placement, cores))
    share = f"its share of the cores of its host, which has this many ranks: {placement.local_ranks}"
    variables = [
        Variable("OMP_NUM_THREADS", threads, share),
        Variable("MKL_NUM_THREADS", threads, share),
        Variable("LOCAL_WORLD_SIZE", str(placement.local_ranks), "the number of ranks on its host"),
    ]
    device = device_of(placement, devices)
    if device is not None:
        variables.append(
            Variable("CUDA_VISIBLE_DEVICES", device, "its own GPU only, which it sees as cuda:0")
        )
    variables.append(Variable(ADDRESS_VARIABLE, address, "the address at which the other ranks reach it"))
    interface = interface_of(address)
    if interface:
        # Without it gloo binds to the address of the host's name, which a laptop may not reach.
        loopback = "the loopback interface: nothing leaves this host"
        why = loopback if address == LOOPBACK else "the interface towards the controller and the other ranks"
        variables += [Variable(f"{library}_SOCKET_IFNAME", interface, why) for library in ("GLOO", "NCCL")]
    return variables
