"""Loss and every gradient against plain transformers: each technique alone, in pairs, and all together.

Each assertion has been seen red. The mutants that must die here: heads in a wrong order on one side, RoPE
missing on k, a corrupted offload (the wrong layer's input comes back, or the wrong layer's attention), a
gradient scaled by 1/P, replicated keys whose gradients are not summed, labels shifted after the sequence was
sharded.
"""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab import models
from lab.bench.parity import (
    MODELS,
    TECHNIQUES,
    TOKENS,
    plain_result,
    relative_errors,
    save_checkpoint,
    token_ids,
    whole_gradients,
)
from lab.bench.reference import FAMILIES, build, config, error
from lab.recipe.ladder import RUNGS, resolve_recipe
from lab.recipe.recipe import Recipe
from lab_tests.support.recipes import EVERYTHING

pytestmark = pytest.mark.slow

PIECES = {
    "fsdp": {"fsdp": True},
    "host": {"fsdp": True, "optimizer": "host"},
    "ulysses": {"ulysses": 2},
    "ring": {"ring": 2},
    "upipe": {"head_chunk": 8},
    "attention": {"attention_tile": 7},
    "checkpoint": {"checkpoint": True},
    "offload": {"checkpoint": True, "offload": "inputs"},
    "mlp": {"mlp_tile": 5},
    "norm": {"norm_tile": 8},
    "loss": {"loss_tile": 9},
    "streamed": {"checkpoint": True, "offload": "inputs", "stream": 5, "segment": 2},
}


def saved(folder, family="llama", heads=24, kv_heads=6, **more) -> str:
    save_checkpoint(folder, family, heads, kv_heads, **more)
    return str(folder)


def assert_exact(ranks4, work, tolerance=1e-9):
    for rank in ranks4.apply(relative_errors, list(work.values())):
        for name, (loss, gradient) in zip(work, rank, strict=True):
            assert loss < tolerance, name
            assert gradient < tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rung_of_a_pretrained_checkpoint_of_each_family(ranks4, tmp_path, family):
    folder = saved(tmp_path, family)
    rungs = {name: (folder, resolve_recipe(name, folder, 4, TOKENS, compute_dtype=None)) for name in RUNGS}
    assert rungs["upipe"][1].ulysses == 2  # four ranks and six key/value heads: rows over the other two
    # Windows allow no ring.
    everything = replace(EVERYTHING, ring=1) if models.shape_of(folder).has_windows else EVERYTHING
    assert_exact(ranks4, {**rungs, "everything": (folder, everything)})


ALONE = [name for name in TECHNIQUES if name not in ("deepspeed", "upipe", "all")]


@pytest.mark.parametrize("place", range(len(MODELS)), ids=lambda place: "-".join(map(str, MODELS[place])))
def test_every_technique_alone_of_every_kind_of_model(ranks4, tmp_path, place):
    """Without FSDP the gradients are summed by hooks, which nothing inside a backward may wake twice.

    The first model has every technique. Each other has UPipe, all techniques together, and two by turns, so
    that each technique alone is in two models or more. ``lab bench parity`` measures all for every model.
    """
    folder = saved(tmp_path, *MODELS[place])
    alone, most = ALONE, "all"
    if models.shape_of(folder).has_windows:
        alone, most = [name for name in ALONE if TECHNIQUES[name].get("ring", 1) == 1], "pairs"
        rings = [name for name in TECHNIQUES if TECHNIQUES[name].get("ring", 1) > 1]
        refused = [(folder, Recipe(**TECHNIQUES[name])) for name in rings]
        assert ranks4.apply(relative_errors, refused) == [[None] * len(rings)] * 4
    some = ALONE if place == 0 else [alone[(2 * place + more) % len(alone)] for more in (0, 1)]
    assert_exact(ranks4, {name: (folder, Recipe(**TECHNIQUES[name])) for name in (*some, "upipe", most)})


