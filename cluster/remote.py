"""What runs on a rank: joining the process group, and running one function and reporting its outcome."""

import gc
import importlib
import os
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import cloudpickle
import torch
import torch.distributed as dist

from cluster import stacks, torch_private, torch_state
from cluster.devices import join_group
from cluster.errors import Failure
from cluster.live import publish, recording
from cluster.network import own_address
from cluster.torch_private import set_timeout

PACKAGE = os.path.dirname(__file__)
SAME_INTERRUPT_SECONDS = 0.2

# A file, or the address and the port of a TCP store.
Rendezvous = str | tuple[str, int]

# The rendezvous is served for as long as something refers to it.
_store: Any = None


@dataclass(frozen=True)
class Answer:
    """The outcome of a call on one rank.

    Attributes:
        result: The cloudpickled result, empty where the call failed.
        failure: Why there is no result, None where there is one.
    """

    result: bytes = b""
    failure: Failure | None = None


def run(payload: bytes, call_id: str, rank: int) -> Answer:
    """Call a function on this rank.

    Args:
        payload: The cloudpickled tuple (timeout, function, arguments, keyword arguments). The timeout is that
            of each collective, in seconds; None where the rank is in no process group.
        call_id: The id of the call, for its records.
        rank: The rank of this process.

    Returns:
        The function's result, or its failure.
    """
    # For each call anew: before each message ipykernel sets a handler of its own.
    signal.signal(signal.SIGINT, _on_interrupt)
    _end_groups_of_earlier_calls()
    with recording(call_id, rank):
        try:
            _on_interrupt.enabled = True
            answer = Answer(result=_call(payload))
            _on_interrupt.enabled = False
            return answer
        except BaseException as error:
            _on_interrupt.enabled = False
            torch_state.reset()
            failure = _describe(error, rank, time.time())
        publish(failure)  # at once, because leaving takes time
        # Outside the except block: the exception is gone, and with it the frames that refer to the groups.
        leave(failed=True)
        return Answer(failure=failure)


def _call(payload: bytes) -> bytes:
    # The first call imports the modules of its function; see `cluster.engine`.
    collects = gc.isenabled()
    gc.disable()
    try:
        timeout, function, args, kwargs = cloudpickle.loads(payload)
    finally:
        if collects:
            gc.enable()
    if timeout is not None:
        set_timeout(timeout)
    result = function(*args, **kwargs)
    if dist.is_initialized() and torch.cuda.is_available():
        # A kernel that hangs or fails is the failure of this function, not of the next one.
        torch.cuda.synchronize()
    answer: bytes = cloudpickle.dumps(result)
    return answer


class _OnInterrupt:
    """Handles SIGINT: it ends the function that runs, and leaves the rest of the engine alone.

    The signal is sent repeatedly, because Python drops an exception that is raised in a destructor. A signal
    that follows shortly after a KeyboardInterrupt is therefore a repetition, and must not hit the code that
    handles the exception. An import and the beginning or end of a `with` block are not interrupted, because
    the half of their work would make later calls fail.

    Attributes:
        enabled: Whether a function of the caller runs, which may be interrupted.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._raised = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        repeated = time.monotonic() - self._raised < SAME_INTERRUPT_SECONDS
        if self.enabled and not repeated and not _must_complete(frame):
            self._raised = time.monotonic()
            raise KeyboardInterrupt


def _must_complete(frame: FrameType | None) -> bool:
    """Whether an import, or the beginning or end of a `with` block, is on the stack."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" or code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


_on_interrupt = _OnInterrupt()


def leave(*, failed: bool = False) -> None:
    """Leave every process group, so that ranks that wait for this one in a collective learn it at once.

    gloo closes its connections when nothing refers to the group any more. The collectives of the peers then
    fail within milliseconds instead of after their timeout. Those ranks need no restart, only a new group.

    NCCL's communicators are aborted where this rank has failed. To destroy a communicator waits for its
    collectives, and so for peers that never join them. The peers go on waiting in their kernels and need a
    restart.

    Args:
        failed: Whether this rank has failed.
    """
    if dist.is_initialized():
        if failed and "nccl" in dist.get_backend_config():
            torch_private.abort_process_groups()
        else:
            dist.destroy_process_group()
    torch_private.clear_mesh_caches()
    gc.collect()


def _end_groups_of_earlier_calls() -> None:
    """Destroy the process groups that earlier calls made. The default group stays.

    A gloo group polls from three threads for as long as it lives. A hundred groups that nobody uses would
    keep a core busy. Groups do not end with their own call but before the next one, because by then every
    rank has answered the call that made them.
    """
    if not dist.is_initialized():
        return
    groups = [group for group in torch_private.process_groups() if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        # DTensor would find a mesh of this call in its caches as an equal one of an earlier call.
        torch_private.clear_mesh_caches()
        # Models refer to their groups in reference cycles.
        gc.collect()


def _describe(error: BaseException, rank: int, when: float) -> Failure:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    position = stacks.report(traceback.extract_tb(error.__traceback__)).position
    try:
        pickled = cloudpickle.dumps(error.with_traceback(None))
    except Exception:  # an exception of the caller's own may refer to anything
        pickled = b""
    return Failure(rank, type(error).__name__, str(error), text, when, position, pickled)


def open_store(ranks: int, timeout: float, folder: Path | None) -> Rendezvous:
    """Open the rendezvous of the process group on this rank.

    Args:
        ranks: How many ranks will meet.
        timeout: How long one rank may wait for the others, in seconds.
        folder: A folder that only this user can read, where all ranks are on this host. None otherwise.

    Returns:
        A new file in the folder, which no other user can read or write. Without a folder, the address and the
        port of a TCP store, whose keys every process that reaches them can read and set. The system chooses
        the port.
    """
    global _store
    if folder is not None:
        return str(folder / f"store-{uuid4()}")
    address = own_address()
    listening = socket.create_server((address, 0))
    port = int(listening.getsockname()[1])
    # The store takes over a socket that already listens. The port cannot be lost to another process, and no
    # other interface is open.
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


def join(rank: int, ranks: int, store: Rendezvous, start_timeout: float) -> str:
    """Join the default process group. This process leaves every earlier group.

    The rendezvous takes at most half of `start_timeout`, so that an error of it arrives in time. Each call
    sets the timeout of its collectives.

    Args:
        rank: The rank of this process.
        ranks: The number of ranks.
        store: The rendezvous, as `open_store` returned it.
        start_timeout: The timeout of the cluster's start, in seconds.

    Returns:
        The type of the device that this rank works on, `cuda` or `cpu`.

    Raises:
        ClusterError: torch cannot use the GPU, or other processes fill it.
    """
    global _store
    patience = timedelta(seconds=start_timeout / 2)
    leave()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if isinstance(store, str):
        _store = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    elif rank != 0:
        _store = dist.TCPStore(  # type: ignore[attr-defined]
            *store, ranks, is_master=False, timeout=patience
        )
    # The functions of this module have the world group as a default argument. If they were imported later,
    # they would keep the first world group for ever.
    importlib.import_module("torch.distributed.nn.functional")
    return join_group(store=_store, rank=rank, world_size=ranks, timeout=patience)


def do_nothing() -> None:
    """Return at once. The answer shows that a rank is free and that its records arrive."""
