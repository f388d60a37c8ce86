"""What a model is called with: taken where it is computed right, refused by name where it is not."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lab.decoder import Patch, facts_of, refuse_copy, refuse_pickle
from lab.errors import RecipeError
from lab.techniques.ring import local_positions
from lab.torch_private import FakeTensor, version

NEUTRAL: dict[str, object] = {
    "is_causal": True, "logits_to_keep": 0, "output_attentions": False, "output_hidden_states": False,
    "return_dict": True, "use_cache": False,
}  # fmt: skip
"""What keywords of transformers are when they ask for nothing; None asks for nothing everywhere."""


def apply_input_checks(model: nn.Module, *, ulysses: int, ring: int, index: int) -> None:
    """Let ``model(input_ids, attention_mask, position_ids, shifted_labels=...)`` take no other keyword.

    ``input_ids`` [b, s] are the tokens that rank ``index`` of the C*R ranks of a sequence holds, and
    ``position_ids`` [1 or b, s] their places in it, as ``lab.shard_batch`` gives both; with C = R = 1
    positions may be left out. ``attention_mask`` [b, s] may mark padding at the end of rows. The model does
    not use it: attention is causal, so padding cannot affect the tokens before it. ``shifted_labels`` [b, s]
    are what ``lab.loss`` gives: the label at place i is the token after it. They have a name of their own
    because ``labels`` of transformers are not shifted yet.

    Modules that changed after the recipe was applied are refused here too: the tests prove the model as it
    was then.

    Costs: one comparison of s integers a forward, and one of the mask, for each of which the host waits; and
    a walk over the modules and two over the parameters. Under fake tensors no tokens are compared.

    Raises, in forward:
        RecipeError: ``labels``; padding elsewhere than at the end of rows, or any under sequence sharding;
            positions that restart, skip or are another rank's; ``inputs_embeds``, caches, requests for hidden
            states or attentions, and every other keyword that is not neutral; autocast; modules that changed.
            In backward: a parameter that an optimizer, or a load of a state, changed after forward.
    """
    plain = model.forward
    before, parameters = _modules(model), dict(model.named_parameters())
    _count_updates_of_fused_optimizers()

    def forward(
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        shifted_labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        _check_keywords(others)
        _check_ids(input_ids)
        assert input_ids is not None
        _check_mode(input_ids.device.type)
        _check_unchanged(model, before)
        if attention_mask is not None:
            _check_mask(attention_mask, input_ids, whole=ulysses * ring == 1)
        positions = _positions(input_ids, position_ids, ulysses, ring, index)
        given = {} if shifted_labels is None else {"labels": shifted_labels}
        output = plain(input_ids=input_ids, position_ids=positions, use_cache=False, **given)
        _refuse_updates_before_backward(output, parameters)
        return output

    # torch.compile of the model compiles only what is outside this forward.
    patch = Patch(torch.compiler.disable(forward), plain)
    patch.sequence = (ulysses, ring)
    model.forward = patch
    # FSDP's classes define these with messages of several lines; attributes of the instance take precedence.
    model.__deepcopy__, model.__reduce_ex__ = refuse_copy, refuse_pickle  # type: ignore[assignment]


def _check_keywords(others: dict[str, Any]) -> None:
    if others.get("labels") is not None:
        raise RecipeError(
            "labels=...: a model with a recipe holds a part of the batch, whose labels are shifted before "
            "it is cut; use lab.loss(model, lab.shard_batch(input_ids, recipe, mesh))"
        )
    for name, value in others.items():
        if value is None or (not isinstance(value, Tensor) and value == NEUTRAL.get(name, ...)):
            continue
        told = "a tensor" if isinstance(value, Tensor) else type(value).__name__
        raise RecipeError(
            f"{name}={value if isinstance(value, bool | int | float | str) else told}: a model with a recipe "
            "takes input_ids, position_ids and, for padding at the end of rows, attention_mask; leave it out"
        )


def _check_mode(device_type: str) -> None:
    if torch.is_autocast_enabled(device_type):
        raise RecipeError(
            "autocast around a model with a recipe: the techniques cast for themselves; set "
            "compute_dtype='bfloat16' in the recipe instead"
        )


def _check_mask(mask: Tensor, input_ids: Tensor, *, whole: bool) -> None:
    if mask.shape != input_ids.shape:
        raise RecipeError(
            f"attention_mask has shape {list(mask.shape)}: give one of the shape of input_ids, "
            f"{list(input_ids.shape)}, 1 for tokens and 0 for padding at the end of rows"
        )
    if isinstance(mask, FakeTensor):
        return
    kept = kept_tokens(mask)
    if bool(kept.all()):
        return
    if not whole:
        raise RecipeError(
            "attention_mask with padding for a part of a sequence: give the whole batch's to "
            "lab.shard_batch(input_ids, recipe, mesh, attention_mask=...)"
        )
    check_right_padding(kept)


def kept_tokens(mask: Tensor) -> Tensor:
    """True where a mask [b, S] is 1 and False where it is 0.

    Raises:
        RecipeError: any other value, such as the numbers of several documents in a row.
    """
    kept = mask == 1
    if not bool((kept | (mask == 0)).all()):
        raise RecipeError("attention_mask with values beside 0 and 1: give 1 for tokens and 0 for padding")
    return kept


def check_right_padding(kept: Tensor) -> None:
    """Refuse a mask [b, S], True for tokens and False for padding, whose rows do not end with their padding.

    Raises:
        RecipeError: the first such row.
    """
    wrong = (kept[:, 1:] & ~kept[:, :-1]).any(1)
    if bool(wrong.any()):
        raise RecipeError(
            f"attention_mask of row {int(wrong.nonzero()[0])} has padding before a token: rows are taken "
            "with padding at their end (tokenizer.padding_side='right')"
        )


def _positions(input_ids: Tensor, given: Tensor | None, ulysses: int, ring: int, index: int) -> Tensor:
    """The positions of this rank's tokens, [1, s]; those given must be these."""
    if given is None and ulysses * ring > 1:
        raise RecipeError(
            f"position_ids left out with ulysses={ulysses}, ring={ring}: a rank holds a part of the "
            "sequence; call lab.loss(model, lab.shard_batch(...)), or give the batch's position_ids"
        )
    total = input_ids.shape[1] * ulysses * ring
    right = local_positions(total, ulysses=ulysses, ring=ring, index=index, device=input_ids.device)[None]
    if given is None:
        return right
    if given.dim() == 2 and given.shape[0] in (1, len(input_ids)) and given.shape[1] == right.shape[1]:
        different = (given != right).any()
        if isinstance(given, FakeTensor) or not bool(different):
            return given[:1]
    raise RecipeError(
        "position_ids are not the positions that this rank holds: use the position_ids of lab.shard_batch; "
        "each row must be one document, counted from 0 (packed documents are not supported)"
    )


