"""Whether a checkpoint is quantized: its config, a file beside it, or the headers of its weights say so."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError

from lab.decoder import quantization_in
from lab.errors import ModelError
from lab.models.headers import dtypes_in, files_of
from lab.models.unread import unread_reason

_NAME = re.compile(
    r"(.*[._])?(scales?|scale_inv|scale_\d|zero_point|absmax|quant_map|SCB|qweight|qzeros|packed|blocks)"
)
"""The names of scales, and of numbers that are packed into integers, in the files of fp8, NVFP4, MXFP4, GPTQ,
AWQ, bitsandbytes and compressed-tensors."""

_DTYPE = re.compile(r"F4\w*|F[68]_\w+|[IU]8")
"""The dtypes of quantized numbers, as safetensors names them: F8_E4M3."""


def quantization_of(config: Mapping[str, Any], folder: Path | None) -> str | None:
    """Return how weights are quantized, in a few words; None if nothing says that they are.

    No values are read. A file whose header cannot be read says nothing.

    Args:
        config: The fields of a config.
        folder: The directory of the checkpoint; None for a config alone.

    Raises:
        ModelError: See ``files_of``.
    """
    for fields in (config, config.get("text_config")):
        said = quantization_in(fields.get("quantization_config")) if isinstance(fields, Mapping) else None
        if said is not None:
            return said
    if folder is None:
        return None
    return _by_note(folder / "hf_quant_config.json") or _by_headers(folder, config.get("model_type"))


def _by_note(path: Path) -> str | None:
    """Return what the note of NVIDIA's ModelOpt says of the weights."""
    if not path.is_file():
        return None
    try:
        method = json.loads(path.read_text(encoding="utf-8-sig"))["quantization"]["quant_algo"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return path.name
    # Where keys and values alone are quantized, in the cache of generation, there is no method.
    return None if method is None else f"{shorten(str(method), 60)} by its {path.name}"


def _by_headers(folder: Path, kind: object) -> str | None:
    wrapper = kind if isinstance(kind, str) else None
    for path, names in files_of(folder).items():
        try:
            dtypes: dict[str, str] = dtypes_in(path)
        except (OSError, SafetensorError, ModelError):
            dtypes = {}
        for name, dtype in {**dict.fromkeys(names, ""), **dtypes}.items():
            quantized = _NAME.fullmatch(name) or _DTYPE.fullmatch(dtype)
            if quantized and unread_reason(name, wrapper) is None:
                return f"{shorten(name, 120)}{dtype and ', '}{dtype} in its files"
    return None
