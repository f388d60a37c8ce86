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
from typing import Any

from lab import models
from lab.memory.categories import CATEGORIES
from lab.models.lora import Lora
from lab.planning.closed_form_streamed import (
    streamed_forward,
    streamed_host,
    streamed_layer,
    streamed_layers,
)
from lab.planning.closed_form_terms import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTED,
    TEMPORARY,
    Held,
    Parts,
    Sizes,
    accumulates,
    bytes_of,
    experts_keep,
    highest_of,
    inside_mlp,
    kernel_bytes,
    kernel_heads,
    nested,
    part_bytes,
    plus,
    scale_bytes,
    sink_bytes,
    sizes_of,
    weight_sums,
    whole_call,
    wide_norm,
)
from lab.recipe.jobs import Job, make_job
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.host_pieces import piece_sizes
from lab.techniques.loss_blocks import BLOCKS
from lab.techniques.upipe.schedule import schedule


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
        return max(self.moments, key=lambda name: bytes_of(_total(self.moments[name])))

    @property
    def parts(self) -> dict[str, int]:
        """The bytes that the device holds then, by part."""
        return {name: bytes_of(held) for name, held in self.moments[self.moment].items()}

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
    lora: Lora | str | None = None,
    **knobs: Any,
) -> Estimate:
    """The peaks of one step of ``rows`` rows of ``tokens`` tokens, from shapes alone; see ``estimate_job``.

    Raises:
        LabError: a model, recipe or size that cannot work.
    """
    shape = models.shape_of(model)
    job = make_job(model, recipe, tokens=tokens, ranks=ranks, rows=rows, lora=lora, shape=shape, **knobs)
    return estimate_job(shape, job)


def estimate_job(shape: Shape, job: Job) -> Estimate:
    """The peaks of one step of a job; ``shape`` is that of its model.

    For fp32 parameters, gradients and Adam states, and a recipe that ``Recipe.check`` lets pass. What a
    kernel takes inside itself is left out, as by ``plan(..., workspace=False)``. Of several micro-batches
    the first is estimated, whose forward begins without gradients; those after it may hold more.
    """
    z = sizes_of(shape, job)
    return Estimate(_moments(z), host_bytes(z))


