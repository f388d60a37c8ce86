"""Models by name, from a Hugging Face directory, or from a callable. Each name is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.models.load import ModelLike, Outline, build, config_of, outline, save
    from lab.models.small_copies import small_copy

__all__ = ["ModelLike", "Outline", "build", "config_of", "outline", "save", "small_copy"]


# A plan from the cache needs the presets, and not torch, which ``lab.models.load`` imports.
def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "small_copies" if name == "small_copy" else "load"
        return getattr(import_module(f"lab.models.{module}"), name)
    raise AttributeError(f"module 'lab.models' has no attribute {name!r}")
