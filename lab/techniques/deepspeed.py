"""DeepSpeed's own Ulysses attention, the reference that everyone knows, in the place of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH, Kernel, attention
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.exchange import check_degree
from lab.torch_private import FakeTensor


def apply_deepspeed_ulysses(model: nn.Module, *, group: dist.ProcessGroup) -> None:
    """Shard the sequence over ``group`` by ``UlyssesSPAttentionHF`` of DeepSpeed, its class unmodified.

    The hidden state of rank c is ``[b, s, E]``, tokens c*s to (c+1)*s, with ``position_ids`` that say so, as
    for ``apply_ulysses``; C is the size of the group. Each attention module gets an instance of its own on
    its first call. DeepSpeed's registration, which replaces an attention of transformers for the whole
    process, is not used; the attention inside the exchange is this lab's, so that the two backends differ
    in the exchange alone.

    Saves: what Ulysses saves, activations of S/C tokens.
    Costs: 4 all-to-alls a layer and direction, and one all-gather of positions, which it insists on. K < C
    heads are replicated as ours are. On CPU its communication backend compiles an operator when it is first
    used (half a minute, once a machine).
    Source: DeepSpeed-Ulysses (arXiv 2309.14509); ALST (arXiv 2506.13996);
    ``deepspeed/runtime/sequence_parallel/ulysses_sp.py``.
    Composes with: checkpointing, offload (of attention too, whose kernel is ours), tiling, FSDP2. Not with
    ring, UPipe or a plan.

    Raises:
        RecipeError: DeepSpeed is missing, or its operator cannot be compiled here; the model's tensors are
            fake; a degree that the heads do not allow.
    """
    parameter = next(model.parameters())
    if isinstance(parameter, FakeTensor):
        raise RecipeError(
            "ulysses_backend='deepspeed' cannot be planned: its exchange wants real tensors; "
            "plan with ulysses_backend='lab', which holds the same bytes or fewer"
        )
    decoder = decoder_of(model)
    check_degree(decoder.shape.H, decoder.shape.K, dist.get_world_size(group))
    kind = _attention_class(parameter.device)
    apply_attention(model)
    for module in decoder.attentions:
        module.lab_attention = _Exchange(kind, group, decoder.shape.L)  # type: ignore[assignment]


class _Exchange:
    """Stands around one module's attention: ``q [b, H, s, D]``, ``k, v [b, K, s, D]`` -> ``[b, H, s, D]``."""

    def __init__(self, kind: type[nn.Module], group: dist.ProcessGroup, layers: int) -> None:
        self._kind, self._group, self._layers = kind, group, layers
        self._made: Any = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, kernel: Kernel = FLASH
    ) -> Tensor:
        rows, heads, tokens, width = q.shape
        # It asks for the number of rows in advance, and for nothing else that may change from call to call.
        if self._made is None or self._made.batch_size != rows:
            self._made = self._kind(
                _attend,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=k.shape[1],
                num_hidden_layers=self._layers,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        # Not the attention module itself, whose num_key_value_groups it overwrites.
        module = SimpleNamespace(training=True)
        # It gathers positions for masks; the attention inside needs none.
        positions = torch.arange(tokens, device=q.device).expand(rows, -1).contiguous()
        out, _ = self._made(module, q, k, v, None, position_ids=positions, scale=scale, kernel=kernel)
        joined: Tensor = out
        return joined.view(rows, tokens, heads, width).transpose(1, 2)


def _attend(
    _module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: None,
    *,
    scale: float | None,
    kernel: Kernel,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention inside, ``[b, H/C, S, D]`` -> ``[b, S, H/C, D]``."""
    return attention(q, k, v, scale=scale, kernel=kernel).transpose(1, 2), None


def _attention_class(device: torch.device) -> type[nn.Module]:
    """DeepSpeed's class, with its communication over the process group that exists."""
    with _accelerator(device):
        try:
            import deepspeed.comm
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        except ImportError as error:
            raise RecipeError(
                f"ulysses_backend='deepspeed' without DeepSpeed ({error}): "
                "install deepspeed>=0.19, or use ulysses_backend='lab'"
            ) from error
        try:
            if not deepspeed.comm.is_initialized():
                deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        except (RuntimeError, OSError, ImportError) as error:
            # What the compiler said, pages of it, follows the first colon.
            said = str(error).partition(":")[0]
            raise RecipeError(
                "ulysses_backend='deepspeed': its communication operator cannot be compiled here, for which "
                f"it needs a C++ compiler and ninja ({said}); use ulysses_backend='lab'"
            ) from error
    kind: type[nn.Module] = UlyssesSPAttentionHF
    return kind


@contextmanager
def _accelerator(device: torch.device) -> Iterator[None]:
    """Name the accelerator while DeepSpeed is imported, if nobody has: it reads this name once, on import,
    and on a machine without one does not guess CPU by itself.
    """
    name = "DS_ACCELERATOR"
    if device.type != "cpu" or name in os.environ:
        yield
        return
    os.environ[name] = "cpu"
    try:
        yield
    finally:
        del os.environ[name]
