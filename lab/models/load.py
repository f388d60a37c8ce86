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
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lab import decoder
from lab.decoder import (
    FAMILIES,
    QUANTIZATION,
    Family,
    check_config,
    check_family,
    check_largest,
    check_not_quantized,
    decoder_of,
)
from lab.errors import LabError, ModelError
from lab.models.adapters import add_adapters
from lab.models.first_values import fill
from lab.models.headers import check_weights, weights_in
from lab.models.lora import Lora, check_takes_adapters
from lab.models.presets import PRESETS, preset_config
from lab.models.quantized import quantization_of
from lab.models.unread import WRAPPERS, wrapper_of
from lab.models.weight_files import MAX_FILE, ReadWeights, WeightFiles, allocate, weights_of, write_weights
from lab.shape import Shape
from lab.techniques.frequencies import check_rope
from lab.techniques.unsupported import instead_of
from lab.torch_private import detect_fake_mode
from lab.units import abbreviate, check_counts

ModelLike: TypeAlias = str | Path | PretrainedConfig | Callable[[], PreTrainedModel]
"""A preset's name, a directory in the Hugging Face layout or its config.json, a config, or a callable that
returns a model."""

_OPTIONAL = ("num_key_value_heads", "decoder_sparse_step")
"""The counts that a config may leave out. Without the first, there are as many key/value heads as query
heads; without the second, all layers have experts."""

MOST_LABELS = 2**12
"""The most labels of a config, of which transformers makes two tables. A language model has none."""


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
            f"{instead_of(dtype)}"
        )
    if callable(model) and not isinstance(model, PretrainedConfig):
        if dtype is not None:
            raise ModelError(
                f"dtype={dtype!r} for a callable: let it return a model with parameters of that dtype, and "
                "leave dtype out"
            )
        return _call(model).config
    if isinstance(model, PretrainedConfig):
        config = model if dtype is None else copy.deepcopy(model)
    else:
        folder = _folder(model)
        config = preset_config(str(model)) if folder is None else _read(folder, dtype)
    if dtype is not None:
        config.dtype = getattr(torch, dtype)
        for name in QUANTIZATION & vars(config).keys():
            delattr(config, name)
    return _checked(config)


def is_quantized(model: ModelLike) -> bool:
    """Return whether a config, or what is in a directory, says that weights are quantized."""
    if isinstance(model, PretrainedConfig):
        return any(getattr(model, name, None) for name in QUANTIZATION)
    folder = _folder(model)
    return folder is not None and quantization_of(_document(folder), folder) is not None


def dtype_source(model: ModelLike, dtype: str | None = None) -> str:
    """Return where the dtype of the parameters comes from, as text: "its config says so"."""
    if dtype is not None:
        return "as was asked for"
    if callable(model) and not isinstance(model, PretrainedConfig):
        return "the callable made them so"
    if isinstance(model, str) and model in PRESETS:
        return "presets are fp32"
    return "its config names none" if config_of(model).dtype is None else "its config says so"


def weights_note(model: ModelLike, dtype: str | None = None) -> str:
    """Return what a result says of the weights of a directory: there are none, or a cast rounds them.

    Else the text is empty. Headers alone are read.

    Raises:
        ModelError: See ``check_weights`` and ``WeightFiles``.
    """
    if not isinstance(model, str | Path) or (folder := _folder(model)) is None:
        return ""
    files, own = _weight_files(folder), config_of(model, dtype).dtype or torch.float32
    if files is None:
        return "random weights: the folder has none"
    assert isinstance(own, torch.dtype)
    rounded = files.rounded_to(own)
    return f"weights of {' and '.join(rounded)} in the files, rounded to {own}" if rounded else ""


