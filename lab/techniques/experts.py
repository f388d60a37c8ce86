"""Mixtures of experts: the MLP of a layer whose shapes depend on the number of tokens alone.

Letters: n tokens of a call, k experts of each token, T = n*k pairs of a token and an expert, N experts, E
hidden size, I inner width of an expert, w bytes per element. Pair p is the expert in place p % k of token
p // k. The *rows* are the pairs in the order of their experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from lab.decoder import Patch, decoder_of
from lab.errors import RecipeError
from lab.techniques.precision import accumulation_dtype

# ---- grouped products --------------------------------------------------------------------------------------

BIAS_ROWS = 8192
"""The number of rows whose biases are in memory at once, if they are added after the kernel."""


@torch.library.custom_op("lab::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor, biases: Tensor | None = None) -> Tensor:
    """Multiply the rows of each expert by the expert's matrix, and add the expert's bias if there is one.

    On CUDA in half precision this is one kernel, if 8 divides a and b. Otherwise it is a matrix product for
    each expert, and on CUDA the host waits once for ``ends``.

    Args:
        rows: [T, a], in the order of their experts.
        weights: [N, a, b], of any strides.
        ends: [N], int32: the number of rows of all experts up to this one, itself included.
        biases: [N, b].

    Returns:
        [T, b].
    """
    if _has_kernel(rows, weights):
        out = grouped_mm(rows, weights, offs=ends)
        if biases is not None:
            # Copying a bias for every row at once would take as much memory as the result.
            for first, part in zip(range(0, len(out), BIAS_ROWS), out.split(BIAS_ROWS), strict=True):
                numbers = torch.arange(first, first + len(part), dtype=ends.dtype, device=ends.device)
                part.add_(biases.index_select(0, torch.bucketize(numbers, ends, right=True)))
        return out
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if biases is None:
            torch.mm(rows[start:end], weights[expert], out=out[start:end])
        else:
            torch.addmm(biases[expert], rows[start:end], weights[expert], out=out[start:end])
        start = end
    return out


@grouped_product.register_fake
def _(
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,  # noqa: ARG001 (the operator's names)
    biases: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@torch.library.custom_op("lab::grouped_outer_product", mutates_args=())
def grouped_outer_product(grads: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the transposed gradients of the matrices of ``grouped_product``; see there for ``ends``.

    The gradient of an expert without rows is zero.

    Args:
        grads: The gradients of the products, [T, b].
        rows: [T, a].
        ends: [N].

    Returns:
        [N, b, a].
    """
    if _has_kernel(grads, rows):
        return _zero_without_rows(grouped_mm(grads.t(), rows, offs=ends), ends)
    out = rows.new_empty(ends.shape[0], grads.shape[1], rows.shape[1])
    start = 0
    for gradient, end in zip(out, ends.tolist(), strict=True):
        torch.mm(grads[start:end].t(), rows[start:end], out=gradient)
        start = end
    return out


@grouped_outer_product.register_fake
def _(grads: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], grads.shape[1], rows.shape[1])


@torch.library.custom_op("lab::grouped_sum", mutates_args=())
def grouped_sum(rows: Tensor, ends: Tensor) -> Tensor:
    """Sum the rows [T, b] of each expert: the gradients of its bias, [N, b]. See ``grouped_product``."""
    if _has_kernel(rows):
        # The product with ones is the sum, and the kernel sums in fp32. Eight ones make a row of 16 bytes,
        # which the kernel requires.
        sums = grouped_mm(rows.t(), rows.new_ones(len(rows), 8), offs=ends)
        return _zero_without_rows(sums[..., 0].contiguous(), ends)
    out = rows.new_empty(ends.shape[0], rows.shape[1])
    start = 0
    for total, end in zip(out, ends.tolist(), strict=True):
        torch.sum(rows[start:end], 0, out=total)
        start = end
    return out


@grouped_sum.register_fake
def _(rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1])


