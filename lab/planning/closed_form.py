"""The closed-form estimate: what a training step holds at its highest moments, in the method's letters.

It is within 1% of the plan on the presets. On any other legal shape it is within 5%, or within 1 KiB if that
is more. In fp64, which is for tests, it is within 10%. With the optimizer on the host, these are parts of
what the device and the host hold together. It leaves out what grows with neither tokens nor weights, such as
Adam's counter for each parameter.

It has the categories of a plan's timeline. On the presets each is within 1% of the device peak of what the
plan has, unless two moments are about equally high and the plan's peak is the other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

from lab import models
from lab.memory.categories import CATEGORIES
from lab.recipe.jobs import Job, make_job
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.host_pieces import piece_sizes
from lab.techniques.upipe.schedule import schedule

WIDTHS = {None: 4, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element by compute dtype; None computes in the parameters' own, fp32."""

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, RECOMPUTED, ACTIVATION_GRADIENTS, TEMPORARY, _ = CATEGORIES

Held = dict[str, int]
"""Bytes by category."""

Parts = dict[str, Held]
"""Device bytes of one rank at one moment, by part of the model or of the step, and by category."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Attributes:
        moments: Every moment at which the device may hold the most, by name, and what it holds then, by part
            and by category.
        host_peak: The most bytes that the host holds.
        disk_peak: The most bytes that a disk holds; see ``lab.planning.closed_form_disk.estimate_on``.
    """

    moments: dict[str, Parts]
    host_peak: int
    disk_peak: int = 0

    @property
    def moment(self) -> str:
        """When the device holds the most."""
        return max(self.moments, key=lambda name: _bytes(_total(self.moments[name])))

    @property
    def parts(self) -> dict[str, int]:
        """The bytes that the device holds then, by part."""
        return {name: _bytes(held) for name, held in self.moments[self.moment].items()}

    @property
    def by_category(self) -> Held:
        """The bytes that the device holds then, by category: all of ``CATEGORIES``, in their order."""
        held = _total(self.moments[self.moment])
        return {category: held.get(category, 0) for category in CATEGORIES}

    @property
    def device_peak(self) -> int:
        """The bytes that the device holds then."""
        return sum(self.parts.values())


def estimate(
    model: models.ModelLike,
    recipe: str | Recipe,
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    **knobs: Any,
) -> Estimate:
    """The peaks of one step of ``rows`` rows of ``tokens`` tokens, from shapes alone; see ``estimate_job``.

    Raises:
        LabError: a model, recipe or size that cannot work.
    """
    shape = models.shape_of(model)
    job = make_job(model, recipe, tokens=tokens, ranks=ranks, rows=rows, shape=shape, **knobs)
    return estimate_job(shape, job)


def estimate_job(shape: Shape, job: Job) -> Estimate:
    """The peaks of one step of a job; ``shape`` is that of its model.

    For fp32 parameters, gradients and Adam states, and a recipe that ``Recipe.check`` lets pass. What a
    kernel takes inside itself is left out, as by ``plan(..., workspace=False)``.
    """
    z = _sizes(shape, job)
    return Estimate(_moments(z), _host(z))


