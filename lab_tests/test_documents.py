"""Documents in one row, in one process: each is computed as if it were alone.

Seen red: documents that see each other, positions that do not restart, a label that crosses the border of two
documents, lengths that are off by one, documents that a recomputation or another micro-batch would forget,
and rows that share the documents of the first row.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab.decoder import FAMILIES, Patch
from lab.errors import RecipeError
from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.techniques.attention.documents import Documents, documents_kernel
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.attention.sinks import sink_kernel
from lab.techniques.attention.tiled_backward import tiled_kernel
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.loss import IGNORED
from lab_tests.support import reference
from lab_tests.support.documents import (
    DOCUMENTS,
    TOKENS,
    plain_result,
    relative_errors,
    save,
    token_ids,
)
from lab_tests.support.mesh import Mesh
from lab_tests.support.parity import whole_gradients

H, G, D, SCALE = 6, 2, 10, 0.3
LENGTHS = ((5, 20, 1, 18), (44,), (1, 43), (1, 43))


# ---- the kernel --------------------------------------------------------------------------------------------


def tensors(rows=4, tokens=TOKENS):
    make = torch.Generator().manual_seed(tokens)
    sizes = [(rows, heads, tokens, D) for heads in (H, H // G, H // G, H)]
    return [torch.randn(size, dtype=torch.float64, generator=make) for size in sizes]


def masked(q, k, v, dout, sinks, window):
    """Return the output, the LSE, and the gradients, by a mask of blocks on the diagonal."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v, sinks)]
    q, k, v, sinks = leaves
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    place = torch.arange(TOKENS)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < window) & (number[:, :, None] == number[:, None])
    scores = q @ k.repeat_interleave(G, 1).transpose(2, 3) * SCALE
    logits = sinks[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat((scores.masked_fill(~seen[:, None], -torch.inf), logits), -1)
    out = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(G, 1)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, dout)


KERNELS = {
    "flash": (FLASH, TOKENS),
    "in tiles": (tiled_kernel(FLASH, 8), TOKENS),
    "a window": (windowed_kernel(FLASH, 7), 7),
    "a window in tiles": (windowed_kernel(tiled_kernel(FLASH, 3), 9, piece=10), 9),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sink", [-torch.inf, 0.4])
def test_attention_is_within_each_document(name, sink):
    kernel, window = KERNELS[name]
    q, k, v, dout = tensors()
    sinks = torch.full((H,), sink, dtype=torch.float64)
    expected = masked(q, k, v, dout, sinks, window)
    kernel = documents_kernel(kernel, Documents(LENGTHS))
    if sink > -torch.inf:
        kernel = sink_kernel(kernel, sinks.requires_grad_())
    out, lse = kernel.forward(q, k, v, scale=SCALE)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attended = attention(*leaves, scale=SCALE, kernel=kernel)
    grads = torch.autograd.grad(attended, [*leaves, *([sinks] if sinks.requires_grad else [])], dout)
    sums = [torch.ones_like(t) for t in (k, v)]
    dq = q.clone()
    kernel.accumulate(dout, dq, k, v, out, lse, *sums, scale=SCALE)
    torch.testing.assert_close((out, lse, attended.detach()), (*expected[:2], expected[0]))
    torch.testing.assert_close(grads, expected[2 : 2 + len(grads)])
    torch.testing.assert_close((dq, *(t - 1 for t in sums)), expected[2:5])


def test_a_kernel_without_sums_adds_to_those_that_it_is_given():
    plain = FLASH._replace(accumulate=None)
    q, k, v, dout = tensors()
    kernel = documents_kernel(plain, Documents(LENGTHS))
    results = kernel.forward(q, k, v)
    sums = [torch.ones_like(t) for t in (k, v)]
    dq, dk, dv = kernel.backward(dout, q, k, v, *results)
    kernel.accumulate(dout, q, k, v, *results, *sums)
    torch.testing.assert_close((q, *(t - 1 for t in sums)), (dq, dk, dv))


def test_rows_of_equal_documents_are_computed_together():
    parts = list(Documents(LENGTHS).parts(torch.Size((4, H, TOKENS, D))))
    assert [(rows.start, rows.stop, tokens.stop) for rows, tokens in parts] == [
        (0, 1, 5), (0, 1, 25), (0, 1, 26), (0, 1, 44), (1, 2, 44), (2, 4, 1), (2, 4, 44),
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "tokens"), [(4, 43), (4, 45), (3, 44), (5, 44)])
def test_tensors_of_another_size_are_not_computed(rows, tokens):
    q, k, v, _ = tensors(rows, tokens)
    with pytest.raises(ValueError, match=rf"in {rows} rows of {tokens} tokens"):
        documents_kernel(FLASH, Documents(LENGTHS)).forward(q, k, v)


