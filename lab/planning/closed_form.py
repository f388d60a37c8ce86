"""The closed-form estimate: what a training step holds at its highest moments, in the method's letters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

from lab import models
from lab.recipe.jobs import Job, make_job
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.host_pieces import piece_sizes
from lab.techniques.upipe.schedule import schedule

WIDTHS = {None: 4, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element by compute dtype; None computes in the parameters' own, fp32."""

Parts = dict[str, int]
"""Device bytes of one rank at one moment, by what they are."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Attributes:
        moments: Every moment at which the device may hold the most, by name, and what it holds then.
        host_peak: The most bytes that the host holds.
    """

    moments: dict[str, Parts]
    host_peak: int

    @property
    def moment(self) -> str:
        """When the device holds the most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> Parts:
        """What the device holds then."""
        return self.moments[self.moment]

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
    highest = {
        "loss backward": _held(z, z.L, {"norms": _norm_keeps(z) + z.A, "loss": _loss(z)}),
        "final norm backward": _held(z, z.L, {"norms": _norm(z), "gradients": z.w * z.table}),
        "optimizer": {"model state": 16 * z.model // z.n},
    }
    # From layer to layer fewer inputs wait and more gradients are there, so it is highest at an end; or one
    # layer from it, where the parameters of the next and the gradients of the one before are under way too.
    for i in {z.L - 1, max(z.L - 2, 0), min(1, z.L - 1), 0}:
        highest |= {f"{part}, layer {i}": _held(z, i, held) for part, held in _layer(z)}
    if z.copied:
        state = {"model state": 12 * z.model // z.n, "gradients": 4 * z.L * z.layer // z.n}
        # The gradient of a tied embedding is a sum of two.
        tables = {"parameters": z.w * z.root, "head and embedding": (3 if z.tied else 2) * z.w * z.table}
        highest["embedding backward"] = state | tables | {"gradients in flight": z.f * z.layer + 2 * z.A}
        # Made, and copied wide to be reduced; then that copy with the reduced shard, and the shard divided.
        copies = z.root * max(z.w + z.f, z.f + 2 * z.f // z.n)
        highest["root's gradients"] = state | {"gradients in flight": copies}
    return highest


# ---- the letters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """The letters: tensors of one rank's b*s tokens in bytes, weights of the whole model in elements.

    w bytes an element as computed with, f an element of a sum; ``n`` ranks share a parameter; ``copied``:
    parameters are cast or gathered, so modules work on a copy of them. M is one tensor inside the MLP, h one
    head, ``sent`` all keys as exchanged (where K < C, each to C/K ranks), ``table`` the embedding, ``root``
    all outside the layers, ``matrices`` those of an MLP. ``head_norms``: q and k are normed.
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
    copied: bool
    tied: bool
    head_norms: bool
    A: int
    M: int
    h: int
    mlp: int
    matrices: int
    layer: int
    table: int
    root: int
    model: int
    sent: int


