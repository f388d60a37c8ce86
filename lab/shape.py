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
        mlp_projections: The names of the projections of an MLP, each of E*I weights, in order. The last one
            has the output.
        head_norms: Whether each head of q and k has a norm.
        layer_norms: Whether the norms over the hidden size are LayerNorm, with a scale and a bias. Otherwise
            they are RMSNorm, with a scale.
        attention_biases: The number of biases of a layer's attention.
        mlp_biases: The number of biases of a layer's MLP.
        relu_squared: Whether the activation of the MLP is ReLU squared.
        scaled_residual: Whether what a layer's attention and MLP return is multiplied before it is added.
        divided_logits: Whether the head's output is divided by a number.
        tied: Whether the head shares its weight with the embedding.
        windows: The number of keys that a query of each layer sees; None if it sees all before it.
        sparse: Whether the MLP of each layer is a mixture of experts. The MLPs of the others are dense.
        experts: The number of experts of such a layer; 0 if no layer has experts.
        experts_per_token: The number of experts that compute each token.
        expert_width: The inner width of an expert.
    """

    L: int
    E: int
    H: int
    K: int
    D: int
    I: int  # noqa: E741
    V: int
    mlp_projections: tuple[str, ...]
    head_norms: bool
    layer_norms: bool
    attention_biases: int
    mlp_biases: int
    relu_squared: bool
    scaled_residual: bool
    divided_logits: bool
    tied: bool
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    experts: int
    experts_per_token: int
    expert_width: int

    @property
    def has_windows(self) -> bool:
        """Whether a layer has a window."""
        return any(window is not None for window in self.windows)

    @property
    def matrices(self) -> int:
        """The number of projections of an MLP: 3 if it is gated, else 2."""
        return len(self.mlp_projections)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The inputs and the outputs of each linear map that all layers have, by its name.

        Experts are no linear maps: the matrices of all of them are one parameter.
        """
        E, heads, keys = self.E, self.H * self.D, self.K * self.D
        attention = {"q_proj": (E, heads), "k_proj": (E, keys), "v_proj": (E, keys), "o_proj": (heads, E)}
        if self.experts:
            return attention
        *first, last = self.mlp_projections
        return attention | dict.fromkeys(first, (E, self.I)) | {last: (self.I, E)}

    def mlp_weights(self, *, sparse: bool) -> int:
        """Return the weights of a layer's MLP; of a mixture of experts, with those of its router."""
        if sparse:
            return self.experts * self.E * (3 * self.expert_width + 1)
        return self.matrices * self.E * self.I + self.mlp_biases

    def layer_weights(self, *, sparse: bool, ranks: int = 1) -> int:
        """Return the weights of a layer that the rank with the most has, of ``ranks``.

        The rows of each parameter are divided over the ranks: of a projection's matrix its outputs, and of
        experts the experts.
        """

        def most(rows: int) -> int:
            return -(-rows // ranks)

        E, D, I = self.E, self.D, self.I  # noqa: E741
        attention = E * (most(self.H * D) + 2 * most(self.K * D)) + self.H * D * most(E)
        if sparse:
            mlp = most(self.experts) * E * (3 * self.expert_width + 1)
        else:
            mlp = (self.matrices - 1) * E * most(I) + I * most(E) + most(self.mlp_biases)
        norms = 2 * most(E) * (1 + self.layer_norms) + 2 * most(D) * self.head_norms
        return attention + most(self.attention_biases) + mlp + norms

    def root_weights(self, *, ranks: int = 1) -> int:
        """Return the weights outside the layers, as ``layer_weights``."""
        tables = (2 - self.tied) * self.E * -(-self.V // ranks)
        return tables + -(-self.E // ranks) * (1 + self.layer_norms)

    @property
    def weights(self) -> int:
        """All weights of the model."""
        return self.root_weights() + sum(self.layer_weights(sparse=sparse) for sparse in self.sparse)

    @property
    def weights_text(self) -> str:
        """The weights of the model and those of a token, in words."""
        return (
            f"{self.weights / 1e9:.1f} billion, of which a token is computed with "
            f"{self.active_weights / 1e9:.1f} billion"
        )

    @property
    def active_weights(self) -> int:
        """The weights that a token is computed with: all but those of the experts that it does not have."""
        idle = (self.experts - self.experts_per_token) * 3 * self.E * self.expert_width
        return self.weights - sum(self.sparse) * idle
