"""Models by name, from a Hugging Face directory, or from a callable."""

from typing import TYPE_CHECKING

from lab import load_on_first_use

if TYPE_CHECKING:
    from lab.models.load import ModelLike, Outline, build, config_of, outline, save, shape_of
    from lab.models.lora import Lora
    from lab.models.small_copies import small_copy

__all__ = [
    "Lora",
    "ModelLike",
    "Outline",
    "build",
    "config_of",
    "outline",
    "save",
    "shape_of",
    "small_copy",
]

__getattr__ = load_on_first_use(
    __name__,
    {
        "Lora": "lab.models.lora",
        "ModelLike": "lab.models.load",
        "Outline": "lab.models.load",
        "build": "lab.models.load",
        "config_of": "lab.models.load",
        "outline": "lab.models.load",
        "save": "lab.models.load",
        "shape_of": "lab.models.load",
        "small_copy": "lab.models.small_copies",
    },
)
