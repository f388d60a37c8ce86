"""Checkpoints of a trainer whose model the lab has sharded.

The weights are gathered one by one and written as ``save_pretrained`` writes them. Every rank writes its
shards of the optimizer's state, which can be read on any number of ranks.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lab.errors import CheckpointError
from lab.training.checkpoint_reader import CheckpointReader, write_index

FOLDER = "optimizer_shards"
"""The name of the folder in a checkpoint of Trainer that has the optimizer's state."""


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint of Trainer in a folder.

    Raises:
        CheckpointError: No checkpoint in the folder is complete.
    """
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _is_complete(path)]
    if not found:
        raise CheckpointError(
            f"no complete checkpoint in {folder}: train without resume_from_checkpoint, or give it the "
            "path of a checkpoint"
        )
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]))


def _is_complete(checkpoint: Path) -> bool:
    # Trainer writes this file last.
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def whole_state(model: nn.Module, *, adapters: bool) -> dict[str, Tensor]:
    """Return the whole weights by name, in host memory; on ranks other than the first, an empty dict.

    Every rank calls this. A rank holds one whole parameter at a time; the first rank keeps them all.

    Args:
        model: The model.
        adapters: Whether only the parameters that are trained are kept: those of adapters, and of modules
            that are saved with them.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if adapters and name not in trained:
            continue
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            whole[name] = full.detach().cpu().clone()
    return whole


def load_whole_state(model: nn.Module, files: list[Path]) -> None:
    """Copy the tensors of safetensors files into a model, sharded or not.

    Every rank reads the files, and keeps its shards.

    Raises:
        CheckpointError: A file has a tensor that the model lacks, or of another shape.
    """
    target = {_stored_name(name, model): value for name, value in model.state_dict().items()}
    for file in files:
        for name, value in load_file(file).items():
            own = target.get(name)
            if own is None or own.shape != value.shape:
                raise CheckpointError(
                    f"{file} has {name} of shape {list(value.shape)}, and the model has "
                    f"{'none' if own is None else list(own.shape)}: give a checkpoint of this model"
                )
            with torch.no_grad():
                if isinstance(own, DTensor):
                    value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
                own.copy_(value)


def _stored_name(name: str, model: nn.Module) -> str:
    """Return the name of a tensor in a file: PEFT leaves out the name of the adapter."""
    adapter = getattr(model, "active_adapter", None)
    return name.replace(f".{adapter}", "") if isinstance(adapter, str) else name


def save_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the optimizer's state into ``folder``; every rank writes its shards.

    Raises:
        CheckpointError: It could not be written.
    """
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    try:
        metadata = save(_moments(model, optimizer), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise CheckpointError(f"{folder} could not be written: {_cause(error)}") from error
    if dist.get_rank() == 0:
        write_index(folder, metadata)
    dist.barrier()


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the files of ``save_optimizer`` into the state of an optimizer. Reading runs no code in the files.

    Raises:
        CheckpointError: The folder is damaged, or belongs to another model.
    """
    reader = CheckpointReader(folder)
    reader.read_metadata()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(_moments(model, optimizer), storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read into this optimizer: {_cause(error)}") from error


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's own state tensors, by the names of their parameters."""
    return {
        "optimizer": {
            name: optimizer.state[parameter]
            for name, parameter in model.named_parameters()
            if parameter in optimizer.state
        }
    }


def _cause(error: CheckpointException) -> str:
    """Return the first line of the error on the first rank that failed."""
    _, (cause, _) = min(error.failures.items())
    return str(cause).partition("\n")[0] or type(cause).__name__
