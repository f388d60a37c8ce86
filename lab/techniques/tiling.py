"""Sequence tiling: modules that work on each token alone run tile by tile, in forward and backward.

The function ``run_in_tiles`` does this for any such module. This file applies it to MLPs and norms. The head
has tiles of its own, in ``loss.py``.

Letters: b rows, s tokens of one rank, t = min(tile, s) tokens of a tile, E hidden size, I intermediate size
of an MLP, w bytes per element, W = max(w, 4).
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
from lab.techniques.gradient_sums import GradientSums
from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.slices import slices


def apply_tiled_mlp(model: nn.Module, *, tile: int) -> None:
    """Run the MLP of every decoder layer in tiles: [b, s, E] -> [b, s, E].

    Args:
        model: The model.
        tile: The number of tokens in a tile, at least 1. If it does not divide s, the last tile is shorter.

    Saves:
        4*b*s*I*w bytes per layer between forward and backward: a gated MLP keeps its input and four tensors
        [b, s, I], and a tiled MLP keeps its input only. At the peak (if tensors of tokens are larger than the
        weights), forward holds 3*b*t*I*w bytes of such tensors instead of 4*b*s*I*w, and backward holds
        6*b*t*I*w bytes instead of 6*b*s*I*w.
    Costs:
        One more forward of the MLP in backward. With checkpointing, it replaces the forward that would be
        recomputed, so there are 2 forwards in all and not 3. The sums of weight gradients take 3*E*I*W bytes
        while the backward of one MLP runs. In addition there is the gradient of one weight from one tile,
        E*I*w bytes, if w = W, and of all three weights otherwise. During the first tile there are no sums.
    Source:
        ALST (arXiv 2506.13996), TiledMLP.
    Composes with:
        Checkpointing, applied after; FSDP2 per layer, applied after (the layer's parameters are whole during
        its backward); every technique for attention.

    Raises:
        RecipeError: ``tile`` is less than 1. In forward: there is a hook on a module in the MLP.
    """
    check_tile("mlp_tile", tile)
    for layer in decoder_of(model).layers:
        _tile_module(layer.mlp, tile, "mlp_tile", returns_weights=layer.returns_weights)


def apply_tiled_norms(model: nn.Module, *, tile: int, layers: bool = True) -> None:
    """Run the norms over the hidden size in tiles: [b, s, E] -> [b, s, E].

    These are the norms before the attention and before the MLP of every layer, and the norm before the head.
    Norms of single heads (q_norm and k_norm of Qwen3) belong to the attention and are not tiled.

    Args:
        model: The model.
        tile: The number of tokens in a tile, at least 1. If it does not divide s, the last tile is shorter.
        layers: Whether the norms of the layers run in tiles too. Those of streamed layers are in the layers'
            own tiles.

    Saves:
        b*s*(4*E + 4) bytes per norm between forward and backward, in every dtype: the fp32 copy of its input
        (for an fp32 input, the normalized input), and the scale of each token. A tiled norm keeps its input
        only.
    Costs:
        One more forward of the norm in backward.
    Source:
        Untied Ulysses (arXiv 2602.21196), which tiles norms in addition to the MLPs of ALST.
    Composes with:
        Everything. Checkpointing and FSDP2 are applied after.

    Raises:
        RecipeError: ``tile`` is less than 1. In forward: there is a hook on a module in the norm.
    """
    check_tile("norm_tile", tile)
    decoder = decoder_of(model)
    for norm in decoder.norms if layers else [decoder.norm]:
        _tile_module(norm, tile, "norm_tile")


def run_in_tiles(fn: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, *, tile: int) -> Tensor:
    """Compute ``fn(x)`` in tiles along dim 1, so that inner tensors exist for one tile at a time.

    1. Forward writes the output of each tile into its place in one tensor, and saves no inner tensor.
    2. Between forward and backward, ``x`` is saved. The parameters stay in the module.
    3. Backward runs ``fn`` on each tile again and differentiates it. The gradient of ``x`` is written into
       its place. The gradients of the parameters are summed in the wider of fp32 and the parameter's dtype
       (see ``GradientSums``). A sum is rounded once, at the end.

    Args:
        fn: Maps [b, t, ...] to [b, t, ...], each token alone, with the parameters of ``module``.
        module: The module whose parameters get gradients.
        x: [b, s, ...], which gets a gradient.
        tile: The number of tokens in a tile.

    Returns:
        [b, s, ...].
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return _forward(fn, tile, x)
    # A separate node saves the input, before anything is computed. A checkpointed layer is recomputed only
    # until all tensors that it saved exist. It stops here, so the tiles run twice in all and not three times.
    saved: Tensor = _SaveInput.apply(x, *parameters)  # type: ignore[no-untyped-call]
    out: Tensor = _Tiled.apply(  # type: ignore[no-untyped-call]
        fn, module, tile, saved.grad_fn, x.requires_grad, saved, *parameters
    )
    return out


