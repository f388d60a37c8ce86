"""The sizes of a model, without torch: all that the closed form and a recipe's rules need of it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

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
        norms_after: Whether there is one after the attention, and one after the MLP.
        head_norms: Whether q and k have a norm: "each" is a norm of each head, "own" is one of each head with
            scales of its own, and "all" is one norm of all heads together.
        fused_attention: Whether one projection ``qkv_proj`` computes q, k and v.
        rotated: The number of cosines of a token: one for each rotated dimension of a head, or one for each
            pair of them. It is summed over the kinds of layers that have frequencies of their own.
        joined_heads: Whether the rotary embedding concatenates parts of each head of q and k, which makes a
            copy of it: the rotated dimensions and the others, or the two halves.
        layer_norms: Whether the norms over the hidden size are LayerNorm, with a scale and a bias. Otherwise
            they are RMSNorm, with a scale.
        bare_norms: Whether they are LayerNorm in fp32, and have no parameters.
        centered_norms: Whether they subtract the mean in fp32, and have a scale alone.
        parallel: Whether attention and MLP take the output of one norm, and both are added to its input.
        wide_rotation: Whether plain attention rotates q and k in fp32.
        rotates: Whether each layer has rotary positions.
        attention_biases: The number of biases of a layer's attention.
        mlp_biases: The number of biases of a layer's MLP.
        clipped: Whether q, k and v are clipped after their projections.
        relu_squared: Whether the activation of the MLP is ReLU squared.
        wide_scales: Whether the norms multiply by their scales in fp32.
        scaled_embedding: Whether the output of the embedding is multiplied by a number.
        scaled_residual: Whether what a layer's attention and MLP return is multiplied before it is added.
        scaled_logits: Whether the head's output is multiplied or divided by a number.
        capped_logits: Whether the logits are capped by a tanh.
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
    norms_after: bool
    head_norms: HeadNorms
    fused_attention: bool
    rotated: int
    joined_heads: bool
    layer_norms: bool
    bare_norms: bool
    centered_norms: bool
    parallel: bool
    wide_rotation: bool
    rotates: tuple[bool, ...]
    attention_biases: int
    mlp_biases: int
    clipped: bool
    relu_squared: bool
    wide_scales: bool
    scaled_embedding: bool
    scaled_residual: bool
    scaled_logits: bool
    capped_logits: bool
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
    def norm_vectors(self) -> int:
        """The number of parameters of a norm over the hidden size: a scale and a bias, a scale, or none."""
        return 0 if self.bare_norms else 1 + self.layer_norms

    def mlp_weights(self, *, sparse: bool) -> int:
        """Return the weights of a layer's MLP; of a mixture of experts, with those of its router."""
        if sparse:
            return self.experts * self._expert_rows
        return self.matrices * self.E * self.I + self.mlp_biases

    @property
    def expert_weights(self) -> int:
        """The weights of an expert: three matrices, and perhaps three biases."""
        biases = 2 * self.expert_width + self.E
        return 3 * self.E * self.expert_width + biases * self.clamped_experts

    @property
    def _expert_rows(self) -> int:
        """The weights of an expert, with its row and its bias of the router."""
        return self.expert_weights + self.E + self.clamped_experts

    def layer_weights(self, *, sparse: bool, ranks: int = 1) -> int:
        """Return the weights of a layer on the rank that has the most of them.

        The rows of each parameter are divided over ``ranks``. The rows of a projection's matrix are its
        outputs, and those of the experts' tensors are the experts.
        """

        def most(rows: int) -> int:
            return -(-rows // ranks)

        def linear(projections: dict[str, tuple[int, int]]) -> int:
            return sum(before * most(after) for before, after in projections.values())

        heads = (self.H * self.D, self.K * self.D)
        of_heads = {"each": 2 * most(self.D), "own": (most(self.H) + most(self.K)) * self.D}
        of_heads |= {"none": 0, "all": sum(map(most, heads))}
        if sparse:
            mlp = most(self.experts) * self._expert_rows
        else:
            mlp = linear(self._dense_projections) + most(self.mlp_biases)
        norms = self.norms * most(self.E) * self.norm_vectors + of_heads[self.head_norms]
        attention = linear(self.attention_projections) + most(self.attention_biases) + most(self.sinks)
        return attention + mlp + norms

    def root_weights(self, *, ranks: int = 1) -> int:
        """Return the weights outside the layers, as ``layer_weights``."""
        tables = (2 - self.tied) * self.E * -(-self.V // ranks)
        return tables + -(-self.E // ranks) * self.norm_vectors

    @property
    def weights(self) -> int:
        """The number of weights of the model."""
        return self.root_weights() + sum(self.layer_weights(sparse=sparse) for sparse in self.sparse)

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
