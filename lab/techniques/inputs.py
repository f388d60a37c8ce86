"""Checks of the arguments that a model with a recipe is called with; unsupported ones are refused by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lab.decoder import Patch, facts_of, refuse_copy, refuse_pickle
from lab.errors import RecipeError
from lab.techniques.attention.documents import Documents, document_positions
from lab.techniques.document_lengths import Lengths, check_documents, several_or_none
from lab.techniques.ring import local_positions
from lab.techniques.rope import rotary_forward
from lab.techniques.ulysses_degrees import token_multiple
from lab.torch_private import FakeTensor, version

NEUTRAL: dict[str, object] = {
    "is_causal": True, "logits_to_keep": 0, "output_attentions": False, "output_hidden_states": False,
    "output_router_logits": False, "return_dict": True, "use_cache": False,
}  # fmt: skip
"""The values of transformers' keywords that change nothing. None changes nothing for every keyword."""


def apply_input_checks(
    model: nn.Module, *, ulysses: int, ring: int, index: int, exchange: str = "send"
) -> None:
    """Check the arguments of every forward of ``model``, and refuse those that are not supported.

    After this, the model is called as ``model(input_ids, attention_mask, position_ids, shifted_labels=...)``:

    - ``input_ids`` [b, s] are this rank's tokens, as ``lab.shard_batch`` returns them.
    - ``position_ids`` [1, s] or [b, s] are the positions of these tokens in the whole sequence, also from
      ``lab.shard_batch``. They may be left out if C = R = 1.
    - ``documents`` are the lengths of the documents of this rank's rows, also from ``lab.shard_batch``; None
      if each row is one. The positions then begin at 0 in each document. No technique sees them between
      calls: they reach each attention as a keyword, see ``Documents``.
    - ``padding`` is how many tokens ``lab.shard_batch`` added at the end of each row. It may be left out if
      C = R = 1, or if the frequencies of rotary positions do not depend on the length of a row.
    - ``attention_mask`` [b, s] may mark padding at the end of rows. The model does not use the mask:
      attention is causal, so padding cannot affect the tokens before it.
    - ``shifted_labels`` [b, s] come from ``lab.loss``. The label at place i is the token that follows it. The
      name differs from ``labels``, because transformers shifts ``labels`` itself.

    Modules that changed after the recipe was applied are refused too, because the recipe was checked for the
    model without the change.

    Costs: in each forward, one comparison of s integers and one of the mask, for both of which the host
    waits; one loop over the modules, and two over the parameters. Fake tokens are not compared.

    Args:
        model: The model, with all other techniques applied.
        ulysses: C, the Ulysses degree.
        ring: R, the ring degree.
        index: The rank's number among the C*R ranks that share a sequence: ring index * C + Ulysses index.
        exchange: How the ranks of a ring exchange keys and values, "send" or "gather".

    Raises:
        RecipeError: In forward: ``labels``; padding before the end of a row, or any padding if C*R > 1;
            positions that skip, belong to another rank, or restart without ``documents``; documents with a
            ring that sends, with LongRoPE or dynamic NTK scaling, or which the layers do not pass on; rows of
            a length that ``RotaryForward`` refuses; ``inputs_embeds``, caches, requests for hidden states or
            attentions, and every other keyword whose value is not in ``NEUTRAL``; autocast; modules that
            changed. In backward: a parameter changed after forward, by an optimizer or by loading a state.
    """
    plain = model.forward
    attentions = sum("lab_window" in vars(module) for module in model.modules())
    rotary, multiple = rotary_forward(model), token_multiple(ulysses, ring)
    before, parameters = _module_records(model), dict(model.named_parameters())
    _count_updates_of_fused_optimizers()

    def forward(
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        shifted_labels: Tensor | None = None,
        documents: Lengths | None = None,
        padding: int | None = None,
        **kwargs: Any,
    ) -> Any:
        _check_keywords(kwargs)
        _check_ids(input_ids)
        assert input_ids is not None
        _check_mode(input_ids.device.type)
        _check_unchanged(model, before)
        if attention_mask is not None:
            _check_mask(attention_mask, input_ids, whole=ulysses * ring == 1)
        tokens = input_ids.shape[1] * ulysses * ring
        if documents is not None:
            documents = several_or_none(check_documents(documents, len(input_ids), tokens), ring, exchange)
            if documents is not None and rotary.type_by_length is not None:
                raise RecipeError(
                    f"several documents in a row with rope_type={rotary.type_by_length!r}: whether a "
                    "document has the frequencies of its own length or of the longest one is not defined; "
                    "give one document per row"
                )
        if padding is not None and padding not in range(multiple):
            raise RecipeError(
                f"padding={padding}: rows are padded to a multiple of {multiple} tokens; give the padding of "
                "lab.shard_batch, which calls of lab.loss do"
            )
        positions = _positions(input_ids, position_ids, documents, ulysses, ring, index)
        keywords: dict[str, Any] = {} if shifted_labels is None else {"labels": shifted_labels}
        in_rows = None if documents is None else Documents(documents)
        if in_rows is not None:
            keywords["lab_documents"] = in_rows
        with rotary.rows_of(None if padding is None else tokens - padding):
            output = plain(input_ids=input_ids, position_ids=positions, use_cache=False, **keywords)
        if in_rows is not None and in_rows.uses != attentions:
            raise RecipeError(
                f"documents reached {in_rows.uses} of {attentions} attentions of a model whose layers do not "
                "pass keywords on: give one document per row"
            )
        _refuse_updates_before_backward(output, parameters)
        return output

    # torch.compile of the model leaves this forward uncompiled.
    patch = Patch(torch.compiler.disable(forward), plain)
    patch.sequence = (ulysses, ring)
    model.forward = patch
    # FSDP's classes define these too, with longer messages. Attributes of the instance take precedence.
    model.__deepcopy__, model.__reduce_ex__ = refuse_copy, refuse_pickle  # type: ignore[assignment]


