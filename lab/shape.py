"""The sizes of a model, without torch: all that saved plans and a recipe's rules need of it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

WIDTHS = {None: 4, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""The bytes of an element, by dtype; None stands for fp32."""

HeadNorms: TypeAlias = Literal["none", "each", "own", "all"]


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
            has the output. One named ``gate_up_proj`` has 2*E*I weights.
        norms: The number of norms over the hidden size in a layer.
        norm_vectors: The parameters of such a norm, in vectors of E: a scale and a bias, a scale, or none.
        head_norms: Whether q and k have a norm: "each" is a norm of each head, "own" is one of each head with
            scales of its own, and "all" is one norm of all heads together.
        fused_attention: Whether one projection ``qkv_proj`` computes q, k and v.
        rotates: Whether each layer has rotary positions.
        attention_biases: The number of biases of a layer's attention.
        mlp_biases: The number of biases of a layer's MLP.
        clipped: Whether q, k and v are clipped after their projections.
        tied: Whether the head shares its weight with the embedding.
        windows: The number of keys that a query of each layer sees; None if it sees all before it.
        sparse: Whether the MLP of each layer is a mixture of experts. The MLPs of the others are dense.
        experts: The number of experts of such a layer; 0 if no layer has experts.
        experts_per_token: The number of experts that compute each token.
        expert_width: The inner width of an expert.
        clamped_experts: Whether gate and up are clamped before they are multiplied, and the experts and their
            router have biases.
        sinks: The number of sinks of a layer's attention: one of each query head, or none.
    """

    L: int
    E: int
    H: int
    K: int
    D: int
    I: int  # noqa: E741
    V: int
    mlp_projections: tuple[str, ...]
    norms: int
    norm_vectors: int
    head_norms: HeadNorms
    fused_attention: bool
    rotates: tuple[bool, ...]
    attention_biases: int
    mlp_biases: int
    clipped: bool
    tied: bool
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    experts: int
    experts_per_token: int
    expert_width: int
    clamped_experts: bool
    sinks: int

    @property
    def has_windows(self) -> bool:
        """Whether a layer has a window."""
        return any(window is not None for window in self.windows)

    @property
    def fused_mlp(self) -> bool:
        """Whether one projection computes gate and up of an MLP."""
        return "gate_up_proj" in self.mlp_projections

    @property
    def matrices(self) -> int:
        """The number of matrices [E, I] of an MLP: 3 if it is gated, else 2."""
        return len(self.mlp_projections) + self.fused_mlp

    @property
    def attention_projections(self) -> dict[str, tuple[int, int]]:
        """The inputs and the outputs of each linear map of a layer's attention; the output's is the last."""
        E, heads, keys = self.E, self.H * self.D, self.K * self.D
        if self.fused_attention:
            return {"qkv_proj": (E, heads + 2 * keys), "o_proj": (heads, E)}
        return {"q_proj": (E, heads), "k_proj": (E, keys), "v_proj": (E, keys), "o_proj": (heads, E)}

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The inputs and the outputs of each linear map that all layers have, by its name.

        Experts are no linear maps: the matrices of all of them are one parameter.
        """
        return self.attention_projections | ({} if self.experts else self._dense_projections)

    @property
    def _dense_projections(self) -> dict[str, tuple[int, int]]:
        *first, last = self.mlp_projections
        inner = self.I * (1 + self.fused_mlp)
        return dict.fromkeys(first, (self.E, inner)) | {last: (self.I, self.E)}

    @property
    def expert_weights(self) -> int:
        """The weights of an expert: three matrices, and perhaps three biases."""
        biases = 2 * self.expert_width + self.E
        return 3 * self.E * self.expert_width + biases * self.clamped_experts

    def layer_weights(self, *, sparse: bool) -> int:
        """Return the weights of a layer; ``sparse`` is whether its MLP is a mixture of experts."""

        def linear(projections: dict[str, tuple[int, int]]) -> int:
            return sum(inputs * outputs for inputs, outputs in projections.values())

        if sparse:
            # Each expert has a row and perhaps a bias of the router.
            mlp = self.experts * (self.expert_weights + self.E + self.clamped_experts)
        else:
            mlp = linear(self._dense_projections) + self.mlp_biases
        heads = (self.H + self.K) * self.D
        of_heads = {"none": 0, "each": 2 * self.D, "own": heads, "all": heads}[self.head_norms]
        norms = self.norms * self.norm_vectors * self.E + of_heads
        return linear(self.attention_projections) + self.attention_biases + self.sinks + mlp + norms

    @property
    def weights(self) -> int:
        """The number of weights of the model."""
        layers = sum(self.layer_weights(sparse=sparse) for sparse in self.sparse)
        return layers + (2 - self.tied) * self.V * self.E + self.norm_vectors * self.E

    @property
    def weights_text(self) -> str:
        """The number of all weights, and of those that compute a token, in words."""
        return (
            f"{self.weights / 1e9:.1f} billion, of which a token is computed with "
            f"{self.active_weights / 1e9:.1f} billion"
        )

    @property
    def active_weights(self) -> int:
        """The number of weights that compute a token: all but those of the experts that it is not sent to."""
        idle = (self.experts - self.experts_per_token) * self.expert_weights
        return self.weights - sum(self.sparse) * idle
