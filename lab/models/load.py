"""Models of transformers, made from a name, a Hugging Face directory, a config or a callable.

Nothing is downloaded.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lab import decoder
from lab.decoder import FAMILIES, SIZES, check_config, check_family, check_not_quantized, decoder_of
from lab.errors import LabError, ModelError
from lab.models.adapters import add_adapters
from lab.models.first_values import fill
from lab.models.lora import Lora, check_takes_adapters
from lab.models.presets import PRESETS
from lab.models.weight_files import MAX_FILE, ReadWeights, WeightFiles, allocate, weights_of, write_weights
from lab.shape import Shape
from lab.techniques.frequencies import check_rope
from lab.torch_private import detect_fake_mode
from lab.units import abbreviate, check_counts

ModelLike: TypeAlias = str | Path | PretrainedConfig | Callable[[], PreTrainedModel]
"""A preset's name, a directory in the Hugging Face layout or its config.json, a config, or a callable that
returns a model."""

SAFETENSORS = "*.safetensors*"
"""The pattern of the names of files of weights, and of their index."""

_OPTIONAL = ("num_key_value_heads", "decoder_sparse_step")
"""The counts that a config may leave out. Without the first, there are as many key/value heads as query
heads; without the second, all layers have experts."""


DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that the parameters of a model can have."""


def config_of(model: ModelLike, dtype: str | None = None) -> PretrainedConfig:
    """Return the config of any model that ``build`` takes. A callable is called.

    The parameters have the dtype of the config, and fp32 if it has none.

    Args:
        model: A name, a directory, a config or a callable.
        dtype: One of ``DTYPES``, in place of the config's own dtype. A config without weights that says that
            they are quantized is then the config of the same model with plain weights.

    Raises:
        ModelError: The name is unknown; the directory has no config.json, or one that cannot be used; the
            family is not supported; a size is not 1 or more; the dtype is not one of ``DTYPES``; there is a
            dtype for a callable; or the callable raises, or returns no transformers model.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(
            f"dtype={abbreviate(repr(dtype))}: it takes {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        )
    if callable(model) and not isinstance(model, PretrainedConfig):
        if dtype is not None:
            raise ModelError(
                f"dtype={dtype!r} for a callable: let it return a model with parameters of that dtype, and leave "
                "dtype out"
            )
        return _call(model).config
    folder = None if isinstance(model, PretrainedConfig) else _folder(model)
    config: PretrainedConfig
    if isinstance(model, PretrainedConfig):
        config = model
    else:
        config = PRESETS[str(model)]() if folder is None else _read(folder, dtype)
    if dtype is not None:
        config = copy.deepcopy(config)
        config.dtype = getattr(torch, dtype)
        if is_quantized(config) and not (folder is not None and _has_weights(folder)):
            del config.quantization_config
    return _checked(config)


def is_quantized(model: ModelLike) -> bool:
    """Return whether the config of a model says that its weights are quantized; a callable's is not asked."""
    if isinstance(model, PretrainedConfig):
        return bool(getattr(model, "quantization_config", None))
    folder = _folder(model)
    return folder is not None and bool(_fields_of(folder / "config.json").get("quantization_config"))


