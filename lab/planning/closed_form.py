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
    bare_norm,
    bytes_of,
    centered_norm,
    experts_keep,
    head_norm,
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

    Parameters, gradients and Adam's state are fp32, and ``Recipe.check`` accepts the recipe. The memory that
    a kernel allocates inside is left out, as by ``plan(..., workspace=False)``. Of several micro-batches the
    first one is estimated, whose forward begins without gradients; those after it may hold more.
    """
    z = sizes_of(shape, job)
    return Estimate(_moments(z), host_bytes(z))


def _moments(z: Sizes) -> dict[str, Parts]:
    """Every moment at which the device may hold the most, by name, and what it holds then."""
    # A frozen head does not keep its input, unless the loss is tiled.
    kept = z.A * (not z.adapted or z.recipe.loss_tile is not None)
    norms, head = {"norms": {ACTIVATIONS: _norm_keeps(z) + kept}}, {"gradients": _head_gradient(z, z.w)}
    # If the loss is tiled, the gradient of the last norm's output was computed in forward.
    wide = z.w != 4 and (z.centered_norms or z.bare_norms)
    early = z.A * (z.recipe.loss_tile is not None and not wide)
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
    # While the first layer is gathered, the buffer that received the root's parameters is still held.
    gathered = {PARAMETERS: (1 + (z.n > 1)) * z.w * (z.root + z.of(0).layer) * z.copied}
    highest["first layer gathered"] = {
        "model state": _state(z), "parameters": gathered, "tokens": {ACTIVATIONS: _tokens(z) + z.A}
    }  # fmt: skip
    if z.L > 1 and z.n > 1:
        # While a layer is gathered, the buffer that received the layer before it is still held, too.
        gathered = {PARAMETERS: z.w * (z.root + 2 * z.of(z.L - 1).layer + z.of(z.L - 2).layer)}
        highest["last layer gathered"] = {
            "model state": _state(z), "parameters": gathered, "tokens": {ACTIVATIONS: _tokens(z)},
            "inputs": {ACTIVATIONS: _waiting(z, z.L - 1) + z.A * (not z.recipe.checkpoint)},
        }  # fmt: skip
    if z.layers[-1].sparse and not z.recipe.stream:
        highest[f"MLP forward, layer {z.L - 1}"] = _last_mlp_forward(z.of(z.L - 1))
    rotated = [i for i in range(z.L) if _rotates_wide(z, i)]
    if rotated and not z.recipe.checkpoint:
        highest[f"rotation, layer {rotated[-1]}"] = _rotation_forward(z.of(rotated[-1]), rotated[-1])
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
            # The copy of the gradients of the layer above is freed by then.
            own = z.of(i).trained
            flight = plus(_reducing(z, own.layer, own.layer_shard), {GRADIENTS: -_copy_of_layer_above(z, i)})
            reduced = {"residual": {ACTIVATION_GRADIENTS: z.A}, "gradients in flight": flight}
            highest[f"gradients of layer {i}"] = _held(z, i, reduced, runs=False)
    return highest


def _last_mlp_forward(z: Sizes) -> Parts:
    """The forward of the last layer's experts: where results are summed, or in the product of gate and up.

    The buffer that received the layer's parameters is still held, because no other layer is gathered. Also
    held are the residual and what the layer keeps; or with checkpointing the residual, the layer's input and
    the input of its experts.
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


def _rotates_wide(z: Sizes, layer: int) -> bool:
    """Return whether a layer rotates its heads in fp32. UPipe and streamed layers do not."""
    return z.wide_rotation and z.rotates[layer] and not z.recipe.head_chunk and not z.recipe.stream


def _rotation_forward(z: Sizes, layer: int) -> Parts:
    """The forward of a layer that keeps all, where q and k are rotated in fp32.

    Held are q, k and v, the layer's input, and the embedding's output, if that is another tensor. The buffer
    that received the layer's parameters is still held, or the next layer is gathered.
    """
    whole = {PARAMETERS: z.w * (z.root + (1 + (z.n > 1)) * z.layer) * z.copied}
    own = _norm_keeps(z) + z.A + z.A * (1 + (layer > 0)) * (z.recipe.norm_tile is None)
    return {
        "model state": _state(z), "parameters": whole, "tokens": {ACTIVATIONS: _tokens(z)},
        "inputs": {ACTIVATIONS: _waiting(z, layer)}, "layer": {ACTIVATIONS: own},
        "attention": _rotation(z),
    }  # fmt: skip