def _moments(z: _Sizes) -> dict[str, Parts]:
    """Every moment that may be the highest, by name, and what is held then."""
    norms, head = {"norms": {ACTIVATIONS: _norm_keeps(z) + z.A}}, {"gradients": _head_gradient(z, z.w)}
    highest = {
        "loss backward": _held(z, z.L, norms | {"loss": _loss(z)}),
        "head backward": _held(z, z.L, norms | {"loss": _head(z)} | head),
        "final norm backward": _held(z, z.L, {"norms": _norm(z, ACTIVATIONS)} | head),
        "optimizer": {"model state": _plus(_state(z), _reduced(z, z.shard, 4))},
    }
    # From layer to layer fewer inputs wait and more gradients are there, so it is highest at an end; or one
    # layer from it, where the parameters of the next and the gradients of the one before are under way too.
    for i in {z.L - 1, max(z.L - 2, 0), min(1, z.L - 1), 0}:
        highest |= {f"{part}, layer {i}": _held(z, i, held) for part, held in _layer(z, i)}
    state = {"model state": _state(z), "gradients": _reduced(z, z.L * z.layer_shard, z.reduced)}
    # The gradient of a tied embedding is a sum of two.
    table = z.w * z.table
    embedding = {GRADIENTS: (1 + z.summed) * table, TEMPORARY: table * z.tied}
    tables = {"head and embedding": _plus(_head_gradient(z, z.w), embedding)}
    whole = {"tokens": {ACTIVATIONS: _tokens(z)}, "parameters": {PARAMETERS: z.w * z.root * z.copied}}
    in_flight = {GRADIENTS: z.f * z.layer * z.copied, ACTIVATION_GRADIENTS: 2 * z.A}
    highest["embedding backward"] = state | tables | whole | {"gradients in flight": in_flight}
    if z.copied:
        root_shard = z.shard - z.L * z.layer_shard
        highest["root's gradients"] = state | {"gradients in flight": _reducing(z, z.root, root_shard)}
        for i in {z.L - 1, min(1, z.L - 1), 0}:
            # The copy of the layer above is gone by then.
            copy = {GRADIENTS: -z.f * z.layer * (i < z.L - 1)}
            flight = _plus(_reducing(z, z.layer, z.layer_shard), copy)
            reduced = {"residual": {ACTIVATION_GRADIENTS: z.A}, "gradients in flight": flight}
            highest[f"gradients of layer {i}"] = _held(z, i, reduced, runs=False)
    return highest


def _bytes(held: Held) -> int:
    return sum(held.values())


def _plus(*several: Held) -> Held:
    """The sum, category by category."""
    names = {name: None for held in several for name in held}
    return {name: sum(held.get(name, 0) for held in several) for name in names}


def _nested(held: Held) -> Held:
    """What a technique holds while it differentiates inside its own backward: gradients are freed there."""
    freed = held.get(GRADIENTS, 0) + held.get(ACTIVATION_GRADIENTS, 0)
    return _plus({name: size for name, size in held.items() if "gradients" not in name}, {TEMPORARY: freed})


def _total(parts: Parts) -> Held:
    return _plus(*parts.values())


def _highest(*moments: Held) -> Held:
    return max(moments, key=_bytes)


def _reducing(z: _Sizes, weights: int, shard: int) -> Held:
    """Gradients as made, and copied wide to be reduced; then that copy, the reduced shard, and it in fp32.

    A group of one rank divides instead, into a third tensor.
    """
    wide = z.f * weights
    divided = {GRADIENTS: wide, TEMPORARY: 2 * wide}
    reduced = divided if z.n == 1 else {GRADIENTS: wide + (z.f + 4 * (z.f > 4)) * shard}
    return _highest({GRADIENTS: z.w * weights + wide}, reduced)


# ---- the letters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """The letters: tensors of one rank's b*s tokens in bytes, weights of the whole model in elements.

    w bytes an element as computed with, f an element of a sum; ``n`` ranks share a parameter; ``copied``:
    parameters are cast or gathered, so modules work on a copy of them; ``summed``: they are not, and each
    gradient is copied to be summed over ranks; ``reduced`` bytes an element of a gradient once it is summed.
    M is one tensor inside the MLP, h one head, ``sent`` all keys as exchanged (where K < C, each to C/K
    ranks), ``table`` the embedding, ``root`` all outside the layers, ``matrices`` those of an MLP.
    ``shard`` of the model, and ``layer_shard`` of a layer, are weights of the rank that has the most.
    ``head_norms``: q and k are normed.
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
    head_norms: bool
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
    shard: int
    sent: int


