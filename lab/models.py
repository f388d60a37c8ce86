"""A name, a Hugging Face directory, a config or a callable -> a transformers decoder; no downloads."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from lab.decoder import SIZES, check_config, check_family, decoder_of
from lab.errors import LabError, ModelError
from lab.presets import PRESETS
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


def build(model: ModelLike, *, seed: int = 0, weights: bool = True) -> PreTrainedModel:
    """Make the model: a directory's own weights where it has them, else random ones, the same for a seed.

    Without ``weights`` a directory's are not read: its config makes the model, in the dtype that they would
    have, under fake tensors too. Parameters are fp32 unless the config beside the weights says otherwise. The
    caller's config and random state are kept.

    Raises:
        ModelError: as ``config_of``; or weights that do not fit or cannot be read.
    """
    if callable(model) and not isinstance(model, PretrainedConfig):
        return _called(model)
    config = copy.deepcopy(config_of(model))
    folder = None if isinstance(model, PretrainedConfig) else _folder(model)
    own = folder is not None and any(folder.glob("*.safetensors*"))
    if folder is not None and not own and any(folder.glob("*.bin*")):
        raise ModelError(f"{folder} holds weights, but none as safetensors, the one format that is read")
    dtype = (config.dtype if own else None) or torch.float32
    if own and weights:
        with _refused(f"the weights in {folder} cannot be loaded"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                local_files_only=True,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
        built, report = loaded
        if report["missing_keys"]:
            # transformers would fill them with random numbers.
            raise ModelError(f"the weights in {folder} lack {', '.join(sorted(report['missing_keys'])[:3])}")
    else:
        with (
            torch.random.fork_rng(devices=[]),
            _refused(f"no {config.model_type} can be made of this config"),
        ):
            torch.manual_seed(seed)
            built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    built.config.use_cache = False
    assert isinstance(built, PreTrainedModel)
    return built


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
