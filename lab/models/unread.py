"""Tensors of weight files for which a model has no place, and which may be left out; all others are refused.

A wrapper is a class of transformers that holds a text model and other parts, such as one that sees images.
The lab computes the text model alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple


class Unread(NamedTuple):
    """Tensors that are not read.

    Attributes:
        name: Their whole name, in which N is the number of a layer; or if it ends in a dot, what their names
            begin with.
        wrapper: The ``model_type`` of the wrapper to which they belong; None for those of any model.
        reason: What they are.
    """

    name: str
    wrapper: str | None
    reason: str


WRAPPERS = {"gemma3": "Gemma3ForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration"}
"""The wrappers that are read as their text model, by ``model_type``, and their classes."""

TEXT_PREFIXES = ("language_model.", "model.language_model.")
"""What the names of a text model begin with in a wrapper's files: those of older and of newer models."""

UNREAD = (
    *(
        Unread(f"{before}{part}.", wrapper, reason)
        for wrapper in WRAPPERS
        for before in ("", "model.")
        for part, reason in (
            ("vision_tower", "the vision tower"),
            ("multi_modal_projector", "the projector of images"),
        )
    ),
    *(
        Unread(f"{before}layers.N.self_attn.rotary_emb.inv_freq", None, "computed from the config")
        for before in ("model.", "")
    ),
    *(
        Unread(f"model.layers.N.self_attn.{name}", None, "a scale of the quantized cache of generation")
        for name in ("k_scale", "v_scale", "kv_scale", "k_proj.k_scale", "v_proj.v_scale")
    ),
)
"""The tensors that are left out."""


def wrapper_of(model: object) -> str | None:
    """Return the ``model_type`` of the wrapper in a directory, or of its config.json; None if it has none."""
    if not isinstance(model, str | Path):
        return None
    path = Path(model) if Path(model).name == "config.json" else Path(model) / "config.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8-sig"))["model_type"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return kind if isinstance(kind, str) and kind in WRAPPERS else None


def left_out(wrapper: str) -> str:
    """Return which parts of a wrapper are not computed, in a few words."""
    parts = dict.fromkeys(one.reason for one in UNREAD if one.wrapper == wrapper)
    return f"the text model of {WRAPPERS[wrapper]}, without {' and '.join(parts)}"


def unread_reason(name: str, wrapper: str | None) -> str | None:
    """Return what a tensor is that is left out; None if it must have a place in the model.

    Args:
        name: Its name in the files.
        wrapper: The ``model_type`` of the wrapper to which the files belong; None if they belong to none.
    """
    for one in UNREAD:
        if one.wrapper in (None, wrapper):
            pattern = re.escape(one.name).replace("N", r"\d+") + ".*" * one.name.endswith(".")
            if re.fullmatch(pattern, name):
                return one.reason
    return None