def _zero_without_rows(gradients: Tensor, ends: Tensor) -> Tensor:
    """Set the gradients [N, ...] of experts without rows to zero, in place; see ``grouped_product``.

    On Blackwell, torch's kernel leaves them undefined (pytorch/pytorch issue 172439).
    """
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return gradients.masked_fill_(empty.view(-1, *(1,) * (gradients.dim() - 1)), 0)


def _has_kernel(*operands: Tensor) -> bool:
    """Return whether torch has one kernel for all experts, whose operands have rows of whole 16 bytes."""
    return all(
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(size % 8 == 0 for size in x.shape[1:])
        for x in operands
    )


class _GroupedLinear(Function):
    """Rows [T, a], weights [N, b, a] ([N, a, b] if transposed), biases [N, b], ends [N] -> [T, b]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, biases: Tensor | None, ends: Tensor, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights, ends)
        ctx.transposed = transposed
        matrices = weights if transposed else weights.transpose(1, 2)
        more = () if biases is None else (biases,)
        out: Tensor = torch.ops.lab.grouped_product(rows, matrices, ends, *more)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, ends = ctx.saved_tensors
        dout, needed = dout.contiguous(), ctx.needs_input_grad
        matrices = weights.transpose(1, 2) if ctx.transposed else weights
        drows = torch.ops.lab.grouped_product(dout, matrices, ends) if needed[0] else None
        dbiases = torch.ops.lab.grouped_sum(dout, ends) if needed[2] else None
        dweights = None
        if needed[1]:
            pair = (rows, dout) if ctx.transposed else (dout, rows)
            dweights = torch.ops.lab.grouped_outer_product(*pair, ends)
        return drows, dweights, dbiases, None, None


# ---- the order of the rows ---------------------------------------------------------------------------------


class Order(NamedTuple):
    """The order of the rows.

    Attributes:
        tokens: The token of each row, [T].
        places: The rows of each token, [k, n].
        ends: The number of rows of all experts up to each one, itself included, [N], int32.
    """

    tokens: Tensor
    places: Tensor
    ends: Tensor


def order_of(chosen: Tensor, experts: int) -> tuple[Order, Tensor]:
    """Return the order of the rows, and the number of the pair of each row, [T].

    Args:
        chosen: The experts of each token, [n, k].
        experts: N.
    """
    n, k = chosen.shape
    by_expert, pairs = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=chosen.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    tokens = pairs // k
    # Pair p is in place p % k of token p // k.
    at = (pairs % k).mul_(n).add_(tokens)
    places = torch.empty_like(pairs).scatter_(0, at, torch.arange(n * k, device=chosen.device))
    return Order(tokens, places.view(k, n), ends), pairs


def to_rows(x: Tensor, order: Order) -> Tensor:
    """Copy tokens [n, E] to their rows [T, E]. The transposed map is ``sum_of_rows``."""
    return x.index_select(0, order.tokens)


def sum_of_rows(rows: Tensor, order: Order) -> Tensor:
    """Return the sum of the k rows of each token, [T, E] -> [n, E], which is rounded once.

    The rows of one place of all tokens are copied at a time, so no second tensor [T, E] is made.
    """
    first, *others = order.places
    total = rows.index_select(0, first).to(accumulation_dtype(rows.dtype))
    for place in others:
        total.add_(rows.index_select(0, place))
    return total.to(rows.dtype)


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *order: Tensor) -> Tensor:
        ctx.save_for_backward(*order)
        return to_rows(x, Order(*order))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None, None]:
        return sum_of_rows(drows, Order(*ctx.saved_tensors)), None, None, None


class _SumOfRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *order: Tensor) -> Tensor:
        ctx.save_for_backward(*order)
        return sum_of_rows(rows, Order(*order))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        return to_rows(dx, Order(*ctx.saved_tensors)), None, None, None


class _Weighted(Function):
    """Inner tensors [T, I] and a weight for each row [T] -> their products, in the dtype of the former."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(inner, weights)
        return torch.mul(inner, weights[:, None], out=torch.empty_like(inner))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        inner, weights = ctx.saved_tensors
        # Torch sums in fp32 or wider inside the kernel.
        dweights = (dout * inner).sum(-1).to(weights.dtype)
        return torch.mul(dout, weights[:, None], out=torch.empty_like(inner)), dweights


