"""Small calls of kernels at the edges of what they take, compared with attention in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.bench.attention import attention_inputs, random_tensors
from lab.bench.timing import seconds
from lab.techniques.attention.documents import Documents, documents_kernel
from lab.techniques.attention.kernel import Gradients, Kernel
from lab.techniques.attention.kernels import FASTEST_FIRST, KERNELS, kernel_support, missing_requirement
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.experts import grouped_outer_product, grouped_product, grouped_sum
from lab.torch_private import DispatchMode

ROWS, HEADS, KV_HEADS = 2, 6, 2

ENDS = (0, 5, 5, 24, 40, 40)
"""The ends of the rows of six experts, of which the first, the third and the last have none."""

NEW_LENGTHS = range(300, 470, 17)
"""Numbers of tokens that no case has."""


@dataclass(frozen=True)
class Case:
    """A call of an attention kernel.

    Attributes:
        tokens: The queries, and the keys unless given.
        keys: The keys of a call without a causal mask.
        heads_first: Whether heads come first in the memory of the gradient of the output, and not tokens.
        window: The last keys, to which a query attends.
        documents: The lengths of the documents of a row.
    """

    tokens: int
    keys: int | None = None
    heads_first: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def inputs(self, head_dim: int, device: torch.device) -> list[Tensor]:
        """Return q, k, v and the gradient of the output."""
        keys = self.keys or self.tokens
        return attention_inputs(device, ROWS, (HEADS, KV_HEADS), head_dim, self.tokens, keys)

    def error(self, kernel: Kernel, head_dim: int, device: torch.device) -> Tensor:
        """Return the worst relative error of out, dq, dk and dv."""
        if self.window is not None:
            kernel = windowed_kernel(kernel, self.window)
        if self.documents is not None:
            kernel = documents_kernel(kernel, Documents((self.documents,) * ROWS))
        q, k, v, dout = self.inputs(head_dim, device)
        if self.heads_first:
            dout = dout.contiguous()
        causal = self.keys is None
        out, lse = kernel.forward(q, k, v, causal=causal)
        gradients = kernel.backward(dout, q, k, v, out, lse, causal=causal)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in exact[1:])
        scores = exact[0] @ keys.mT * head_dim**-0.5
        if causal:
            scores = scores.masked_fill(~self.visible(device), -torch.inf)
        right = scores.softmax(-1) @ values
        expected = (right.detach(), *torch.autograd.grad(right, exact, dout.double()))
        # dq and dk are zero where there is one key, so errors are relative to all results together.
        size = torch.stack([y.norm() for y in expected]).norm()
        pairs = zip((out, *gradients), expected, strict=True)
        return torch.stack([(x.double() - y).norm() / size for x, y in pairs]).max()

    def visible(self, device: torch.device) -> Tensor:
        """Return which key each query attends to [S, S], under a causal mask."""
        position = torch.arange(self.tokens, device=device)
        distance = position[:, None] - position
        document = torch.repeat_interleave(torch.tensor(self.documents or (self.tokens,), device=device))
        same = document[:, None] == document
        return (distance >= 0) & (distance < (self.window or self.tokens)) & same


CASES = {
    **{f"{tokens} tokens": Case(tokens) for tokens in (1, 2, 3, 8, 129)},
    # A kernel that keeps what it built for q, k and v must not use it for other strides of the rest.
    "129 tokens, gradient with heads first": Case(129, heads_first=True),
    "129 tokens, gradient with tokens first": Case(129),
    "64 queries of 129 keys": Case(64, keys=129),
    "1 query of 129 keys": Case(1, keys=129),
    "64 queries of 1 key": Case(64, keys=1),
    **{f"129 tokens, window of {window}": Case(129, window=window) for window in (1, 2, 13)},
    "documents of (1, 5, 1, 2, 120)": Case(129, documents=(1, 5, 1, 2, 120)),
}


def measure_edges(where: str) -> dict[str, Any]:
    """Return the worst relative error of the output and the gradients of each case, by the name of the case.

    Inputs are bf16 on CUDA and fp32 on CPU, and the same inputs in fp64 give what is right. "worst" is the
    largest error, or NaN if one is NaN. A case that fails has its error as text. "operators" has those that
    computed attention in a case: a kernel leaves some calls to matrix products (``bmm``).
    """
    errors: dict[str, float | str] = {}
    operators: dict[str, str] = {}
    new_length_seconds = {}
    device = torch.device(where)
    support = kernel_support(device)
    for name in FASTEST_FIRST:
        for head_dim in (128, 64, 20):
            if missing_requirement(name, support, head_dim) is None:
                for case_name, case in CASES.items():
                    label, seen = f"{name} D={head_dim} {case_name}", _Operators()
                    run = partial(case.error, seen.watch(KERNELS[name]), head_dim, device)
                    errors[label] = _outcome(run)
                    operators[label] = ", ".join(sorted(seen.names)) or "none of torch"
        if missing_requirement(name, support, 128) is None:
            times = [seconds(partial(_run, KERNELS[name], Case(tokens), device)) for tokens in NEW_LENGTHS]
            new_length_seconds[f"{name}, s a new length"] = sum(times) / len(times)
    errors["experts without rows"] = _outcome(lambda: _experts_error(device))
    numbers = [error for error in errors.values() if isinstance(error, float)]
    failed = {case: error for case, error in errors.items() if isinstance(error, str)}
    worst = float(torch.tensor(numbers).max())
    found = {"errors": errors, "operators": operators, "worst": worst, "failed cases": failed}
    return found | new_length_seconds


class _Operators(DispatchMode):
    """Collects the names of the operators that compute attention."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def watch(self, kernel: Kernel) -> Kernel:
        """Return the kernel, with this mode on while it computes."""

        def forward(*tensors: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
            with self:
                return kernel.forward(*tensors, **settings)

        def backward(*tensors: Tensor, **settings: Any) -> Gradients:
            with self:
                return kernel.backward(*tensors, **settings)

        return Kernel(forward, backward)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in func.name() for part in ("attention", "attn", "flash", "bmm")):
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def _outcome(run: Callable[[], Tensor]) -> float | str:
    try:
        return float(run())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _run(kernel: Kernel, case: Case, device: torch.device) -> None:
    q, k, v, dout = case.inputs(128, device)
    kernel.backward(dout, q, k, v, *kernel.forward(q, k, v))


def _experts_error(device: torch.device) -> Tensor:
    """Return the worst relative error of the grouped products; inf where an expert without rows has a sum."""
    random = random_tensors(device)
    rows, grads, weights = random(ENDS[-1], 16), random(ENDS[-1], 24), random(len(ENDS), 16, 24)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    parts = [slice(start, end) for start, end in zip((0, *ENDS), ENDS, strict=False)]
    results = (
        grouped_product(rows, weights, ends),
        grouped_outer_product(grads, rows, ends),
        grouped_sum(grads, ends),
    )
    x, dy, w = rows.double(), grads.double(), weights.double()
    expected = (
        torch.cat([x[part] @ w[expert] for expert, part in enumerate(parts)]),
        torch.stack([dy[part].T @ x[part] for part in parts]),
        torch.stack([dy[part].sum(0) for part in parts]),
    )
    worst = torch.stack(
        [(a.double() - b).norm() / b.norm() for a, b in zip(results, expected, strict=True)]
    ).max()
    empty = [expert for expert, part in enumerate(parts) if part.start == part.stop]
    written = any(bool(sums[empty].any()) for sums in results[1:])
    return worst.new_tensor(torch.inf) if written else worst
