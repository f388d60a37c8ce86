"""The terms of the closed form: its letters, sums of bytes by category, and what several parts hold alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm, prod

from lab.memory.categories import CATEGORIES
from lab.models.lora import Lora
from lab.recipe.jobs import Job
from lab.recipe.recipe import Recipe
from lab.shape import HeadNorms, Shape
from lab.techniques.upipe.schedule import schedule
from lab.techniques.window_pieces import PIECE, SINK_PIECE

WIDTHS = {None: 4, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element by compute dtype; None computes in the parameters' own, fp32."""

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, RECOMPUTED, ACTIVATION_GRADIENTS, TEMPORARY, _ = CATEGORIES

Held = dict[str, int]
"""Bytes by category."""

Parts = dict[str, Held]
"""Device bytes of one rank at one moment, by part of the model or of the step, and by category."""


def bytes_of(held: Held) -> int:
    """The sum over categories."""
    return sum(held.values())


def plus(*several: Held) -> Held:
    """The sum, category by category."""
    names = {name: None for held in several for name in held}
    return {name: sum(held.get(name, 0) for held in several) for name in names}


def nested(held: Held) -> Held:
    """What a technique holds while it differentiates inside its own backward: gradients are freed there."""
    freed = held.get(GRADIENTS, 0) + held.get(ACTIVATION_GRADIENTS, 0)
    return plus({name: size for name, size in held.items() if "gradients" not in name}, {TEMPORARY: freed})


def highest_of(*moments: Held) -> Held:
    """The moment at which the most is held."""
    return max(moments, key=bytes_of)


# ---- the letters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    """Which projections of a layer have no adapter, in a model whose own parameters are frozen.

    Such a projection keeps no input for backward. ``qkv`` is True if none of q, k and v has an adapter, and
    ``gate`` also if the MLP has no projection for the gate alone.
    """

    qkv: bool = False
    output: bool = False
    gate: bool = False
    up: bool = False
    down: bool = False


@dataclass(frozen=True)
class Trained:
    """The number of weights that have gradients: of all weights, or of those of the adapters alone.

    Attributes:
        table: Those of the head.
        mlp: Those of a layer's MLP.
        output: Those of the projection of a layer's attention output.
        tail: Those of all parts of a layer that follow attention.
        layer: Those of a layer.
        layer_shard: Those of a layer on the rank that has the most.
        shard: Those of the model on the rank that has the most.
        effective_inputs: The elements of the matrices W + scale * B @ A for q, k and v; 0 without adapters.
        effective_output: The elements of that matrix for the attention output; 0 without an adapter.
        low: r times the number of adapters in attention, and in the MLP.
        frozen: The projections without an adapter, if there are adapters.
    """

    table: int
    mlp: int
    output: int
    tail: int
    layer: int
    layer_shard: int
    shard: int
    effective_inputs: int = 0
    effective_output: int = 0
    low: tuple[int, int] = (0, 0)
    frozen: Frozen = Frozen()


@dataclass(frozen=True)
class LayerSizes:
    """The sizes that differ between a layer with experts and a dense layer; see ``Sizes``."""

    sparse: bool
    M: int
    mlp: int
    layer: int
    layer_shard: int
    trained: Trained


@dataclass(frozen=True)
class Sizes:
    """The letters of the formulas: tensors of one rank's b*s tokens in bytes, and weights in elements.

    The fields that ``LayerSizes`` has are those of the first layer, or of one layer after ``of(layer)``. They
    differ if some layers have experts and others are dense. Fields that are not listed are those of
    ``Shape``.

    Attributes:
        recipe: The recipe.
        b: The rows of a rank's batch.
        s: The tokens of a row on one rank.
        w: The bytes per element of the compute dtype.
        f: The bytes per element of a sum: w, but at least 4.
        n: The number of ranks that a parameter is sharded over; 1 without FSDP.
        reduced: The bytes per element of a gradient after it was summed over the ranks.
        copied: Whether modules compute with copies of the parameters, which are cast or gathered.
        summed: Whether they compute with the parameters themselves on several ranks. Each gradient is then
            copied to be summed over the ranks.
        norms_before: Whether a layer has a norm before the attention, and one before the MLP.
        A: A hidden state [b, s, E].
        M: A tensor [b, s, I] inside the MLP; with experts, an inner tensor of all rows, which are ``chosen``
            for each token.
        h: One head [b, s, D].
        mlp: The weights of a layer's MLP.
        layer: The weights of a layer as FSDP gathers them: n shards of equal length.
        table: The weights of the embedding.
        root: The weights outside the layers, as FSDP gathers them.
        layer_shard: The weights of a layer on the rank that has the most.
        root_shard: The weights outside the layers on the rank that has the most.
        shard: The weights of the model on the rank that has the most.
        sent: All keys as Ulysses exchanges them. If K < C, each head is sent to C/K ranks.
        adapted: Whether adapters are trained, and all other parameters are frozen.
        windows: For each layer, the keys that a query sees, at most all tokens; None if the layer's kernel
            computes without a window.
        trained: The weights that have gradients.
        sparse: Whether the MLP is a mixture of experts.
        chosen: The number of experts that compute each token.
        clamped: Whether gate and up of the experts are clamped.
        sinks: Whether each query head has a sink.
        layers: The sizes of each layer.
    """

    recipe: Recipe
    L: int
    E: int
    H: int
    K: int
    D: int
    V: int
    b: int
    s: int
    w: int
    f: int
    n: int
    reduced: int
    copied: bool
    summed: bool
    tied: bool
    norms: int
    norms_after: bool
    norms_before: bool
    joined_heads: bool
    fused_attention: bool
    fused_mlp: bool
    rotated: int
    wide_scales: bool
    scaled_embedding: bool
    head_norms: HeadNorms
    layer_norms: bool
    bare_norms: bool
    centered_norms: bool
    parallel: bool
    wide_rotation: bool
    rotates: tuple[bool, ...]
    clipped: bool
    relu_squared: bool
    scaled_residual: bool
    scaled_logits: bool
    capped_logits: bool
    A: int
    M: int
    h: int
    mlp: int
    matrices: int
    layer: int
    table: int
    root: int
    layer_shard: int
    root_shard: int
    shard: int
    sent: int
    adapted: bool
    windows: tuple[int | None, ...]
    trained: Trained
    sparse: bool
    experts: int
    chosen: int
    clamped: bool
    sinks: bool
    layers: tuple[LayerSizes, ...]

    def of(self, layer: int) -> Sizes:
        """Return the sizes as those of a layer."""
        own = self.layers[layer]
        # There are at most two kinds of layers. A copy for each of many calls would take most of the time.
        return self if own.sparse == self.sparse else replace(self, **vars(own))

    def trained_shards(self, first: int) -> int:
        """Return the trained weights of the layers from ``first`` on, on the rank that has the most."""
        return sum(layer.trained.layer_shard for layer in self.layers[first:])

    @property
    def branches(self) -> bool:
        """Whether the gradient of what attention and MLP return is another tensor than the residual's."""
        return self.scaled_residual or self.norms_after

    @property
    def qkv(self) -> int:
        """The bytes of q, k and v of all heads."""
        return (self.H + 2 * self.K) * self.h