class _SaveInput(Function):
    """Return x unchanged, and save it.

    The parameters are inputs too, so that this is a node of the graph even if x needs no gradient. The saved
    tensor is then freed when backward has passed the node.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.parameters = len(parameters)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Any, ...]:
        return dx, *(None,) * ctx.parameters


class _Tiled(Function):
    """``run_in_tiles`` with gradients; ``save_input`` is the node that saved x."""

    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[[Tensor], Tensor],
        module: nn.Module,
        tile: int,
        save_input: Any,
        x_needs_grad: bool,
        x: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.fn, ctx.module, ctx.tile, ctx.x_needs_grad = fn, module, tile, x_needs_grad
        ctx.save_input = save_input
        return _forward(fn, tile, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.save_input.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.x_needs_grad else None
        with parameter_aliases(ctx.module) as parameters:
            sums = GradientSums(parameters)
            for start, length in slices(x.shape[1], ctx.tile):
                x_tile, dout_tile = (a.narrow(1, start, length) for a in (x, dout))
                dx_tile = None if dx is None else dx.narrow(1, start, length)
                _backward_tile(ctx.fn, x_tile, dout_tile, dx_tile, sums)
        return *(None,) * 5, dx, *sums.round()


def _backward_tile(
    fn: Callable[[Tensor], Tensor], x: Tensor, dout: Tensor, dx: Tensor | None, sums: GradientSums
) -> None:
    """Run ``fn`` on one tile again, write the gradient of x to ``dx``, and add the others to ``sums``."""
    x = x.detach().requires_grad_(dx is not None)
    with torch.enable_grad():
        out = fn(x)
    if dx is None:
        sums.differentiate([out], [dout], [])
    else:
        (x_grad,) = sums.differentiate([out], [dout], [x])
        dx.copy_(x_grad)


def _forward(fn: Callable[[Tensor], Tensor], tile: int, x: Tensor) -> Tensor:
    out: Tensor | None = None
    for start, length in slices(x.shape[1], tile):
        part = fn(x.narrow(1, start, length))
        if out is None:
            out = part.new_empty(part.shape[0], x.shape[1], *part.shape[2:])
        out.narrow(1, start, length).copy_(part)
        del part
    assert out is not None, "a sequence has at least one token"
    return out


def check_tile(knob: str, tile: int) -> None:
    """Refuse a tile of less than 1 token; ``knob`` is the name of the knob in the message.

    Raises:
        RecipeError: ``tile`` is less than 1.
    """
    if tile < 1:
        raise RecipeError(
            f"{knob}={tile}: a tile is a number of tokens; use 1 or more, or None for no tiling"
        )


def _tile_module(module: nn.Module, tile: int, knob: str, *, returns_weights: bool = False) -> None:
    """Let a module run in tiles; one that ``returns_weights`` of a router returns None in their place."""
    inner = module.forward

    def result(x: Tensor) -> Tensor:
        out = inner(x)
        return out[0] if returns_weights else out  # type: ignore[no-any-return]

    def forward(x: Tensor) -> Tensor | tuple[Tensor, None]:
        # A hook on a module inside this one would be called with one tile after the other.
        for submodule in module.modules():
            if submodule is not module:
                check_hooks(submodule, knob)
        out = run_in_tiles(result, module, x, tile=tile)
        return (out, None) if returns_weights else out

    module.forward = Patch(forward, inner)