def test_every_pair_of_techniques(ranks4, tmp_path):
    folder = saved(tmp_path)
    pairs = {pair: {**PIECES[pair[0]], **PIECES[pair[1]]} for pair in combinations(PIECES, 2)}
    del pairs["mlp", "streamed"]  # refused: a streamed layer has its own tile
    assert len(pairs) == 65
    assert_exact(ranks4, {pair: (folder, Recipe(**knobs)) for pair, knobs in pairs.items()})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "knobs"),
    [
        (28, 4, {"ulysses": 4, "head_chunk": 4}),
        (40, 8, {"ulysses": 4, "head_chunk": 20}),
        (24, 1, {"ulysses": 4, "head_chunk": 12}),
        (24, 2, {"ulysses": 4, "head_chunk": 8}),
        (24, 24, {"ulysses": 2, "ring": 2, "head_chunk": 6}),
        (40, 8, {"ring": 4}),
    ],
)
def test_heads_of_every_kind_under_everything_else(ranks4, tmp_path, heads, kv_heads, knobs):
    folder = saved(tmp_path, heads=heads, kv_heads=kv_heads, tie_word_embeddings=heads == 28)
    recipe = Recipe(fsdp=True, checkpoint=True, mlp_tile=5, norm_tile=8, loss_tile=9, **knobs)
    streamed = replace(recipe, offload="inputs", mlp_tile=None, stream=8)
    assert_exact(ranks4, {str(knobs): (folder, recipe), f"{knobs}, streamed": (folder, streamed)})


def test_loss_and_gradients_in_single_precision(ranks4, tmp_path):
    folder = saved(tmp_path, dtype=torch.float32)
    work = {name: (folder, resolve_recipe(name, folder, 4, TOKENS, compute_dtype=None)) for name in RUNGS}
    assert_exact(ranks4, {**work, "everything": (folder, EVERYTHING)}, tolerance=5e-6)


def test_bf16_is_at_most_half_again_as_far_from_fp32_as_plain_bf16(ranks4, tmp_path):
    """Parameters in fp32, forward and backward in bf16; the plain model has its parameters rounded."""
    for family in ("llama", "qwen3"):
        folder = tmp_path / family
        folder.mkdir()
        saved(folder, family, dtype=torch.float32)
        truth = torch.load(folder / "expected.pt")
        plain = plain_result(build(config(family), torch.float32).to(torch.bfloat16))
        own_error = error(plain[1], truth[1])
        rungs = [resolve_recipe(name, str(folder), 4, TOKENS) for name in RUNGS]
        assert {recipe.compute_dtype for recipe in rungs} == {"bfloat16"}
        for name, (_, gradient) in zip(
            RUNGS, ranks4.apply(relative_errors, [(str(folder), recipe) for recipe in rungs])[0], strict=True
        ):
            assert 1e-4 < gradient < 1.5 * own_error, (family, name)


def test_a_scaled_and_accumulated_loss_under_everything(ranks4, tmp_path):
    for errors in ranks4.apply(accumulated_error, saved(tmp_path, "qwen3"), EVERYTHING):
        assert errors < 1e-9


def accumulated_error(folder, recipe):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = models.build(folder)
    lab.apply_recipe(model, recipe, mesh)
    # Powers of two: the norms go through fp32, where any other share would be rounded on its way.
    for share in (0.5, 0.25, 0.25):
        (share * lab.loss(model, lab.shard_batch(token_ids(), recipe, mesh))).backward()
    return error(whole_gradients(model), torch.load(f"{folder}/expected.pt")[1])


def test_parameter_names_stay_the_plain_models(ranks4, tmp_path):
    folder = saved(tmp_path, "qwen3")
    plain = list(models.build(folder).state_dict())
    assert ranks4.apply(names, folder, EVERYTHING) == [plain] * 4


def names(folder, recipe):
    model = models.build(folder)
    lab.apply_recipe(model, recipe, init_device_mesh("cpu", (dist.get_world_size(),)))
    return list(model.state_dict())
