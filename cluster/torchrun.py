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

from cluster.devices import first_line, join_group
from cluster.errors import ClusterError
from cluster.live import notify
from cluster.network import LOOPBACK, interface_of
from cluster.timeouts import DEFAULT_SECONDS
from cluster.torch_private import set_timeout

# As long as the name of a host that starts at the same time may take to be known.
RENDEZVOUS_SECONDS = 40.0
POLL_SECONDS = 5.0
# Longer than a rank waits for the memory of its GPU, and than ranks on a busy machine start apart.
SILENT_SECONDS = 30.0

_REMEDY = "unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start this process by torchrun again"


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
    started = _number("WORLD_SIZE", range(1, 10**6))
    if ranks not in (None, started):
        raise ClusterError(
            f"--ranks {ranks}: torchrun started {started}; --ranks {started} would work, or no --ranks"
        )


def _number(name: str, allowed: range) -> int:
    text = os.environ.get(name, f"{allowed[0]}")
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) not in allowed:
        raise ClusterError(
            f"{name}={text}: {name} must be a whole number from {allowed[0]} to {allowed[-1]}; {_REMEDY}"
        )
    return int(text)


@contextmanager
def rendezvous() -> Iterator[None]:
    """Check a launcher's variables, and that the host of rank 0 can be reached, before a `with` block.

    In the block this process joins the process group, for which torch would wait for half an hour. The port
    may still be closed, because ranks start at different times. After SILENT_SECONDS a line says what this
    process waits for.

    Raises:
        ClusterError: A variable is not a number in its range, the host cannot be reached within
            RENDEZVOUS_SECONDS, or torch reports an error of the network.
    """
    if not launched() or dist.is_initialized():
        yield
        return
    ranks = _number("WORLD_SIZE", range(1, 10**6))
    rank, port = _number("RANK", range(ranks)), _number("MASTER_PORT", range(min(1, ranks - 1), 2**16))
    _number("LOCAL_RANK", range(ranks))
    _number("LOCAL_WORLD_SIZE", range(1, ranks + 1))
    where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={port}"
    note = f"rank {rank} of {ranks} waits to join the others at {where}; if they do not start, {_REMEDY}"
    waiting = Timer(SILENT_SECONDS, notify, [note])
    waiting.start()
    try:
        _reach(os.environ["MASTER_ADDR"], port, where)
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ClusterError(f"{where}: {first_line(error)}; {_REMEDY}") from error
    finally:
        waiting.cancel()


def _reach(host: str, port: int, where: str) -> None:
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=POLL_SECONDS, all_errors=True).close()
        except (OSError, UnicodeError, ExceptionGroup) as group:
            errors = getattr(group, "exceptions", [group])
            if any(isinstance(error, ConnectionRefusedError) for error in errors):
                return None
            if isinstance(errors[0], UnicodeError) or time.monotonic() > deadline:
                why = getattr(errors[0], "strerror", None) or errors[0]
                raise ClusterError(
                    f"{where}: the host of rank 0 cannot be reached ({why}); {_REMEDY}"
                ) from group
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
    with rendezvous():
        one_node = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
        loopback = interface_of(LOOPBACK)
        if one_node and loopback:
            # Without it gloo binds to the address of the host's name, which a laptop may not reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        # In this order: with a driver that is too old, is_available() warns, and join_group says why.
        if local >= devices and torch.cuda.is_available():
            raise ClusterError(
                f"rank {os.environ['RANK']} is number {local + 1} on its host and sees {devices} GPUs; "
                f"torchrun --nproc-per-node {devices} would work"
            )
        # Torch's own is half an hour for two backends together, 10 minutes for NCCL alone.
        set_timeout(DEFAULT_SECONDS[join_group(local)])
    yield dist.get_rank()
    # Not after a failure: peers may wait in a collective, and the process ends in any case.
    dist.destroy_process_group()
