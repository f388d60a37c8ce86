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
    """Which projections of a layer have no adapter, in a model that is frozen: these keep no input.

    ``qkv``: none of q, k and v has one. An MLP that is not gated has no ``gate``, as if it were frozen.
    """

    qkv: bool = False
    output: bool = False
    gate: bool = False
    up: bool = False
    down: bool = False


@dataclass(frozen=True)
class Trained:
    """The weights that have gradients, in elements: all of them, or those of the adapters alone.

    ``table`` is the head's, ``mlp`` those of a layer's MLP, ``output`` those of its output projection,
    ``tail`` those of all that follows attention, and ``layer`` all of the layer. ``layer_shard`` of a layer,
    and ``shard`` of the model, are those of the rank that has the most.

    With adapters, ``effective_inputs`` and ``effective_output`` are the weights W + scale * B @ A of the
    projections of q, k and v, and of the output, where they have one; and ``low`` is r times the adapters of
    attention and of the MLP.
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
    """What a layer with experts has in another size than a dense one; see ``Sizes``."""

    sparse: bool
    M: int
    mlp: int
    layer: int
    layer_shard: int
    trained: Trained


@dataclass(frozen=True)
class Sizes:
    """The letters: tensors of one rank's b*s tokens in bytes, weights of the whole model in elements.

    Where layers with experts and dense ones take turns, what ``LayerSizes`` has is that of one layer: the
    first one's, or that of ``of(layer)``.

    w bytes an element as computed with, f an element of a sum; ``n`` ranks share a parameter; ``copied``:
    parameters are cast or gathered, so modules work on a copy of them; ``summed``: they are not, and each
    gradient is copied to be summed over ranks; ``reduced`` bytes an element of a gradient once it is summed.
    M is one tensor inside the MLP, h one head, ``sent`` all keys as exchanged (where K < C, each to C/K
    ranks), ``table`` the embedding, ``root`` all outside the layers, ``matrices`` those of an MLP.
    ``shard`` of the model, and ``layer_shard`` of a layer, are weights of the rank that has the most. FSDP
    gathers shards that are as long on every rank, so ``layer`` and ``root`` are n of them.
    ``head_norms``: q and k are normed. ``adapted``: adapters are trained, and all else is frozen. ``windows``
    are the keys that a query of each layer sees, at most all; None if the layer's kernel knows of no window.
    ``sparse``: the MLP is a mixture of experts, ``chosen`` of them for each token. M is then one inner tensor
    of all rows, of which each token has as many. ``clamped``: their gate and up are clamped. ``sinks``: each
    query head has a sink.
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
    relu_squared: bool
    scaled_residual: bool
    divided_logits: bool
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
        return replace(self, **vars(self.layers[layer]))

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
        # Without FSDP, sums over ranks stay until the step's end, beside the fp32 that is made of them.
        reduced=4 if recipe.fsdp or f == 4 else 4 + f, copied=copied, summed=ranks > 1 and not copied,
        tied=tied, norms=shape.norms, norms_after=shape.norms_after,
        norms_before=shape.norms > 2 * shape.norms_after, joined_heads=shape.joined_heads,
        fused_attention=shape.fused_attention, fused_mlp=shape.fused_mlp, rotated=shape.rotated,
        wide_scales=shape.wide_scales, scaled_embedding=shape.scaled_embedding, head_norms=head_norms,
        layer_norms=shape.layer_norms, relu_squared=shape.relu_squared,
        scaled_residual=shape.scaled_residual, divided_logits=shape.divided_logits,
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
        tail = mlp + output + norms * shape.E * (1 + shape.layer_norms)
        shard = sum(shape.layer_weights(sparse=kind, ranks=n) for kind in shape.sparse)
        shard += shape.root_weights(ranks=n)
        layer = shape.layer_weights(sparse=sparse)
        trained = Trained(shape.V * shape.E, mlp, output, tail, layer, layer_shard, shard)
    else:
        trained = _adapters(shape, job.lora, n)
        layer_shard += trained.layer_shard
    return LayerSizes(sparse, token * inner, mlp, n * layer_shard, layer_shard, trained)


def _window(window: int | None, recipe: Recipe, s: int) -> int | None:
    """The keys of a window; a kernel that computes in tiles is without a window of all tokens as with one."""
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
    """dq, dk and dv; in a ring also what travels, and wide sums; a ring of two passes nothing on.

    Of keys that come from another rank, all queries meet half, or half the queries meet all. The first dq is
    its own sum if that is not wider.
    """
    wide_q, wide_k = q * z.f // z.w, k * z.f // z.w
    if z.recipe.ring == 1:
        return _call(z, q, k, window)
    part = max(_call(z, q, k, keys=2), _call(z, q, k, queries=2))
    if z.recipe.ring == 2:
        return wide_q + max(q * (z.f > z.w) + 6 * k + 2 * wide_k, part + 2 * k + 4 * wide_k)
    return wide_q + part + 4 * k + 4 * wide_k


