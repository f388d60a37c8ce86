"""Checkpoints of a trainer whose model the lab has sharded.

The weights are gathered one by one and written as ``save_pretrained`` writes them. Every rank writes its
shards of the optimizer's state, which can be read on any number of ranks.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lab.errors import CheckpointError
from lab.models.expert_files import Place, parts_in_files
from lab.models.weight_files import copy_part
from lab.training.checkpoint_reader import CheckpointReader, first_cause, write_index

FOLDER = "optimizer_shards"
"""The name of the folder in a checkpoint of Trainer that has the optimizer's state."""

GROUPS = "param_groups.pt"
"""The name of the file in that folder that has the optimizer's settings, such as betas and weight decay."""


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
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return the whole weights by name, in host memory; an empty dict on a rank that does not keep them.

    Every rank calls this, and holds one whole parameter at a time. Of a model of PEFT, the weights are those
    that PEFT saves, whether they are trained or frozen.

    Args:
        model: The model.
        keep: Whether this rank writes the weights.
    """
    state = model.state_dict()
    whole: dict[str, Tensor] = {}
    for name in _names_to_save(model, state):
        tensor = state[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = full.detach().cpu().clone()
    return whole


def _names_to_save(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    if not isinstance(model, PeftModel):
        return list(state)
    names: list[list[str]] = [[]]
    if dist.get_rank() == 0:
        saved = {
            id(tensor)
            for adapter in model.peft_config
            for tensor in get_peft_model_state_dict(model, state, adapter_name=adapter).values()
        }
        names = [[name for name, tensor in state.items() if id(tensor) in saved]]
    # PEFT may ask the Hub whether the vocabulary was changed, and ranks could get different answers. So one
    # rank decides for all.
    dist.broadcast_object_list(names)
    return names[0]


def save_by_all_ranks(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` gather the shards; every rank calls it, and the first one writes."""
    save: Callable[..., Any] = model.save_pretrained  # type: ignore[assignment]

    def save_pretrained(
        save_directory: str | PathLike[str],
        *,
        state_dict: dict[str, Tensor] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> Any:
        if state_dict is None:
            is_main_process = dist.get_rank() == 0
            state_dict = whole_state(model, keep=is_main_process)
        if not is_main_process:
            return None
        return save(save_directory, state_dict=state_dict, is_main_process=is_main_process, **kwargs)

    model.save_pretrained = save_pretrained  # type: ignore[assignment]


def load_whole_state(model: nn.Module, checkpoint: Path) -> None:
    """Copy the weights of a checkpoint into a model, sharded or not.

    Every rank reads its shards from the safetensors files.

    Raises:
        CheckpointError: There is no file; a file has a tensor that the model lacks, or of another shape; a
            parameter that is trained is in no file.
    """
    loaded: set[nn.Parameter | Tensor] = set()
    for folder, target in _stored_tensors(model, checkpoint).items():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} has no *.safetensors: give a checkpoint of this trainer")
        family: str = model.config.model_type  # type: ignore[assignment, union-attr]
        # In the files of some families, each expert has a tensor of its own. A parameter is loaded when all
        # of its parts are.
        places = {
            name_in_file: place
            for name, own in target.items()
            for name_in_file, place in parts_in_files(family, name, own.shape).items()
        }
        missing = Counter(place.parameter for place in places.values())
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    place, part = places.get(name, Place(name)), opened.get_slice(name)
                    own = target.get(place.parameter)
                    if own is None or place.shape_in(own.shape) != part.get_shape():
                        raise CheckpointError(
                            f"{file} has {name} of shape {part.get_shape()}, and the model has "
                            f"{'none' if own is None else place.shape_in(own.shape)}: give a checkpoint of "
                            "this model"
                        )
                    copy_part(own, place, part)
                    missing[place.parameter] -= 1
                    if name == place.parameter or missing[place.parameter] == 0:
                        loaded.add(own)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in loaded:
            raise CheckpointError(
                f"{checkpoint} has no {name}: a file is missing or of another model; give a whole checkpoint "
                "of this model"
            )


def _stored_tensors(model: nn.Module, checkpoint: Path) -> dict[Path, dict[str, Tensor]]:
    """Return the live tensors by their names in files, for each folder of a checkpoint that has files."""
    state = model.state_dict(keep_vars=True)
    if not isinstance(model, PeftModel):
        return {checkpoint: state}
    # PEFT writes each adapter but the default one into a folder of its own. A file may have embeddings.
    return {
        checkpoint if adapter == "default" else checkpoint / adapter: get_peft_model_state_dict(
            model, state, adapter_name=adapter, save_embedding_layers=True
        )
        for adapter in model.peft_config
    }


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
        raise CheckpointError(f"{folder} could not be written: {first_cause(error)}") from error
    if dist.get_rank() == 0:
        torch.save(_groups(model, optimizer), folder / GROUPS)
        write_index(folder, metadata)
    dist.barrier()


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the files of ``save_optimizer`` into an optimizer. Reading runs no code in the files.

    The optimizer then has the settings of the checkpoint, as after its ``load_state_dict``.

    Raises:
        CheckpointError: The folder is damaged, or belongs to another model or optimizer.
    """
    _load_groups(folder / GROUPS, model, optimizer)
    CheckpointReader(folder).load_into("optimizer", _moments(model, optimizer), dist.group.WORLD)


def _load_groups(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the settings of each parameter group into an optimizer with the same groups.

    Raises:
        CheckpointError: There is no such file, or it is damaged; the optimizer has other groups.
    """
    try:
        stored = torch.load(file, weights_only=True)
        names = [sorted(group.pop("params")) for group in stored]
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{file} is missing or damaged: resume from another checkpoint of this trainer"
        ) from error
    if names != [sorted(group["params"]) for group in _groups(model, optimizer)]:
        raise CheckpointError(
            f"{file} has other groups of parameters than this optimizer: give the trainer the optimizer that "
            "it was saved with"
        )
    for group, settings in zip(optimizer.param_groups, stored, strict=True):
        group.update(settings)


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, with the names of its parameters as ``params``."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's own state tensors, by the names of their parameters."""
    return {
        "optimizer": {
            name: optimizer.state[parameter]
            for name, parameter in model.named_parameters()
            if parameter in optimizer.state
        }
    }
