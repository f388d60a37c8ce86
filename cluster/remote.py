"""What runs on a rank: joining the process group, and running one function with its outcome noted."""

import gc
import os
import socket
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from cluster.errors import Failure
from cluster.live import recording
from cluster.network import own_address

# Held here because the rendezvous is served for as long as it is referenced.
_store: Any = None


@dataclass(frozen=True)
class Answer:
    """A rank's outcome: the cloudpickled result, or why there is none."""

    result: bytes = b""
    failure: Failure | None = None


def run(payload: bytes, run_id: str, rank: int) -> Answer:
    """Call the cloudpickled (function, arguments, keyword arguments) and note the outcome."""
    _end_groups_of_earlier_calls()
    with recording(run_id, rank):
        try:
            function, args, kwargs = cloudpickle.loads(payload)
            result = function(*args, **kwargs)
            if dist.is_initialized() and torch.cuda.is_available():
                # A kernel that hangs or fails is this function's failure, not the next one's.
                torch.cuda.synchronize()
            return Answer(result=cloudpickle.dumps(result))
        except BaseException as error:
            return Answer(failure=_describe(error, rank, time.time()))


def _end_groups_of_earlier_calls() -> None:
    """Process groups live as long as the call that made them; what is joined here stays.

    A gloo group polls from three threads of its own for ever: a hundred forgotten ones keep a core busy. They
    end now and not with their own call, for by now every rank has answered that one.
    """
    if not dist.is_initialized():
        return
    made = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        # Models hold their groups in reference cycles.
        gc.collect()


def _describe(error: BaseException, rank: int, when: float) -> Failure:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(rank, type(error).__name__, str(error), text, when)


def open_store(ranks: int, timeout: float) -> tuple[str, int]:
    """Open the rendezvous of `ranks` on this rank and return its address and port, chosen by the system."""
    global _store
    address = own_address()
    listening = socket.create_server((address, 0))
    port = int(listening.getsockname()[1])
    # The store takes over a socket that already listens: no port to lose, no interface but that one.
    _store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return address, port


def join(rank: int, ranks: int, store: tuple[str, int], timeout: float) -> str:
    """Join this process, as `rank` of `ranks`, to the default process group; collectives time out.

    Returns the type of the device it works on.
    """
    global _store
    limit = timedelta(seconds=timeout)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if rank != 0:
        _store = dist.TCPStore(  # type: ignore[attr-defined]
            *store, ranks, is_master=False, timeout=limit
        )
    backend, device = "gloo", None
    if torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda:0")
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=_store, rank=rank, world_size=ranks, timeout=limit, device_id=device
    )
    return device.type if device else "cpu"


def nothing() -> None:
    """Do nothing: what comes back shows that a rank is free and its records arrive."""