def dtype_source(model: ModelLike, dtype: str | None = None) -> str:
    """Return where the dtype of the parameters comes from, as text: "its config says so"."""
    if dtype is not None:
        return "as was asked for"
    if callable(model) and not isinstance(model, PretrainedConfig):
        return "the callable made them so"
    if isinstance(model, str) and model in PRESETS:
        return "presets are fp32"
    return "its config names none" if config_of(model).dtype is None else "its config says so"


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model on the meta device, with real buffers, and the source of its parameters' values.

    Attributes:
        model: The model. Its parameters have shapes and dtypes, and no memory yet. Techniques can be applied
            to it.
        seed: The seed of the first values. Adapters get them, and all parameters if there are no files.
        files: The weights of the directory; None if it has none, or if they are not read.
        lora: The adapters that were added to the model; None if there are none.
    """

    model: PreTrainedModel
    seed: int
    files: WeightFiles | None
    lora: Lora | None

    def origin(self) -> str:
        """Return a text that is the same on two ranks only if their models get the same values.

        Raises:
            ModelError: The files do not fit the model, or cannot be read.
        """
        seed = f"seed {self.seed}"
        if self.files is None:
            return seed
        with _as_model_error(f"the weights in {self.files.folder} cannot be loaded"):
            files = self.files.digest(self.model)
        return files if self.lora is None else f"{files}, {seed}"

    def materialize(self, device: torch.device) -> None:
        """Allocate the model's parameters on ``device``, or this rank's shards, and write their values.

        The extra memory is one piece of a parameter (``lab.models.first_values.piece_elements``), or one
        shard that is read from the files.

        Raises:
            ModelError: See ``origin``.
        """
        allocate(self.model, device)
        if self.files is None:
            fill(self.model, self.seed)
            return
        with _as_model_error(f"the weights in {self.files.folder} cannot be loaded"):
            self.files.load(self.model)
        if self.lora is not None:
            fill(self.model, self.seed, adapters_alone=True)


def build_on_meta(
    model: str | Path | PretrainedConfig,
    *,
    dtype: str | None = None,
    lora: Lora | None = None,
    seed: int = 0,
    weights: bool = True,
) -> MetaModel:
    """Make a model without memory for its parameters.

    It takes no callable, which would return a whole model. The caller's config and random state do not
    change.

    Args:
        model: A name, a directory or a config.
        dtype: The dtype of the parameters; None for that of the config, see ``config_of``.
        lora: The adapters to add. All other parameters are then frozen.
        seed: The seed of the first values.
        weights: Whether the weights of a directory are used. Without them the parameters get first values.

    Raises:
        ModelError: See ``config_of`` and ``add_adapters``; or the weights are not safetensors.
    """
    config = copy.deepcopy(config_of(model, dtype))
    folder = None if isinstance(model, PretrainedConfig) else _folder(model)
    own = folder is not None and any(folder.glob(SAFETENSORS))
    if folder is not None and not own and _has_weights(folder):
        raise ModelError(f"{folder} has weights, but none as safetensors: save them in that format")
    with _as_model_error(f"no {config.model_type} model can be made from this config"):
        # transformers has no sdpa for attention with sinks.
        attention = "eager" if FAMILIES[config.model_type].sinks else "sdpa"
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(
                config, dtype=config.dtype or torch.float32, attn_implementation=attention
            )
        assert isinstance(skeleton, PreTrainedModel)
        # Two modules of these families have buffers. The rotary embedding computes them in its constructor.
        decoder: Any = skeleton.model
        decoder.rotary_emb = type(decoder.rotary_emb)(decoder.rotary_emb.config)
        embedding = decoder.embed_tokens
        if hasattr(embedding, "embed_scale"):
            scale = torch.tensor(embedding.scalar_embed_scale, dtype=skeleton.dtype)
            embedding.embed_scale = nn.Buffer(scale, persistent=False)
    skeleton.config.use_cache = False
    files = None
    if folder is not None and own and weights:
        with _as_model_error(f"the weights in {folder} cannot be loaded"):
            files = WeightFiles(folder)
            if (folder / "generation_config.json").is_file():
                skeleton.generation_config = GenerationConfig.from_pretrained(folder)
        skeleton.eval()
    if lora is not None:
        add_adapters(skeleton, lora)
    return MetaModel(skeleton, seed, files, lora)


def build(
    model: ModelLike,
    *,
    dtype: str | None = None,
    lora: Lora | None = None,
    seed: int = 0,
    weights: bool = True,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Make a model with the weights of its directory, or else with random weights.

    Under fake tensors, and on the meta device, the parameters have no values. In all other respects the
    model is that of ``build_on_meta``.

    Args:
        model: A name, a directory, a config or a callable.
        dtype: The dtype of the parameters; None for that of the config, or of the callable's model.
        lora: The adapters to add. All other parameters are then frozen.
        seed: The seed of random weights. The same seed gives the same weights.
        weights: Whether the weights of a directory are used.
        device: The device of the parameters; None stands for torch's default device.

    Raises:
        ModelError: See ``config_of``; or the weights do not fit the model, or cannot be read.
    """
    place = device or torch.get_default_device()
    if callable(model) and not isinstance(model, PretrainedConfig):
        check_takes_adapters(model, lora)
        result = _call(model)
        return result if device is None else result.to(device)  # type: ignore[arg-type]
    empty = build_on_meta(model, dtype=dtype, lora=lora, seed=seed, weights=weights)
    if detect_fake_mode() is not None:
        allocate(empty.model, place)
    elif place.type != "meta":
        empty.materialize(place)
    return empty.model