# ---- the experts -------------------------------------------------------------------------------------------


def apply_experts(model: nn.Module) -> None:
    """Compute the experts of every layer by grouped products: [n, E] -> [n, E].

    The router of transformers chooses k experts for each token, and weights. The tokens are copied to rows in
    the order of their experts. All experts compute their rows together, whatever number of rows each has. The
    result of an expert is multiplied by its weight before the last product, where it has I elements and not
    E. Then the k rows of each token are summed. If the experts have biases, those of the last product are
    added to the sums: they are a product of the weights [n, N], which are zero for other experts, and the
    biases [N, E].

    All shapes depend on the number of tokens alone, so a plan on fake tensors holds the bytes of a run. Each
    token is computed alone, so the MLP may run in tiles. An expert that no token has chosen has a gradient of
    zero.

    Saves:
        Nothing, compared with the tokens of one expert after the other. The implementation ``"batched_mm"``
        of transformers would copy the weights of an expert for each row.
    Costs:
        Forward keeps w*T*(E + 5*I) bytes of n tokens: the rows, and five inner tensors; where gate and up are
        clamped, w*T*(E + 8*I). Each of the N experts has a gradient, with rows or without.
    Source:
        Mixtral (arXiv 2401.04088), section 2.1; MegaBlocks (arXiv 2211.15841), for the grouped products.
    Composes with:
        Everything. The experts of a layer are sharded by FSDP2 as its other parameters are.

    Raises:
        ModelError: See ``decoder_of``.
        RecipeError: In forward: ``output_router_logits`` was turned on.
    """
    for layer in decoder_of(model).layers:
        if layer.experts is not None:
            _group_products(layer.experts)
            _take_slices(layer.mlp)


def _take_slices(mlp: nn.Module) -> None:
    """Let an MLP take tiles [b, t, E] whose rows lie apart in memory.

    The forwards of transformers flatten a tile, most of them by ``view``, which needs contiguous memory.
    """
    inner = mlp.forward

    def forward(hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out: Tensor | tuple[Tensor, Tensor] = inner(hidden_states.contiguous())
        return out

    mlp.forward = Patch(forward, inner)


def _group_products(experts: Any) -> None:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if experts.config.output_router_logits:
            raise RecipeError(
                "output_router_logits was turned on after the recipe was applied: the loss that balances the "
                "experts is one of the whole sequence, and is not supported; set it to False"
            )
        order, pairs = order_of(top_k_index, experts.num_experts)
        weights = top_k_weights.flatten().gather(0, pairs)
        biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)

        def linear(rows: Tensor, matrices: Tensor, of_rows: Tensor | None) -> Tensor:
            out: Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
                rows, matrices, of_rows, order.ends, experts.is_transposed
            )
            return out

        # Long tensors get no names here, so that those which backward does not need are freed after use.
        inner = experts._apply_gate(
            linear(_ToRows.apply(hidden_states, *order), experts.gate_up_proj, biases[0])  # type: ignore[no-untyped-call]
        )
        out: Tensor = _SumOfRows.apply(  # type: ignore[no-untyped-call]
            linear(_Weighted.apply(inner, weights), experts.down_proj, None),  # type: ignore[no-untyped-call]
            *order,
        )
        if biases[1] is None:
            return out
        of_all = top_k_weights.new_zeros(len(out), experts.num_experts).scatter(1, top_k_index, top_k_weights)
        return torch.addmm(out, of_all.to(out.dtype), biases[1])

    experts.forward = Patch(forward, experts.forward)
