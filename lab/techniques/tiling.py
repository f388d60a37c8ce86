"""Sequence tiling: modules that treat every token alone run slice by slice, forward and backward.

One combinator, ``tiled``, and the modules it is applied to here: MLPs and norms. The loss with its head is
the third, in ``tiled_loss.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lab.decoder import Patch, check_hooks, decoder_of
from lab.errors import RecipeError
from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.precision import accumulation_dtype
from lab.techniques.slices import slices


def apply_tiled_mlp(model: nn.Module, *, tile: int) -> None:
    """Run the MLP of every decoder layer over slices of ``tile`` tokens: ``[b, s, E]`` -> ``[b, s, E]``.

    With I the intermediate size, w bytes an element, W = max(w, 4) and t = min(tile, s) tokens a tile:
    Saves: 4*b*s*I*w bytes a layer between forward and backward (a gated MLP keeps its input and four tensors
    ``[b, s, I]``, a tiled one its input). At the peak, where tokens and not weights weigh most, forward
    holds 3*b*t*I*w of them instead of 4*b*s*I*w, and backward 6*b*t*I*w instead of 6*b*s*I*w.
    Costs: one more MLP forward in backward, which under activation checkpointing takes the place of the
    recomputed one (2 in all, not 3). Sums of weight gradients: 3*E*I*W while the backward of one MLP runs.
    Source: ALST (arXiv 2506.13996), its TiledMLP.
    Composes with: checkpointing (applied after), FSDP2 per layer (applied after: the layer's parameters are
    whole while its backward runs), everything in attention. Tiles that do not divide s leave a shorter last
    one.

    Raises:
        RecipeError: ``tile`` is less than 1.
    """
    check_tile("mlp_tile", tile)
    for layer in decoder_of(model).layers:
        _tile_module(layer.mlp, tile, "mlp_tile")


def apply_tiled_norms(model: nn.Module, *, tile: int) -> None:
    """Run the norms over the hidden size in slices of ``tile`` tokens: ``[b, s, E]`` -> ``[b, s, E]``.

    The norms before attention and before the MLP of every layer, and the one before the head; norms per
    head (Qwen3's q_norm and k_norm) belong to the attention.
    Saves: b*s*(4*E + 4) bytes a norm between forward and backward, in every dtype: the fp32 copy of its
    input, or in fp32 the normalised input, and the scale of each token. A tiled norm keeps its input.
    Costs: one more norm forward in backward.
    Source: Untied Ulysses (arXiv 2602.21196) tiles the norms beside the MLP of ALST.
    Composes with: everything; checkpointing and FSDP2 are applied after.

    Raises:
        RecipeError: ``tile`` is less than 1.
    """
    check_tile("norm_tile", tile)
    for norm in decoder_of(model).norms:
        _tile_module(norm, tile, "norm_tile")


def tiled(fn: Callable[..., Tensor], module: nn.Module, x: Tensor, *beside: Tensor, tile: int) -> Tensor:
    """Compute ``fn(x, *beside)`` in slices of ``tile`` along dim 1, and hold the inside of one at a time.

    ``fn`` maps ``[b, t, ...]`` to ``[b, t, ...]`` token by token with the parameters of ``module``; ``x`` is
    ``[b, s, ...]`` and gets a gradient, ``beside`` is sliced with it and gets none.

    1. Forward: each slice's output goes into its place of one preallocated tensor; nothing inside is kept.
    2. Between: ``x`` and ``beside`` are kept, and the parameters where the module has them.
    3. Backward: each slice runs again with gradients and is differentiated; dx goes into its place, and the
       parameters' gradients into sums that are fp32 or the parameter's dtype, whichever is wider: they
       are rounded once, at the end, and not at every slice.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return _forward(fn, tile, x, beside)
    # The input is saved by a node of its own, before anything is computed. A checkpointed layer recomputes
    # until it has what it saved: it stops here, and the slices run twice in all and not three times.
    kept: Tensor = _Keep.apply(x, len(beside), *beside, *parameters)  # type: ignore[no-untyped-call]
    out: Tensor = _Tiled.apply(  # type: ignore[no-untyped-call]
        fn, module, tile, kept.grad_fn, x.requires_grad, beside, kept, *parameters
    )
    return out


class _Keep(Function):
    """Pass x on unchanged and save it, with what lies beside it. The parameters make it a node of the graph
    where x itself needs no gradient, so that what is saved goes when backward has passed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *beside_and_parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *beside_and_parameters[:count])
        ctx.inputs = 2 + len(beside_and_parameters)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Any, ...]:
        return dx, *(None,) * (ctx.inputs - 1)


class _Tiled(Function):
    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[..., Tensor],
        module: nn.Module,
        tile: int,
        keep: Any,
        x_needs_grad: bool,
        beside: tuple[Tensor, ...],
        x: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.fn, ctx.module, ctx.tile, ctx.keep, ctx.x_needs_grad = fn, module, tile, keep, x_needs_grad
        return _forward(fn, tile, x, beside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, *beside = ctx.keep.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.x_needs_grad else None
        with parameter_aliases(ctx.module) as parameters:
            sums = [torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) for p in parameters]
            uses = [False] * len(parameters)
            for start, length in slices(x.shape[1], ctx.tile):
                x_tile, dout_tile, *beside_tile = (a.narrow(1, start, length) for a in (x, dout, *beside))
                dx_tile = None if dx is None else dx.narrow(1, start, length)
                uses = _backward_tile(ctx.fn, x_tile, beside_tile, dout_tile, parameters, dx_tile, sums)
            # Of a parameter that no tile used (an adapter that is switched off) there is none.
            gradients = [
                total.to(p.dtype) if used else None
                for total, p, used in zip(sums, parameters, uses, strict=True)
            ]
        return *(None,) * 6, dx, *gradients


def _backward_tile(
    fn: Callable[..., Tensor],
    x: Tensor,
    beside: list[Tensor],
    dout: Tensor,
    parameters: list[Tensor],
    dx: Tensor | None,
    sums: list[Tensor],
) -> list[bool]:
    """Run one slice again and differentiate it: write its dx, add to the sums. Nothing else outlives it.

    Returns which parameters were used.
    """
    x = x.detach().requires_grad_(dx is not None)
    wanted = [*parameters] if dx is None else [x, *parameters]
    with torch.enable_grad():
        out = fn(x, *beside)
    grads = list(torch.autograd.grad(out, wanted, dout, allow_unused=True))
    if dx is not None:
        own = grads.pop(0)
        assert own is not None, "every module here depends on its input"
        dx.copy_(own)
        del own
    uses = [grad is not None for grad in grads]
    for total, grad in zip(sums, grads, strict=True):
        if grad is not None:
            total.add_(grad)
    return uses


def _forward(fn: Callable[..., Tensor], tile: int, x: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
    out: Tensor | None = None
    for start, length in slices(x.shape[1], tile):
        part = fn(x.narrow(1, start, length), *(b.narrow(1, start, length) for b in beside))
        if out is None:
            out = part.new_empty(part.shape[0], x.shape[1], *part.shape[2:])
        out.narrow(1, start, length).copy_(part)
        del part
    assert out is not None, "a sequence has at least one token"
    return out


def check_tile(knob: str, tile: int) -> None:
    """Refuse a tile that is no number of tokens.

    Raises:
        RecipeError: less than 1.
    """
    if tile < 1:
        raise RecipeError(
            f"{knob}={tile}: a tile is a number of tokens; use 1 or more, or None for no tiling"
        )


def _tile_module(module: nn.Module, tile: int, knob: str) -> None:
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        # A hook on what the module consists of would see a tile for the whole.
        for part in module.modules():
            if part is not module:
                check_hooks(part, knob)
        return tiled(inner, module, x, tile=tile)

    module.forward = Patch(forward, inner)