def _sizes(shape: Shape, job: Job) -> _Sizes:
    recipe, ranks = job.recipe, job.ranks
    degree, w = recipe.ulysses * recipe.ring, WIDTHS[recipe.compute_dtype]
    L, E, H, K, D, V = shape.L, shape.E, shape.H, shape.K, shape.D, shape.V
    tied, head_norms = shape.tied, shape.head_norms
    padded = lcm(degree, 2 * recipe.ring if recipe.ring > 1 else 1)
    b, s = -(-job.rows * degree // ranks), -(-job.tokens // padded) * padded // degree
    token, mlp = w * b * s, shape.matrices * E * shape.I
    layer, root = 2 * E * D * (H + K) + mlp + 2 * E + 2 * D * head_norms, V * E * (2 - tied) + E
    return _Sizes(
        recipe, L, E, H, K, D, V, b, s, w, f=max(w, 4), n=ranks if recipe.fsdp else 1,
        copied=recipe.fsdp or recipe.compute_dtype is not None, tied=tied, head_norms=head_norms,
        A=token * E, M=token * shape.I, h=token * D, mlp=mlp, matrices=shape.matrices,
        layer=layer, table=V * E, root=root, model=L * layer + root, sent=token * D * max(K, recipe.ulysses),
    )  # fmt: skip


def _held(z: _Sizes, layer: int, more: Parts) -> Parts:
    """``more``, and what a step holds all along while backward is in ``layer`` (L: it has reached none).

    The root's parameters are whole for the step, a layer's while it runs, and the next one's are gathered
    then; its gradients are copied wide to be reduced, and that copy lives until the layer below makes its
    own. The head's gradient is whole until the step's end.
    """
    above = z.L - 1 - layer
    whole = z.root + z.layer * (2 if 0 < layer < z.L else 1)
    held = {
        "model state": 12 * z.model // z.n,
        "parameters": z.w * whole * z.copied,
        "tokens": 8 * (2 * z.b + 1) * z.s + 2 * z.w * z.s * z.D,  # ids, labels, positions; cos and sin
        "inputs": _waiting(z, layer),
        "gradients": 4 * max(above, 0) * z.layer // z.n + (z.w if z.copied else 4) * z.table * (above >= 0),
        "gradients in flight": z.f * z.layer * (above > 0 and z.copied),
    }
    return {name: held.get(name, 0) + more.get(name, 0) for name in held | more}


def _host(z: _Sizes) -> int:
    """All inputs but the last layer's, where backward begins; all outputs and LSEs, one a UPipe stage."""
    if z.recipe.offload == "none":
        return 0
    inputs = (z.L - 1) * sum(piece_sizes(z.A))
    if z.recipe.offload == "inputs":
        return inputs
    stages = z.H // (z.recipe.head_chunk or z.H)
    lse = sum(piece_sizes(z.f * z.b * z.s * z.H // stages))
    return inputs + z.L * (sum(piece_sizes(z.H * z.h)) + stages * lse)


def _waiting(z: _Sizes, layer: int) -> int:
    """What layers keep for backward when it is in ``layer``: all they need, or their inputs alone.

    On the host they take the device's memory when they are wanted: the layer's own and the next to come, and
    of what the next one's attention made as much again; the layer's own is its attention's.
    """
    # Gated: gate, silu(gate), up and their product. Else: up, and what the activation makes of it.
    mlp = 0 if z.recipe.mlp_tile else (4 if z.matrices == 3 else 2) * z.M
    if not z.recipe.checkpoint:
        return layer * (2 * (_norm_keeps(z) + z.A) + _attention_keeps(z) + mlp)
    if z.recipe.offload == "none":
        return z.A * min(layer + 1, z.L)
    coming = z.A + _attended(z) * (z.recipe.offload == "attention")
    return z.A + coming * (0 < layer < z.L)


def _norm_keeps(z: _Sizes) -> int:
    """Its input if tiled; else a wide copy of it and the normalised input, and the scale of each token."""
    return z.A if z.recipe.norm_tile else (z.f + z.w) * z.b * z.s * z.E + z.f * z.b * z.s


def _attended(z: _Sizes) -> int:
    """What attention makes: output and LSE."""
    return z.H * z.h + z.f * z.b * z.s * z.H


def _attention_keeps(z: _Sizes) -> int:
    """Output and LSE; without UPipe q, k, v too, and the output twice if it is exchanged."""
    kept = _attended(z)
    if z.recipe.head_chunk:
        return kept
    # Norms of q and k are never tiled: a wide copy and the normalised heads.
    kept += (z.H + z.K) * z.h * (z.f + z.w) // z.w * z.head_norms
    return kept + (1 + (z.recipe.ulysses > 1)) * z.H * z.h + 2 * z.sent


# ---- the backward of each part ---------------------------------------------------------------------------


def _layer(z: _Sizes) -> Iterator[tuple[str, Parts]]:
    """A layer's parts, last to first. The residual is dy, then dh; the layer's weight gradients gather."""
    attention, norms = _attention_keeps(z), _norm_keeps(z) + z.A
    # The layer's input, which waited, is kept by its first norm too, or not kept once it has run again.
    first = norms - z.A * z.recipe.checkpoint
    weights = {"residual": z.A, "gradients in flight": z.w * z.mlp}
    yield "MLP backward", {"residual": z.A, "norms": first + norms, "attention": attention} | _mlp(z)
    yield "norm backward", weights | {"norms": first + _norm(z), "attention": attention}
    inside = _upipe(z) if z.recipe.head_chunk else _attention(z)
    yield "attention backward", weights | {"norms": first, "attention": inside}
    if z.recipe.checkpoint and not z.recipe.head_chunk:
        # Beside what it keeps, q, k and v before the exchange, and the output as it is sent.
        more = (1 + (z.recipe.ulysses > 1)) * z.H * z.h + 2 * z.K * z.h
        yield "attention recomputed", {"residual": z.A, "norms": first, "attention": attention + more}


def _norm(z: _Sizes) -> int:
    """Six wide tensors; of a tile, beside the whole input and both gradients."""
    inside = 6 * z.f * z.b * min(z.recipe.norm_tile or z.s, z.s) * z.E
    return inside + 3 * z.A if z.recipe.norm_tile else inside


def _mlp(z: _Sizes) -> Parts:
    """The higher of two moments, and of a tile, beside it, the whole dx and the sums of the weight gradients.

    Early, six tensors [b, t, I] (three where the MLP is not gated) and the last matrix's weight gradient;
    late, one such tensor and the gradients of all matrices.
    """
    tile, t = z.recipe.mlp_tile, min(z.recipe.mlp_tile or z.s, z.s)
    one, x = z.M * t // z.s, z.A * t // z.s
    tensors = 6 if z.matrices == 3 else 3
    # A tile of several rows lies apart in x and dout, so each is copied.
    copies = (1 if z.b == 1 else 3) * x if tile else 0
    early, late = (tensors * one + copies, z.w * z.mlp // z.matrices), (one + x, z.w * z.mlp)
    activations, weights = max(early, late, key=sum)
    whole, sums = (z.A, z.f * z.mlp) if tile else (0, 0)
    return {"mlp": whole + activations, "gradients in flight": sums + weights}


def _kernel(z: _Sizes, q: int, k: int) -> int:
    """dq, dk and dv; in a ring also what travels, and wide sums; a ring of two passes nothing on.

    Of two ranks the second holds more: its queries all meet the keys that come, half of them.
    """
    wide_q, wide_k = q * z.f // z.w, k * z.f // z.w
    if z.recipe.ring == 1:
        return q + 2 * k
    if z.recipe.ring == 2:
        return wide_q + max(q + 6 * k + 2 * wide_k, q + 3 * k + 4 * wide_k)
    return wide_q + q + 5 * k + 4 * wide_k


def _attention(z: _Sizes) -> int:
    """In the kernel; or where dout is exchanged; or, when all that is done, in the norm of q."""
    q, exchanged = z.H * z.h, z.recipe.ulysses > 1
    kept = _attention_keeps(z) - q * exchanged  # the output as it went on is of no more use
    dout, norm = (3 if z.b == 1 else 4) * q * exchanged, (z.A + 6 * z.f * q // z.w) * z.head_norms
    return max(kept + q + _kernel(z, q, z.sent), kept + dout, norm)


def _upipe(z: _Sizes) -> int:
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
    end = home + max(z.A + z.w * z.E * z.D * (z.H + 2 * z.K), home // 2 * (groups > 1))
    peaks = [3 * u + 2 * u_kv + sums + there + ahead + _kernel(z, u, u_kv), end]
    if z.head_norms:
        inside = 6 * z.f // z.w + 1
        peaks.append(2 * u + 2 * u_kv + max(sums, 2 * u_kv) + there + ahead + inside * u)
    return _attention_keeps(z) + z.w * z.E * z.H * z.D + max(peaks)


def _loss(z: _Sizes) -> int:
    """Three wide logits; tiled, dx, a tile's logits and dx, the head's gradient of it and the sum of them."""
    if z.recipe.loss_tile is None:
        return 3 * z.f * z.b * z.s * z.V
    return z.A + z.w * min(z.recipe.loss_tile, z.b * z.s) * (z.V + z.E) + (z.w + z.f) * z.table
