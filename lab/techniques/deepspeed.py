"""DeepSpeed's own Ulysses attention, which can replace this lab's implementation for a comparison."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from threading import Timer
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cluster import limits
from cluster.folders import cache_folder
from cluster.live import notify
from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.kernel import Kernel
from lab.techniques.ulysses_degrees import check_degree
from lab.torch_private import FakeTensor
from lab.units import format_bytes

SILENT_SECONDS = 3.0
"""A wait for another process that compiles is not mentioned before it takes so long."""

FILE_MEMORY = 1600 * 2**20
"""The peak memory of GCC 12's largest process for one of the operator's two files, in bytes."""

_OPERATOR = "DeepSpeed's communication operator"


def apply_deepspeed_ulysses(model: nn.Module, *, group: dist.ProcessGroup) -> None:
    """Shard the sequence over ``group`` with DeepSpeed's class ``UlyssesSPAttentionHF``, unmodified.

    Rank c has the hidden state [b, s, E] of tokens c*s to (c+1)*s, and ``position_ids`` must be those, as for
    ``apply_ulysses``. Each attention module makes its own instance of the class on its first call. DeepSpeed
    could register itself in transformers for the whole process; this function does not use that. The kernel
    between the exchanges is this lab's, so the two backends differ only in the exchange.

    Letters: C ranks in the group, b rows, S tokens, s = S/C tokens of one rank, E hidden size, K key/value
    heads.

    Saves:
        What ``apply_ulysses`` saves: activations of s instead of S tokens.
    Costs:
        4 all-to-alls per layer in forward and 4 in backward, and one all-gather of positions, which
        DeepSpeed always runs. If K < C, key/value heads are replicated as in ``apply_ulysses``. On CPU,
        DeepSpeed compiles a communication operator at its first use (half a minute, once per machine;
        ``lab doctor --warm`` does it beforehand).
    Source:
        DeepSpeed-Ulysses (arXiv 2309.14509); ALST (arXiv 2506.13996);
        ``deepspeed/runtime/sequence_parallel/ulysses_sp.py``.
    Composes with:
        Checkpointing, offload (also of attention), tiling and FSDP2. Not with a ring, UPipe or a plan.

    Raises:
        RecipeError: DeepSpeed is missing; its operator cannot be compiled here; the model's tensors are
            fake; the heads do not allow the degree C.
    """
    parameter = next(model.parameters())
    if isinstance(parameter, FakeTensor):
        raise RecipeError(
            "ulysses_backend='deepspeed' cannot be planned: its exchange wants real tensors; "
            "plan with ulysses_backend='lab', which holds the same bytes or fewer"
        )
    decoder = decoder_of(model)
    check_degree(decoder.shape.H, decoder.shape.K, dist.get_world_size(group))
    attention_class = _attention_class(parameter.device)
    apply_attention(model)
    for module in decoder.attentions:
        module.lab_attention = _DeepSpeedAttention(  # type: ignore[assignment]
            attention_class, group, decoder.shape.L
        )
        module.lab_ranks = (dist.get_world_size(group), dist.get_rank(group))  # type: ignore[assignment]


class _DeepSpeedAttention:
    """The attention of one module with DeepSpeed's exchange: q [b, H, s, D], k and v [b, K, s, D] -> like q.

    Letters: b rows, H query heads, K key/value heads, s tokens of one rank, D head_dim.
    """

    def __init__(self, attention_class: type[nn.Module], group: dist.ProcessGroup, layers: int) -> None:
        self._attention_class, self._group, self._layers = attention_class, group, layers
        self._attention: Any = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, kernel: Kernel = FLASH
    ) -> Tensor:
        rows, heads, tokens, head_dim = q.shape
        # An instance is made for one number of rows. Nothing else that it is made for changes between calls.
        if self._attention is None or self._attention.batch_size != rows:
            self._attention = self._attention_class(
                _attend,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=head_dim,
                kv_head_count=k.shape[1],
                num_hidden_layers=self._layers,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        # DeepSpeed overwrites num_key_value_groups of the module that it is given, so it gets another object.
        module = SimpleNamespace(training=True)
        # DeepSpeed gathers positions for masks. The kernel needs no mask, so any positions will do.
        positions = torch.arange(tokens, device=q.device).expand(rows, -1).contiguous()
        result, _ = self._attention(module, q, k, v, None, position_ids=positions, scale=scale, kernel=kernel)
        out: Tensor = result
        return out.view(rows, tokens, heads, head_dim).transpose(1, 2)


def _attend(
    _module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: None,
    *,
    scale: float | None,
    kernel: Kernel,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention between the two exchanges: q [b, H/C, S, D] -> [b, S, H/C, D]."""
    return attention(q, k, v, scale=scale, kernel=kernel).transpose(1, 2), None