def _sizes(shape: Shape, job: Job) -> _Sizes:
    recipe, ranks = job.recipe, job.ranks
    w = WIDTHS[recipe.compute_dtype]
    L, E, H, K, D, V = shape.L, shape.E, shape.H, shape.K, shape.D, shape.V
    tied, head_norms = shape.tied, shape.head_norms
    b, s = local_sizes(job)
    n = ranks if recipe.fsdp else 1
    (layer, root), (layer_shard, root_shard) = _weights(shape, 1), _weights(shape, n)
    token, f, copied = w * b * s, max(w, 4), recipe.fsdp or recipe.compute_dtype is not None
    return _Sizes(
        recipe, L, E, H, K, D, V, b, s, w, f, n,
        # Without FSDP, sums over ranks stay until the step's end, beside the fp32 that is made of them.
        reduced=4 if recipe.fsdp or f == 4 else 4 + f, copied=copied, summed=ranks > 1 and not copied,
        tied=tied, head_norms=head_norms, layer_norms=shape.layer_norms, relu_squared=shape.relu_squared,
        scaled_residual=shape.scaled_residual, divided_logits=shape.divided_logits,
        A=token * E, M=token * shape.I, h=token * D, mlp=shape.matrices * E * shape.I + shape.mlp_biases,
        matrices=shape.matrices, layer=layer, table=V * E, root=root, layer_shard=layer_shard,
        shard=L * layer_shard + root_shard, sent=token * D * max(K, recipe.ulysses),
    )  # fmt: skip


