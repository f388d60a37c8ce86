"""What one rank finds in its environment, each variable with its reason; worked out on its own host."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from cluster.errors import ClusterError
from cluster.network import ADDRESS_VARIABLE, LOOPBACK, interface_of
from cluster.places import Place


class Variable(NamedTuple):
    """An environment variable and why it is set."""

    name: str
    value: str
    why: str


def share_of_cores(place: Place, cores: Sequence[Set[int]]) -> int:
    """Return how many threads a rank gets, of the cores each local rank may use: `cores[local_rank]`."""
    own = cores[place.local_rank]
    return max(1, len(own) // sum(other == own for other in cores))


def device_of(place: Place, devices: Sequence[str]) -> str | None:
    """Return the device of a rank among the host's visible `devices`, None where there are none.

    Raises ClusterError where there are fewer devices than ranks.
    """
    if not devices:
        return None
    if len(devices) == 1:
        # A scheduler that binds GPUs to tasks shows each rank its own one only; two ranks cannot share one
        # by mistake, for NCCL refuses that by name.
        return devices[0]
    if place.local_rank >= len(devices):
        raise ClusterError(
            f"rank {place.rank} is number {place.local_rank + 1} of {place.local_ranks} on its host and sees "
            f"{len(devices)} GPUs; {len(devices)} ranks on a host would work"
        )
    return devices[place.local_rank]


def rank_environment(
    place: Place,
    devices: Sequence[str],
    cores: Sequence[Set[int]],
    address: str,
    extra: Mapping[str, str],
) -> list[Variable]:
    """Return the variables of the rank at `place`, on a host with these GPUs, whose own address is `address`.

    `extra` comes last and wins.
    """
    threads = str(share_of_cores(place, cores))
    shared = f"the cores it may use, over the ranks of its host: {place.local_ranks}"
    found = [Variable("OMP_NUM_THREADS", threads, shared), Variable("MKL_NUM_THREADS", threads, shared)]
    found.append(Variable("LOCAL_WORLD_SIZE", str(place.local_ranks), "the ranks that share its host"))
    device = device_of(place, devices)
    if device is not None:
        found.append(Variable("CUDA_VISIBLE_DEVICES", device, "its own GPU only, which it knows as cuda:0"))
    found.append(Variable(ADDRESS_VARIABLE, address, "where the other ranks reach it"))
    interface = interface_of(address)
    if interface:
        # Without it gloo binds what the host's name resolves to, which a laptop may not reach.
        loopback = "loopback: nothing leaves this host"
        why = loopback if address == LOOPBACK else "the way to the controller, and so to the other ranks"
        found += [Variable(f"{library}_SOCKET_IFNAME", interface, why) for library in ("GLOO", "NCCL")]
    return found + [Variable(name, value, "set by the profile") for name, value in extra.items()]
