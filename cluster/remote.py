"""What runs on a rank: joining the process group, and running one function with its outcome noted."""

import functools
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from cluster.devices import FREE_SECONDS, check_driver, check_free
from cluster.errors import Failure
from cluster.live import publish, recording
from cluster.network import own_address
from cluster.stacks import whereabouts
from cluster.timeouts import set_timeout
from cluster.torch_state import end_modes

OURS = os.path.dirname(__file__)
SAME_INTERRUPT_SECONDS = 0.2

# Held here because the rendezvous is served for as long as it is referenced.
_store: Any = None


@dataclass(frozen=True)
class Answer:
    """A rank's outcome: the cloudpickled result, or why there is none."""

    result: bytes = b""
    failure: Failure | None = None


def run(payload: bytes, run_id: str, rank: int) -> Answer:
    """Call the cloudpickled (function, arguments, keyword arguments) and note the outcome."""
    # Here and not once and for all: before each message ipykernel sets a handler of its own.
    signal.signal(signal.SIGINT, _interrupts)
    _end_groups_of_earlier_calls()
    with recording(run_id, rank):
        try:
            _interrupts.wanted = True
            answer = Answer(result=_call(payload))
            _interrupts.wanted = False
            return answer
        except BaseException as error:
            _interrupts.wanted = False
            end_modes()
            failure = _describe(error, rank, time.time())
        publish(failure)  # at once: to leave takes its time
        # Only now, when the exception is gone, and with its frames what held the groups.
        leave(failed=True)
        return Answer(failure=failure)


def _call(payload: bytes) -> bytes:
    function, args, kwargs = cloudpickle.loads(payload)
    result = function(*args, **kwargs)
    if dist.is_initialized() and torch.cuda.is_available():
        # A kernel that hangs or fails is this function's failure, not the next one's.
        torch.cuda.synchronize()
    answer: bytes = cloudpickle.dumps(result)
    return answer


def within(
    seconds: float, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return `function(*args, **kwargs)`, whose collectives may take `seconds` each."""
    set_timeout(seconds)
    return function(*args, **kwargs)


class _Interrupts:
    """SIGINT ends the function that runs, and nothing else of the engine.

    It is sent again and again, for Python drops an exception that is raised in a destructor; what comes soon
    after one that was raised is the same one, and must not hit whoever handles it. Neither an import nor the
    beginning or end of a `with` block is ended in its middle: what is left half done would fail the calls to
    come.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._raised = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        handled = time.monotonic() - self._raised < SAME_INTERRUPT_SECONDS
        if self.wanted and not handled and not _half_done(frame):
            self._raised = time.monotonic()
            raise KeyboardInterrupt


def _half_done(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" or code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


_interrupts = _Interrupts()


def leave(*, failed: bool = False) -> None:
    """Leave every process group, so that ranks that wait for this one in a collective learn it at once.

    gloo closes its connections and the peers' collectives fail within milliseconds instead of after their
    timeout; the ranks need no restart then, only a new group. Connections close when nothing holds the group.

    NCCL's communicators are aborted where this rank has `failed`: to destroy one waits for its collectives,
    and so for peers that will never come. Those wait on in their kernels, and need a restart.
    """
    if dist.is_initialized():
        if failed and "nccl" in dist.get_backend_config():
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor remembers what it worked out by mesh, and a mesh holds its groups.
        torch._C._clear_DTensor_sharding_propagator_cache()
        sys.modules["torch.distributed.tensor._redistribute"].clear_redistribute_planner_cache()
        _clear_caches_of_torch()
    gc.collect()


def _clear_caches_of_torch() -> None:
    # A function of its own: the loop's variable keeps the last object, which may be a part of a model.
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper) and _is_of_torch(found):
            found.cache_clear()


def _is_of_torch(cache: object) -> bool:
    return (getattr(cache, "__module__", None) or "").startswith("torch.distributed.")


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
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    doing = whereabouts(traceback.extract_tb(error.__traceback__)).doing
    try:
        travels = cloudpickle.dumps(error.with_traceback(None))
    except Exception:  # an exception of the caller's own may hold anything
        travels = b""
    return Failure(rank, type(error).__name__, str(error), text, when, doing, travels)


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


def join(rank: int, ranks: int, store: tuple[str, int], start_timeout: float) -> str:
    """Join this process, as `rank` of `ranks`, to the default process group, which replaces any other.

    The meeting takes half of `start_timeout` seconds at most, so that what a rank says of it arrives; how
    long collectives take each call says. Returns the type of the device it works on. Raises ClusterError
    for a GPU that torch cannot use, or that other processes fill.
    """
    global _store
    patience = timedelta(seconds=start_timeout / 2)
    leave()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if rank != 0:
        _store = dist.TCPStore(  # type: ignore[attr-defined]
            *store, ranks, is_master=False, timeout=patience
        )
    backend, device = "gloo", None
    check_driver()
    if torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda:0")
        torch.cuda.set_device(device)
        check_free(FREE_SECONDS)
    # Its functions take the world group as a default: imported later, they would keep the first for ever.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(
        backend, store=_store, rank=rank, world_size=ranks, timeout=patience, device_id=device
    )
    return device.type if device else "cpu"


def nothing() -> None:
    """Do nothing: what comes back shows that a rank is free and its records arrive."""
