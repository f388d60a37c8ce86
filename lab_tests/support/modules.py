"""Modules whose objects the garbage collector of a rank leaves alone."""

import gc
from importlib import import_module


def freeze_modules(*names: str) -> None:
    """Import modules, and let the garbage collector ignore all objects that there are; runs on ranks.

    Torch and transformers make 400,000 objects that live as long as the process. A rank collects garbage
    before each call, and to walk them takes it a quarter of a second, as long as many a test's step.
    """
    for name in names:
        import_module(name)
    gc.collect()
    gc.freeze()