def _check_keywords(kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        raise RecipeError(
            "labels=...: a model with a recipe holds a part of the batch, whose labels are shifted before "
            "it is cut; use lab.loss(model, lab.shard_batch(input_ids, recipe, mesh))"
        )
    for name, value in kwargs.items():
        if value is None or (not isinstance(value, Tensor) and value == NEUTRAL.get(name, ...)):
            continue
        description = "a tensor" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, bool | int | float | str):
            description = str(value)
        raise RecipeError(
            f"{name}={description}: a model with a recipe takes input_ids, position_ids and, for padding at "
            "the end of rows, attention_mask; leave it out"
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
    is_token = boolean_mask(mask)
    if bool(is_token.all()):
        return
    if not whole:
        raise RecipeError(
            "attention_mask with padding for a part of a sequence: give the whole batch's to "
            "lab.shard_batch(input_ids, recipe, mesh, attention_mask=...)"
        )
    check_right_padding(is_token)


def boolean_mask(mask: Tensor) -> Tensor:
    """Convert an attention mask to bool: True for a token (1), and False for padding (0).

    Args:
        mask: [b, S], with b rows of S tokens.

    Returns:
        [b, S], bool.

    Raises:
        RecipeError: The mask has another value, such as the number of a document in a packed row.
    """
    is_token = mask == 1
    if not bool((is_token | (mask == 0)).all()):
        raise RecipeError("attention_mask has values other than 0 and 1: give 1 for tokens and 0 for padding")
    return is_token


def check_right_padding(is_token: Tensor) -> None:
    """Refuse a mask with padding before a token.

    Args:
        is_token: [b, S], True for a token and False for padding.

    Raises:
        RecipeError: A row has padding before a token; the message names the first such row.
    """
    wrong = (is_token[:, 1:] & ~is_token[:, :-1]).any(1)
    if bool(wrong.any()):
        raise RecipeError(
            f"attention_mask of row {int(wrong.nonzero()[0])} has padding before a token: rows are taken "
            "with padding at their end (tokenizer.padding_side='right')"
        )


def _positions(
    input_ids: Tensor,
    position_ids: Tensor | None,
    documents: Lengths | None,
    ulysses: int,
    ring: int,
    index: int,
) -> Tensor:
    """Return the positions of this rank's tokens, and refuse ``position_ids`` that differ.

    Returns:
        [1, s], or [b, s] if the rows have different documents.
    """
    if position_ids is None and ulysses * ring > 1:
        raise RecipeError(
            f"position_ids left out with ulysses={ulysses}, ring={ring}: a rank holds a part of the "
            "sequence; call lab.loss(model, lab.shard_batch(...)), or give the batch's position_ids"
        )
    total = input_ids.shape[1] * ulysses * ring
    expected = local_positions(total, ulysses=ulysses, ring=ring, index=index, device=input_ids.device)[None]
    if documents is not None:
        expected = document_positions(documents, input_ids.device)[:, expected[0]]
    if position_ids is None:
        return expected
    if position_ids.shape in (expected.shape, input_ids.shape):
        different = (position_ids != expected).any()
        if isinstance(position_ids, FakeTensor) or not bool(different):
            return position_ids[: len(expected)]
    raise RecipeError(
        "position_ids are not the positions that this rank holds: use the position_ids of lab.shard_batch, "
        "which takes documents= or position_ids= for rows of several documents, and call lab.loss"
    )


ModuleRecord = tuple[nn.Module, type, object, dict[str, object]]
"""What must not change of a module: the module itself, its class, its forward, and its plain attributes."""


def _module_records(model: nn.Module) -> dict[str, ModuleRecord]:
    """Record every module in ``model``, by name."""
    return {
        name: (module, type(module), _foreign(vars(module).get("forward")), facts_of(module))
        for name, module in model.named_modules()
        if name
    }


def _foreign(forward: object) -> object:
    """Return ``forward`` if the lab did not set it, else None: techniques may be applied by hand later."""
    return None if isinstance(forward, Patch) else forward


def _check_unchanged(model: nn.Module, before: dict[str, ModuleRecord]) -> None:
    now = _module_records(model)
    if now != before:
        changed = next(name for name in (*now, *before) if now.get(name) != before.get(name))
        raise RecipeError(
            f"{changed} changed after the recipe was applied (an adapter, another module or forward, an "
            "attribute): change the model first, then apply the recipe"
        )


def _refuse_updates_before_backward(output: Any, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse a backward if a parameter changed after forward.

    FSDP gathers the parameters again in backward, and a checkpointed layer computes with them again. Autograd
    checks the versions only of tensors that it saved itself, so it would not notice the change.
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
    """Increase the version of every parameter after each step of an optimizer, once per process.

    A fused optimizer updates the shard of a DTensor directly, which does not change the DTensor's version.
    """

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                torch.autograd.graph.increment_version(parameter)

    register_optimizer_step_post_hook(count)


def _check_ids(input_ids: Tensor | None) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype != torch.int64:
        raise RecipeError("a model with a recipe is called with input_ids of shape [rows, tokens], int64")