Facts = tuple[nn.Module, type, object, dict[str, object]]


def _modules(model: nn.Module) -> dict[str, Facts]:
    """What must stay as it was of each module: itself, its class, its forward, its plain attributes."""
    return {
        name: (module, type(module), _foreign(vars(module).get("forward")), facts_of(module))
        for name, module in model.named_modules()
        if name
    }


def _foreign(forward: object) -> object:
    """A forward that is not the lab's; a technique may still be applied by hand, as the notebooks do."""
    return None if isinstance(forward, Patch) else forward


def _check_unchanged(model: nn.Module, before: dict[str, Facts]) -> None:
    now = _modules(model)
    if now != before:
        changed = next(name for name in (*now, *before) if now.get(name) != before.get(name))
        raise RecipeError(
            f"{changed} changed after the recipe was applied (an adapter, another module or forward, an "
            "attribute): change the model first, then apply the recipe"
        )


def _refuse_updates_before_backward(output: Any, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse, in backward, parameters that changed after forward.

    FSDP gathers them again and a checkpoint computes with them again; autograd compares the versions only of
    tensors that it saved itself.
    """
    result = output.logits if output.loss is None else output.loss
    if not result.requires_grad:
        return
    versions = [version(parameter) for parameter in parameters.values()]

    def check(_: Tensor) -> None:
        for (name, parameter), before in zip(parameters.items(), versions, strict=True):
            if version(parameter) != before:
                raise RecipeError(
                    f"{name} changed between forward and backward, and backward would use the new values: "
                    "call optimizer.step() after backward"
                )

    result.register_hook(check)


@cache
def _count_updates_of_fused_optimizers() -> None:
    """Let the version of a DTensor count the updates of fused optimizers, which change only its shard."""

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                torch.autograd.graph.increment_version(parameter)

    register_optimizer_step_post_hook(count)


def _check_ids(input_ids: Tensor | None) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype != torch.int64:
        raise RecipeError("a model with a recipe is called with input_ids of shape [rows, tokens], int64")
