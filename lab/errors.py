"""What the lab refuses, by name. Each message says what was wrong and what would work."""

from typing import Any


class LabError(ValueError):
    """Input the lab cannot work with; the command line prints its message as one line and exits with 2."""


class RecipeError(LabError):
    """A knob, or a combination of knobs, that a technique or the model forbids."""


class ModelError(LabError):
    """A model that is unknown, incomplete, or of a family the techniques do not cover."""


class DataError(LabError):
    """A text that is missing, empty, or not text."""


class NotebookError(LabError):
    """A notebook that is unknown, a parameter it does not take, or a cell of it that failed."""


class CheckpointError(LabError):
    """A checkpoint that is missing, cut short, of another run, or that could not be written."""


class DivergedError(LabError):
    """Training whose loss, or what it would save in a checkpoint, is not finite.

    Attributes:
        step: the step in which training ended, counted from 1.
        loss: the loss of that step.
        kept: what ``lab.run`` measured until then; None from other verbs.
    """

    def __init__(self, said: str, step: int, loss: float) -> None:
        # As arguments of the exception, which is how it travels from a rank to the caller.
        super().__init__(said, step, loss)
        self.said, self.step, self.loss = said, step, loss
        self.kept: Any = None

    def __str__(self) -> str:
        """One line."""
        return self.said