def _weight_files(folder: Path) -> WeightFiles | None:
    check_weights(folder)
    if weights_in(folder) == "none":
        return None
    with _as_model_error(f"the weights in {folder} cannot be loaded"):
        return WeightFiles(folder, wrapper_of(folder))


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
            fill(self.model, self.seed, device=device)
            return
        with _as_model_error(f"the weights in {self.files.folder} cannot be loaded"):
            self.files.load(self.model)
        if self.lora is not None:
            fill(self.model, self.seed, adapters_alone=True, device=device)


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
        ModelError: See ``config_of``, ``weights_note`` and ``add_adapters``; or a file cannot be read.
    """
    config = copy.deepcopy(config_of(model, dtype))
    # ``config_of`` takes an empty one alone, and transformers searches it where it is null, too.
    vars(config).pop("auto_map", None)
    folder = None if isinstance(model, PretrainedConfig) else _folder(model)
    with _as_model_error(f"no {config.model_type} model can be made from this config"):
        attention = FAMILIES[config.model_type].attention
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
    files = _weight_files(folder) if folder is not None and weights else None
    if folder is not None and files is not None:
        if (folder / "generation_config.json").is_file():
            with _as_model_error(f"{folder}/generation_config.json cannot be read; mend it or take it out"):
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


def _read(folder: Path, dtype: str | None) -> PretrainedConfig:
    """Return the config in ``folder``, of a wrapper that of its text model; a size left out is refused.

    transformers would take the default of its config class, which is the size of another model. A wrapper is
    published with these sizes left out, so there the default is the size. With a dtype, and without weights,
    quantization is left out.
    """
    path, document = folder / "config.json", _document(folder)
    kind = document.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(
            f"{path} has model_type={abbreviate(repr(kind))}: give the name of its family, such as llama"
        )
    fields = document if kind not in WRAPPERS else _text_fields(path, document)
    # A reason that nothing mends comes first.
    family = _family(path, document, fields["model_type"])
    how = quantization_of(document, folder)
    if how is not None and weights_in(folder) != "none":
        check_not_quantized(how)
    if how is not None and dtype is None:
        raise ModelError(
            f"{path} is that of a checkpoint with quantized weights ({how}): give dtype='bfloat16', or "
            "--dtype bfloat16, to plan it as if dequantized"
        )
    for one in (document, fields):
        _check_no_code(path, one)
    if fields is document and fields.get("text_config") is not None:
        raise ModelError(f"{path} has text_config, which a {kind} model does not read: take it out")
    # As transformers' AutoConfig reads it.
    alternates = fields is document and kind == "mistral" and "layer_types" in fields
    config_class: Any = CONFIG_MAPPING["ministral" if alternates else fields["model_type"]]
    sizes = {}
    for name in family.counts:
        own = config_class.attribute_map.get(name, name)
        value = fields.get(own, fields.get(name))
        if value is not None:
            check_counts({f"{path}: {name}": value}, ModelError)
            sizes[name] = value
        elif fields is not document:
            continue
        elif (hasattr(config_class, own) or hasattr(config_class, name)) and name not in _OPTIONAL:
            written = name if hasattr(config_class, name) else own
            raise ModelError(f"{path} has no {written}: add the model's own")
    # transformers makes lists of these lengths.
    check_largest(sizes)
    labels = fields.get("num_labels")
    if isinstance(labels, int | float) and labels > MOST_LABELS:
        raise ModelError(f"{path} has num_labels={labels}, which no language model has: take it out")
    if dtype is not None:
        fields = {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}
    written = fields.get("dtype", fields.get("torch_dtype"))
    if isinstance(written, str) and not isinstance(
        getattr(torch, written.removeprefix("torch."), None), torch.dtype
    ):
        raise ModelError(
            f"{path} has dtype={abbreviate(repr(written))}: write one of {', '.join(DTYPES)} there, or give "
            "dtype='bfloat16', or --dtype bfloat16"
        )
    with _as_model_error(f"{path} is not a config that transformers can read"):
        whole = fields is document and how is None
        left_out = () if whole else ("model_type", "quantization_config")
        config = config_class(**{name: value for name, value in fields.items() if name not in left_out})
    assert isinstance(config, PretrainedConfig)
    return config


def _document(folder: Path) -> dict[str, Any]:
    """Return the fields in the config.json of a folder; none if it holds no table.

    Raises:
        ModelError: It cannot be read.
    """
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {_sentence(error)}") from error
    if not isinstance(document, dict):
        return {}
    # The name of the field in older checkpoints of compressed-tensors.
    older = document.pop("compression_config", None)
    return document if older is None else {**document, "quantization_config": older}


def _number(table: dict[str, Any]) -> Any:
    """Return the number that transformers writes as a table, because JSON has no infinity."""
    value = table.get("__float__")
    return float(value) if isinstance(value, str) and len(table) == 1 else table


def _text_fields(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model of a wrapper, with those that the wrapper has for all of its parts.

    Raises:
        ModelError: It has no text model.
    """
    kind, text = document["model_type"], document.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"{path} has no text_config, in which {WRAPPERS[kind]} has its text model: add it")
    config_class: Any = CONFIG_MAPPING[kind]
    usual = config_class.sub_configs_defaults["text_config"].model_type
    whole = {
        name: document[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in document
    }
    return {"model_type": usual, **text, **whole}


def _family(path: Path, document: dict[str, Any], kind: object) -> Family:
    """Return the family of a config.

    Raises:
        ModelError: It is not supported.
    """
    text = document.get("text_config")
    of_text = text.get("model_type") if isinstance(text, dict) else None
    if kind not in FAMILIES and isinstance(of_text, str) and of_text in FAMILIES:
        raise ModelError(
            f"{path} is the config of {abbreviate(repr(kind))}, whose files the lab does not read, and of "
            f"which {of_text} is the text model: to plan that, write its config by transformers.AutoConfig."
            f"for_model(**json.loads(pathlib.Path({str(path)!r}).read_text())['text_config'])"
            ".save_pretrained(DIR), and give DIR"
        )
    return check_family(kind if isinstance(kind, str) else repr(kind))


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
    own = fields.get("auto_map")
    if not own:
        return
    classes = abbreviate(", ".join(own) if isinstance(own, dict) else repr(own))
    raise ModelError(
        f"{path} has auto_map ({classes}), which names code in the model's own files: the lab never executes "
        f"it; take auto_map out, if transformers' own class of {fields['model_type']} computes the same"
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