def local_sizes(job: Job) -> tuple[int, int]:
    """Return b and s, the rows of a rank's batch and the tokens of each that are on the rank."""
    recipe = job.recipe
    degree = recipe.ulysses * recipe.ring
    padded = lcm(degree, 2 * recipe.ring if recipe.ring > 1 else 1)
    return -(-job.rows * degree // job.ranks), -(-job.tokens // padded) * padded // degree


def _weights(shape: Shape, n: int) -> tuple[int, int]:
    """The weights of a layer, and those outside the layers, on the rank of ``n`` that has the most.

    The rows of each are divided over the ranks: of a projection's matrix, its outputs.
    """

    def most(rows: int) -> int:
        return -(-rows // n)

    E, D, I = shape.E, shape.D, shape.I  # noqa: E741
    attention = E * (most(shape.H * D) + 2 * most(shape.K * D)) + shape.H * D * most(E)
    mlp = (shape.matrices - 1) * E * most(I) + I * most(E)
    norm = most(E) * (1 + shape.layer_norms)
    vectors = most(shape.attention_biases) + most(shape.mlp_biases) + 2 * most(D) * shape.head_norms
    return attention + mlp + vectors + 2 * norm, (2 - shape.tied) * E * most(shape.V) + norm


def _held(z: _Sizes, layer: int, more: Parts, *, runs: bool = True) -> Parts:
    """``more``, and what a step holds all along while backward is in ``layer`` (L: it has reached none).

    ``runs`` is False when the layer has run, and its gradients are there.

    The root's parameters are whole for the step, and a layer's while it runs; the next one's are gathered
    then, if they are sharded. A layer's gradients are copied wide to be reduced, and that copy lives until
    the layer below makes its own. The head's gradient is whole until the step's end.
    """
    above, head = z.L - 1 - layer, z.w if z.copied else 4
    whole = z.root + z.layer * ((layer < z.L and runs) + (layer > 0 and z.n > 1))
    reduced = _reduced(z, max(above, 0) * z.layer_shard, z.reduced)
    held: Parts = {
        "model state": _state(z),
        "parameters": {PARAMETERS: z.w * whole * z.copied},
        "tokens": {ACTIVATIONS: _tokens(z)},
        "inputs": {ACTIVATIONS: _waiting(z, layer)},
        "gradients": _plus(reduced, _head_gradient(z, head * (above >= 0))),
        "gradients in flight": {GRADIENTS: z.f * z.layer * (above > 0 and z.copied)},
    }
    return {name: _plus(held.get(name, {}), more.get(name, {})) for name in held | more}


def _head_gradient(z: _Sizes, width: int) -> Held:
    """The gradient of the head's matrix. If it is tied, autograd keeps it until the embedding's is added."""
    return {ACTIVATION_GRADIENTS if z.tied else GRADIENTS: width * z.table}


def _state(z: _Sizes) -> Held:
    """The fp32 parameters, and Adam's two moments of each; nothing if they are on the host."""
    if z.recipe.optimizer == "host":
        return {}
    return {PARAMETERS: 4 * z.shard, OPTIMIZER: 8 * z.shard}


def _reduced(z: _Sizes, weights: int, width: int) -> Held:
    """Gradients that are summed over the ranks, of ``width`` bytes; nothing if they are on the host."""
    return {GRADIENTS: width * weights * (z.recipe.optimizer == "device")}


def _tokens(z: _Sizes) -> int:
    """Ids, labels, and positions; cos and sin."""
    return 8 * (2 * z.b + 1) * z.s + 2 * z.w * z.s * z.D


def _host(z: _Sizes) -> int:
    """The most that layers keep on the host; with the optimizer there, its state beside it, or gradients.

    When forward ends, all that layers keep is there, and no gradient; when backward ends, all gradients.
    """
    kept = _kept_on_host(z)
    return kept if z.recipe.optimizer == "device" else 12 * z.shard + max(kept, 4 * z.shard)


def _kept_on_host(z: _Sizes) -> int:
    """All inputs but the last layer's, where backward begins; all outputs and LSEs, one of each kernel."""
    if z.recipe.offload == "none":
        return 0
    inputs = (z.L - 1) * sum(piece_sizes(z.A))
    if z.recipe.offload == "inputs":
        return inputs
    lses = sum(sum(piece_sizes(z.f * z.b * z.s * heads)) for heads in _kernels(z))
    return inputs + z.L * (sum(piece_sizes(z.H * z.h)) + lses)


def _kernels(z: _Sizes) -> list[int]:
    """The heads of each run of a layer's kernel, summed over the Ulysses ranks: UPipe has several runs."""
    if not z.recipe.head_chunk:
        return [z.H]
    plan = schedule(z.H, z.K, z.recipe.ulysses, z.recipe.head_chunk)
    return [plan.ranks * len(run.slots) * len(run.queries) for stage in plan.stages for run in stage]


def _waiting(z: _Sizes, layer: int) -> int:
    """What layers keep for backward when it is in ``layer``: all they need, or their inputs alone.

    On the host they take the device's memory when they are wanted: the layer's own and the next to come, and
    of what the next one's attention made as much again; the layer's own is its attention's.
    """
    # Gated: gate, silu(gate), up and their product. Else: up, and what the activation makes of it.
    mlp = 0 if z.recipe.mlp_tile else (4 if z.matrices == 3 else 2) * z.M
    if not z.recipe.checkpoint:
        return layer * (2 * (_norm_keeps(z) + z.A) + _bytes(_attention_keeps(z)) + mlp)
    if z.recipe.offload == "none":
        return z.A * min(layer + 1, z.L)
    coming = z.A + _attended(z) * (z.recipe.offload == "attention")
    return z.A + coming * (0 < layer < z.L)


def _norm_keeps(z: _Sizes) -> int:
    """Its input if tiled, or of LayerNorm; else it in fp32 and the normalised input; what each token has."""
    if z.recipe.norm_tile:
        return z.A
    return z.A + 8 * z.b * z.s if z.layer_norms else (4 + z.w) * z.b * z.s * z.E + 4 * z.b * z.s


def _attended(z: _Sizes) -> int:
    """What attention makes: output and LSE."""
    return z.H * z.h + z.f * z.b * z.s * z.H


def _kept(z: _Sizes, tile: int | None = None) -> str:
    """The category of what a forward keeps inside a layer, while its backward runs; a tile runs it again."""
    return RECOMPUTED if z.recipe.checkpoint or tile else ACTIVATIONS


def _attention_keeps(z: _Sizes) -> Held:
    """Output and LSE; without UPipe q, k, v too, and the output twice if it is exchanged."""
    attended = {ACTIVATIONS if z.recipe.offload == "attention" else _kept(z): _attended(z)}
    if z.recipe.head_chunk:
        return attended
    # Norms of q and k are never tiled: the heads in fp32, normalised, and the scale of each.
    normed = (z.H + z.K) * z.b * z.s * ((4 + z.w) * z.D + 4) * z.head_norms
    return _plus(attended, {_kept(z): normed + (1 + (z.recipe.ulysses > 1)) * z.H * z.h + 2 * z.sent})


# ---- the backward of each part ---------------------------------------------------------------------------


def _layer(z: _Sizes, layer: int) -> Iterator[tuple[str, Parts]]:
    """A layer's parts, last to first. The residual is dy, then dh; the layer's weight gradients gather."""
    attention, norms, kept = _attention_keeps(z), _norm_keeps(z) + z.A, _kept(z)
    # The layer's input, which waited, is what its first norm keeps; or it came from the host, as all but the
    # last layer's do, and is not kept once the layer has run again.
    same = z.w == 4 or z.layer_norms or z.recipe.norm_tile is not None
    dropped = z.recipe.offload != "none" and layer < z.L - 1
    first = {kept: norms - z.A * (z.recipe.checkpoint and same)}
    gone: Parts = {"inputs": {ACTIVATIONS: -z.A * (z.recipe.checkpoint and dropped and not same)}}
    # What a multiplied residual makes of dh; UPipe holds it until it ends.
    dout = z.A * z.scaled_residual
    upipe, done, projection = bool(z.recipe.head_chunk), z.w * z.mlp, z.w * z.E * z.H * z.D

    def beside(weights: int, residual: int = z.A) -> Parts:
        return {"residual": {ACTIVATION_GRADIENTS: residual}, "gradients in flight": {GRADIENTS: weights}}

    residual = gone | beside(0)
    yield "MLP backward", residual | {"norms": _plus(first, {kept: norms}), "attention": attention} | _mlp(z)
    after = gone | beside(done) | {"norms": _plus(first, _norm(z, kept)), "attention": attention}
    yield "norm backward", after
    # The gradient of the output's projection is there before the kernel runs; in UPipe it is counted inside.
    weights = gone | beside(done + projection * (not upipe), z.A + dout * upipe)
    yield "attention backward", weights | {"norms": first, "attention": _upipe(z) if upipe else _attention(z)}
    # Of the projections, q's is the last: beside its gradient, dx so far and its own part of it.
    every = beside(z.w * z.layer)
    inside = {ACTIVATION_GRADIENTS: z.H * z.h + 2 * z.A, GRADIENTS: projection * z.summed}
    yield "projections backward", gone | every | {"norms": first, "attention": inside}
    yield "first norm backward", every | {"norms": _norm(z, kept)}
    if z.recipe.checkpoint and not z.recipe.head_chunk:
        # Beside what it keeps, q, k and v before the exchange, and the output as it is sent.
        exchanged = z.recipe.ulysses > 1
        keys = z.K * z.h
        more = {TEMPORARY: (1 + exchanged) * z.H * z.h + (2 - exchanged) * keys, kept: exchanged * keys}
        inside = _plus(attention, more)
        yield "attention recomputed", residual | {"norms": first, "attention": inside}


def _norm(z: _Sizes, kept: str) -> Held:
    """Of RMSNorm six tensors in fp32; of a tile, beside the whole input and both gradients.

    Or, if that is more, four as computed with and the input in fp32. LayerNorm has its input, dout and dx; of
    a tile, its output and dx.
    """
    tiled = z.recipe.norm_tile is not None
    elements = z.b * min(z.recipe.norm_tile or z.s, z.s) * z.E
    if z.layer_norms:
        inside = {kept: z.w * elements, ACTIVATION_GRADIENTS: (2 - tiled) * z.w * elements}
    else:
        inside = _wide_norm(z, TEMPORARY if tiled else kept, elements)
    if not tiled:
        return inside
    return _plus(_nested(inside), {kept: z.A, ACTIVATION_GRADIENTS: 2 * z.A})


def _wide_norm(z: _Sizes, kept: str, elements: int) -> Held:
    """The backward of RMSNorm: its input, two gradients and three products, or what is more."""
    wide = max(6 * 4, 4 * z.w + 4)
    gradients = {ACTIVATION_GRADIENTS: (wide - 16) * elements}
    return _plus({kept: 4 * elements}, {TEMPORARY: 12 * elements}, gradients)


def _mlp(z: _Sizes) -> Parts:
    """The higher of two moments, and of a tile, beside it, the whole dx and the sums of the weight gradients.

    Early, six tensors [b, t, I] (where the MLP is not gated three, or five of ReLU squared) and the last
    matrix's weight gradient; late, the gradients of all matrices and one such tensor with dx. A gated MLP has
    two dx; a tile, which keeps its input, also has their sum.
    """
    tile, t, kept = z.recipe.mlp_tile, min(z.recipe.mlp_tile or z.s, z.s), _kept(z, z.recipe.mlp_tile)
    one, x = z.M * t // z.s, z.A * t // z.s
    gated = z.matrices == 3
    tensors = 6 if gated else 5 if z.relu_squared else 3
    # A tile makes its output too. In a tile of several rows, x and dout lie apart, so each is copied.
    out, copies = x * bool(tile), 2 * x * (z.b > 1 and t < z.s)
    # What a multiplied residual makes of dy is there until the last matrix has run, or its last tile.
    dout = z.A * z.scaled_residual
    half, inner = tensors // 2, (2 * one if z.relu_squared else 0)
    early = _highest(
        {kept: (tensors - half) * one - inner, TEMPORARY: inner, ACTIVATION_GRADIENTS: half * one},
        {kept: 3 * one, ACTIVATION_GRADIENTS: (2 * gated) * one + (0 if tile else dout)},
    )
    early = _plus(early, {kept: out + copies, GRADIENTS: z.w * z.mlp // z.matrices})
    if not gated:
        late = {ACTIVATION_GRADIENTS: one + x, kept: out}
    elif tile:
        late = {ACTIVATION_GRADIENTS: max(one, x) + 3 * x}
    else:
        late = {ACTIVATION_GRADIENTS: one + 2 * x}
    highest = _highest(early, _plus(late, {GRADIENTS: z.w * z.mlp}))
    weights = {GRADIENTS: highest.pop(GRADIENTS)}
    if tile:
        highest, weights = _nested(highest), _nested(weights)
    whole = {ACTIVATION_GRADIENTS: (z.A + dout) * bool(tile)}
    sums = _sums(z, z.mlp * bool(tile))
    return {"mlp": _plus(whole, highest), "gradients in flight": _plus(sums, weights)}


def _kernel(z: _Sizes, q: int, k: int) -> int:
    """dq, dk and dv; in a ring also what travels, and wide sums; a ring of two passes nothing on.

    Of keys that come from another rank, all queries meet half, or half the queries meet all. The first dq is
    its own sum if that is not wider.
    """
    wide_q, wide_k = q * z.f // z.w, k * z.f // z.w
    if z.recipe.ring == 1:
        return _call(z, q, k)
    part = max(_call(z, q, k, keys=2), _call(z, q, k, queries=2))
    if z.recipe.ring == 2:
        return wide_q + max(q * (z.f > z.w) + 6 * k + 2 * wide_k, part + 2 * k + 4 * wide_k)
    return wide_q + part + 4 * k + 4 * wide_k


def _call(z: _Sizes, q: int, k: int, *, queries: int = 1, keys: int = 1) -> int:
    """dq, dk and dv of one call of the kernel, with one of so many parts of the queries and of the keys.

    In tiles, the sums of dk and dv and a pair of tiles; at the end, the sums and what is rounded of them.
    """
    dq, dk = q // queries, k // keys
    if z.recipe.attention_tile is None:
        return dq + 2 * dk
    return dq + 2 * dk * z.f // z.w + max(_pair(z, q, k, queries, keys), dk * (z.f > z.w))


def _pair(z: _Sizes, q: int, k: int, queries: int = 1, keys: int = 1) -> int:
    """dq, dk and dv of a pair of tiles, and the sum of dq; ``q`` and ``k`` are bytes of all tokens."""
    tokens = z.s * z.recipe.ulysses
    tile = z.recipe.attention_tile or tokens
    return (min(tile, tokens // queries) * (q + q * z.f // z.w) + min(tile, tokens // keys) * 2 * k) // tokens


def _attention(z: _Sizes) -> Held:
    """In the kernel; or where dout is exchanged; or, when all that is done, in the norm of q."""
    q, exchanged = z.H * z.h, z.recipe.ulysses > 1
    # The output as it went on is of no more use.
    kept = _plus(_attention_keeps(z), {_kept(z): -q * exchanged})
    # A ring makes its gradients of what it sums and passes on; dq is its own sum if that is no wider.
    backward = _kernel(z, q, z.sent)
    made = backward if z.recipe.ring == 1 else q * (z.f == z.w)
    if z.recipe.ring == 1 and z.recipe.attention_tile is not None:
        made = q + 2 * z.sent * (z.f == z.w)
    kernel = _plus(kept, {ACTIVATION_GRADIENTS: q + made, TEMPORARY: backward - made})
    dout = _plus(
        kept, {ACTIVATION_GRADIENTS: 2 * q * exchanged, TEMPORARY: (1 if z.b == 1 else 2) * q * exchanged}
    )
    norm = _plus({ACTIVATION_GRADIENTS: z.A}, _wide_norm(z, _kept(z), q // z.w)) if z.head_norms else {}
    return _highest(kernel, dout, norm)


def _upipe(z: _Sizes) -> Held:
    """A stage of U heads with U_kv in flight, or the end; or in the norms of a stage's heads."""
    chunk = z.recipe.head_chunk or z.H
    plan = schedule(z.H, z.K, z.recipe.ulysses, chunk)
    u, u_kv = chunk * z.h, z.recipe.ulysses * plan.slots_in_flight * z.h
    lasting = any(not run.closes for stage in plan.stages for run in stage)
    sums, home, groups = 2 * u_kv * z.f // z.w * lasting, 2 * z.K * z.h, plan.slots // plan.slots_in_flight
    there, ahead = home * (groups - 1) // groups, 0
    if z.recipe.overlap and z.recipe.ulysses > 1 and len(plan.stages) > 1:
        # Highest where the next stage opens a group, so another is still to come home.
        there, ahead = home * max(groups - 2, 0) // groups, 6 * u + 4 * u_kv * (groups > 1)
    weights = z.w * z.E * z.D * (z.H + 2 * z.K)
    grouped = home // 2 * (groups > 1)
    end = {ACTIVATION_GRADIENTS: z.A, GRADIENTS: weights} if z.A + weights > grouped else {TEMPORARY: grouped}
    end = _plus(end, {TEMPORARY: home})
    heads = max(_kernels(z)) * z.h
    if z.recipe.attention_tile is None or z.recipe.ring > 1:
        stage = 3 * u + 2 * u_kv + sums + _kernel(z, heads, u_kv)
    else:
        # In pairs of tiles all is summed wide; or the output is exchanged; or what a stage made is.
        exchange = (4 if z.recipe.ulysses > 1 else 3) * u + 2 * u_kv + sums
        kernel, sent_back = 3 * u + 2 * u_kv + _pair(z, heads, u_kv), 2 * u + 4 * u_kv
        stage = max(2 * u_kv * z.f // z.w + max(kernel, sent_back), exchange)
    peaks = [{TEMPORARY: stage + there + ahead}, end]
    if z.head_norms:
        # Among them is the input in fp32, which is another tensor if it is not computed with in fp32.
        normed = {TEMPORARY: 2 * u + 2 * u_kv + max(sums, 2 * u_kv) + there + ahead}
        inside = _plus(_nested(_wide_norm(z, RECOMPUTED, u // z.w)), {RECOMPUTED: u * (z.w != 4)})
        peaks.append(_plus(normed, inside))
    return _plus(_attention_keeps(z), {GRADIENTS: z.w * z.E * z.H * z.D}, _highest(*peaks))


def _loss(z: _Sizes) -> Held:
    """Three wide logits; tiled, dx, a tile's logits and dx, the head's gradient of it and the sum of them.

    Where the logits are divided, so is their gradient, into a second tensor.
    """
    if z.recipe.loss_tile is None:
        logits = z.f * z.b * z.s * z.V
        return {ACTIVATIONS: logits, ACTIVATION_GRADIENTS: 2 * logits}
    tile = z.w * min(z.recipe.loss_tile, z.b * z.s)
    kept = {TEMPORARY if z.divided_logits else RECOMPUTED: tile * z.V}
    of_tile = {ACTIVATION_GRADIENTS: tile * (z.V * z.divided_logits + z.E), GRADIENTS: z.w * z.table}
    return _plus(kept, _nested(of_tile), {ACTIVATION_GRADIENTS: z.A}, _sums(z, z.table))


def _sums(z: _Sizes, weights: int) -> Held:
    """The sums of tiles' gradients: the gradients themselves, or wider ones of which they are made."""
    return {GRADIENTS if z.f == z.w else TEMPORARY: z.f * weights}


def _head(z: _Sizes) -> Held:
    """The gradient of whole logits, dx, and a copy of the weight's gradient where it is summed."""
    logits = z.w * z.b * z.s * z.V if z.recipe.loss_tile is None else 0
    return {ACTIVATION_GRADIENTS: logits + z.A, GRADIENTS: z.w * z.table * z.summed}