def _rotation(z: Sizes) -> Held:
    """q, k and v as projected, q and k in fp32, and where q or then k is rotated, three tensors as large.

    Norms of q and k have run before.
    """
    q, k = _wide_heads(z)
    return {_kept(z): z.qkv + _head_norms_keep(z), TEMPORARY: (q + k) * (z.w != 4) + max(3 * q, q + 3 * k)}


def _wide_heads(z: Sizes) -> tuple[int, int]:
    """The bytes of q and of k in fp32."""
    return 4 * z.b * z.s * z.D * z.H, 4 * z.b * z.s * z.D * z.K


def _layers(z: Sizes) -> list[int]:
    """The layers in whose backward the step may hold the most.

    From layer to layer, fewer inputs are kept and more gradients exist. So the peak is in the first or in the
    last layer, or next to one of them, where the parameters of the next layer and the gradients of the one
    before are in flight too. Layers between them are alike if they have the same window, and if they and
    both of their neighbours have the same kinds of MLP. Of these, the first and the last are enough.
    """
    ends = {z.L - 1, max(z.L - 2, 0), min(1, z.L - 1), 0}
    alike: dict[object, list[int]] = {}
    for i in range(z.L):
        if i not in ends:
            kinds = tuple(layer.sparse for layer in z.layers[i - 1 : i + 2])
            alike.setdefault((z.windows[i], kinds), []).append(i)
    return sorted(ends | {i for layers in alike.values() for i in (layers[0], layers[-1])})


def _copy_of_layer_above(z: Sizes, layer: int) -> int:
    """The gradients of the layer above, copied in the dtype of sums while they are summed over ranks."""
    return z.f * z.n * z.of(layer + 1).trained.layer_shard * z.copied if layer < z.L - 1 else 0


def _total(parts: Parts) -> Held:
    return plus(*parts.values())


def _reducing(z: Sizes, weights: int, shard: int) -> Held:
    """The gradients of a layer or of the root, while they are summed over ranks.

    First, the gradients as they were computed, and their copy in the dtype of sums. Then this copy and the
    reduced shard, in fp64 also the shard in fp32. A group of one rank divides instead, into a third tensor.
    """
    wide = z.f * z.n * shard
    divided = {GRADIENTS: wide, TEMPORARY: 2 * wide}
    reduced = divided if z.n == 1 else {GRADIENTS: wide + (z.f + 4 * (z.f > 4)) * shard}
    return highest_of({GRADIENTS: z.w * weights + wide}, reduced)


def _held(z: Sizes, layer: int, more: Parts, *, runs: bool = True, others: int | None = None) -> Parts:
    """``more``, with what a step holds in addition while backward is in ``layer``.

    If ``layer`` is L, backward has reached no layer yet. ``runs`` is False if the layer has run, so that its
    gradients exist. ``others`` is the number of other layers whose parameters are whole: by default the next
    one, if parameters are sharded.

    The root's parameters are whole during the step, and a layer's while it runs. The gradients of a layer are
    copied in the dtype of sums to be reduced, and the copy is held until the layer below has made its own.
    The head's gradient is whole until the step's end.
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
    """The gradient of the head's matrix. That of a tied head is kept until the embedding's is added."""
    tiled = z.recipe.loss_tile is not None and z.f == z.w
    category = (ACTIVATIONS if tiled else ACTIVATION_GRADIENTS) if z.tied else GRADIENTS
    return {category: width * z.trained.table}


def _state(z: Sizes) -> Held:
    """The fp32 parameters, and Adam's two moments of the trained ones; nothing if they are on the host."""
    if z.recipe.optimizer == "host":
        return {}
    return {PARAMETERS: 4 * z.shard, OPTIMIZER: 8 * z.trained.shard}


def _reduced(z: Sizes, weights: int, width: int) -> Held:
    """Gradients that were summed over ranks, of ``width`` bytes each; nothing if they are on the host."""
    return {GRADIENTS: width * weights * (z.recipe.optimizer == "device")}


