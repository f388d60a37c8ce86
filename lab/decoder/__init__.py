"""What a model is: the families that the lab supports, and a frozen view of the parts of a decoder."""

from lab.decoder.config import (
    QUANTIZATION,
    check_config,
    check_largest,
    check_not_quantized,
    config_fields,
    head_dim_of,
    keep_layers,
    quantization_in,
    shape_of,
    windows_of,
)
from lab.decoder.families import FAMILIES, PER_LAYER, SIZES, Family, Rotation, check_family
from lab.decoder.modules import (
    check_hooks,
    check_materialized,
    check_untouched,
    effective_weight,
    facts_of,
    has_cache,
)
from lab.decoder.parts import Decoder, Layer, decoder_of, kinds_of
from lab.decoder.patch import Patch, refuse_copy, refuse_pickle

__all__ = [
    "FAMILIES",
    "PER_LAYER",
    "QUANTIZATION",
    "SIZES",
    "Decoder",
    "Family",
    "Layer",
    "Patch",
    "Rotation",
    "check_config",
    "check_family",
    "check_hooks",
    "check_largest",
    "check_materialized",
    "check_not_quantized",
    "check_untouched",
    "config_fields",
    "decoder_of",
    "effective_weight",
    "facts_of",
    "has_cache",
    "head_dim_of",
    "keep_layers",
    "kinds_of",
    "quantization_in",
    "refuse_copy",
    "refuse_pickle",
    "shape_of",
    "windows_of",
]
