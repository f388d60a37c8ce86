"""Checkpoints: written while training goes on, seen only when whole; read on any number of ranks; exported.

A save copies this rank's shard of the parameters and of Adam's state into host memory, 12 bytes per parameter
in fp32, divided by the ranks under FSDP. That copy is all that training waits for; the disk is written from
it by a thread, and it is freed when the thread ends. With one save in flight at a time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from lab import models
from lab.errors import CheckpointError, ModelError
from lab.training.checkpoint_reader import CheckpointReader, first_cause, write_index
from lab.training.manifest import (
    PART,
    Manifest,
    checkpoints_in,
    in_checkpoint,
    name_of,
    newest,
    remove_all_but,
)
from lab.units import format_bytes, parse_file_size

WRITING = timedelta(hours=2)
"""How long a rank waits for the slowest disk; a rank that dies is noticed at once."""


class Checkpointer:
    """Writes checkpoints into ``folder``, which all ranks share, keeps the newest ``keep``, and reads them.

    Every rank makes one, and calls it alike.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # A group of its own: its thread's collectives must not mix with those of the training step, and a
        # disk may take longer than a step.
        self._group = dist.new_group(backend="gloo", timeout=WRITING)
        self._saving: Future[Metadata] | None = None
        self._name = ""

    @property
    def writing(self) -> bool:
        """Whether this rank's part of the last save is still under way."""
        return self._saving is not None and not self._saving.done()

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
        """Begin to write the state after ``manifest.step`` steps; returns when it is copied.

        Raises:
            CheckpointError: the save before this one failed, as ``wait`` says.
        """
        self.wait()
        self._name = name_of(manifest.step)
        writer = _Writer(self._folder / (self._name + PART), self._folder / self._name, manifest, self._keep)
        saving = async_save(_state(model, optimizer), storage_writer=writer, process_group=self._group)
        assert isinstance(saving, Future)
        self._saving = saving

    def is_finite(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this rank's part of what ``save`` would write has no NaN and no infinity."""
        state = _state(model, optimizer)
        parts = [state["model"], *state["optimizer"].values()]
        tensors = [_local(tensor) for part in parts for tensor in part.values()]
        # The largest magnitude: a sum of squares overflows where no number did. An empty shard has none.
        counted = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        return bool(get_total_norm(counted, math.inf).isfinite())

    def restore(self, checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Read a checkpoint into a model and its optimizer, in place, whatever ranks and recipe wrote it.

        Raises:
            CheckpointError: what it holds is not this model's.
        """
        reader, state = CheckpointReader(checkpoint), _state(model, optimizer)
        reader.check_dtypes(state["model"])
        reader.load_into("model", state, self._group)

    def wait(self) -> None:
        """Wait until the last save is whole on disk.

        Raises:
            CheckpointError: it could not be written, said alike on every rank; the ones before it stay.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except CheckpointException as error:
            if dist.get_rank() == 0:
                shutil.rmtree(self._folder / (self._name + PART), ignore_errors=True)
            # Every rank waits here, so that the folder is gone on every rank when this raises.
            dist.barrier(self._group)
            raise CheckpointError(self._told(error)) from error

    def _told(self, error: CheckpointException) -> str:
        free = shutil.disk_usage(self._folder).free
        good = checkpoints_in(self._folder)
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier checkpoint"
        return (
            f"{self._name} could not be written in {self._folder} ({format_bytes(free)} free): "
            f"{first_cause(error)}; {kept}"
        )

    def close(self) -> None:
        """Wait for the last save, and end the group that saves spoke through. Raises as ``wait``."""
        self.wait()
        # A peer may still be reading what this rank said last.
        dist.barrier()
        dist.destroy_process_group(self._group)


class _Writer(FileSystemWriter):
    """Torch's own writer into ``part``, which becomes ``whole`` when the last rank has written."""

    def __init__(self, part: Path, whole: Path, manifest: Manifest, keep: int) -> None:
        super().__init__(part)
        self._part, self._whole, self._manifest, self._keep = part, whole, manifest, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Raise what the disk said: torch's archive says at which byte it was, and only behind that why."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on rank 0 once every rank's files are on disk; what it raises is raised on every rank."""
        super().finish(metadata, results)
        for written in results:
            for one in written:
                if not (self._part / one.storage_data.relative_path).exists():
                    raise OSError(
                        f"{one.storage_data.relative_path}, written by another rank, is not seen by rank 0: "
                        "the folder must be one that all ranks share"
                    )
        write_index(self._part, metadata)
        self._manifest.complete(self._part)
        _sync(self._part)
        self._part.rename(self._whole)
        _sync(self._whole.parent)
        remove_all_but(self._keep, self._whole.parent)


def export(folder: Path, out: Path, *, max_file: str | int = models.MAX_FILE) -> Path:
    """Write the newest checkpoint in ``folder`` as a Hugging Face directory ``out``; returns the checkpoint.

    Runs in one process, which never holds the whole model: the weights are read and written one file at a
    time. The optimizer's state is only checked.

    Args:
        folder: The folder of the checkpoints.
        out: The directory, new or empty.
        max_file: The most bytes of weights in a file, such as "5GB". A larger tensor has a file of its own.
            Memory holds a file, and the largest part of a tensor that a rank wrote.

    Raises:
        LabError: ``max_file`` is no size.
        CheckpointError: no checkpoint, one that is damaged, an ``out`` that has something in it or that
            cannot be written.
    """
    size = parse_file_size(max_file)
    out = out.absolute()
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise CheckpointError(f"{out} is there already: give a folder that is new or empty")
    if in_checkpoint(out, folder):
        raise CheckpointError(f"{out} has the place of a checkpoint: give a folder outside of {folder}")
    checkpoint, manifest = newest(folder)
    reader = CheckpointReader(checkpoint)
    model = _skeleton(manifest, checkpoint)
    weights = models.weights_of(model)
    reader.check_sizes(weights)
    model.to(dtype=reader.dtype())  # type: ignore[call-arg]
    model.config.use_cache = True

    def read(names: list[str]) -> dict[str, Tensor]:
        values = {name: torch.empty_like(weights[name], dtype=model.dtype, device="cpu") for name in names}
        reader.load_into("model", {"model": values}, None)
        return values

    # A name of its own: a folder that an export which was killed has left is not written into.
    part = out.with_name(f"{out.name}-{uuid4()}{PART}")
    try:
        models.save(model, part, read, max_file=size)
        for path in (*part.iterdir(), part):
            _sync(path)
        if out.exists():
            out.rmdir()
        part.rename(out)
        _sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out} could not be written: {error}; {checkpoint} stays") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return checkpoint


def _skeleton(manifest: Manifest, checkpoint: Path) -> PreTrainedModel:
    """Return the model of the config in a manifest, on the meta device.

    Raises:
        CheckpointError: The config would be refused in a model's directory, too.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(manifest.config), encoding="utf-8")
        try:
            return models.build_on_meta(folder).model
        except ModelError as error:
            said = str(error).replace(folder, "its config")
            raise CheckpointError(f"{checkpoint} is damaged: {said}") from error


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds, the live tensors themselves, each under its parameter's name.

    Torch's own ``get_state_dict`` would do the same for optimizers whose state is not made yet; this lab's
    always is, so what is saved and what is loaded into are the same tensors.
    """
    weights = models.weights_of(model)
    moments = {name: optimizer.state[weight] for name, weight in weights.items() if weight in optimizer.state}
    return {"model": weights, "optimizer": moments}


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sync(path: Path) -> None:
    """Have a file's bytes on disk, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