def _tokens(z: Sizes) -> int:
    """The token ids, the labels and the positions of a batch, and the cosines and sines."""
    return 8 * (2 * z.b + 1) * z.s + 2 * z.w * z.s * z.rotated


def host_bytes(z: Sizes, *, tiles: bool = True) -> int:
    """The most bytes on the host: what layers keep there, and the model state, if the optimizer is there.

    When forward ends, all that layers keep is on the host, and no gradient. When backward ends, all gradients
    are, and nothing that layers keep. Without ``tiles``, the tiles of streamed layers are not counted.
    """
    kept = _kept_on_host(z, tiles)
    if z.recipe.optimizer == "device":
        return kept
    return 4 * z.shard + 8 * z.trained.shard + max(kept, 4 * z.trained.shard)


def _kept_on_host(z: Sizes, tiles: bool) -> int:
    """What layers keep on the host: the inputs of all layers but the last, and perhaps attention's results.

    The results are the output, and the LSE of each run of the kernel. With the optimizer on the host, the
    gradients of the last layer arrive while the results of the other layers are still there.
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
    """What layers keep on the device when backward is in ``layer``: all they need, or their inputs alone.

    With offload, these are the input of the layer, and the prefetched input of the next one, with the
    prefetched results of its attention. ``_attention_keeps`` counts the results of the layer itself. Streamed
    layers keep nothing on the device.
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
    """The inputs of attention and of the MLP, which UPipe, tiles and trained projections keep.

    In a parallel block both are one tensor.
    """
    frozen = z.trained.frozen
    attention = z.recipe.head_chunk is not None or not frozen.qkv
    mlp = z.recipe.mlp_tile is not None or not (frozen.gate and frozen.up)
    if z.parallel:
        mlp = mlp and not attention
    return z.A * attention, z.A * mlp


def _mlp_keeps(z: Sizes) -> int:
    """A gated MLP keeps gate, silu(gate), up and their product; any other, up and its activation."""
    if z.recipe.mlp_tile:
        return 0
    if z.sparse:
        return experts_keep(z, z.s)
    tensors = (4 if z.matrices == 3 else 2) - z.trained.frozen.down
    return tensors * z.M + z.w * z.b * z.s * z.trained.low[1]


