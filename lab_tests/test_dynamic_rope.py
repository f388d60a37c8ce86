"""Rotary positions of dynamic NTK scaling, whose frequencies depend on the number of tokens of a row."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.techniques.frequencies import inverse_frequencies
from lab.techniques.inputs import apply_input_checks
from lab.techniques.loss import apply_loss
from lab.techniques.rope import apply_rope, check_lengths
from lab_tests.support.reference import VOCABULARY, build, config, error, exact_rotary, gradients, loss_of

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}
LIMIT, ROWS = 30, 2
RECIPES = {
    "ulysses": Recipe(fsdp=True, ulysses=4),
    "upipe": Recipe(ulysses=4, head_chunk=8),
    "ring": Recipe(ring=4),
    "streamed": Recipe(
        fsdp=True, ulysses=2, ring=2, head_chunk=4, checkpoint=True, offload="inputs", stream=5
    ),
}
"""Rows are padded to a multiple of 4 tokens, or of 8 with the ring of four."""


def small(family="llama", **more):
    fields = {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT, **more}
    return build(config(family, 24, 4, **fields))


def token_ids(tokens):
    return torch.randint(0, VOCABULARY, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))


def expected(tokens):
    """The loss and the gradients of transformers' own model, with its angles in fp64."""
    model, ids = exact_rotary(small()), token_ids(tokens)
    mean = loss_of(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:]) / (ROWS * (tokens - 1))
    mean.backward()
    return mean.item(), gradients(model)


def parity_error(recipe, tokens, right):
    """The largest relative error of the loss or of a gradient. Runs on each rank."""
    model, mesh = small(), init_device_mesh("cpu", (dist.get_world_size(),))
    lab.apply_recipe(model, recipe, mesh)
    value = lab.loss(model, lab.shard_batch(token_ids(tokens), recipe, mesh))
    value.backward()
    found = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in gradients(model).items()}
    return max(abs(value.item() / right[0] - 1), error(found, right[1]))


@pytest.mark.parametrize("tokens", [20, LIMIT, LIMIT + 1, 47])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "glm4"])
def test_the_tables_are_transformers_own(family, tokens):
    """Also with parameters for each type of layers, and of a part of each head."""
    parameters = {"glm4": {**DYNAMIC, "partial_rotary_factor": 0.6}}.get(family, DYNAMIC)
    types = [{}]
    if family == "gemma3_text":
        parameters = {"full_attention": DYNAMIC, "sliding_attention": {**DYNAMIC, "factor": 2.0}}
        types = [{"layer_type": kind} for kind in parameters]
    theirs, ours = (small(family, rope_parameters=parameters) for _ in range(2))
    apply_rope(ours)
    x, positions = torch.zeros(1), torch.arange(tokens)[None]
    for of_type in types:
        pairs = [model.model.rotary_emb(x, position_ids=positions, **of_type) for model in (ours, theirs)]
        for found, right in zip(*pairs, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=3e-5)


def test_loss_and_gradients_on_four_ranks(ranks4):
    """Of rows below and above the limit, divided and padded; 30 tokens are padded to 32, above the limit."""
    cases = {"ulysses": 24, "upipe": 48, "ring": LIMIT, "streamed": 43}
    work = [(RECIPES[name], tokens, expected(tokens)) for name, tokens in cases.items()]
    for found in ranks4.apply(parity_errors, work):
        assert all(one < 1e-9 for one in found), dict(zip(cases, found, strict=True))


def parity_errors(work):
    return [parity_error(*case) for case in work]


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("lengths", "refused"),
    [
        ((43, 20, 43, LIMIT - 1), None),
        ((43, 44), r"rows of 44 tokens and rows of 43 .*=30 tokens or more .*; pad or cut all rows to one"),
        ((44, 20, 43), "rows of 43 tokens and rows of 44 with"),
        ((43, LIMIT), "rows of 30 tokens and rows of 43 with .* or to fewer than 30 tokens; for another"),
        ((LIMIT, 43), "rows of 43 tokens and rows of 30 with"),
    ],
)
def test_rows_from_the_limit_on_have_one_length(lengths, refused):
    """In transformers, a row of 43 tokens after one of 44 has the frequencies of 44."""
    model, recipe, mesh = small(), Recipe(), init_device_mesh("cpu", (1,))
    lab.apply_recipe(model, recipe, mesh)
    for number, tokens in enumerate(lengths):
        last = number == len(lengths) - 1
        with pytest.raises(RecipeError, match=f"^{refused}") if refused and last else nullcontext():
            lab.loss(model, lab.shard_batch(token_ids(tokens), recipe, mesh))


