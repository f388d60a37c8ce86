"""The sizes of a model, without torch: all that the closed form and a recipe's rules need of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. Formulas use the same letters.

    Attributes:
        L: The number of layers.
        E: The hidden size.
        H: The number of query heads.
        K: The number of key/value heads.
        D: The head_dim.
        I: The inner width of the MLP.
        V: The size of the vocabulary.
        matrices: The number of matrices in an MLP, each of E*I weights: 3 if it is gated, else 2.
        head_norms: Whether each head of q and k has a norm.
        tied: Whether the head shares its weight with the embedding.
    """

    L: int
    E: int
    H: int
    K: int
    D: int
    I: int  # noqa: E741
    V: int
    matrices: int
    head_norms: bool
    tied: bool
