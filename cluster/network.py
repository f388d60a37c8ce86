"""Addresses and interfaces: where this process is reached, and which way leads to another host."""

import os
import socket
from contextlib import suppress

import psutil

from cluster.errors import ClusterError

LOOPBACK = "127.0.0.1"

# An engine's own address, set in its environment by cluster/engine.py.
ADDRESS_VARIABLE = "CLUSTER_ADDRESS"

# Reserved for documentation (RFC 5737): the way to it is the way outward, and nothing is sent.
_FAR_AWAY = "198.51.100.1"


def own_address() -> str:
    """Return the IPv4 address at which the other ranks reach this process."""
    return os.environ.get(ADDRESS_VARIABLE, LOOPBACK)


def address_towards(host: str) -> str | None:
    """Return this host's address on the way to `host`, None where there is no way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # Connecting a datagram socket only chooses a route; any port will do.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def outward_address() -> str:
    """Return this host's address on the way outward. Raises ClusterError where nothing leads outward."""
    found = address_towards(_FAR_AWAY)
    if found is None:
        raise ClusterError(f"no network leads outward from here; address=... would work, {_ours()}")
    return found


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, None where none shows it."""
    return next((name for name, has in _addresses() if has == address), None)


def check_free(address: str, ports: list[int]) -> None:
    """Raise ClusterError unless a server can listen at `address`, on each of `ports`."""
    for port in ports or [0]:
        with socket.socket() as probe:
            # As the controller binds: a port that only lingers after a closed connection is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except PermissionError:
                raise ClusterError(
                    f"ports: {port} is not for ordinary users; ports from 1024 on would work"
                ) from None
            except OSError as error:
                if interface_of(address) is None:
                    raise ClusterError(
                        f"address={address!r} is not this machine's ({error.strerror}); {_ours()}"
                    ) from None
                raise ClusterError(
                    f"ports: {port} of {address} is in use; other ports, or none for any, would work"
                ) from None


def _ours() -> str:
    return f"this machine has {', '.join(sorted(address for _, address in _addresses())) or 'none'}"


def _addresses() -> list[tuple[str, str]]:
    return [
        (name, str(a.address))
        for name, addresses in psutil.net_if_addrs().items()
        for a in addresses
        if a.family == socket.AF_INET
    ]
