"""All ranks on this machine: the cores shared out, one GPU a rank where there are GPUs, loopback only."""

import os
import socket

import psutil

from cluster.capacity import visible_devices
from cluster.profiles.base import Profile


def environment(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables of `rank` out of `ranks`. With GPUs, a rank sees its own one only, as cuda:0."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    devices = visible_devices()
    if devices:
        variables["CUDA_VISIBLE_DEVICES"] = devices[rank]
    loopback = loopback_interface()
    if loopback:
        # Without it gloo binds what the host's name resolves to, which a laptop may not reach.
        variables["GLOO_SOCKET_IFNAME"] = loopback
        variables["NCCL_SOCKET_IFNAME"] = loopback
    return variables


def loopback_interface() -> str | None:
    """Return the name of the interface that has 127.0.0.1, None where none shows it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return name
    return None


LOCAL = Profile(name="local", environment=environment)
