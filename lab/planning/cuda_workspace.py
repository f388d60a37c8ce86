"""The CUDA workspace model: the bytes that CUDA takes and that a meter at the dispatcher cannot see.

A plan for a CUDA device adds them to what the meter counts. Each figure has its source.
"""

from __future__ import annotations

from typing import Any

from lab.memory.workspace import Workspace
from lab.planning.hardware import Figure
from lab.techniques.limits import QUERY_BLOCK, flash_takes
from lab.units import GiB, MiB

_ATEN = "PyTorch, aten/src/ATen"
_CONTEXT = "ml-engineering, training/performance: with every kernel of torch 2.1.1 loaded; 0.47 GiB with one"
# 0.5 + 4.7 + 4 MiB to receive in three protocols and a header to send, each rounded up to 2 MiB.
_CONNECTION = "NCCL 2.30, src/transport/p2p.cc and src/init.cc; the 10 + 2 MiB of NVIDIA/nccl issue 1685"

BLOCK = Figure(512, "B", "PyTorch, c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize")
CUDA_CONTEXT = Figure(0.92 * GiB, "B", _CONTEXT)
CUBLAS_WORKSPACE = Figure(32 * MiB, "B", f"{_ATEN}/cuda/CublasHandlePool.cpp, Hopper; 8.1 MiB before it")
CUBLAS_HANDLES = Figure(2, "1", f"{_ATEN}/cuda/CublasHandlePool.cpp: one a thread, autograd's is the other")
NCCL_CONNECTION = Figure(12 * MiB, "B", _CONNECTION)
NCCL_PAIR_CHANNELS = Figure(32, "1", "NVIDIA/nccl issue 1685: an all-to-all on 8 x H100, each pair")
NCCL_RING_CHANNELS = Figure(24, "1", "assumed from public logs of NCCL_DEBUG=INFO: 24 coll channels")
NODE = 8  # GPUs that NVLink joins

_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward"


def rounded(nbytes: int) -> int:
    """Bytes of the block that the caching allocator hands out for a tensor; an empty one takes none.

    With expandable segments what is left of a segment goes to other tensors, and the device is asked for
    pages of 20 MiB (2 MiB for tensors up to 1 MiB). Without them a remainder of up to 1 MiB is lost.
    """
    return round_up(nbytes, int(BLOCK.value))


def flash_backward_workspace(
    batch: int, heads: int, kv_heads: int, tokens_q: int, tokens_k: int, head_dim: int, *, copies: int = 0
) -> int:
    """Bytes that torch's CUDA flash backward allocates inside itself and frees before it returns.

    In half precision, of b sequences, h query heads and D rounded up to 8: an fp32 dq [b, S, h, D], S rounded
    up to 128 and D to 32 (to 64 above 128); the row sums of out * grad_out, fp32 [b, h, S]; and for grouped
    queries dk and dv of all h heads [b, S', h, D], summed over the groups at the end. ``copies`` is how many
    of out and grad_out do not lie in memory as [b, S, h, D] without gaps: each is copied first. The forward
    of a long sequence allocates its results and nothing else.

    Source: PyTorch, aten/src/ATen/native/transformers/cuda: mha_bwd in flash_attn/flash_api.cpp (not its
    deterministic mode, which keeps many dq), _flash_attention_backward in attention_backward.cu.
    """
    dim = round_up(head_dim, 8)
    rows = batch * heads * round_up(tokens_q, 128)
    tensors = [4 * rows * round_up(dim, 32 if dim <= 128 else 64), 4 * rows]
    if heads != kv_heads:
        tensors += [2 * batch * heads * tokens_k * dim] * 2
    tensors += [2 * batch * heads * tokens_q * dim] * copies
    return sum(map(rounded, tensors))