def _moments(z: Sizes) -> dict[str, Parts]:
    """Every moment that may be the highest, by name, and what is held then."""
    # A frozen head does not keep its input; tiles do.
    kept = z.A * (not z.adapted or z.recipe.loss_tile is not None)
    norms, head = {"norms": {ACTIVATIONS: _norm_keeps(z) + kept}}, {"gradients": _head_gradient(z, z.w)}
    # The gradient that comes to the last norm was made in forward, if the loss is tiled.
    early = z.A * (z.recipe.loss_tile is not None)
    final = plus(_norm(z, ACTIVATIONS), {ACTIVATIONS: early, ACTIVATION_GRADIENTS: -early})
    loss = "loss backward" if z.recipe.loss_tile is None else "loss"
    highest = {
        loss: _held(z, z.L, norms | {"loss": _loss(z)}),
        "head backward": _held(z, z.L, norms | {"loss": _head(z)} | head),
        "final norm backward": _held(z, z.L, {"norms": final} | head),
        "optimizer": {"model state": plus(_state(z), _reduced(z, z.trained.shard, 4))},
    }
    for i in () if z.recipe.stream else _layers(z):
        highest |= {f"{part}, layer {i}": _held(z, i, held) for part, held in _layer(z, i)}
    if z.recipe.stream:
        forward = {"attention": streamed_forward(z)}
        highest["streamed forward"] = _held(z, z.L, forward, others=1 + (z.n > 1))
    for i in streamed_layers(z) if z.recipe.stream else ():
        highest |= {
            f"{part}, layer {i}": _held(z, i, held, others=others)
            for part, held, others in streamed_layer(z, i)
        }
    # The first layer is gathered while the buffer is there into which the root's parameters came.
    gathered = {PARAMETERS: (1 + (z.n > 1)) * z.w * (z.root + z.of(0).layer) * z.copied}
    highest["first layer gathered"] = {
        "model state": _state(z), "parameters": gathered, "tokens": {ACTIVATIONS: _tokens(z) + z.A}
    }  # fmt: skip
    if z.L > 1 and z.n > 1:
        # Of a layer, too, while the buffer is there into which the parameters of the layer before came.
        gathered = {PARAMETERS: z.w * (z.root + 2 * z.of(z.L - 1).layer + z.of(z.L - 2).layer)}
        highest["last layer gathered"] = {
            "model state": _state(z), "parameters": gathered, "tokens": {ACTIVATIONS: _tokens(z)},
            "inputs": {ACTIVATIONS: _waiting(z, z.L - 1) + z.A * (not z.recipe.checkpoint)},
        }  # fmt: skip
    if z.layers[-1].sparse and not z.recipe.stream:
        highest[f"MLP forward, layer {z.L - 1}"] = _last_mlp_forward(z.of(z.L - 1))
    state = {"model state": _state(z), "gradients": _reduced(z, z.trained_shards(0), z.reduced)}
    # The gradient of a tied embedding is a sum of two.
    table = z.w * z.trained.table
    embedding = {GRADIENTS: (1 + z.summed) * table, TEMPORARY: table * z.tied}
    tables = {"head and embedding": plus(_head_gradient(z, z.w), embedding)}
    whole = {"tokens": {ACTIVATIONS: _tokens(z)}, "parameters": {PARAMETERS: z.w * z.root * z.copied}}
    in_flight = {GRADIENTS: _copy_of_layer_above(z, -1), ACTIVATION_GRADIENTS: 2 * z.A}
    highest["embedding backward"] = state | tables | whole | {"gradients in flight": in_flight}
    if z.copied and not z.adapted:
        highest["root's gradients"] = state | {"gradients in flight": _reducing(z, z.root, z.root_shard)}
    if z.copied:
        for i in _layers(z):
            # The copy of the layer above is gone by then.
            own = z.of(i).trained
            flight = plus(_reducing(z, own.layer, own.layer_shard), {GRADIENTS: -_copy_of_layer_above(z, i)})
            reduced = {"residual": {ACTIVATION_GRADIENTS: z.A}, "gradients in flight": flight}
            highest[f"gradients of layer {i}"] = _held(z, i, reduced, runs=False)
    return highest


