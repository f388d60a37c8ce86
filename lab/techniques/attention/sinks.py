"""Attention sinks: a learned logit of each query head, by any kernel of causal attention.

Letters: b rows, h query heads, S query tokens, D head_dim. The LSE (log-sum-exp) of a query is the logarithm
of its softmax's denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.techniques.attention.kernel import Kernel
from lab.techniques.limits import SINK_PIECE
from lab.techniques.slices import slices


def sink_kernel(kernel: Kernel, sinks: Tensor) -> Kernel:
    """Return a kernel whose queries also attend to a sink: a key with this logit, and the value zero.

    If LSE is that of all other keys, the LSE with a sink z is logaddexp(LSE, z), and the output is multiplied
    by exp(LSE - logaddexp(LSE, z)). Backward gets this output and this LSE. From them a kernel's backward
    computes the exact gradients of q, k and v. ``attention`` computes the gradients of the sinks.

    Args:
        kernel: Computes causal attention: on one rank, on a ring, or with a window.
        sinks: The sinks of the kernel's query heads, [h].

    Saves:
        A key and a value for all heads, which would need a kernel with a mask of its own.
    Costs:
        In forward, one more tensor of the size of the LSE. In backward, see ``sink_gradients``.
    Source:
        gpt-oss (arXiv 2508.10925), section 2.2; StreamingLLM (arXiv 2309.17453), section 3.3, for a sink
        without key and value. FlashAttention (arXiv 2205.14135), appendix B.4, for gradients from the LSE.
    Composes with:
        Every kernel, windows, a ring, Ulysses, UPipe and streamed layers. A rank has the sinks of its heads.
    """
    own = sinks.detach()

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
        return out, add_sinks_(out, lse, own)

    return kernel._replace(forward=forward, sinks=sinks)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale outputs [b, h, S, D] in place for a softmax with the sinks [h]; return the LSE with them."""
    logits = sinks.to(lse.dtype)[:, None]
    out.mul_((lse - logits).sigmoid_()[..., None])
    return torch.logaddexp(lse, logits)


def sink_gradients(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute the gradient of each head's sink: the sum over the head's queries of -P * <dout, out>.

    P = exp(sink - LSE) is the share of the sink in the softmax.

    Args:
        grad_out: dout, the gradient of the output, [b, h, S, D].
        out: The output with the sinks, [b, h, S, D].
        lse: The LSE with the sinks, [b, h, S].
        sinks: [h].

    Returns:
        [h], in the dtype of ``lse``.

    Costs:
        In the dtype of ``lse``: P of all tokens, b*h*S elements, and for ``SINK_PIECE`` tokens t at a time
        the products of dout and out and their sums, b*h*t*(D + 1) elements.
    """
    shares = (sinks.detach().to(lse.dtype)[:, None] - lse).exp_()
    total = torch.zeros_like(sinks, dtype=lse.dtype)
    for start, length in slices(out.shape[2], SINK_PIECE):
        dout, part, share = (t.narrow(2, start, length) for t in (grad_out, out, shares))
        products = torch.empty_like(dout, dtype=lse.dtype).copy_(dout).mul_(part)
        total.sub_((products.sum(-1).mul_(share)).sum((0, 2)))
        del products
    return total
