"""Models by name, from a Hugging Face directory, or from a callable."""

from typing import TYPE_CHECKING

from lab import load_on_first_use

if TYPE_CHECKING:
    from lab.models.load import ModelLike, Outline, build, config_of, outline, save, shape_of
    from lab.models.lora import Lora
    from lab.models.small_copies import small_copy
    from lab.models.weight_files import MAX_FILE, weights_of

__all__ = [
    "MAX_FILE",
    "Lora",
    "ModelLike",
    "Outline",
    "build",
    "config_of",
    "outline",
    "save",
    "shape_of",
    "small_copy",
    "weights_of",
]

__getattr__ = load_on_first_use(
    __name__,
    {
        "MAX_FILE": "lab.models.weight_files",
        "Lora": "lab.models.lora",
        "ModelLike": "lab.models.load",
        "Outline": "lab.models.load",
        "build": "lab.models.load",
        "config_of": "lab.models.load",
        "outline": "lab.models.load",
        "save": "lab.models.load",
        "shape_of": "lab.models.load",
        "small_copy": "lab.models.small_copies",
        "weights_of": "lab.models.weight_files",
    },
)