def sizes_of(shape: Shape, job: Job) -> Sizes:
    """The letters of a job; ``shape`` is that of its model."""
    recipe, ranks = job.recipe, job.ranks
    w = WIDTHS[recipe.compute_dtype]
    L, E, H, K, D, V = shape.L, shape.E, shape.H, shape.K, shape.D, shape.V
    tied, head_norms = shape.tied, shape.head_norms
    b, s = local_sizes(job)
    n = ranks if recipe.fsdp else 1
    token, f, copied = w * b * s, max(w, 4), recipe.fsdp or recipe.compute_dtype is not None
    kinds = {sparse: _layer_sizes(shape, job, n, token, sparse=sparse) for sparse in set(shape.sparse)}
    layers = tuple(kinds[sparse] for sparse in shape.sparse)
    root_shard = shape.root_weights(ranks=n)
    return Sizes(
        recipe, L, E, H, K, D, V, b, s, w, f, n,
        # Without FSDP, sums over ranks stay until the step's end, together with their copies in fp32.
        reduced=4 if recipe.fsdp or f == 4 else 4 + f, copied=copied, summed=ranks > 1 and not copied,
        tied=tied, norms=shape.norms, norms_after=shape.norms_after,
        norms_before=shape.norms > 2 * shape.norms_after, joined_heads=shape.joined_heads,
        fused_attention=shape.fused_attention, fused_mlp=shape.fused_mlp, rotated=shape.rotated,
        wide_scales=shape.wide_scales, scaled_embedding=shape.scaled_embedding, head_norms=head_norms,
        layer_norms=shape.layer_norms, bare_norms=shape.bare_norms, clipped=shape.clipped,
        centered_norms=shape.centered_norms, parallel=shape.parallel,
        wide_rotation=shape.wide_rotation, rotates=shape.rotates, relu_squared=shape.relu_squared,
        scaled_residual=shape.scaled_residual, scaled_logits=shape.scaled_logits,
        capped_logits=shape.capped_logits,
        A=token * E, h=token * D, matrices=shape.matrices, table=V * E, root=n * root_shard,
        root_shard=root_shard, shard=sum(layer.layer_shard for layer in layers) + root_shard,
        sent=token * D * max(K, recipe.ulysses), adapted=job.lora is not None,
        windows=tuple(_window(window, recipe, s) for window in shape.windows),
        experts=shape.experts, chosen=shape.experts_per_token, clamped=shape.clamped_experts,
        sinks=shape.sinks > 0, layers=layers, **vars(layers[0]),
    )  # fmt: skip