def part_of_a_row(model, tokens, **more):
    """Call a model that takes the first of two ranks' parts of rows of ``tokens`` tokens."""
    ids = token_ids(tokens // 2)
    return model(ids, position_ids=torch.arange(tokens // 2)[None], **more)


def test_a_forward_by_hand_says_how_many_tokens_are_padding():
    model = small()
    apply_rope(model, ulysses=2)
    apply_loss(model)
    apply_input_checks(model, ulysses=2, ring=1, index=0)
    part_of_a_row(model, LIMIT - 2)
    for tokens in (LIMIT + 2, 44):
        said = rf"^rows of {tokens - 1} to {tokens} tokens, .*'dynamic': .*; call lab\.loss\(.* padding$"
        with pytest.raises(RecipeError, match=said):
            part_of_a_row(model, tokens)
    with pytest.raises(RecipeError, match=r"^padding=2: rows are padded to a multiple of 2 tokens; give"):
        part_of_a_row(model, 44, padding=2)
    part_of_a_row(model, 44, padding=1)
    with pytest.raises(RecipeError, match=r"^rows of 44 tokens and rows of 43 with"):
        part_of_a_row(model, 44, padding=0)
    # What one call says does not count for the next.
    with pytest.raises(RecipeError, match=r"^rows of 43 to 44 tokens"):
        part_of_a_row(model, 44)


def test_a_model_that_has_computed_a_long_row_is_refused():
    model = small()
    model(token_ids(LIMIT))
    apply_rope(model)
    model = small()
    model(token_ids(43))
    with pytest.raises(RecipeError, match=r"^a model with .* that has computed a row of 43 .*=30: .*; build"):
        apply_rope(model)
    assert "forward" not in vars(model.model.rotary_emb)
    # A short row ends it, as in transformers.
    model(token_ids(20))
    apply_rope(model)


def test_another_limit_than_the_model_was_made_with_is_refused():
    model = small()
    model.config.max_position_embeddings = 31
    with pytest.raises(RecipeError, match=r"^the rotary embedding has other frequencies than config"):
        apply_rope(model)


@pytest.mark.usefixtures("alone")
def test_several_documents_in_a_row_are_refused():
    model, recipe, mesh = small(), Recipe(), init_device_mesh("cpu", (1,))
    lab.apply_recipe(model, recipe, mesh)
    with pytest.raises(RecipeError, match=r"^several documents in a row with rope_type='dynamic': "):
        lab.loss(model, lab.shard_batch(token_ids(20), recipe, mesh, documents=[[5, 15]] * ROWS))


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), "8", None, [], 10**400])
def test_a_factor_that_gives_no_frequencies_is_refused(factor):
    with pytest.raises(RecipeError, match="rope_parameters with which no angle can be computed"):
        inverse_frequencies({**DYNAMIC, "factor": factor}, 64, max_positions=LIMIT)


@pytest.mark.parametrize("limit", [0, -1, "a", None, 30.5])
def test_a_limit_that_gives_no_frequencies_is_refused(limit):
    with pytest.raises(RecipeError, match=r"max_position_embeddings=.* are not above 0"):
        inverse_frequencies(DYNAMIC, 64, max_positions=limit)


def test_groups_of_ranks_refuse_other_lengths_together(ranks4):
    """In a trainer, each group of ranks that share a sequence has rows of its own."""
    found = ranks4.apply(refusals_of_groups)
    assert all(refusals[0] is None for refusals in found)
    assert all(refusals[1].startswith("rows of 44 tokens and rows of 43 with") for refusals in found), found


def refusals_of_groups():
    model, found = small(), []
    apply_rope(model)
    for lengths in ((20, 43), (43, 44)):
        try:
            check_lengths(model, lengths[dist.get_rank() // 2], dist.group.WORLD)
            found.append(None)
        except RecipeError as refusal:
            found.append(str(refusal))
    return found
