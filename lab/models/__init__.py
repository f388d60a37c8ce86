"""Models by name, from a Hugging Face directory, or from a callable."""

from typing import TYPE_CHECKING

from lab import load_on_first_use

if TYPE_CHECKING:
    from lab.models.family_differences import Difference, differences
    from lab.models.load import (
        DTYPES,
        MetaModel,
        ModelLike,
        build,
        build_on_meta,
        config_of,
        dtype_source,
        is_quantized,
        save,
        shape_of,
        weights_note,
    )
    from lab.models.lora import Lora
    from lab.models.small_copies import small_copy
    from lab.models.weight_files import MAX_FILE, weights_of

__all__ = [
    "DTYPES",
    "MAX_FILE",
    "Difference",
    "Lora",
    "MetaModel",
    "ModelLike",
    "build",
    "build_on_meta",
    "config_of",
    "differences",
    "dtype_source",
    "is_quantized",
    "save",
    "shape_of",
    "small_copy",
    "weights_note",
    "weights_of",
]

__getattr__ = load_on_first_use(
    __name__,
    {
        "DTYPES": "lab.models.load",
        "MAX_FILE": "lab.models.weight_files",
        "Difference": "lab.models.family_differences",
        "Lora": "lab.models.lora",
        "MetaModel": "lab.models.load",
        "ModelLike": "lab.models.load",
        "build": "lab.models.load",
        "build_on_meta": "lab.models.load",
        "config_of": "lab.models.load",
        "differences": "lab.models.family_differences",
        "dtype_source": "lab.models.load",
        "is_quantized": "lab.models.load",
        "save": "lab.models.load",
        "shape_of": "lab.models.load",
        "weights_note": "lab.models.load",
        "small_copy": "lab.models.small_copies",
        "weights_of": "lab.models.weight_files",
    },
)