def _layer_sizes(shape: Shape, job: Job, n: int, token: int, *, sparse: bool) -> LayerSizes:
    """The sizes of a layer with experts, or of a dense one; ``token`` is b*s elements, in bytes."""
    layer_shard = shape.layer_weights(sparse=sparse, ranks=n)
    mlp, inner = shape.mlp_weights(sparse=sparse), shape.I
    if sparse:
        inner = shape.experts_per_token * shape.expert_width
    if job.lora is None:
        output = shape.E * shape.H * shape.D
        norms = shape.norms - (shape.norms > 2 * shape.norms_after)
        tail = mlp + output + norms * shape.E * shape.norm_vectors
        shard = sum(shape.layer_weights(sparse=kind, ranks=n) for kind in shape.sparse)
        shard += shape.root_weights(ranks=n)
        layer = shape.layer_weights(sparse=sparse)
        trained = Trained(shape.V * shape.E, mlp, output, tail, layer, layer_shard, shard)
    else:
        trained = _adapters(shape, job.lora, n)
        layer_shard += trained.layer_shard
    return LayerSizes(sparse, token * inner, mlp, n * layer_shard, layer_shard, trained)


def _window(window: int | None, recipe: Recipe, s: int) -> int | None:
    """The keys of a window; None if a kernel that computes in tiles has a window of all tokens."""
    tokens = s * recipe.ulysses
    if window is None or (window >= tokens and recipe.attention_tile is not None):
        return None
    return min(window, tokens)


