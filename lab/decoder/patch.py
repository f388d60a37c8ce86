"""A forward that a technique puts in the place of a module's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NoReturn

from lab.errors import RecipeError


class Patch:
    """A forward that replaces the forward of one module.

    It refers to the module for which it was made. In a copy of the module it would compute with the weights
    of the original. So a module with a Patch cannot be copied or pickled.

    Attributes:
        checkpointed: Whether it belongs to a decoder layer that keeps its input alone and is recomputed in
            backward.
        sequence: The Ulysses and ring degree of the model's batches; None if this is not the forward of a
            model with a recipe.
    """

    checkpointed = False
    sequence: tuple[int, int] | None = None

    def __init__(self, forward: Callable[..., Any], replaced: Callable[..., Any]) -> None:
        # transformers reads the signature of a forward.
        update_wrapper(self, replaced, updated=())
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the new forward."""
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied."""
        refuse_copy(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled."""
        refuse_pickle(protocol)


def refuse_copy(_: Any) -> NoReturn:
    """Refuse ``copy.deepcopy`` of a model with techniques.

    Raises:
        RecipeError: Always.
    """
    raise RecipeError(
        "a model with techniques applied cannot be copied: the copy would compute with the original's "
        "weights; copy the model first, then apply the recipe to each"
    )


def refuse_pickle(_: Any) -> NoReturn:
    """Refuse to pickle a model with techniques.

    Raises:
        RecipeError: Always.
    """
    raise RecipeError(
        "a model with techniques applied cannot be pickled: save its state_dict (with "
        "torch.distributed.checkpoint if it is sharded), and apply the recipe after loading"
    )