def save(
    model: PreTrainedModel, folder: Path, read: ReadWeights | None = None, *, max_file: int = MAX_FILE
) -> None:
    """Write a model as a Hugging Face directory, as ``save_pretrained`` does, with one file in memory.

    Args:
        model: The model. Its parameters may be on the meta device if ``read`` is given.
        folder: The folder, which is made.
        read: Returns the values of parameters by name, for one file at a time; None stands for the model's.
        max_file: The most bytes of weights in a file.

    Raises:
        OSError, SafetensorError: A file cannot be written.
    """
    weights = weights_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = copy.deepcopy(model.config)
    config.dtype, config.architectures = model.dtype, [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    read = read or partial(_values, weights)
    write_weights(weights, model.config.model_type, folder, read, max_file)


def _values(weights: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: weights[name].detach() for name in names}


def _folder(model: str | Path | Callable[[], object]) -> Path | None:
    """Return the directory of a model; None for a preset or a callable.

    The directory may be given as itself or as its config.json.
    """
    if callable(model) or (isinstance(model, str) and model in PRESETS):
        return None
    if not isinstance(model, str | Path):
        raise ModelError(
            f"a model of type {type(model).__name__}: give a name, a directory, a config, or a callable"
        )
    folder = Path(model)
    # os.path, because a Path raises where a name is too long for a file.
    if folder.name == "config.json" and isfile(folder):
        return folder.parent
    if isfile(folder / "config.json"):
        return folder
    if isdir(folder):
        raise ModelError(f"{folder} holds no config.json: give a directory in the Hugging Face layout")
    close = get_close_matches(str(model), PRESETS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ModelError(
        f"unknown model {abbreviate(repr(str(model)))}{hint}: give one of {', '.join(PRESETS)}, "
        "or a directory that holds a config.json"
    )


def shape_of(model: ModelLike, dtype: str | None = None) -> Shape:
    """Return the sizes of a model that the lab computes right; ``dtype`` is as in ``config_of``.

    Raises:
        ModelError: See ``config_of``.
        RecipeError: The rope type has no exact angles.
    """
    config = config_of(model, dtype)
    check_rope(config)
    return decoder.shape_of(config)


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in (SAFETENSORS, "*.bin*"))


def _fields_of(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {_sentence(error)}") from error
    return document if isinstance(document, dict) else {}


def _read(folder: Path, dtype: str | None) -> PretrainedConfig:
    """Return the config in ``folder``, unchecked but for a size that is left out, which is refused.

    transformers would take the default of its config class, which is the size of another model.
    """
    path = folder / "config.json"
    fields = _fields_of(path)
    kind = fields.get("model_type")
    _check_no_code(path, fields)
    # Before transformers reads them, which fails where it is not a dict.
    if dtype is None or _has_weights(folder):
        check_not_quantized(fields.get("quantization_config"))
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(
            f"{path} has model_type={kind!r}: give one that transformers knows, such as llama or qwen3"
        )
    text = fields.get("text_config")
    if text is not None and kind in FAMILIES:
        raise ModelError(
            f"{path} has text_config, which a {kind} model does not read: take it out, or give the directory "
            "of the text model, with text_config as its config.json"
        )
    of_text = text.get("model_type") if isinstance(text, dict) else None
    if kind not in FAMILIES and isinstance(of_text, str) and of_text in FAMILIES:
        raise ModelError(
            f"{path} is the config of {kind}, of which {of_text} is the text model: the lab trains the text "
            "model alone; give a directory that holds it, with text_config as its config.json"
        )
    counts = (*SIZES, *check_family(kind).counts)
    family: Any = CONFIG_MAPPING[kind]
    for name in counts:
        own = family.attribute_map.get(name, name)
        value = fields.get(own, fields.get(name))
        if value is not None:
            check_counts({f"{path}: {name}": value}, ModelError)
        elif (hasattr(family, own) or hasattr(family, name)) and name not in _OPTIONAL:
            written = name if hasattr(family, name) else own
            raise ModelError(f"{path} has no {written}: add the model's own")
    with _as_model_error(f"{path} is not a config that transformers can read"):
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    assert isinstance(config, PretrainedConfig)
    return config


def _checked(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config with which a new model can be made, and which the lab computes right.

    Raises:
        ModelError: It is not one.
    """
    check_config(config)
    if config.dtype is not None and str(config.dtype).removeprefix("torch.") not in DTYPES:
        raise ModelError(
            f"dtype={config.dtype} in the config: the lab trains parameters of {', '.join(DTYPES)}; give one "
            "of these as dtype"
        )
    if getattr(config, "gradient_checkpointing", False):
        raise ModelError(
            "gradient_checkpointing in the config: a recipe has its own, checkpoint=True; take the field out"
        )
    padding, tokens = config.pad_token_id, config.vocab_size
    # A negative index counts from the end of the embedding.
    if padding is not None and not -tokens <= padding < tokens:
        raise ModelError(
            f"pad_token_id={padding} and vocab_size={tokens}: give a token of the vocabulary, or None"
        )
    return config


def _check_no_code(path: Path, fields: dict[str, Any]) -> None:
    """Refuse a config that names classes in the model's own files. No such file is imported.

    Raises:
        ModelError: The config has ``auto_map``.
    """
    own, kind = fields.get("auto_map"), fields.get("model_type")
    if not own:
        return
    works = "give a model whose class is one of transformers'"
    if isinstance(kind, str) and kind in FAMILIES:
        works = f"take auto_map out, if transformers' own class of {kind} computes the same"
    classes = abbreviate(", ".join(own) if isinstance(own, dict) else repr(own))
    raise ModelError(
        f"{path} has auto_map ({classes}), which names code in the model's own files: the lab never executes "
        f"it; {works}"
    )


def _call(model: Callable[[], object]) -> PreTrainedModel:
    if isinstance(model, nn.Module):
        raise ModelError(f"a model ({type(model).__name__}) was given: give a callable that returns one")
    with _as_model_error("the callable failed"):
        result = model()
    if not isinstance(result, PreTrainedModel):
        raise ModelError(f"the callable returned {type(result).__name__}, not a transformers model")
    decoder_of(result)
    return result


@contextmanager
def _as_model_error(what: str) -> Iterator[None]:
    """Raise errors of other code, which may have many lines, as a ModelError of one line.

    Errors of the lab are raised unchanged.
    """
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {type(error).__name__}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """Return the first sentence of an error's message, on one line."""
    return re.split(r"(?<=[.!?]) ", " ".join(str(error).split()), maxsplit=1)[0].rstrip(".")