def _first_keeps_less(z: Sizes) -> int:
    """What the first layer of a frozen model keeps less than the others.

    Its input needs no gradient, so only the tensors behind the first adapter need one.
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
    if z.parallel or (frozen.qkv and frozen.output):
        # silu(gate) is kept for the gradient of up, and up for that of silu(gate).
        inner = frozen.up + 2 * frozen.gate if z.matrices == 3 else frozen.up
        less += _norm_keeps(z) * (not z.parallel) + inner * z.M * (not tiled)
    return less


def _norm_keeps(z: Sizes) -> int:
    """What a norm keeps for backward: its input, or in RMSNorm without tiles its input in fp32.

    RMSNorm without tiles also keeps the normalized input. A norm without tiles also keeps one number for each
    token in fp32, or LayerNorm two. LayerNorm in fp32 keeps its input in fp32.
    """
    if z.recipe.norm_tile:
        return z.A
    if z.layer_norms:
        return z.A + 8 * z.b * z.s
    if z.bare_norms:
        return 4 * z.b * z.s * z.E + 8 * z.b * z.s
    # The scale of a frozen norm has no gradient, so the normalized input is not kept. A norm that subtracts
    # the mean keeps the difference twice, and not its input.
    return (4 + 4 * z.centered_norms + scale_bytes(z)) * z.b * z.s * z.E + 4 * z.b * z.s


def _attended(z: Sizes) -> int:
    """The results of attention: the output and the LSE."""
    return z.H * z.h + z.f * z.b * z.s * z.H


def _kept(z: Sizes) -> str:
    """The category of what a forward keeps inside a layer, while its backward runs."""
    return RECOMPUTED if z.recipe.checkpoint else ACTIVATIONS


def _attention_keeps(z: Sizes) -> Held:
    """The output and the LSE; without UPipe also q, k and v, and the exchanged output for its projection."""
    attended = {ACTIVATIONS if z.recipe.offload == "attention" else _kept(z): _attended(z)}
    if z.recipe.head_chunk:
        effective = z.w * (z.trained.effective_inputs + z.trained.effective_output)
        return plus(attended, {_kept(z): effective})
    normed = _head_norms_keep(z) + z.w * z.b * z.s * z.trained.low[0]
    exchanged = z.recipe.ulysses > 1
    # With one projection for q, k and v, v keeps the whole result of it. Joined heads are copies whose layout
    # the output gets, so the output is copied for its projection.
    whole = (z.H + z.K) * z.h * z.fused_attention * (not exchanged)
    copied = z.H * z.h * (z.joined_heads and not exchanged)
    # Where q, k and v are clipped in place, copies of them are kept.
    own = normed + whole + copied + z.qkv * z.clipped
    return plus(attended, {_kept(z): own + z.H * z.h + _sent_on(z) + 2 * z.sent})


def _head_norms_keep(z: Sizes) -> int:
    """What the norms of q and k keep, which are never tiled: the heads in fp32, and the normalized heads.

    In addition, a number for each head; see also ``_norm_keeps``.
    """
    of_head = (4 + 4 * z.centered_norms + scale_bytes(z)) * z.D + 4
    return (z.H + z.K) * z.b * z.s * of_head * (z.head_norms != "none")


def _sent_on(z: Sizes) -> int:
    """The exchanged output of attention, if its projection keeps it."""
    return z.H * z.h * (z.recipe.ulysses > 1 and not z.trained.frozen.output)


# ---- the backward of each part ---------------------------------------------------------------------------


def _layer(z: Sizes, layer: int) -> Iterator[tuple[str, Parts]]:
    """The moments of a layer's backward by name, from its last part to its first, and what is held then.

    ``residual`` is dy, the gradient of the layer's output, and then dh, that of the sum after attention.
    """
    z = z.of(layer)
    attention, kept = _attention_keeps(z), _kept(z)
    before, after = _norm_keeps(z) * z.norms_before, _norm_keeps(z) * z.norms_after
    of_attention, of_mlp = _inputs_kept(z)
    window = z.windows[layer]
    # The kept input of the layer may be the tensor that its first norm keeps (``same``). If it is not, and
    # came from the host, as that of all layers but the last, it is freed when the layer has run again.
    same = z.w == 4 or z.layer_norms or not z.norms_before
    same = z.recipe.norm_tile is not None or (same and not z.centered_norms)
    dropped = z.recipe.offload != "none" and layer < z.L - 1
    first = {kept: before + of_attention - z.A * (z.recipe.checkpoint and same)}
    second = {kept: after + before * (not z.parallel) + of_mlp}
    gone: Parts = {"inputs": {ACTIVATIONS: -z.A * (z.recipe.checkpoint and dropped and not same)}}
    # The gradient of what attention returns, if it is another tensor than dh; UPipe holds it until its end.
    dout = z.A * z.branches
    upipe, done, projection = bool(z.recipe.head_chunk), z.w * z.trained.mlp, z.w * z.trained.output

    def gradients(weights: int, residual: int = z.A) -> Parts:
        return {"residual": {ACTIVATION_GRADIENTS: residual}, "gradients in flight": {GRADIENTS: weights}}

    residual = gone | gradients(0)
    if z.norms_after:
        inside = plus(first, second, _norm(z, kept))
        mlp = {"mlp": {kept: _mlp_keeps(z)}}
        yield "norm after MLP backward", residual | {"norms": inside, "attention": attention} | mlp
    yield "MLP backward", residual | {"norms": plus(first, second), "attention": attention} | _mlp(z)
    if z.norms_before and not z.parallel:
        inside = plus(first, {kept: after}, _norm(z, kept))
        yield "norm backward", gone | gradients(done) | {"norms": inside, "attention": attention}
    if z.norms_after:
        inside = plus(first, _norm(z, kept))
        held = {"norms": inside, "attention": attention}
        yield "norm after attention backward", gone | gradients(done) | held
    # The gradient of the output projection exists before the kernel runs. ``_upipe`` counts it itself. In a
    # parallel block, the MLP's part of the gradient of the norm's output exists too.
    weights = gone | gradients(done + projection * (not upipe), z.A * (1 + z.parallel) + dout * upipe)
    inside = _upipe(z, window) if upipe else _attention(z, window)
    yield "attention backward", weights | {"norms": first, "attention": inside}
    # Of the projections, that of q is the last. Held are the gradient of q, dx so far, and its part of dx;
    # then both of these, and their sum.
    every = gradients(z.w * z.trained.layer)
    inside = {ACTIVATION_GRADIENTS: max(z.H * z.h, z.A) + 2 * z.A, GRADIENTS: projection * z.summed}
    if _rotates_wide(z, layer):
        # dq in fp32, a product of it, and the gradients of the two halves of each pair; dk in fp32, and dv.
        q, k = _wide_heads(z)
        rotation = {
            ACTIVATION_GRADIENTS: 3 * q + k + z.K * z.h, TEMPORARY: q, kept: _head_norms_keep(z)
        }  # fmt: skip
        yield "rotation backward", weights | {"norms": first, "attention": rotation}
    if z.parallel and not upipe:
        # The projection of v is the first, and its part of dx is added to that of the MLP.
        of_v = gradients(done + projection + z.w * z.E * z.K * z.D * (not z.adapted))
        added = {ACTIVATION_GRADIENTS: 3 * z.A + (z.H + z.K) * z.h}
        yield "v backward", gone | of_v | {"norms": first, "attention": added}
    if z.fused_attention:
        # The gradients of q, k and v are summed, each with zeros in the place of the others. Or in UPipe, the
        # gradients of the weights of the stages are joined.
        parts = {ACTIVATION_GRADIENTS: 2 * z.qkv + z.H * z.h}
        joined = {ACTIVATION_GRADIENTS: z.A, GRADIENTS: z.w * z.E * z.D * (z.H + 2 * z.K)}
        inside = {ACTIVATION_GRADIENTS: z.qkv + z.A, GRADIENTS: projection * z.summed}
        yield "q, k and v backward", weights | {"norms": first, "attention": {} if upipe else parts}
        inside = joined if upipe else inside
    yield "projections backward", gone | every | {"norms": first, "attention": inside}
    if z.adapted and not z.trained.frozen.output and not upipe:
        # The outputs of the heads have a gradient through W and one through B @ A, and the sum of both. The
        # exchanged output is freed by then.
        inside = plus(attention, {kept: -_sent_on(z)}, {ACTIVATION_GRADIENTS: 3 * z.H * z.h})
        yield "output projection backward", weights | {"norms": first, "attention": inside}
    if z.norms_before:
        yield "first norm backward", every | {"norms": _norm(z, kept)}
    if z.recipe.checkpoint and _rotates_wide(z, layer):
        inside = plus(_rotation(z), {kept: z.A - of_attention})
        yield "rotation recomputed", gradients(0) | {"norms": first, "attention": inside}
    if z.recipe.checkpoint and not z.recipe.head_chunk:
        # In addition to what attention keeps: its input, and q, k and v before the exchange.
        exchanged = z.recipe.ulysses > 1
        keys = z.K * z.h
        more = {TEMPORARY: z.H * z.h + (2 - exchanged) * keys, kept: z.A - of_attention + exchanged * keys}
        # The output as it is sent and as it comes.
        sent = {TEMPORARY: 2 * exchanged * z.H * z.h - _sent_on(z)}
        # With an adapter, the output goes through W and through B @ A, and is scaled.
        through = {TEMPORARY: z.A, kept: 2 * z.A} if z.trained.output and z.adapted else sent
        # What a windowed kernel holds in addition is less in forward than in backward.
        inside = plus(attention, more, highest_of(sent, through))
        yield "attention recomputed", residual | {"norms": first, "attention": inside}


def _norm(z: Sizes, kept: str) -> Held:
    """The backward of a norm: of RMSNorm, see ``wide_norm``; of LayerNorm, its input, dout and dx.

    With tiles, these are the tensors of one tile, in addition to the whole input and both whole gradients. A
    tile of LayerNorm has its output and dx. Of a norm that subtracts the mean, see ``centered_norm``.
    """
    tiled = z.recipe.norm_tile is not None
    elements = z.b * min(z.recipe.norm_tile or z.s, z.s) * z.E
    if z.layer_norms:
        inside = {kept: z.w * elements, ACTIVATION_GRADIENTS: (2 - tiled) * z.w * elements}
    elif z.bare_norms:
        inside = bare_norm(z, kept, elements, output=tiled)
    elif z.centered_norms and not z.adapted:
        inside = centered_norm(kept, elements)
    else:
        inside = wide_norm(z, TEMPORARY if tiled else kept, elements)
    if not tiled:
        return inside
    return plus(nested(inside), {kept: z.A, ACTIVATION_GRADIENTS: 2 * z.A})


def _mlp(z: Sizes) -> Parts:
    """The highest moment of the backward of an MLP.

    With tiles, there are in addition the whole dx and the sums of the weight gradients. During the first tile
    there are no sums; they are made of its gradients.
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
    # The gradient of the MLP's result, if it is another tensor than dy, is held until the last tile has run.
    whole = {ACTIVATION_GRADIENTS: z.A * (1 + z.branches)}
    return {"mlp": plus(whole, inside), "gradients in flight": weights}