def test_attention_that_is_not_causal_is_refused():
    q, k, v, dout = tensors()
    kernel = documents_kernel(FLASH, Documents(LENGTHS))
    results = kernel.forward(q, k, v)
    for call, arguments in (
        (kernel.forward, (q, k, v)),
        (kernel.backward, (dout, q, k, v, *results)),
        (kernel.accumulate, (dout, q, k, v, *results, k, v)),
    ):
        with pytest.raises(ValueError, match="causal=False with documents is not supported"):
            call(*arguments, causal=False)


# ---- the batch ---------------------------------------------------------------------------------------------


def shards(ranks, documents=DOCUMENTS, rows=None, **knobs):
    given = {"documents": documents}
    return [
        shard_batch(token_ids(rows or len(documents)), Recipe(**knobs), Mesh(ranks, rank), **given)
        for rank in range(ranks)
    ]


def positions_of(documents):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_labels_and_positions_are_within_each_document(ulysses):
    batches = shards(ulysses, ulysses=ulysses)
    rows = [torch.cat(parts, 1) for parts in zip(*((b.labels, b.position_ids) for b in batches), strict=True)]
    ids, positions = token_ids(), positions_of(DOCUMENTS)
    expected = ids.roll(-1, 1)
    expected[positions.roll(-1, 1) == 0] = IGNORED
    assert torch.equal(rows[0], expected)
    assert torch.equal(rows[1], positions)
    assert {b.label_count for b in batches} == {3 * TOKENS - 8} == {int((expected != IGNORED).sum())}
    assert {b.documents for b in batches} == {tuple(map(tuple, DOCUMENTS))}


def test_padding_to_equal_parts_belongs_to_the_last_document():
    batches = shards(3, ulysses=3)
    assert {b.documents for b in batches} == {((5, 20, 20), (1, 30, 1, 13), (45,))}
    assert batches[2].labels[:, -1].tolist() == [IGNORED] * 3


def test_a_rank_has_the_documents_of_its_rows_and_repeats():
    batches = shards(2)
    assert batches[0].documents == ((5, 20, 19), (1, 30, 1, 12))
    assert batches[1].documents == ((44,), (5, 20, 19))
    assert (batches[1].labels[1] == IGNORED).all()


def test_positions_of_equal_rows_are_those_of_one():
    [batch] = shards(1, [[4, 40]] * 2)
    assert batch.position_ids.shape == (1, TOKENS)
    assert batch.documents == ((4, 40),) * 2


def test_positions_that_restart_are_documents():
    alone, ids = Mesh(1, 0), token_ids()
    by_positions = shard_batch(ids, Recipe(), alone, position_ids=positions_of(DOCUMENTS))
    [by_lengths] = shards(1)
    assert by_positions.documents == by_lengths.documents
    assert torch.equal(by_positions.labels, by_lengths.labels)
    assert torch.equal(by_positions.position_ids, by_lengths.position_ids)


def test_rows_of_one_document_are_a_plain_batch():
    whole = torch.arange(TOKENS).expand(3, -1)
    for given in ({"documents": [[TOKENS]] * 3}, {"position_ids": whole}, {}):
        batch = shard_batch(token_ids(), Recipe(ring=2), Mesh(2, 0), **given)
        assert batch.documents is None
        assert batch.position_ids.tolist() == [[*range(11), *range(33, 44)]]


