"""The process group of processes that torchrun started, or any launcher that sets the same variables."""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import torch
import torch.distributed as dist

from cluster.devices import join_group
from cluster.errors import ClusterError
from cluster.live import notify
from cluster.network import LOOPBACK, interface_of
from cluster.timeouts import DEFAULT_SECONDS
from cluster.torch_private import set_timeout

# As long as the name of a host that starts at the same time may take to be known.
RENDEZVOUS_SECONDS = 40.0
POLL_SECONDS = 5.0
# A group that forms sooner is not mentioned.
SILENT_SECONDS = 10.0

_REMEDY = (
    "unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where no launcher set them for this process, or "
    "start it by torchrun again"
)


def launched() -> bool:
    """Return whether torchrun started this process.

    The environment then has the rank, the number of ranks, and the address and the port of the rendezvous.
    """
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def check_ranks(ranks: int | None) -> None:
    """Check the number of ranks that a user asked for.

    Args:
        ranks: The number, None where the user named none.

    Raises:
        ClusterError: torchrun started another number of ranks.
    """
    started = _number("WORLD_SIZE", 1)
    if ranks not in (None, started):
        raise ClusterError(
            f"--ranks {ranks}: torchrun started {started}; --ranks {started} would work, or no --ranks"
        )


def _number(name: str, least: int, most: int = 10**6) -> int:
    text = os.environ[name]
    if not re.fullmatch("[0-9]{1,7}", text) or not least <= int(text) <= most:
        raise ClusterError(f"{name}={text}: it takes a whole number from {least} to {most}; {_REMEDY}")
    return int(text)


@contextmanager
def rendezvous() -> Iterator[None]:
    """Check the variables of a launcher for a `with` block in which this process joins their process group.

    Torch waits half an hour for the host of rank 0, and for ranks that do not come. The host must be there.
    Its port may not be open yet, because ranks start at different times: after SILENT_SECONDS a line says
    what this process waits for.

    Raises:
        ClusterError: A number is none, or the host cannot be reached within RENDEZVOUS_SECONDS.
    """
    if not launched() or dist.is_initialized():
        yield
        return
    ranks = _number("WORLD_SIZE", 1)
    rank, port = _number("RANK", 0, ranks - 1), _number("MASTER_PORT", 0, 65535)
    host = os.environ["MASTER_ADDR"]
    note = f"rank {rank} waits for {ranks} ranks at MASTER_ADDR={host}, MASTER_PORT={port}; {_REMEDY}"
    waiting = Timer(SILENT_SECONDS, notify, [note])
    waiting.start()
    try:
        _reach(host, port)
        yield
    finally:
        waiting.cancel()


def _reach(host: str, port: int) -> None:
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while True:
        try:
            address = (host, port)
            return socket.create_connection(address, timeout=POLL_SECONDS, all_errors=True).close()
        except (OSError, ExceptionGroup) as group:
            errors = getattr(group, "exceptions", [group])
            if any(isinstance(error, ConnectionRefusedError) for error in errors):
                return None
            if time.monotonic() > deadline:
                error = errors[0]
                raise ClusterError(
                    f"MASTER_ADDR={host}, MASTER_PORT={port}: the host of rank 0 cannot be reached ("
                    f"{error.strerror or error}); {_REMEDY}"
                ) from error
        time.sleep(POLL_SECONDS)


@contextmanager
def process_group() -> Iterator[int]:
    """Join the process group for the length of a `with` block, on the device of this process's LOCAL_RANK.

    A collective may take as long as in a Cluster: DEFAULT_SECONDS.

    Yields:
        The rank of this process.

    Raises:
        ClusterError: There is no such device, torch cannot use it, or other processes fill it; or see
            `rendezvous`.
    """
    one_node = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    loopback = interface_of(LOOPBACK)
    if one_node and loopback:
        # Without it gloo binds to the address of the host's name, which a laptop may not reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    # In this order: with a driver that is too old, is_available() warns, and join_group says why in one line.
    if local >= devices and torch.cuda.is_available():
        raise ClusterError(
            f"rank {os.environ['RANK']} is number {local + 1} on its host and sees {devices} GPUs; "
            f"torchrun --nproc-per-node {devices} would work"
        )
    # Torch's own is half an hour for two backends together, 10 minutes for NCCL alone.
    with rendezvous():
        set_timeout(DEFAULT_SECONDS[join_group(local)])
    yield dist.get_rank()
    # Not after a failure: peers may wait in a collective, and the process ends in any case.
    dist.destroy_process_group()
