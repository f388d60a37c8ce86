"""The closed form of a streamed layer: its moments on the device, and its tensors on the host.

The head of a layer computes q, k and v, its tail all that follows attention; see ``apply_streaming``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lab.planning.closed_form_terms import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    RECOMPUTED,
    TEMPORARY,
    Held,
    Parts,
    Sizes,
    accumulates,
    bare_norm,
    centered_norm,
    forward_bytes,
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
    weight_sums,
    wide_norm,
)
from lab.techniques.host_pieces import piece_sizes
from lab.techniques.upipe.schedule import Schedule, schedule


def streamed_forward(z: Sizes) -> Held:
    """A layer's forward: its input and the output of the embedding on the device, and attention in a stage.

    With adapters, a tile of the tail may hold more: an inner tensor is computed by W and by B @ A, and the
    latter is scaled.
    """
    inputs, tile = {ACTIVATIONS: z.A * min(2, z.L)}, _tiles(z)[0]
    inner = z.M * tile.t // z.s
    made = {ACTIVATIONS: z.A + 3 * inner + tile.x, TEMPORARY: inner + 3 * tile.x}
    stage = highest_of(*(_attention_forward(z, window, in_tiles=False) for window in set(z.windows)))
    return plus(inputs, highest_of(stage, made) if z.adapted else stage)


def streamed_layers(z: Sizes) -> list[int]:
    """The layers in which the step may hold the most.

    The lower a layer, the more gradients are there. So of the layers that run a segment again, and of those
    that do not, with a layer below or none, the lowest with each window is enough.
    """
    lowest = {}
    for layer in reversed(range(z.L)):
        kinds = z.layers[max(layer - 1, 0) : layer + 2]
        alike = (z.windows[layer], *(kind.sparse for kind in kinds))
        lowest[alike, _begins(z, layer), layer % z.recipe.segment > 0, layer > 0] = layer
    return sorted(lowest.values())


def _begins(z: Sizes, layer: int) -> bool:
    """Return whether this layer is the last one of a segment. The segment runs again before its backward."""
    return layer == z.L - 1 or layer % z.recipe.segment == z.recipe.segment - 1


def streamed_layer(z: Sizes, layer: int) -> Iterator[tuple[str, Parts, int]]:
    """The moments of a layer's backward: the name, what is held, and how many other layers are gathered.

    dx is written over dy.
    """
    place, others = layer % z.recipe.segment, int(layer > 0 and z.n > 1)
    begins, window, z = _begins(z, layer), z.windows[layer], z.of(layer)
    dy: Parts = {"residual": {ACTIVATION_GRADIENTS: z.A}}
    if begins and place:
        # The layer below was gathered in advance, but has run again since, and its parameters were freed.
        # While it ran, less was held than in its backward.
        others = 0
    if begins and z.recipe.offload != "attention":
        yield "attention again", dy | {"attention": _attention_forward(z, window)}, others
    made = ACTIVATION_GRADIENTS if z.summed else GRADIENTS
    done: Held = {made: z.w * z.trained.tail}
    yield "tail backward", dy | _tail_backward(z, made), others
    yield "attention backward", dy | {"attention": _stages(z, window), "gradients in flight": done}, others
    yield "head backward", dy | _head_backward(z, made) | {"gradients in flight": done}, others


# ---- tiles -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """The sizes of a tile's tensors.

    Attributes:
        t: The number of tokens.
        before: The number of tiles that ran before this one.
        elements: The elements of its input.
        x: The bytes of its input.
        q: The bytes of all query heads.
        k: The bytes of all key heads.
        sent: The bytes of one copy to the host: the outputs of a stage.
    """

    t: int
    before: int
    elements: int
    x: int
    q: int
    k: int
    sent: int


def _tiles(z: Sizes) -> list[_Tile]:
    """The first three tiles. The last one may be shorter, and during the first there are no gradient sums."""
    tile, stages = z.recipe.stream or z.s, len(_schedule(z).stages)
    tiles = []
    for before, start in enumerate(range(0, z.s, tile)[:3]):
        t = min(tile, z.s - start)
        q, elements = z.H * z.h * t // z.s, z.b * t * z.E
        tiles.append(_Tile(t, before, elements, z.w * elements, q, z.K * z.h * t // z.s, sent=q // stages))
    return tiles


def _buffers(z: Sizes, of_tile: int) -> Held:
    """The buffers into which tiles come from the host: one is filled while another is computed with."""
    return {ACTIVATIONS: of_tile * min(2, len(_tiles(z)))}


def _sums(z: Sizes, weights: int, made: str) -> Held:
    """The sums over tiles of weight gradients. If they are not wider, they become the gradients: ``made``."""
    return {made if name == GRADIENTS else name: size for name, size in weight_sums(z, weights).items()}


def _tail_backward(z: Sizes, made: str) -> Parts:
    """The tail of a tile runs forward and is differentiated: the highest moment of any tile.

    In addition there are the joined outputs of the heads, and the copies to the host that may be in flight.
    """
    first, weights, peaks = _tiles(z)[0], z.trained.tail, list[Held]()
    stages = first.q // first.sent
    sums = _sums(z, weights, made)
    for tile in _tiles(z):
        x, q, under_way = tile.x, tile.q, min(2, stages * tile.before)
        earlier, new = (sums, {}) if tile.before else ({}, sums)
        # When a tile has been differentiated: y, and the gradients of x and of the heads.
        ends = {TEMPORARY: 2 * x + q + z.w * weights}
        keeps = _norm_keeps(z, tile)
        before = plus(keeps if z.norms_before else {}, {RECOMPUTED: x})
        after = keeps if z.norms_after else {}
        norm, done = _norm_backward(z, tile), {TEMPORARY: x + z.w * z.trained.mlp}
        moments = [
            plus(before, after, nested(inside_mlp(z, tile.t, {}, RECOMPUTED, TEMPORARY))),
            plus(ends, {TEMPORARY: x * z.branches}),
            plus(ends, new),
            plus({TEMPORARY: x + q + tile.sent}, new),
        ]
        if z.norms_before:
            moments.append(plus(after, norm, done))
        if z.norms_after:
            mlp = {RECOMPUTED: (4 if z.matrices == 3 else 2) * z.M * tile.t // z.s}
            moments += [plus(before, after, mlp, norm), plus(norm, done)]
        joined = {TEMPORARY: q + under_way * first.sent}
        peaks.append(plus(earlier, joined, highest_of(*moments)))
    return {"tiles": _buffers(z, first.x + first.q), "tail": highest_of(*peaks)}


def _head_backward(z: Sizes, made: str) -> Parts:
    """The head of a tile runs forward and is differentiated: the highest moment of any tile.

    In addition there are the joined gradients of q, k and v.
    """
    first, weights, peaks = _tiles(z)[0], z.trained.layer - z.trained.tail, list[Held]()
    qkv = first.q + 2 * first.k
    sums = _sums(z, weights, made)
    # What the norm keeps of its input may be the tile itself, which is in its buffer.
    buffered = z.layer_norms or (z.w == 4 and not z.centered_norms)
    keys = 2 * z.w * z.E * z.K * z.D * (not z.adapted and not z.fused_attention)
    for tile in _tiles(z):
        x, q, k = tile.x, tile.q, tile.k
        # The gradients of q, k and v are concatenated into one; or the gradient of k is held while that of q
        # passes its norm.
        last = q + 2 * k if z.fused_attention else q * (z.head_norms != "none" or z.clipped)
        dx = x if z.fused_attention else 3 * x
        earlier, new = (sums, {}) if tile.before else ({}, sums)
        # What is clipped is kept for backward, and the outputs are other tensors.
        outputs, own = {TEMPORARY if z.clipped else RECOMPUTED: q + 2 * k}, {TEMPORARY: -x * buffered}
        keeps = plus(_norm_keeps(z, tile) if z.norms_before else {}, own, outputs)
        moments = [
            # The gradients of the tile before are held until those of this one are joined and rotated.
            {TEMPORARY: qkv * (tile.before > 0) + q // 2},
            # Of the projections, q's is the last. Two gradients of the norm's output, and their sum.
            plus(keeps, {RECOMPUTED: x, TEMPORARY: dx + keys + last}),
            # While its weight's gradient is computed, two of them, or one of one projection.
            plus(keeps, {TEMPORARY: max(dx, (2 - z.fused_attention) * x + last) + z.w * weights}),
            plus(_norm_backward(z, tile), own, outputs, {TEMPORARY: z.w * weights}),
            plus(outputs, {TEMPORARY: x + z.w * weights}, new),
        ]
        if z.clipped:
            # The gradient of q is the last that is masked, by two masks.
            masked = {RECOMPUTED: x + q, TEMPORARY: q + 2 * k + 2 * q // z.w}
            moments.append(plus(keeps, masked))
        if z.adapted:
            # In forward, q by W and by B @ A, and the latter scaled, before k and v are computed.
            moments.append(plus(_norm_keeps(z, tile), own, {RECOMPUTED: x + 2 * q, TEMPORARY: q}))
        if z.head_norms != "none":
            normed = plus(keeps, {RECOMPUTED: x})
            of_keys, of_queries = (nested(head_norm(z, RECOMPUTED, part // z.w)) for part in (k, q))
            kept_queries = (4 + 4 * z.centered_norms + scale_bytes(z)) * (q // z.w)
            moments.append(plus(normed, of_keys, {RECOMPUTED: kept_queries}))
            moments.append(plus(normed, of_queries, {TEMPORARY: k}))
        peaks.append(plus(earlier, {TEMPORARY: q + 2 * k}, highest_of(*moments)))
    return {"tiles": _buffers(z, first.x + qkv), "head": plus(highest_of(*peaks), _effective(z))}


def _norm_keeps(z: Sizes, tile: _Tile) -> Held:
    """What a norm keeps: its input, which RMSNorm converts to fp32; of RMSNorm also the normalized input.

    A norm that subtracts the mean keeps the difference twice, in place of its input.
    """
    if z.layer_norms:
        return {TEMPORARY: tile.x, RECOMPUTED: 8 * z.b * tile.t}
    if z.bare_norms:
        return plus(
            {TEMPORARY if z.w == 4 else RECOMPUTED: 4 * tile.elements}, {RECOMPUTED: 8 * z.b * tile.t}
        )
    scales = scale_bytes(z) * tile.elements + 4 * z.b * tile.t
    if z.centered_norms:
        return {RECOMPUTED: 8 * tile.elements + scales}
    return plus({TEMPORARY if z.w == 4 else RECOMPUTED: 4 * tile.elements}, {RECOMPUTED: scales})


def _norm_backward(z: Sizes, tile: _Tile) -> Held:
    """The backward of a norm: of LayerNorm its input, dout and dx; of RMSNorm see ``wide_norm``."""
    if z.layer_norms:
        return {TEMPORARY: 3 * tile.x}
    if z.bare_norms:
        return nested(bare_norm(z, TEMPORARY if z.w == 4 else RECOMPUTED, tile.elements, output=False))
    if z.centered_norms and not z.adapted:
        return nested(centered_norm(RECOMPUTED, tile.elements))
    kept = TEMPORARY if z.w == 4 and not z.centered_norms else RECOMPUTED
    return nested(wide_norm(z, kept, tile.elements))


def _norm_forward(z: Sizes, tile: _Tile) -> int:
    """The forward of a norm: two fp32 tensors; or one, and the normalized input and the output in w bytes.

    A norm that subtracts the mean has two beside its input in fp32, which may be a copy. LayerNorm in fp32
    has its output, and perhaps a copy of its input or the rounded output.
    """
    if z.bare_norms:
        return (4 if z.w == 4 else max(8, 4 + z.w)) * tile.elements
    copied = 4 * tile.elements * (z.centered_norms and z.w != 4)
    return max(8 * tile.elements + copied, 4 * tile.elements + 2 * tile.x)


# ---- stages ----------------------------------------------------------------------------------------------


def _schedule(z: Sizes) -> Schedule:
    return schedule(z.H, z.K, z.recipe.ulysses, z.recipe.head_chunk or z.H)


def _overlaps(z: Sizes) -> bool:
    return z.recipe.overlap and z.recipe.ulysses > 1 and len(_schedule(z).stages) > 1


def _stage_sizes(z: Sizes) -> tuple[int, int]:
    """The bytes of U heads and of U_kv."""
    plan = _schedule(z)
    return plan.chunk * z.h, z.recipe.ulysses * plan.slots_in_flight * z.h


def _stages(z: Sizes, window: int | None) -> Held:
    """The highest moment of attention's backward in a stage.

    It is in the kernel; or where q, k and v of a tile are computed; or where dout and the output are
    exchanged, if the kernel computes in tiles.
    """
    plan, (u, u_kv), first = _schedule(z), _stage_sizes(z), _tiles(z)[0]
    lasting = any(not run.closes for stage in plan.stages for run in stage)
    sums = 2 * u_kv * z.f // z.w * lasting
    # The next stage's q, k, v, dout and out, if it has keys of its own, as computed and as received.
    ahead = (6 * u + 4 * u_kv * (plan.slots > plan.slots_in_flight)) * _overlaps(z)
    stage, heads = 3 * u + 2 * u_kv + ahead, max(kernel_heads(z))
    lse = {ACTIVATIONS: z.f * z.b * z.s * heads}
    if accumulates(z, window):
        # dk and dv are summed in the accumulation dtype; then the gradients of a stage are exchanged.
        part = max(part_bytes(z, heads * z.h, u_kv, window), sink_bytes(z, heads * z.h))
        inside = 2 * u_kv * z.f // z.w + max(part, 2 * u_kv - u)
    else:
        inside = sums + max(kernel_bytes(z, heads * z.h, u_kv, window), sink_bytes(z, heads * z.h))
    kernel, exchange = plus(lse, {TEMPORARY: stage + inside}), stage + u * (z.recipe.ulysses > 1) + sums
    # A stage that computes its keys and values has no sums yet.
    computed = stage + sums if ahead else 2 * u + max(4 * u_kv, 2 * u_kv + sums)
    tile = plus(_buffers(z, first.x), {TEMPORARY: computed + _norm_forward(z, first)})
    return plus(highest_of(kernel, {TEMPORARY: exchange}, tile), _effective(z))


def _attention_forward(z: Sizes, window: int | None, *, in_tiles: bool = True) -> Held:
    """The highest moment of a stage in forward: in the kernel, or where q, k and v of a tile are computed.

    The LSEs of all stages are held to the end of attention. Tiles of the input come from the host
    (``in_tiles``), or are slices of an input on the device.
    """
    (u, u_kv), first, lse = _stage_sizes(z), _tiles(z)[0], z.f * z.b * z.s
    heads, qkv = max(kernel_heads(z)), u + 2 * u_kv
    ahead = 2 * qkv * _overlaps(z)
    ring = (heads * z.h * z.f // z.w + 4 * u_kv + 3 * heads * lse) * (z.recipe.ring > 1)
    windowed = forward_bytes(z, heads * z.h, u_kv, window)
    kernel = {TEMPORARY: qkv + ahead + lse * z.H + heads * z.h + ring + windowed}
    computed = 2 * qkv + ahead + lse * (z.H - _schedule(z).chunk) + _norm_forward(z, first)
    tile = plus(_buffers(z, first.x * in_tiles), {TEMPORARY: computed})
    return plus(highest_of(kernel, tile), _effective(z))


def _effective(z: Sizes) -> Held:
    """The weights of the projections with adapters, for a pass of the stages."""
    return {TEMPORARY: z.w * z.trained.effective_inputs}


# ---- host ------------------------------------------------------------------------------------------------


def streamed_host(z: Sizes) -> Iterator[tuple[int, int]]:
    """What layers have on the host when the backward of a segment's last layer runs: the tiles, and the rest.

    The tiles are the inputs of the segments up to this one and of its layers, the outputs of the heads of its
    layers (of all layers up to it, if they are kept), and the gradients in that backward. The rest are the
    LSEs, and with the optimizer on the host the gradients of the weights of the layers above.
    """
    k, kept = z.recipe.segment, z.recipe.offload == "attention"
    plan = _schedule(z)
    outputs = len(plan.stages) * _pages(plan.chunk * z.h)
    lses = sum(_pages(z.f * z.b * z.s * heads) for heads in kernel_heads(z))
    grads, on_host = _head_gradients(z, plan), z.recipe.optimizer == "host"
    for number, first in enumerate(range(0, z.L, k), start=1):
        length = min(k, z.L - first)
        layers = first * kept + length
        tiles = (number + length - 1) * _pages(z.A) + layers * outputs + grads
        yield tiles, layers * lses + 4 * z.trained_shards(first + length) * on_host


def _head_gradients(z: Sizes, plan: Schedule) -> int:
    """The most bytes of gradients of the heads. A stage frees those of its outputs, and adds dk and dv."""
    stages, made, of_stage = len(plan.stages), 0, _pages(plan.chunk * z.h)
    most = stages * of_stage
    for number, runs in enumerate(plan.stages, start=1):
        made += sum(
            2 * _pages(z.h * len(run.slots) * plan.ranks // plan.replicas) for run in runs if run.closes
        )
        most = max(most, max(stages - number - _overlaps(z), 0) * of_stage + made)
    return most


def _pages(nbytes: int) -> int:
    return sum(piece_sizes(nbytes))