def _mlp_tile(z: Sizes, t: int, sums: Held, *, added: bool = False) -> tuple[Held, Held]:
    """What a tile of t tokens holds: its tensors, and the gradients of weights with their sums."""
    # If a batch has several rows, x and dout of a tile are not contiguous, so each is copied.
    copies = {RECOMPUTED: 2 * (z.A * t // z.s) * (z.b > 1 and t < z.s)}
    inside = inside_mlp(z, t, copies, RECOMPUTED, RECOMPUTED, added=added)
    weights = {GRADIENTS: inside.pop(GRADIENTS, 0)}
    # The gradients of the first tile may become the sums.
    become_sums = z.f == z.w and not added
    return nested(inside), plus(sums, weights if become_sums else nested(weights))


def _attention(z: Sizes, window: int | None) -> Held:
    """The highest moment of attention's backward without UPipe.

    It is in the kernel, or before it for the gradients of the sinks; where dout is exchanged; or at the end,
    in the norm of q.
    """
    q, exchanged = z.H * z.h, z.recipe.ulysses > 1
    # The exchanged output is freed before.
    kept = plus(_attention_keeps(z), {_kept(z): -_sent_on(z)})
    # A ring computes its results from sums, which are temporary; dq is its own sum, if that is not wider.
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
    norm = plus({ACTIVATION_GRADIENTS: z.A}, head_norm(z, _kept(z), q // z.w))
    return highest_of(kernel, dout, norm if z.head_norms != "none" else {})


def _upipe(z: Sizes, window: int | None) -> Held:
    """The highest moment of UPipe's backward: in a stage of U heads, at its end, or in a norm of heads.

    U_kv key/value heads are in flight in a stage; see ``apply_upipe``.
    """
    chunk = z.recipe.head_chunk or z.H
    plan = schedule(z.H, z.K, z.recipe.ulysses, chunk)
    u, u_kv = chunk * z.h, z.recipe.ulysses * plan.slots_in_flight * z.h
    lasting = any(not run.closes for stage in plan.stages for run in stage)
    sums, home, groups = 2 * u_kv * z.f // z.w * lasting, 2 * z.K * z.h, plan.slots // plan.slots_in_flight
    there, ahead = home * (groups - 1) // groups, 0
    if z.recipe.overlap and z.recipe.ulysses > 1 and len(plan.stages) > 1:
        # The peak is where the next stage begins a group, so the dk and dv of one group less are complete.
        there, ahead = home * max(groups - 2, 0) // groups, 6 * u + 4 * u_kv * (groups > 1)
    weights = z.w * (z.trained.effective_inputs if z.adapted else z.E * z.D * (z.H + 2 * z.K))
    output = z.w * (z.trained.effective_output if z.adapted else z.E * z.H * z.D)
    grouped = home // 2 * (groups > 1)
    end = {ACTIVATION_GRADIENTS: z.A, GRADIENTS: weights} if z.A + weights > grouped else {TEMPORARY: grouped}
    end = plus(end, {TEMPORARY: home})
    heads = max(kernel_heads(z)) * z.h
    stage = 3 * u + 2 * u_kv + sums
    if accumulates(z, window):
        # dk and dv are summed in the dtype of sums; or the output or the gradients of a stage are exchanged.
        part = max(part_bytes(z, heads, u_kv, window), sink_bytes(z, heads))
        kernel, sent_back = 3 * u + 2 * u_kv + part, 2 * u + 4 * u_kv
        exchange = stage + u * (z.recipe.ulysses > 1)
        stage = max(2 * u_kv * z.f // z.w + max(kernel, sent_back), exchange)
    else:
        stage += max(kernel_bytes(z, heads, u_kv, window), sink_bytes(z, heads))
    peaks = [{TEMPORARY: stage + there + ahead}, end]
    if z.head_norms == "all":
        # So many tokens are computed at once that all of their heads are as large as an eighth of a stage.
        inside = plus(nested(wide_norm(z, RECOMPUTED, u // z.w // 8)), {RECOMPUTED: u // 8 * (z.w != 4)})
        peaks.append(plus({TEMPORARY: home}, inside))
    if z.head_norms == "own":
        # The queries of a stage are normalized in fp32: they, the difference to their mean, and a product of
        # it; and three numbers for each head. They have not been sent.
        wide = 4 * u // z.w
        made = (2 + (z.w != 4)) * wide + 3 * wide // z.D
        peaks.append({TEMPORARY: 2 * u + max(4 * u_kv, 2 * u_kv + sums) + made + there + ahead})
    if z.head_norms == "each":
        # One of them is the input in fp32, which is another tensor unless the compute dtype is fp32.
        normed = {TEMPORARY: 2 * u + 2 * u_kv + max(sums, 2 * u_kv) + there + ahead}
        inside = plus(nested(wide_norm(z, RECOMPUTED, u // z.w)), {RECOMPUTED: u * (z.w != 4)})
        peaks.append(plus(normed, inside))
    return plus(_attention_keeps(z), {GRADIENTS: output}, highest_of(*peaks))


def _loss(z: Sizes) -> Held:
    """The highest moment of the loss: of its backward, or of its forward, in which tiles are differentiated.

    Without tiles, three tensors of logits in the dtype of sums, and the tanh of logits that are capped. With
    tiles, the whole dx, the logits and dx of a tile, the head's gradient of the tile, and its sum over tiles.
    What outlives forward is an activation. If the logits are divided, their gradient is divided into a second
    tensor. If they are capped, a block has the tanh of its logits too.
    """
    if z.recipe.loss_tile is None:
        logits = z.f * z.b * z.s * z.V
        tanh = z.w * z.b * z.s * z.V * z.capped_logits
        return {ACTIVATIONS: logits + tanh, ACTIVATION_GRADIENTS: 2 * logits}
    tile, tokens = min(z.recipe.loss_tile, z.b * z.s), z.b * z.s
    whole = {ACTIVATIONS: z.A}
    logits_of_tile = {TEMPORARY if z.scaled_logits else ACTIVATIONS: z.w * tile * z.V}
    of_tile = {TEMPORARY: z.w * tile * (z.V * z.scaled_logits + z.E)}
    gradient, summed = {TEMPORARY: z.w * z.trained.table}, _head_sums(z)
    # The logits of a block in the dtype of sums are freed before the head's backward.
    block = {TEMPORARY: z.f * -(-tile // BLOCKS) * z.V * ((z.f != z.w) + z.capped_logits)}
    inside = plus(logits_of_tile, whole, highest_of(plus(of_tile, gradient), block))
    if tile < tokens:
        return plus(inside, summed)
    # With one tile, its gradient is the sum, or a wide sum is made of it at the end.
    if z.f == z.w:
        return plus(logits_of_tile, whole, highest_of(plus(of_tile, summed), block))
    return plus(logits_of_tile, whole, highest_of(plus(of_tile, gradient, summed), block))


def _head_sums(z: Sizes) -> Held:
    """The sum over tiles of the head's gradient: the gradient itself, or a wider one of which it is made."""
    itself = z.f == z.w and not z.tied
    return {GRADIENTS if itself else ACTIVATIONS: z.f * z.trained.table}


def _head(z: Sizes) -> Held:
    """The backward of the head: the gradient of the logits, dx, and a copy of the weight's gradient.

    With a tiled loss, dx, and the wide sum that the weight's gradient is made of.
    """
    copy = {GRADIENTS: z.w * z.trained.table * z.summed}
    if z.recipe.loss_tile is None:
        return plus({ACTIVATION_GRADIENTS: z.w * z.b * z.s * z.V + z.A}, copy)
    return plus({ACTIVATIONS: z.A}, copy if z.f == z.w else _head_sums(z))
