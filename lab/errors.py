"""The lab's errors. Each message is one line that says what was wrong and what would work."""

from typing import Any


class LabError(ValueError):
    """Input that the lab cannot work with.

    The command line prints the message and exits with code 2, or with the code that a subclass names.
    """


class DoesNotFitError(LabError):
    """No recipe, or no context, fits the memory. The command line exits with code 3."""


class RecipeError(LabError):
    """A value of a knob, or a combination of values, that a technique or the model does not allow."""


class ModelError(LabError):
    """A model that is unknown, incomplete, or of a family that the techniques do not support."""


class DataError(LabError):
    """A text that is missing, empty, or not text."""


class NotebookError(LabError):
    """A notebook that is unknown, a parameter that it does not have, or a cell that failed."""


class CheckpointError(LabError):
    """A checkpoint that is missing, incomplete, of another run, or that could not be written."""


class HostFileError(LabError):
    """A folder in which the host memory of streamed layers cannot lie."""


class ResultError(LabError):
    """A question to a timeline, a plan or a run that it cannot answer."""


class DivergedError(LabError):
    """Training that ended because the loss, a parameter or the optimizer's state is not finite.

    Attributes:
        message: The message.
        step: The step in which training ended, counted from 1.
        loss: The loss of that step.
        partial: The measurements of ``lab.run`` until then; None from other verbs.
    """

    def __init__(self, message: str, step: int, loss: float) -> None:
        # All values are arguments of the exception, so that pickling keeps them on the way to the caller.
        super().__init__(message, step, loss)
        self.message, self.step, self.loss = message, step, loss
        self.partial: Any = None

    def __str__(self) -> str:
        """Return the message alone."""
        return self.message
