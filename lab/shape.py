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
        layer_norms: Whether the norms over the hidden size are LayerNorm, with a scale and a bias. Otherwise
            they are RMSNorm, with a scale.
        attention_biases: The number of biases of a layer's attention.
        mlp_biases: The number of biases of a layer's MLP.
        relu_squared: Whether the activation of the MLP is ReLU squared.
        scaled_residual: Whether what a layer's attention and MLP return is multiplied before it is added.
        divided_logits: Whether the head's output is divided by a number.
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
    layer_norms: bool
    attention_biases: int
    mlp_biases: int
    relu_squared: bool
    scaled_residual: bool
    divided_logits: bool
    tied: bool