@pytest.mark.parametrize("padding_positions", [0, 1, 7])
def test_padding_at_the_end_of_rows_is_predicted_by_nothing(padding_positions):
    mask = torch.ones(3, TOKENS, dtype=torch.int64)
    mask[0, 40:], mask[2, 7:] = 0, 0
    positions = positions_of(DOCUMENTS).masked_fill(mask == 0, padding_positions)
    of_lengths = shard_batch(token_ids(), Recipe(), Mesh(1, 0), documents=DOCUMENTS, attention_mask=mask)
    of_positions = shard_batch(token_ids(), Recipe(), Mesh(1, 0), position_ids=positions, attention_mask=mask)
    assert torch.equal(of_lengths.labels, of_positions.labels)
    assert of_positions.documents == of_lengths.documents
    counted = int((of_lengths.labels != IGNORED).sum())
    assert of_lengths.label_count == counted == (40 - 3) + (44 - 4) + (7 - 1)


def refused(message, **given):
    with pytest.raises(RecipeError, match=message) as caught:
        shard_batch(token_ids(), given.pop("recipe", Recipe()), given.pop("mesh", Mesh(1, 0)), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[5, 20, 18], [44], [44]], "row 0 have 43 tokens together, and the row has 44: .*add up"),
        ([[44], [44], [44, 1]], "documents of row 2 have 45 tokens together, and the row has 44"),
        ([[44], [], [44]], "documents of row 1 have 0 tokens together"),
        ([[44], [0, 44], [44]], "documents of row 1 with a length of 0: .* 1 token or more"),
        ([[44], [46, -2], [44]], "documents of row 1 with a length of -2"),
        ([[44], [44.0], [44]], r"documents of row 1 with a length of 44\.0"),
        ([[44], [True, 43], [44]], "documents of row 1 with a length of True"),
        ([[44], [44]], "documents of 2 rows for input_ids of 3"),
        ([5, 20, 19], "documents: give a list of lengths for each row"),
        (torch.tensor([[44]] * 3), "documents: give a list of lengths for each row"),
        ([[1] * 44] * 3, "documents leave no token to predict"),
    ],
)
def test_lengths_that_are_no_documents_are_refused(documents, message):
    refused(message, documents=documents)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, *range(43)], "position_ids of row 1 have 1 at token 0: .*count from 0 in each document"),
        ([*range(20), *range(21, 45)], "position_ids of row 1 have 21 at token 20"),
        ([*range(20), *range(1, 25)], "position_ids of row 1 have 1 at token 20"),
        ([0, -1, *range(42)], "position_ids of row 1 have -1 at token 1"),
        ([*range(20), 19, *range(23)], "position_ids of row 1 have 19 at token 20"),
    ],
)
def test_positions_that_are_no_documents_are_refused(row, message):
    positions = torch.stack([torch.arange(TOKENS), torch.tensor(row), torch.arange(TOKENS)])
    refused(message, position_ids=positions)


def test_positions_of_another_shape_or_type_are_refused():
    refused(r"position_ids of shape \[44\] in torch.int64: give one of", position_ids=torch.arange(44))
    refused("position_ids of shape .* in torch.float32", position_ids=positions_of(DOCUMENTS).float())
    refused("position_ids are tensors", position_ids=positions_of(DOCUMENTS).tolist())


def test_documents_given_twice_are_refused():
    refused("documents and position_ids together", documents=DOCUMENTS, position_ids=positions_of(DOCUMENTS))


@pytest.mark.parametrize("name", ["documents", "position_ids"])
def test_a_ring_is_refused(name):
    given = {"documents": DOCUMENTS, "position_ids": positions_of(DOCUMENTS)}[name]
    message = "several documents in a row with ring=2, .*set ring_exchange='gather', or ring=1 and shard"
    refused(message, recipe=Recipe(ring=2), mesh=Mesh(2, 0), **{name: given})


# ---- the model ---------------------------------------------------------------------------------------------