def matrix_products_workspace(
    batch: int,
    heads: int,
    kv_heads: int,
    tokens_q: int,
    tokens_k: int,
    head_dim: int,
    *,
    width: int,
    copies: int,
    backward: bool,
) -> int:
    """Bytes that attention by matrix products holds on CUDA in addition to its arguments and results.

    It is an upper bound, which is reached to within a few blocks of queries if they fill the last block. All
    sizes are those of the accumulation dtype: fp32, or fp64 for fp64. A matrix of scores has the last
    QUERY_BLOCK queries of all heads and all keys, [b, h, QUERY_BLOCK, S'].

    - Forward holds two of them, the scores and what ``logsumexp`` makes of them inside, or, if that is more,
      the scores and the copies of k or of v. Which of them is more does not depend on the tokens.
    - Backward holds the weights and the gradient of the scores, and the term that is added to the sum of dk,
      [b, h/G, S', D], or the copies of k or of v. Where the sums of dk and dv are wider than the results, it
      holds these sums, and not yet the results.
    - Up to three tensors of a block of queries, [b, h, QUERY_BLOCK, D], are taken to be in memory with them.

    Source: ``lab/techniques/attention/matrix_products.py``, and the profiler's memory events on CPU, which
    include what ``logsumexp`` allocates.

    Args:
        batch: b, the rows.
        heads: h, the query heads.
        kv_heads: h/G, the heads of k and v.
        tokens_q: S, the query tokens.
        tokens_k: S', the key tokens.
        head_dim: D.
        width: The bytes of an element of q.
        copies: How many copies of all of k, or of v, a matrix product needs: one in a wider dtype, and one if
            the heads of its rows do not lie at equal distances.
        backward: Whether it is the backward.
    """
    wide = max(width, 4)
    rows = wide * batch * heads * min(QUERY_BLOCK, tokens_q)
    scores, of_keys = rows * tokens_k, wide * batch * kv_heads * tokens_k * head_dim
    block = rounded(rows * head_dim)
    if not backward:
        return rounded(scores) + max(rounded(scores), copies * rounded(of_keys)) + 3 * block
    held = 2 * rounded(scores) + max(copies, 1) * rounded(of_keys) + 3 * block + rounded(rows)
    if width < wide:
        held += 2 * (rounded(of_keys) - rounded(of_keys * width // wide))
    return held


def matrix_products_note(dtype: str, head_dim: int) -> str:
    """Return what is to be known where attention in this dtype and D runs as matrix products on CUDA."""
    fast = "compute_dtype='bfloat16' runs a flash kernel"
    advice = fast if flash_takes(2, head_dim) else "flash kernels take at most 256"
    runs = f"in {dtype} with head_dim={head_dim} attention runs as matrix products on CUDA"
    return f"{runs}, several times slower than a flash kernel, of which the planned seconds are; {advice}"


def fixed_workspace(ranks: int) -> int:
    """Bytes a rank holds from its first step on, whatever the shapes: CUDA, cuBLAS, and NCCL's buffers.

    One communicator over all ranks, with an all-to-all (a connection to each other GPU of a node of 8) and a
    ring; each communicator more takes its own. Connections to other nodes and NVLink SHARP are left out.
    Eight ranks come to 3.9 GiB; NVIDIA/nccl issue 1685 saw 4.3 GB on 8 x H100 after its first all-to-all.
    """
    return int(CUBLAS_HANDLES.value * CUBLAS_WORKSPACE.value) + outside_workspace(ranks)


def outside_workspace(ranks: int) -> int:
    """The part of it that torch does not count as allocated: all but the cuBLAS workspaces."""
    return int(CUDA_CONTEXT.value) + nccl_workspace(ranks)


def nccl_workspace(ranks: int) -> int:
    """Bytes of NCCL's buffers on each of ``ranks`` ranks; a single rank has none."""
    if ranks == 1:
        return 0
    pairs = (min(ranks, NODE) - 1) * NCCL_PAIR_CHANNELS.value
    return int((pairs + NCCL_RING_CHANNELS.value) * NCCL_CONNECTION.value)


def cuda_workspace(ranks: int) -> Workspace:
    """What CUDA takes on each of ``ranks`` ranks, by the model above."""
    return Workspace(fixed_workspace(ranks), _inside_kernel)


def _inside_kernel(op: str, args: tuple[Any, ...]) -> int:
    if op not in (_FORWARD, _BACKWARD):
        return 0
    q, k, v = args[1:4] if op == _BACKWARD else args[:3]
    (batch, heads, tokens, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    if not flash_takes(q.itemsize, head_dim):
        return matrix_products_workspace(
            batch, heads, kv_heads, tokens, keys, head_dim,
            width=q.itemsize, copies=max(_copies(k), _copies(v)), backward=op == _BACKWARD,
        )  # fmt: skip
    if op == _FORWARD:
        return 0
    copies = sum(not x.transpose(1, 2).is_contiguous() for x in (args[0], args[4]))
    return flash_backward_workspace(batch, heads, kv_heads, tokens, keys, head_dim, copies=copies)


def _copies(keys: Any) -> int:
    """Copies of all keys [b, h/G, S', D] for a product with them: see ``matrix_products_workspace``."""
    (batch, heads, *_), (of_row, of_head, of_token, _) = keys.shape, keys.stride()
    wider = keys.itemsize < 4
    # A wider copy lies without gaps, in the order of the strides.
    joined = of_head > of_token if wider else of_row == heads * of_head
    return int(wider) + int(batch > 1 and heads > 1 and not joined)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a value."""
    return -(-value // multiple) * multiple
