"""What a profile is: where ranks run, and what each finds in its environment."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """A place for ranks. `environment(rank, ranks)` gives the variables one rank's process starts with."""

    name: str
    environment: Callable[[int, int], dict[str, str]]