FEW = {
    "llama": Recipe(),
    "upipe": Recipe(head_chunk=8, attention_tile=7, checkpoint=True, offload="attention"),
    "streamed": Recipe(fsdp=True, head_chunk=4, checkpoint=True, offload="inputs", stream=5, segment=2),
}


@pytest.mark.long
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_passes_documents_on(tmp_path, family):
    """A layer that drops keywords would let documents see each other; UPipe's needs none."""
    [errors] = relative_errors([(save(tmp_path, family), Recipe())])
    assert max(errors) < 1e-9


@pytest.mark.usefixtures("alone")
@pytest.mark.long
def test_every_named_recipe_on_one_rank(tmp_path):
    folder = save(tmp_path)
    recipes = {name: resolve_recipe(name, folder, 1, TOKENS, compute_dtype=None) for name in RECIPE_NAMES}
    found = relative_errors([(folder, recipe) for recipe in recipes.values()])
    for name, errors in zip(recipes, found, strict=True):
        assert max(errors) < 1e-9, name


def made(recipe, **more):
    cfg = reference.config(**more)
    mesh = init_device_mesh("cpu", (1,))
    model = reference.build(cfg)
    lab.apply_recipe(model, recipe, mesh)
    return model, mesh


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", FEW)
def test_the_backward_of_a_batch_has_its_own_documents(name):
    """Two batches with other documents, both forward before both backward, as in a pipeline."""
    recipe, others = FEW[name], [[40, 4], [7, 7, 30], [2] * 22]
    model, mesh = made(recipe)
    batches = [shard_batch(token_ids(), recipe, mesh, documents=d) for d in (DOCUMENTS, others)]
    values = [lab.loss(model, batch) for batch in batches]
    for value in values:
        value.backward()
    found = whole_gradients(model)
    plain = [
        plain_result(reference.build(reference.config()), token_ids(), documents)
        for documents in (DOCUMENTS, others)
    ]
    torch.testing.assert_close([v.item() for v in values], [value for value, _ in plain])
    expected = {name: sum(gradients[name] for _, gradients in plain) for name in found}
    assert reference.error(found, expected) < 1e-9


@pytest.mark.usefixtures("alone")
def test_a_model_that_passes_no_keywords_on_is_refused():
    model, mesh = made(Recipe())
    batch = shard_batch(token_ids(), Recipe(), mesh, documents=DOCUMENTS)
    layer = model.model.layers[1]
    plain = layer.forward
    layer.forward = Patch(lambda *args, lab_documents, **kwargs: plain(*args, **kwargs), plain)
    with pytest.raises(RecipeError, match="documents reached 1 of 2 attentions"):
        lab.loss(model, batch)


@pytest.mark.usefixtures("alone")
def test_longrope_with_documents_is_refused():
    """Plain transformers gives all documents of a row the frequencies of the longest one."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 30}
    numbers = {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    model, recipe = reference.build(reference.config(rope_parameters={**longrope, **numbers})), Recipe()
    mesh = init_device_mesh("cpu", (1,))
    lab.apply_recipe(model, recipe, mesh)
    with pytest.raises(RecipeError, match=r"^several documents in a row with rope_type='longrope': "):
        lab.loss(model, lab.shard_batch(token_ids(), recipe, mesh, documents=DOCUMENTS))
    lab.loss(model, lab.shard_batch(token_ids(), recipe, mesh))


def test_a_forward_by_hand_checks_its_documents():
    model, mesh = made(Recipe())
    batch = shard_batch(token_ids(), Recipe(), mesh, documents=DOCUMENTS)
    with pytest.raises(RecipeError, match=r"not the positions that this rank holds: .*documents= or pos"):
        model(batch.input_ids, position_ids=batch.position_ids)
    with pytest.raises(RecipeError, match="not the positions that this rank holds"):
        model(batch.input_ids, position_ids=torch.arange(TOKENS)[None], documents=batch.documents)
    with pytest.raises(RecipeError, match="documents of row 0 have 43 tokens together"):
        model(batch.input_ids, position_ids=batch.position_ids, documents=((43,),) * 3)