def _call(z: Sizes, q: int, k: int, window: int | None = None, *, queries: int = 1, keys: int = 1) -> int:
    """dq, dk and dv of one call of the kernel, with one of so many parts of the queries and of the keys.

    In tiles or windows, the sums of dk and dv and a pair of tiles; at the end, the sums and what is rounded
    of them.
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
    """What a kernel that computes backward in parts holds for one of them; see ``_call``.

    ``q`` and ``k`` are bytes of all tokens. In tiles, dq, dk and dv of a pair of tiles, and the sum of dq. In
    windows, of the queries that see keys of the block before theirs, dout, q, the output and the LSE in
    reversed order, and of these keys k and v, with dq, dk and dv; or this dq, and those of the blocks.
    """
    tokens, tile = z.s * z.recipe.ulysses, z.recipe.attention_tile

    def pair(queries: int, keys: int) -> int:
        """Of tiles of so many queries and keys; here and below in units of ``q`` and ``k`` of a token."""
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
    for blocks, length, later in _window_calls(z, window):
        reversed_ = later * (window - 1)
        parts.append(reversed_ * q + call(blocks, length))
        if reversed_:
            parts.append(reversed_ * (3 * q + 2 * k + _lse(z, q)) + call(later, window - 1))
    return max(parts) // (z.b * tokens)


def forward_bytes(z: Sizes, q: int, k: int, window: int | None) -> int:
    """What a kernel with a window holds forward beside the outputs and LSEs of all tokens: those of a part.

    Or q, k, v and an output of the queries that see keys of the block before theirs, in reversed order. Or,
    where sums are wider, that output and what it is added to, both in order, and LSEs and factors of them.
    """
    tokens, parts = z.s * z.recipe.ulysses, [0]
    if window in (None, tokens):
        return 0
    for blocks, length, later in _window_calls(z, window):
        merged = later * min(length, window - 1)
        parts += [
            blocks * length * (q + _lse(z, q)),
            later * (window - 1) * (2 * q + 2 * k + _lse(z, q)),
            merged * (q + q * z.f // z.w + 3 * _lse(z, q)) * (z.f > z.w),
        ]
    return max(parts) // (z.b * tokens)


def sink_bytes(z: Sizes, q: int) -> int:
    """What the gradients of sinks take before the kernel's backward: products of a piece, and two LSEs."""
    if not z.sinks:
        return 0
    tokens = z.s * z.recipe.ulysses
    return q * z.f // z.w * min(tokens, SINK_PIECE) // tokens + 2 * _lse(z, q)


def _lse(z: Sizes, q: int) -> int:
    """The bytes of the LSEs of the queries that have ``q`` bytes."""
    return q * z.f // (z.w * z.D)


def _window_calls(z: Sizes, window: int) -> Iterator[tuple[int, int, int]]:
    """The blocks of a call of a windowed kernel, their length, and how many see keys of the block before.

    All but the first block of a sequence do. There are the first call, the next, and that of the last block.
    """
    tokens = z.s * z.recipe.ulysses
    whole, together = tokens // window, max(1, PIECE // window)
    yield min(together, whole), window, min(together, whole) - 1
    if whole > together:
        yield (min(together, whole - together), window, min(together, whole - together))
    if tokens % window:
        yield 1, tokens % window, 1


def scale_bytes(z: Sizes) -> int:
    """The bytes of a normalised element that is kept for the gradient of the scale."""
    return 0 if z.adapted else 4 if z.wide_scales else z.w


def wide_norm(z: Sizes, kept: str, elements: int) -> Held:
    """The backward of RMSNorm: its input, two gradients and three products, or what is more."""
    wide = max(6 * 4, 4 * z.w + 4)
    gradients = {ACTIVATION_GRADIENTS: (wide - 16) * elements}
    return plus({kept: 4 * elements}, {TEMPORARY: 12 * elements}, gradients)


def inside_mlp(z: Sizes, t: int, copies: Held, kept: str, output: str | None, *, added: bool = False) -> Held:
    """The higher of two moments in the backward of an MLP that sees t tokens.

    ``kept`` is the category of what its forward keeps, and ``output`` that of a tile's output, which is there
    while the tile is differentiated. ``copies`` are those of the tile's input.

    Early, six tensors [b, t, I] (where the MLP is not gated three, or five of ReLU squared) and the last
    matrix's weight gradient; late, the gradients of all matrices and one such tensor with dx. A gated MLP has
    two dx; a tile, which keeps its input, also has their sum.

    ``added``: autograd adds each weight gradient to that of the tiles before, as soon as it is there. So one
    exists at a time, and the last matrix's does so before the sixth tensor.
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
        late = {ACTIVATION_GRADIENTS: one + 2 * x}
    return highest_of(early, plus(late, gradients))


def _inside_experts(z: Sizes, t: int, copies: Held, kept: str, output: str | None, *, added: bool) -> Held:
    """The highest moment in the backward of a mixture of experts; the arguments are those of ``inside_mlp``.

    In the last product, what forward keeps, the gradients of its result and of its operand, and that of its
    matrices. Where the inner tensor is weighted, the latter gradient, and a product of it. In the first
    product, the rows, their gradient, that of its result, and those of all matrices. Where the gradients of a
    token's rows are summed, these rows, the sum and a part of it, or a copy of the largest gradient, which is
    summed over ranks. If forward runs again, where the results are summed in the same way.
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
    """What a mixture of experts keeps of t tokens for backward: rows, and five inner tensors of these.

    Where gate and up are clamped, three more: gate as it is clamped, its sigmoid, and up + 1. With frozen
    experts there are no rows, and one inner tensor less. In addition, the probabilities of the router in
    fp32, and of each row eleven numbers of 4 bytes: its token, place and pair, and its weight.
    """
    inner = (5 + 3 * z.clamped - z.adapted) * z.M * t // z.s
    rows = z.chosen * z.A * t // z.s * (not z.adapted)
    return rows + inner + z.b * t * (44 * z.chosen + 4 * z.experts)


def weight_sums(z: Sizes, weights: int) -> Held:
    """The sums of tiles' gradients: the gradients themselves, or wider ones of which they are made."""
    return {GRADIENTS if z.f == z.w else TEMPORARY: z.f * weights}
