"""Addresses, interfaces and ports of this host."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

from cluster.errors import ClusterError

LOOPBACK = "127.0.0.1"

# An engine's own address, set in its environment by cluster/engine.py.
ADDRESS_VARIABLE = "CLUSTER_ADDRESS"

# An address that is reserved for documentation (RFC 5737). The route to it is the route to other networks.
# Nothing is sent to it.
_OUTSIDE = "198.51.100.1"


def own_address() -> str:
    """Return the IPv4 address at which the other ranks reach this process."""
    return os.environ.get(ADDRESS_VARIABLE, LOOPBACK)


def address_towards(host: str) -> str | None:
    """Return the address of this host on the route to `host`, None where there is no route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # To connect a datagram socket only chooses a route. The port has no meaning.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def outward_address() -> str:
    """Return the address of this host on the route to other networks.

    Raises:
        ClusterError: No route leads to other networks.
    """
    address = address_towards(_OUTSIDE)
    if address is None:
        raise ClusterError(
            f"no route leads from this machine to other networks; address=... would work, {_own_addresses()}"
        )
    return address


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, None where no interface has it."""
    return next((name for name, own in _addresses() if own == address), None)


def check_ports(address: str, ports: list[int]) -> None:
    """Check that a server can listen at an address.

    Args:
        address: The address.
        ports: The ports to listen on. An empty list stands for any port.

    Raises:
        ClusterError: The address is not this machine's, or a port is in use or not allowed.
    """
    for port in ports or [0]:
        with socket.socket() as probe:
            # The controller binds in the same way. A port in TIME_WAIT, after a closed connection, counts as
            # free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except PermissionError:
                raise ClusterError(
                    f"ports: only root can listen on {port}; ports from 1024 on would work"
                ) from None
            except OSError as error:
                if interface_of(address) is None:
                    raise ClusterError(
                        f"address={address!r} is not an address of this machine ({error.strerror}); "
                        f"{_own_addresses()}"
                    ) from None
                raise ClusterError(
                    f"ports: {port} of {address} is in use; other ports would work, or no ports= at all"
                ) from None


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Keep free ports from every other process, until a server that shares addresses listens on them.

    A server that is told a free port listens on it only later. Meanwhile the system would give it to any
    other process. A socket with SO_REUSEADDR that does not listen keeps it, and lets ZeroMQ's sockets, which
    have that option too, listen on it.

    Args:
        count: The number of ports.

    Yields:
        The ports.
    """
    with ExitStack() as stack:
        reserved = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in reserved:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", 0))
        yield [one.getsockname()[1] for one in reserved]


def _own_addresses() -> str:
    return f"this machine has {', '.join(sorted(address for _, address in _addresses())) or 'none'}"


def _addresses() -> list[tuple[str, str]]:
    return [
        (name, str(a.address))
        for name, addresses in psutil.net_if_addrs().items()
        for a in addresses
        if a.family == socket.AF_INET
    ]
