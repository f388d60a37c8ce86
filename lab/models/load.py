"""A name, a Hugging Face directory, a config or a callable -> a transformers decoder; no downloads."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lab.decoder import SIZES, check_config, check_family, decoder_of
from lab.errors import LabError, ModelError
from lab.models.first_values import fill
from lab.models.presets import PRESETS
from lab.models.weight_files import WeightFiles, allocate
from lab.torch_private import detect_fake_mode
from lab.units import check_counts

ModelLike: TypeAlias = str | Path | PretrainedConfig | Callable[[], PreTrainedModel]
"""A preset's name, a directory in the Hugging Face layout or its config.json, a config, or a callable that
returns a model."""


def config_of(model: ModelLike) -> PretrainedConfig:
    """The config behind anything that ``build`` takes; a callable is called for it.

    Raises:
        ModelError: an unknown name, a directory without a config.json or with one that cannot be used, a
            family that the techniques do not know, a size that is not 1 or more, or a callable that raises
            or returns no transformers model.
    """
    if isinstance(model, PretrainedConfig):
        check_config(model)
        return model
    folder = _folder(model)
    if folder is not None:
        return _read(folder)
    if callable(model):
        return _called(model).config
    return PRESETS[str(model)]()


@dataclass(frozen=True, eq=False)
class Outline:
    """A model on the meta device, with real buffers, and where its parameters' values come from.

    Attributes:
        model: its parameters have shapes and dtypes, and no memory yet. Techniques can be applied to it.
        seed: of the first values, where there are no files.
        files: the weights, if the directory has any that are to be read.
    """

    model: PreTrainedModel
    seed: int
    files: WeightFiles | None

    def origin(self) -> str:
        """A text that differs where the values would.

        Raises:
            ModelError: files that do not fit the model or cannot be read.
        """
        if self.files is None:
            return f"seed {self.seed}"
        with _refused(f"the weights in {self.files.folder} cannot be loaded"):
            return self.files.digest(self.model)

    def materialize(self, device: torch.device) -> None:
        """Give the model its parameters on ``device``, in place; of sharded ones, this rank's shards.

        Beside these it holds one piece of a parameter (``lab.models.first_values.piece_elements``), or one
        shard read from the files.

        Raises:
            ModelError: as ``origin``.
        """
        allocate(self.model, device)
        if self.files is None:
            fill(self.model, self.seed)
            return
        with _refused(f"the weights in {self.files.folder} cannot be loaded"):
            self.files.load(self.model)


def outline(model: str | Path | PretrainedConfig, *, seed: int = 0, weights: bool = True) -> Outline:
    """Make the model without memory for its parameters; a callable's model arrives whole, and has no outline.

    Without ``weights`` those of a directory are not read, and random ones of the dtype that they would have
    take their place. Parameters are fp32 unless the config beside the weights says otherwise. The caller's
    config and random state are kept.

    Raises:
        ModelError: as ``config_of``; weights that are not safetensors.
    """
    config = copy.deepcopy(config_of(model))
    folder = None if isinstance(model, PretrainedConfig) else _folder(model)
    own = folder is not None and any(folder.glob("*.safetensors*"))
    if folder is not None and not own and any(folder.glob("*.bin*")):
        raise ModelError(f"{folder} holds weights, but none as safetensors, the one format that is read")
    dtype = (config.dtype if own else None) or torch.float32
    with _refused(f"no {config.model_type} can be made of this config"):
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        assert isinstance(built, PreTrainedModel)
        # The one module of these families that has buffers. It computes them when it is made.
        made: Any = built.model
        made.rotary_emb = type(made.rotary_emb)(made.rotary_emb.config)
    built.config.use_cache = False
    files = None
    if folder is not None and own and weights:
        with _refused(f"the weights in {folder} cannot be loaded"):
            files = WeightFiles(folder)
            if (folder / "generation_config.json").is_file():
                built.generation_config = GenerationConfig.from_pretrained(folder)
        built.eval()
    return Outline(built, seed, files)


def build(
    model: ModelLike, *, seed: int = 0, weights: bool = True, device: torch.device | None = None
) -> PreTrainedModel:
    """Make the model: a directory's own weights where it has them, else random ones, the same for a seed.

    Its parameters are made on ``device``, by default torch's default device. Under fake tensors, and on the
    meta device, they have no values. All else is as ``outline`` has it.

    Raises:
        ModelError: as ``config_of``; or weights that do not fit or cannot be read.
    """
    place = device or torch.get_default_device()
    if callable(model) and not isinstance(model, PretrainedConfig):
        called = _called(model)
        return called if device is None else called.to(device)  # type: ignore[arg-type]
    made = outline(model, seed=seed, weights=weights)
    if detect_fake_mode() is not None:
        allocate(made.model, place)
    elif place.type != "meta":
        made.materialize(place)
    return made.model


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a model as a Hugging Face directory.

    Where accelerate and DeepSpeed are installed transformers imports DeepSpeed here, which logs to the stdout
    that it finds. stdout is for what a command answers.
    """
    with redirect_stdout(sys.stderr):
        model.save_pretrained(folder)


def _folder(model: str | Path | Callable[[], object]) -> Path | None:
    """The directory that ``model`` names, itself or by its config.json; None for a preset or a callable."""
    if callable(model) or (isinstance(model, str) and model in PRESETS):
        return None
    if not isinstance(model, str | Path):
        raise ModelError(
            f"a model of type {type(model).__name__}: give a name, a directory, a config, or a callable"
        )
    folder = Path(model)
    if folder.name == "config.json" and folder.is_file():
        return folder.parent
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ModelError(f"{folder} holds no config.json: give a directory in the Hugging Face layout")
    close = get_close_matches(str(model), PRESETS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ModelError(
        f"unknown model {str(model)!r}{hint}: give one of {', '.join(PRESETS)}, "
        "or a directory that holds a config.json"
    )


def _read(folder: Path) -> PretrainedConfig:
    """The config in ``folder``; transformers fills a size left out with a default, another model's."""
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {_sentence(error)}") from error
    kind = document.get("model_type") if isinstance(document, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(
            f"{path} has model_type={kind!r}: give one that transformers knows, such as llama or qwen3"
        )
    check_family(kind)
    family: Any = CONFIG_MAPPING[kind]
    for name in SIZES:
        own = family.attribute_map.get(name, name)
        value = document.get(own, document.get(name))
        if value is not None:
            check_counts({f"{path}: {name}": value}, ModelError)
        # Without key/value heads of its own a model has as many as query heads, by its family's definition.
        elif hasattr(family, own) and name != "num_key_value_heads":
            raise ModelError(f"{path} has no {own}: give it the model's own")
    with _refused(f"{path} is not a config transformers can read"):
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    assert isinstance(config, PretrainedConfig)
    check_config(config)
    return config


def _called(model: Callable[[], object]) -> PreTrainedModel:
    if isinstance(model, nn.Module):
        raise ModelError(f"a {type(model).__name__} itself: give a callable that returns one")
    with _refused("the callable failed"):
        built = model()
    if not isinstance(built, PreTrainedModel):
        raise ModelError(f"the callable returned {type(built).__name__}, not a transformers model")
    decoder_of(built)
    return built


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Errors of code that is not the lab's, of any type and many lines, as one line; the lab's own pass."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {type(error).__name__}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """The first sentence that ``error`` says, on one line."""
    return re.split(r"(?<=[.!?]) ", " ".join(str(error).split()), maxsplit=1)[0].rstrip(".")