def _adapters(shape: Shape, lora: Lora, n: int) -> Trained:
    """The weights of adapters: of each, A [r, in] and B [out, r], whose rows are divided over n ranks."""
    targets = lora.targets_in(shape)

    def weights(names: Iterable[str], ranks: int = 1) -> int:
        sizes = [shape.projections[name] for name in names if name in targets]
        return sum(-(-lora.r // ranks) * before + -(-after // ranks) * lora.r for before, after in sizes)

    *inputs, output = shape.attention_projections
    mlp, layer_shard = weights(shape.mlp_projections), weights(targets, n)
    of_mlp = len(set(shape.mlp_projections) & set(targets))
    *gate, up, down = (name not in targets for name in shape.mlp_projections)
    return Trained(
        table=0,
        mlp=mlp,
        output=weights([output]),
        tail=mlp + weights([output]),
        layer=weights(targets),
        layer_shard=layer_shard,
        shard=shape.L * layer_shard,
        effective_inputs=sum(prod(shape.projections[name]) for name in inputs if name in targets),
        effective_output=prod(shape.projections[output]) * (output in targets),
        low=(lora.r * (len(targets) - of_mlp), lora.r * of_mlp),
        frozen=Frozen(not set(inputs) & set(targets), output not in targets, all(gate), up, down),
    )


def local_sizes(job: Job) -> tuple[int, int]:
    """Return b and s, the rows of a rank's batch and the tokens of each that are on the rank."""
    recipe = job.recipe
    degree = recipe.ulysses * recipe.ring
    padded = lcm(degree, 2 * recipe.ring if recipe.ring > 1 else 1)
    return -(-job.rows * degree // job.ranks), -(-job.tokens // padded) * padded // degree


# ---- what several parts hold alike -------------------------------------------------------------------------


def kernel_heads(z: Sizes) -> list[int]:
    """The heads of each run of a layer's kernel, summed over the Ulysses ranks: UPipe has several runs."""
    if not z.recipe.head_chunk:
        return [z.H]
    plan = schedule(z.H, z.K, z.recipe.ulysses, z.recipe.head_chunk)
    return [plan.ranks * len(run.slots) * len(run.queries) for stage in plan.stages for run in stage]


def kernel_bytes(z: Sizes, q: int, k: int, window: int | None) -> int:
    """What the backward of a layer's kernel holds: dq, dk and dv of ``q`` bytes and twice ``k`` bytes.

    In a ring there are also the tensors that are sent and received, and sums in the accumulation dtype. A
    ring of two ranks sends nothing on. Of the keys of another rank, all queries attend to one half, or half
    of the queries attend to all. The first dq becomes the sum, if the sum is not wider.
    """
    wide_q, wide_k = q * z.f // z.w, k * z.f // z.w
    if z.recipe.ring == 1:
        return _call(z, q, k, window)
    part = max(_call(z, q, k, keys=2), _call(z, q, k, queries=2))
    if z.recipe.ring == 2:
        return wide_q + max(q * (z.f > z.w) + 6 * k + 2 * wide_k, part + 2 * k + 4 * wide_k)
    return wide_q + part + 4 * k + 4 * wide_k


def _call(z: Sizes, q: int, k: int, window: int | None = None, *, queries: int = 1, keys: int = 1) -> int:
    """What one call of the kernel holds, for 1/``queries`` of the queries and 1/``keys`` of the keys.

    It is dq, dk and dv. In tiles or windows, it is dq, the sums of dk and dv, and a part of the backward, or
    in its place one rounded sum.
    """
    dq, dk = q // queries, k // keys
    if whole_call(z, window):
        return dq + 2 * dk
    part = part_bytes(z, q, k, window, queries=queries, keys=keys)
    return dq + 2 * dk * z.f // z.w + max(part, dk * (z.f > z.w))


def whole_call(z: Sizes, window: int | None) -> bool:
    """Return whether the backward of a layer's kernel computes all tokens at once."""
    return z.recipe.attention_tile is None and window in (None, z.s * z.recipe.ulysses)


def accumulates(z: Sizes, window: int | None) -> bool:
    """Return whether the kernel of a layer has ``accumulate``, which UPipe then calls."""
    return z.recipe.ring == 1 and (window is not None or z.recipe.attention_tile is not None)


def part_bytes(z: Sizes, q: int, k: int, window: int | None, *, queries: int = 1, keys: int = 1) -> int:
    """What a kernel that computes backward in parts holds for one part; see ``_call``.

    ``q`` and ``k`` are the bytes of all tokens. In tiles, a part is dq, dk and dv of a pair of tiles, and the
    sum of dq. In windows, there are two calls. The first has the queries that see keys of the block before
    theirs: dout, q, the output and the LSE in reversed order, k and v of these keys, and dq, dk and dv. The
    second has the dq of the first, and dq, dk and dv of the blocks themselves.
    """
    tokens, tile = z.s * z.recipe.ulysses, z.recipe.attention_tile

    def pair(queries: int, keys: int) -> int:
        """Return the bytes of tiles of so many tokens, times the number of tokens that ``q`` has."""
        return queries * (q + q * z.f // z.w) + keys * 2 * k

    if window is None:
        assert tile is not None
        return pair(min(tile, tokens // queries), min(tile, tokens // keys)) // tokens

    def call(blocks: int, length: int) -> int:
        of_blocks = blocks * length
        if tile is None:
            return of_blocks * (q + 2 * k)
        part = max(pair(*(blocks * min(tile, length),) * 2), of_blocks * k * (z.f > z.w))
        return of_blocks * (q + 2 * k * z.f // z.w) + part

    parts = []
    for blocks, length, later in window_calls(z, window):
        reversed_ = later * (window - 1)
        parts.append(reversed_ * q + call(blocks, length))
        if reversed_:
            parts.append(reversed_ * (3 * q + 2 * k + _lse(z, q)) + call(later, window - 1))
    return max(parts) // (z.b * tokens)


def forward_bytes(z: Sizes, q: int, k: int, window: int | None) -> int:
    """What a kernel with a window holds forward, in addition to the outputs and LSEs of all tokens.

    It is the largest of three: the output and the LSE of one call; q, k, v and an output of the queries that
    see keys of the block before theirs, in reversed order; and if sums are wider, that output in order, the
    wide output that it is merged with, and three tensors of the size of an LSE.
    """
    tokens, parts = z.s * z.recipe.ulysses, [0]
    if window in (None, tokens):
        return 0
    for blocks, length, later in window_calls(z, window):
        merged = later * min(length, window - 1)
        parts += [
            blocks * length * (q + _lse(z, q)),
            later * (window - 1) * (2 * q + 2 * k + _lse(z, q)),
            merged * (q + q * z.f // z.w + 3 * _lse(z, q)) * (z.f > z.w),
        ]
    return max(parts) // (z.b * tokens)


def sink_bytes(z: Sizes, q: int) -> int:
    """What the gradients of sinks take before the kernel's backward: products of a piece, and two LSEs.

    One of them is the share of the sink in each softmax. The other is an upper bound of the sums of a piece.
    """
    if not z.sinks:
        return 0
    tokens = z.s * z.recipe.ulysses
    return q * z.f // z.w * min(tokens, SINK_PIECE) // tokens + 2 * _lse(z, q)


def _lse(z: Sizes, q: int) -> int:
    """The bytes of the LSEs of the queries that have ``q`` bytes."""
    return q * z.f // (z.w * z.D)


def window_calls(z: Sizes, window: int) -> Iterator[tuple[int, int, int]]:
    """The blocks of a call of a windowed kernel, their length, and how many see keys of the block before.

    All but the first block of a sequence see such keys. The calls are the first one, the second one, and that
    of a shorter last block. The others hold as much as the second.
    """
    tokens = z.s * z.recipe.ulysses
    whole, together = tokens // window, max(1, PIECE // window)
    yield min(together, whole), window, min(together, whole) - 1
    if whole > together:
        yield (min(together, whole - together), window, min(together, whole - together))
    if tokens % window:
        yield 1, tokens % window, 1


def scale_bytes(z: Sizes) -> int:
    """The bytes per element of the normalized input, which is kept for the gradient of the scale."""
    return 0 if z.adapted else 4 if z.wide_scales else z.w


def wide_norm(z: Sizes, kept: str, elements: int) -> Held:
    """The backward of RMSNorm in fp32: its input, two gradients and three products.

    Or, if that is more, four tensors in the compute dtype and the input in fp32.
    """
    wide = max(6 * 4, 4 * z.w + 4)
    gradients = {ACTIVATION_GRADIENTS: (wide - 16) * elements}
    return plus({kept: 4 * elements}, {TEMPORARY: 12 * elements}, gradients)


def centered_norm(kept: str, elements: int) -> Held:
    """The backward of a norm in fp32 that subtracts the mean, where its scale gets a gradient.

    What is left of the input, twice, and normalized; dout and a product of it; and the products of which the
    scale's gradient is the sum.
    """
    return {kept: 12 * elements, TEMPORARY: 4 * elements, ACTIVATION_GRADIENTS: 8 * elements}


def head_norm(z: Sizes, kept: str, elements: int) -> Held:
    """The backward of a norm of heads; see ``wide_norm`` and ``centered_norm``."""
    if z.centered_norms and not z.adapted:
        return centered_norm(kept, elements)
    return wide_norm(z, kept, elements)


def bare_norm(z: Sizes, kept: str, elements: int, *, output: bool) -> Held:
    """The backward of LayerNorm in fp32 without parameters: its input, dout and dx in fp32.

    With ``output``, it runs in a tile, which has its output, and whose input and dout are parts of others.
    """
    copied = z.w != 4
    if output:
        return {kept: (z.w + 4 * copied) * elements, ACTIVATION_GRADIENTS: (4 + 4 * copied) * elements}
    return {kept: 4 * elements, ACTIVATION_GRADIENTS: max(8, z.w + 4) * elements}


def inside_mlp(z: Sizes, t: int, copies: Held, kept: str, output: str | None, *, added: bool = False) -> Held:
    """The higher of two moments in the backward of an MLP that sees t tokens.

    ``kept`` is the category of what its forward keeps, and ``output`` that of a tile's output, which is there
    while the tile is differentiated. ``copies`` are those of the tile's input.

    Early, there are six tensors [b, t, I] (three if the MLP is not gated, or five with ReLU squared) and the
    gradient of the last matrix. Late, there are the gradients of all matrices, and one such tensor with dx. A
    gated MLP has two dx; a tile, which keeps its input, also has their sum.

    ``added``: autograd adds the gradient of each matrix to the sum over earlier tiles as soon as it is
    computed. So there is one at a time, and that of the last matrix is freed before the sixth tensor is made.
    """
    if z.sparse:
        return _inside_experts(z, t, copies, kept, output, added=added)
    one, x = z.M * t // z.s, z.A * t // z.s
    gated = z.matrices == 3
    # An adapter of the last projection has two gradients of its input, and their sum.
    tensors = 6 if gated else 5 if z.relu_squared else 3 + (z.adapted and not z.trained.frozen.down)
    out = {output: x} if output else {}
    # What a multiplied residual makes of dy is there until the last matrix has run.
    dout = z.A * z.branches * (not output)
    half, inner = tensors // 2, (2 * one if z.relu_squared else 0)
    early = highest_of(
        {kept: (tensors - half) * one - inner, TEMPORARY: inner, ACTIVATION_GRADIENTS: half * one},
        {kept: 3 * one, ACTIVATION_GRADIENTS: (2 * gated) * one + dout},
    )
    one_gradient = {GRADIENTS: z.w * z.mlp // z.matrices * (not z.adapted)}
    largest_gradient = {GRADIENTS: one_gradient[GRADIENTS] * (1 + z.fused_mlp)}
    gradients = {GRADIENTS: z.w * z.trained.mlp}
    if added:
        last = {kept: (4 if gated else 2) * one, ACTIVATION_GRADIENTS: one}
        early, gradients = highest_of(early, plus(last, one_gradient)), largest_gradient
    else:
        early = plus(early, one_gradient)
    early = plus(early, out, copies)
    if not gated:
        late = plus(out, {ACTIVATION_GRADIENTS: one + x})
    elif z.fused_mlp:
        late = {ACTIVATION_GRADIENTS: max(2 * one, x) + x}
    elif output:
        late = {ACTIVATION_GRADIENTS: max(one, x) + 3 * x}
    else:
        late = {ACTIVATION_GRADIENTS: max(one, x) + 2 * x}
    return highest_of(early, plus(late, gradients))


def _inside_experts(z: Sizes, t: int, copies: Held, kept: str, output: str | None, *, added: bool) -> Held:
    """The highest moment in the backward of a mixture of experts; the arguments are those of ``inside_mlp``.

    These moments are compared, in this order. In the last product: what forward keeps, the gradients of the
    product and of its rows, and that of its matrices. Where the inner tensor is weighted: what forward keeps,
    two inner tensors, and the gradient of the matrices. In the first product: the rows, their gradient, that
    of the product, and those of all matrices. Where the gradients of a token's rows are summed: these rows,
    the wide sum, and its rounded copy; or a copy of the largest gradient, which is summed over ranks. If
    forward runs again: where the results are summed in the same way.
    """
    one, x = z.M * t // z.s, z.A * t // z.s
    rows, summed = z.chosen * x, x * z.f // z.w + x
    last, trained = z.w * (z.mlp - z.experts * z.E) // 3 * (not z.adapted), z.w * z.trained.mlp
    out = {output: x} if output else {}
    moments = [
        {kept: experts_keep(z, t), ACTIVATION_GRADIENTS: rows + one, GRADIENTS: last},
        {
            kept: experts_keep(z, t) - one * (not z.adapted),
            ACTIVATION_GRADIENTS: one,
            TEMPORARY: one,
            GRADIENTS: last,
        },
        {
            kept: rows * (not z.adapted),
            ACTIVATION_GRADIENTS: 2 * one + rows,
            GRADIENTS: 2 * last if added else trained,
        },
        {ACTIVATION_GRADIENTS: rows + summed, GRADIENTS: 0 if added else trained},
        {ACTIVATION_GRADIENTS: rows, GRADIENTS: (trained + 2 * last) * (z.summed and not output)},
    ]
    if output or z.recipe.checkpoint:
        moments.append({kept: experts_keep(z, t), TEMPORARY: rows + summed})
    return plus(out, copies, highest_of(*moments))


def experts_keep(z: Sizes, t: int) -> int:
    """What a mixture of experts keeps of t tokens for backward: the rows, and five inner tensors of the rows.

    If gate and up are clamped, there are three more: the clamped gate, its sigmoid, and up + 1. Frozen
    experts keep no rows, and one inner tensor less. In addition, there are the probabilities of the router in
    fp32, and 44 bytes for each row: its token, its place and its pair, and its weight.
    """
    inner = (5 + 3 * z.clamped - z.adapted) * z.M * t // z.s
    rows = z.chosen * z.A * t // z.s * (not z.adapted)
    return rows + inner + z.b * t * (44 * z.chosen + 4 * z.experts)


def weight_sums(z: Sizes, weights: int) -> Held:
    """The sums of tiles' gradients: the gradients themselves, or wider ones of which they are made."""
    return {GRADIENTS if z.f == z.w else TEMPORARY: z.f * weights}