def _attention_class(device: torch.device) -> type[nn.Module]:
    """Import DeepSpeed's class, and let DeepSpeed communicate over torch's default process group.

    Raises:
        RecipeError: DeepSpeed is not installed; its communication operator cannot be compiled.
    """
    attention_class: type[nn.Module] = sequence_parallel(device).UlyssesSPAttentionHF
    with _accelerator(device), _one_line_refusal():
        # It is there: ulysses_sp was imported with it.
        import deepspeed.comm

        if not deepspeed.comm.is_initialized():
            _build_operator()
            deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return attention_class


def warm_operator(device: torch.device) -> None:
    """Compile and load DeepSpeed's communication operator, so that no rank has to wait for it later.

    Raises:
        RecipeError: DeepSpeed is not installed; its communication operator cannot be compiled.
    """
    sequence_parallel(device)
    with _accelerator(device), _one_line_refusal():
        _build_operator()


@contextmanager
def _one_line_refusal() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ImportError) as error:
        # The first colon is followed by pages of compiler output.
        reason = str(error).partition(":")[0]
        raise RecipeError(
            "ulysses_backend='deepspeed': its communication operator cannot be compiled here, for which "
            f"it needs a C++ compiler and ninja ({reason}); use ulysses_backend='lab'"
        ) from error


def sequence_parallel(device: torch.device) -> ModuleType:
    """Import DeepSpeed's ``ulysses_sp``, which has its Ulysses attention and its functions in tiles.

    Raises:
        RecipeError: DeepSpeed is not installed.
    """
    with _accelerator(device):
        try:
            import_module("deepspeed.comm")
            return import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
        except ImportError as error:
            raise RecipeError(
                f"ulysses_backend='deepspeed' without DeepSpeed ({error}): "
                "install deepspeed>=0.19, or use ulysses_backend='lab'"
            ) from error


def _build_operator() -> None:
    """Compile and load DeepSpeed's communication operator, so that ``init_distributed`` finds it loaded.

    On a GPU there is none.
    """
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        with build_folder() as folder:
            jobs = {}
            if not any(folder.glob("*/*.so")):
                jobs = _jobs()
                notify(f"compiling {_OPERATOR}, once on this machine: half a minute, longer if it is busy")
            with _variables(**jobs):
                builder.load(verbose=False)


def _jobs() -> dict[str, str]:
    """Return the variables of the compilation: MAX_JOBS=1 if both files at once take too much memory.

    Raises:
        RecipeError: One file takes too much.
    """
    free = limits.memory().available
    if free < FILE_MEMORY:
        raise RecipeError(
            "ulysses_backend='deepspeed': compiling its communication operator takes "
            f"{format_bytes(FILE_MEMORY)} of memory, and {format_bytes(free)} are available here; free some "
            "and run `lab doctor --warm`, or use ulysses_backend='lab'"
        )
    return {"MAX_JOBS": "1"} if free < 2 * FILE_MEMORY else {}


@contextmanager
def build_folder() -> Iterator[Path]:
    """Let torch compile extensions in a folder of the lab, in one process of this machine at a time.

    torch marks a folder in which it compiles with a file. Every other process waits until the file is gone,
    without a limit, and a process that ends meanwhile leaves it. Here the right to compile is an ``flock``,
    which ends with its process. The process that has it removes torch's file, because nobody else compiles.
    A process that waits, and one that removes such a file, says so in one line.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions = f"python-{python} torch-{torch.__version__} deepspeed-{version('deepspeed')}"
    folder = _cache(os.environ.get("TORCH_EXTENSIONS_DIR")) / versions
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "flock").open("a+") as lock:
        waiting = Timer(SILENT_SECONDS, _say_who_compiles, [Path(lock.name)])
        waiting.start()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        finally:
            waiting.cancel()
        lock.truncate(0)
        lock.write(f"{os.getpid()}")
        lock.flush()
        for stale in folder.glob("*/lock"):
            stale.unlink()
            notify(f"removed {stale}: a process that ended while it compiled has left this lock")
        with _variables(TORCH_EXTENSIONS_DIR=str(folder)):
            yield folder


def _say_who_compiles(lock: Path) -> None:
    notify(
        f"waiting for process {lock.read_text()}, which compiles {_OPERATOR} and holds {lock}: half a "
        "minute, longer on a busy machine; if that process hangs, end it"
    )


def _cache(extensions: str | None) -> Path:
    """Return where to compile: below the folder that the user has set for it, or in the user's cache."""
    if extensions:
        return Path(extensions) / "longcontext-lab"
    return cache_folder() / "extensions"


@contextmanager
def _accelerator(device: torch.device) -> Iterator[None]:
    """Set the environment variable ``DS_ACCELERATOR`` to "cpu" during the import of DeepSpeed.

    DeepSpeed reads it once, when it is imported. Without it, DeepSpeed does not select the CPU on a machine
    that has no accelerator. A value that the user has set is kept, and for a GPU nothing is set.
    """
    if device.type != "cpu" or "DS_ACCELERATOR" in os.environ:
        yield
        return
    with _variables(DS_ACCELERATOR="cpu"):
        yield


@contextmanager
def _variables(**values: str) -> Iterator[None]:
    """Set environment variables for the length of a `with` block. Other changes in the block remain."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