def _last_mlp_forward(z: Sizes) -> Parts:
    """The last layer's experts, where their results are summed; or in the product of gate and up.

    The buffer into which the layer's parameters came is there still, because no other layer is gathered.
    Beside what the layer keeps, or its input and the input of its experts, the residual.
    """
    t, keeps = z.s, not z.recipe.checkpoint
    rows = z.chosen * z.A
    summed = {TEMPORARY: rows + z.A * z.f // z.w + z.A}
    if z.recipe.mlp_tile or not keeps:
        t = min(z.recipe.mlp_tile or z.s, z.s)
        rows, one, x = (size * t // z.s for size in (rows, z.M, z.A))
        gated = (4 + 3 * z.clamped) * one
        summed = {TEMPORARY: max(gated, one + rows + x * z.f // z.w + x) + z.A * (t < z.s)}
    own = 3 * z.A
    if keeps:
        own = 2 * _norm_keeps(z) + 3 * z.A + bytes_of(_attention_keeps(z)) + _mlp_keeps(z)
    whole = {PARAMETERS: z.w * (z.root + (1 + (z.n > 1)) * z.layer) * z.copied}
    return {
        "model state": _state(z), "parameters": whole, "tokens": {ACTIVATIONS: _tokens(z)},
        "inputs": {ACTIVATIONS: _waiting(z, z.L - 1)}, "layer": {ACTIVATIONS: own}, "mlp": summed,
    }  # fmt: skip


def _layers(z: Sizes) -> list[int]:
    """The layers in which the step may hold the most.

    From layer to layer fewer inputs wait and more gradients are there, so it is highest at an end; or one
    layer from it, where the parameters of the next and the gradients of the one before are under way too. Of
    those between, it is so for the layers that have the same window, and experts as the layers beside them.
    """
    ends = {z.L - 1, max(z.L - 2, 0), min(1, z.L - 1), 0}
    alike: dict[object, list[int]] = {}
    for i in range(z.L):
        if i not in ends:
            beside = tuple(layer.sparse for layer in z.layers[i - 1 : i + 2])
            alike.setdefault((z.windows[i], beside), []).append(i)
    return sorted(ends | {i for layers in alike.values() for i in (layers[0], layers[-1])})


def _copy_of_layer_above(z: Sizes, layer: int) -> int:
    """The wide copy of the gradients of the layer above, which are summed over ranks meanwhile."""
    return z.f * z.n * z.of(layer + 1).trained.layer_shard * z.copied if layer < z.L - 1 else 0


def _total(parts: Parts) -> Held:
    return plus(*parts.values())


def _reducing(z: Sizes, weights: int, shard: int) -> Held:
    """Gradients as made, and copied wide to be reduced; then that copy, the reduced shard, and it in fp32.

    A group of one rank divides instead, into a third tensor.
    """
    wide = z.f * z.n * shard
    divided = {GRADIENTS: wide, TEMPORARY: 2 * wide}
    reduced = divided if z.n == 1 else {GRADIENTS: wide + (z.f + 4 * (z.f > 4)) * shard}
    return highest_of({GRADIENTS: z.w * weights + wide}, reduced)


def _held(z: Sizes, layer: int, more: Parts, *, runs: bool = True, others: int | None = None) -> Parts:
    """``more``, and what a step holds all along while backward is in ``layer`` (L: it has reached none).

    ``runs`` is False when the layer has run, and its gradients are there. ``others`` is the number of other
    layers whose parameters are whole.

    The root's parameters are whole for the step, and a layer's while it runs; the next one's are gathered
    then, if they are sharded. A layer's gradients are copied wide to be reduced, and that copy lives until
    the layer below makes its own. The head's gradient is whole until the step's end.
    """
    above, head = z.L - 1 - layer, z.w if z.copied else 4
    if others is None:
        others = layer > 0 and z.n > 1
    # Which layers are gathered in forward does not matter, but for their sizes.
    following = z.of(layer - 1).layer if 0 < layer < z.L else max(kind.layer for kind in z.layers)
    whole = z.root + others * following + (z.of(layer).layer if layer < z.L and runs else 0)
    reduced = _reduced(z, z.trained_shards(layer + 1), z.reduced)
    held: Parts = {
        "model state": _state(z),
        "parameters": {PARAMETERS: z.w * whole * z.copied},
        "tokens": {ACTIVATIONS: _tokens(z)},
        "inputs": {ACTIVATIONS: _waiting(z, layer)},
        "gradients": plus(reduced, _head_gradient(z, head * (above >= 0))),
        "gradients in flight": {GRADIENTS: _copy_of_layer_above(z, layer)},
    }
    return {name: plus(held.get(name, {}), more.get(name, {})) for name in held | more}


def _head_gradient(z: Sizes, width: int) -> Held:
    """The gradient of the head's matrix. If it is tied, autograd keeps it until the embedding's is added."""
    tiled = z.recipe.loss_tile is not None and z.f == z.w
    category = (ACTIVATIONS if tiled else ACTIVATION_GRADIENTS) if z.tied else GRADIENTS
    return {category: width * z.trained.table}


def _state(z: Sizes) -> Held:
    """The fp32 parameters, and Adam's two moments of the trained ones; nothing if they are on the host."""
    if z.recipe.optimizer == "host":
        return {}
    return {PARAMETERS: 4 * z.shard, OPTIMIZER: 8 * z.trained.shard}


def _reduced(z: Sizes, weights: int, width: int) -> Held:
    """Gradients that are summed over the ranks, of ``width`` bytes; nothing if they are on the host."""
    return {GRADIENTS: width * weights * (z.recipe.optimizer == "device")}


def _tokens(z: Sizes) -> int:
    """Ids, labels, and positions; cos and sin."""
    return 8 * (2 * z.b + 1) * z.s + 2 * z.w * z.s * z.rotated


def host_bytes(z: Sizes, *, tiles: bool = True) -> int:
    """The most that layers keep on the host; with the optimizer there, its state beside it, or gradients.

    When forward ends, all that layers keep is there, and no gradient; when backward ends, all gradients.
    Without ``tiles``, those of streamed layers are not counted.
    """
    kept = _kept_on_host(z, tiles)
    if z.recipe.optimizer == "device":
        return kept
    return 4 * z.shard + 8 * z.trained.shard + max(kept, 4 * z.trained.shard)


def _kept_on_host(z: Sizes, tiles: bool) -> int:
    """All inputs but the last layer's, where backward begins; all outputs and LSEs, one of each kernel.

    With the optimizer on the host, the gradients of the last layer come while those of the others wait.
    """
    if z.recipe.offload == "none":
        return 0
    if z.recipe.stream:
        return max(in_tiles * tiles + rest for in_tiles, rest in streamed_host(z))
    inputs, attended = (z.L - 1) * sum(piece_sizes(z.A)), 0
    if z.recipe.offload == "attention":
        attended = sum(piece_sizes(z.H * z.h))
        attended += sum(sum(piece_sizes(z.f * z.b * z.s * heads)) for heads in kernel_heads(z))
    grads = 4 * z.trained_shards(z.L - 1) * (z.recipe.optimizer == "host")
    return inputs + max(z.L * attended, (z.L - 1) * attended + grads)


def _waiting(z: Sizes, layer: int) -> int:
    """What layers keep for backward when it is in ``layer``: all they need, or their inputs alone.

    On the host they take the device's memory when they are wanted: the layer's own and the next to come, and
    of what the next one's attention made as much again; the layer's own is its attention's. Of a streamed
    layer nothing waits on the device.
    """
    if z.recipe.stream:
        return 0
    if not z.recipe.checkpoint:
        kept = z.norms * _norm_keeps(z) + _inputs_kept(z)[0] + bytes_of(_attention_keeps(z))
        mlps = sum(_inputs_kept(z.of(i))[1] + _mlp_keeps(z.of(i)) for i in range(layer))
        return layer * kept + mlps - _first_keeps_less(z) * (layer > 0)
    if z.recipe.offload == "none":
        return z.A * min(layer + 1, z.L)
    coming = z.A + _attended(z) * (z.recipe.offload == "attention")
    return z.A + coming * (0 < layer < z.L)


def _inputs_kept(z: Sizes) -> tuple[int, int]:
    """The inputs of attention and of the MLP: a stage and a tile keep them, and so do trained projections."""
    frozen = z.trained.frozen
    attention = z.recipe.head_chunk is not None or not frozen.qkv
    mlp = z.recipe.mlp_tile is not None or not (frozen.gate and frozen.up)
    return z.A * attention, z.A * mlp


def _mlp_keeps(z: Sizes) -> int:
    """Gated: gate, silu(gate), up and their product. Else: up, and what the activation makes of it."""
    if z.recipe.mlp_tile:
        return 0
    if z.sparse:
        return experts_keep(z, z.s)
    tensors = (4 if z.matrices == 3 else 2) - z.trained.frozen.down
    return tensors * z.M + z.w * z.b * z.s * z.trained.low[1]


def _first_keeps_less(z: Sizes) -> int:
    """What the first layer of a frozen model does not keep: its input needs no gradient.

    So what is made of it needs one only behind the first adapter.
    """
    if not z.adapted:
        return 0
    frozen, tiled = z.trained.frozen, z.recipe.mlp_tile is not None
    less = _norm_keeps(z)
    if z.recipe.head_chunk:
        attends = not (frozen.qkv and frozen.output)
        less += (_inputs_kept(z)[0] + bytes_of(_attention_keeps(z))) * (not attends)
    elif frozen.qkv:
        # The output projection keeps its input.
        output = z.H * z.h + z.w * z.b * z.s * z.trained.low[0]
        less += bytes_of(_attention_keeps(z)) - output * (not frozen.output)
    if frozen.qkv and frozen.output:
        # silu(gate) is kept for the gradient of up, and up for that of silu(gate).
        inner = frozen.up + 2 * frozen.gate if z.matrices == 3 else frozen.up
        less += _norm_keeps(z) + inner * z.M * (not tiled)
    return less


def _norm_keeps(z: Sizes) -> int:
    """Its input if tiled, or of LayerNorm; else it in fp32 and the normalised input; what each token has."""
    if z.recipe.norm_tile:
        return z.A
    if z.layer_norms:
        return z.A + 8 * z.b * z.s
    # The scale of a frozen norm has no gradient, so the normalised input is not kept.
    return (4 + scale_bytes(z)) * z.b * z.s * z.E + 4 * z.b * z.s


def _attended(z: Sizes) -> int:
    """What attention makes: output and LSE."""
    return z.H * z.h + z.f * z.b * z.s * z.H


def _kept(z: Sizes) -> str:
    """The category of what a forward keeps inside a layer, while its backward runs."""
    return RECOMPUTED if z.recipe.checkpoint else ACTIVATIONS


def _attention_keeps(z: Sizes) -> Held:
    """Output and LSE; without UPipe q, k, v too, and the output as it is exchanged, for its projection."""
    attended = {ACTIVATIONS if z.recipe.offload == "attention" else _kept(z): _attended(z)}
    if z.recipe.head_chunk:
        effective = z.w * (z.trained.effective_inputs + z.trained.effective_output)
        return plus(attended, {_kept(z): effective})
    # Norms of q and k are never tiled: the heads in fp32, normalised, and the scale of each.
    normed = (z.H + z.K) * z.b * z.s * ((4 + scale_bytes(z)) * z.D + 4) * (z.head_norms != "none")
    normed += z.w * z.b * z.s * z.trained.low[0]
    exchanged = z.recipe.ulysses > 1
    # v is a part of what one projection made of all heads. A copy of joined heads gives its layout to the
    # output, which is copied then.
    whole = (z.H + z.K) * z.h * z.fused_attention * (not exchanged)
    copied = z.H * z.h * (z.joined_heads and not exchanged)
    return plus(attended, {_kept(z): normed + whole + copied + z.H * z.h + _sent_on(z) + 2 * z.sent})


def _sent_on(z: Sizes) -> int:
    """The output of attention as it is exchanged, if its projection keeps it."""
    return z.H * z.h * (z.recipe.ulysses > 1 and not z.trained.frozen.output)


# ---- the backward of each part ---------------------------------------------------------------------------


def _layer(z: Sizes, layer: int) -> Iterator[tuple[str, Parts]]:
    """A layer's parts, last to first. The residual is dy, then dh; the layer's weight gradients gather."""
    z = z.of(layer)
    attention, kept = _attention_keeps(z), _kept(z)
    before, after = _norm_keeps(z) * z.norms_before, _norm_keeps(z) * z.norms_after
    of_attention, of_mlp = _inputs_kept(z)
    window = z.windows[layer]
    # The layer's input, which waited, is what its first norm keeps; or it came from the host, as all but the
    # last layer's do, and is not kept once the layer has run again.
    same = z.w == 4 or z.layer_norms or z.recipe.norm_tile is not None or not z.norms_before
    dropped = z.recipe.offload != "none" and layer < z.L - 1
    first = {kept: before + of_attention - z.A * (z.recipe.checkpoint and same)}
    second = {kept: after + before + of_mlp}
    gone: Parts = {"inputs": {ACTIVATIONS: -z.A * (z.recipe.checkpoint and dropped and not same)}}
    # What a multiplied residual makes of dh; UPipe holds it until it ends.
    dout = z.A * z.branches
    upipe, done, projection = bool(z.recipe.head_chunk), z.w * z.trained.mlp, z.w * z.trained.output

    def beside(weights: int, residual: int = z.A) -> Parts:
        return {"residual": {ACTIVATION_GRADIENTS: residual}, "gradients in flight": {GRADIENTS: weights}}

    residual = gone | beside(0)
    if z.norms_after:
        inside = plus(first, second, _norm(z, kept))
        mlp = {"mlp": {kept: _mlp_keeps(z)}}
        yield "norm after MLP backward", residual | {"norms": inside, "attention": attention} | mlp
    yield "MLP backward", residual | {"norms": plus(first, second), "attention": attention} | _mlp(z)
    if z.norms_before:
        inside = plus(first, {kept: after}, _norm(z, kept))
        yield "norm backward", gone | beside(done) | {"norms": inside, "attention": attention}
    if z.norms_after:
        inside = plus(first, _norm(z, kept))
        yield "norm after attention backward", gone | beside(done) | {"norms": inside, "attention": attention}
    # The gradient of the output's projection is there before the kernel runs; in UPipe it is counted inside.
    weights = gone | beside(done + projection * (not upipe), z.A + dout * upipe)
    inside = _upipe(z, window) if upipe else _attention(z, window)
    yield "attention backward", weights | {"norms": first, "attention": inside}
    # Of the projections, q's is the last: beside its gradient, dx so far and its own part of it.
    every = beside(z.w * z.trained.layer)
    inside = {ACTIVATION_GRADIENTS: z.H * z.h + 2 * z.A, GRADIENTS: projection * z.summed}
    if z.fused_attention:
        # The gradients of q, k and v are summed, each as wide as all of them. Or those of the stages' weights
        # are joined.
        parts = {ACTIVATION_GRADIENTS: 2 * z.qkv + z.H * z.h}
        joined = {ACTIVATION_GRADIENTS: z.A, GRADIENTS: z.w * z.E * z.D * (z.H + 2 * z.K)}
        inside = {ACTIVATION_GRADIENTS: z.qkv + z.A, GRADIENTS: projection * z.summed}
        yield "q, k and v backward", weights | {"norms": first, "attention": {} if upipe else parts}
        inside = joined if upipe else inside
    yield "projections backward", gone | every | {"norms": first, "attention": inside}
    if z.adapted and not z.trained.frozen.output and not upipe:
        # Of the heads' outputs, a gradient through W and one through B @ A, and their sum. What went on of
        # the outputs is gone by then.
        inside = plus(attention, {kept: -_sent_on(z)}, {ACTIVATION_GRADIENTS: 3 * z.H * z.h})
        yield "output projection backward", weights | {"norms": first, "attention": inside}
    if z.norms_before:
        yield "first norm backward", every | {"norms": _norm(z, kept)}
    if z.recipe.checkpoint and not z.recipe.head_chunk:
        # Beside what it keeps, its input, and q, k and v before the exchange.
        exchanged = z.recipe.ulysses > 1
        keys = z.K * z.h
        more = {TEMPORARY: z.H * z.h + (2 - exchanged) * keys, kept: z.A - of_attention + exchanged * keys}
        # The output as it is sent and as it comes.
        sent = {TEMPORARY: 2 * exchanged * z.H * z.h - _sent_on(z)}
        # With an adapter, the output goes through W and through B @ A, and is scaled.
        through = {TEMPORARY: z.A, kept: 2 * z.A} if z.trained.output and z.adapted else sent
        # What a windowed kernel holds forward beside this is less than what it holds in backward.
        inside = plus(attention, more, highest_of(sent, through))
        yield "attention recomputed", residual | {"norms": first, "attention": inside}


def _norm(z: Sizes, kept: str) -> Held:
    """Of RMSNorm six tensors in fp32; of a tile, beside the whole input and both gradients.

    Or, if that is more, four as computed with and the input in fp32. LayerNorm has its input, dout and dx; of
    a tile, its output and dx.
    """
    tiled = z.recipe.norm_tile is not None
    elements = z.b * min(z.recipe.norm_tile or z.s, z.s) * z.E
    if z.layer_norms:
        inside = {kept: z.w * elements, ACTIVATION_GRADIENTS: (2 - tiled) * z.w * elements}
    else:
        inside = wide_norm(z, TEMPORARY if tiled else kept, elements)
    if not tiled:
        return inside
    return plus(nested(inside), {kept: z.A, ACTIVATION_GRADIENTS: 2 * z.A})


def _mlp(z: Sizes) -> Parts:
    """The highest moment inside; of tiles, beside it, the whole dx and the sums of the weight gradients.

    The first tile has no sums beside it, and makes them.
    """
    if z.recipe.mlp_tile is None:
        highest = inside_mlp(z, z.s, {}, _kept(z), None)
        return {"mlp": highest, "gradients in flight": {GRADIENTS: highest.pop(GRADIENTS, 0)}}
    t, sums, summed = min(z.recipe.mlp_tile, z.s), weight_sums(z, z.trained.mlp), z.f == z.w
    made: Held = {} if summed else plus(sums, {GRADIENTS: z.w * z.trained.mlp // z.matrices})
    # Of experts two matrices are one parameter, whose gradient is copied to be summed over ranks.
    copied = {GRADIENTS: z.f * z.trained.mlp * 5 // 3 * (z.summed and z.sparse)}
    moments = [_mlp_tile(z, t, {}), ({}, made), ({}, copied)]
    if t < z.s:
        moments.append(_mlp_tile(z, min(t, z.s - t), sums, added=summed))
    inside, weights = max(moments, key=lambda parts: sum(map(bytes_of, parts)))
    # What a multiplied residual makes of dy is there until the last tile has run.
    whole = {ACTIVATION_GRADIENTS: z.A * (1 + z.branches)}
    return {"mlp": plus(whole, inside), "gradients in flight": weights}


def _mlp_tile(z: Sizes, t: int, sums: Held, *, added: bool = False) -> tuple[Held, Held]:
    """Of a tile of t tokens: what is held inside, and the gradients of weights with the sums of them."""
    # In a tile of several rows, x and dout lie apart, so each is copied.
    copies = {RECOMPUTED: 2 * (z.A * t // z.s) * (z.b > 1 and t < z.s)}
    inside = inside_mlp(z, t, copies, RECOMPUTED, RECOMPUTED, added=added)
    weights = {GRADIENTS: inside.pop(GRADIENTS, 0)}
    # The gradients of the first tile may become the sums.
    become_sums = z.f == z.w and not added
    return nested(inside), plus(sums, weights if become_sums else nested(weights))


def _attention(z: Sizes, window: int | None) -> Held:
    """In the kernel; or where dout is exchanged; or, when all that is done, in the norm of q."""
    q, exchanged = z.H * z.h, z.recipe.ulysses > 1
    # The output as it went on is of no more use.
    kept = plus(_attention_keeps(z), {_kept(z): -_sent_on(z)})
    # A ring makes its gradients of what it sums and passes on; dq is its own sum if that is no wider.
    backward = kernel_bytes(z, q, z.sent, window)
    made = backward if z.recipe.ring == 1 else q * (z.f == z.w)
    if z.recipe.ring == 1 and not whole_call(z, window):
        made = q + 2 * z.sent * (z.f == z.w)
    inside = {ACTIVATION_GRADIENTS: q + made, TEMPORARY: backward - made}
    of_sinks = {ACTIVATION_GRADIENTS: q, TEMPORARY: sink_bytes(z, q)}
    kernel = plus(kept, highest_of(inside, of_sinks))
    dout = plus(
        kept, {ACTIVATION_GRADIENTS: 2 * q * exchanged, TEMPORARY: (1 if z.b == 1 else 2) * q * exchanged}
    )
    norm = plus({ACTIVATION_GRADIENTS: z.A}, wide_norm(z, _kept(z), q // z.w))
    return highest_of(kernel, dout, norm if z.head_norms != "none" else {})


def _upipe(z: Sizes, window: int | None) -> Held:
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
    weights = z.w * (z.trained.effective_inputs if z.adapted else z.E * z.D * (z.H + 2 * z.K))
    output = z.w * (z.trained.effective_output if z.adapted else z.E * z.H * z.D)
    grouped = home // 2 * (groups > 1)
    end = {ACTIVATION_GRADIENTS: z.A, GRADIENTS: weights} if z.A + weights > grouped else {TEMPORARY: grouped}
    end = plus(end, {TEMPORARY: home})
    heads = max(kernel_heads(z)) * z.h
    stage = 3 * u + 2 * u_kv + sums
    if accumulates(z, window):
        # All is summed wide; or the output is exchanged; or what a stage made is.
        part = max(part_bytes(z, heads, u_kv, window), sink_bytes(z, heads))
        kernel, sent_back = 3 * u + 2 * u_kv + part, 2 * u + 4 * u_kv
        exchange = stage + u * (z.recipe.ulysses > 1)
        stage = max(2 * u_kv * z.f // z.w + max(kernel, sent_back), exchange)
    else:
        stage += max(kernel_bytes(z, heads, u_kv, window), sink_bytes(z, heads))
    peaks = [{TEMPORARY: stage + there + ahead}, end]
    if z.head_norms == "all":
        # As many tokens at once that all of their heads are as large as an eighth of a stage.
        inside = plus(nested(wide_norm(z, RECOMPUTED, u // z.w // 8)), {RECOMPUTED: u // 8 * (z.w != 4)})
        peaks.append(plus({TEMPORARY: home}, inside))
    if z.head_norms == "each":
        # Among them is the input in fp32, which is another tensor if it is not computed with in fp32.
        normed = {TEMPORARY: 2 * u + 2 * u_kv + max(sums, 2 * u_kv) + there + ahead}
        inside = plus(nested(wide_norm(z, RECOMPUTED, u // z.w)), {RECOMPUTED: u * (z.w != 4)})
        peaks.append(plus(normed, inside))
    return plus(_attention_keeps(z), {GRADIENTS: output}, highest_of(*peaks))


def _loss(z: Sizes) -> Held:
    """Three wide logits; tiled, dx, a tile's logits and dx, the head's gradient of it and the sum of them.

    Tiles are differentiated in forward, so what outlives it is an activation. Where the logits are divided,
    so is their gradient, into a second tensor.
    """
    if z.recipe.loss_tile is None:
        logits = z.f * z.b * z.s * z.V
        return {ACTIVATIONS: logits, ACTIVATION_GRADIENTS: 2 * logits}
    tile, tokens = min(z.recipe.loss_tile, z.b * z.s), z.b * z.s
    whole = {ACTIVATIONS: z.A}
    logits_of_tile = {TEMPORARY if z.divided_logits else ACTIVATIONS: z.w * tile * z.V}
    of_tile = {TEMPORARY: z.w * tile * (z.V * z.divided_logits + z.E)}
    gradient, summed = {TEMPORARY: z.w * z.trained.table}, _head_sums(z)
    # The wide logits of a block of tokens are gone before the head's backward.
    block = {TEMPORARY: z.f * -(-tile // BLOCKS) * z.V * (z.f != z.w)}
    inside = plus(logits_of_tile, whole, highest_of(plus(of_tile, gradient), block))
    if tile < tokens:
        return plus(inside, summed)
    # One tile has no sum beside it. Its gradient is the sum, or a wide sum is made of it at the end.
    if z.f == z.w:
        return plus(logits_of_tile, whole, highest_of(plus(of_tile, summed), block))
    return plus(logits_of_tile, whole, highest_of(plus(of_tile, gradient, summed), block))


def _head_sums(z: Sizes) -> Held:
    """The sum over tiles of the head's gradient: the gradient itself, or a wider one of which it is made."""
    itself = z.f == z.w and not z.tied
    return {GRADIENTS if itself else ACTIVATIONS: z.f * z.trained.table}


def _head(z: Sizes) -> Held:
    """The gradient of whole logits, dx, and a copy of the weight's gradient where it is summed.

    Tiled, dx, and the wide sum of which the weight's gradient is made.
    """
    copy = {GRADIENTS: z.w * z.trained.table * z.summed}
    if z.recipe.loss_tile is None:
        return plus({ACTIVATION_GRADIENTS: z.w * z.b * z.s * z.V + z.A}, copy)
    return plus({ACTIVATIONS: z.A}, copy if z.f == z.w else _head_sums(z))
