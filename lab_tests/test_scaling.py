"""The plan of a step at a further length, from its plans at three: equal to its own plan, to the byte."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

import lab
from lab.memory.storages import TensorKind
from lab.planning import answers, plan_cache, whole_step
from lab.planning.fake_step import fake_step
from lab.planning.freeing import cheapest_changes
from lab.planning.hardware import hardware
from lab.planning.plan import plan_job
from lab.planning.scaling import Scaling, Step, length_class
from lab.planning.scaling_file import decode, encode
from lab.recipe.jobs import Job, Machine, make_job
from lab.recipe.ladder import RECIPE_NAMES
from lab.recipe.recipe import Recipe
from lab.techniques import tiling
from lab_tests.proofs.length_draws import differences
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config

RANKS = 4
H100 = hardware("h100")


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_cache, "folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(answers, "SHIPPED", tmp_path / "shipped")


@pytest.fixture
def walks(monkeypatch):
    """The lengths of the steps that are walked."""
    lengths = []

    def walked(job, layers, **settings):
        # One length may be walked as the first rank of several ring ranks.
        if lengths[-1:] != [job.tokens]:
            lengths.append(job.tokens)
        return fake_step(job, layers, **settings)

    monkeypatch.setattr(whole_step, "fake_step", walked)
    return lengths


def job_of(tokens: int, recipe: str = "upipe", model: Any = None, **settings: Any) -> Job:
    model = model or small_config(num_hidden_layers=2, vocab_size=104)
    return make_job(model, recipe, tokens=tokens, **{"ranks": RANKS, **settings})


def scaling_of(lengths: Sequence[int], steps: Sequence[Step]) -> Scaling:
    scaling = Scaling((), ())
    for tokens, step in zip(lengths, steps, strict=True):
        scaling = scaling.with_step(tokens, step)
    return scaling


def scaled_and_walked(job: Any, lengths: tuple[int, ...], *, workspace: bool) -> tuple[Step, Step]:
    """The step at the last length, from those before it, and walked."""
    *steps, walked = (
        fake_step(job(tokens), 2, workspace=workspace, ring_rank=min(1, job(tokens).recipe.ring - 1))
        for tokens in lengths
    )
    shape = lab.models.shape_of(job(lengths[0]).model)
    assert len({str(length_class(job(tokens), shape)) for tokens in lengths}) == 1
    scaling = scaling_of(lengths[:-1], steps)
    again, _ = decode(encode(scaling, {}, small=False))
    machine = Machine(workspace=workspace)
    timeline, _ = walked.priced(H100, machine, RANKS)
    held = again.held(lengths[-1], machine)
    assert (held.device_peak, held.host_peak, held.disk_peak) == (
        timeline.device_peak, timeline.host_peak, 0
    )  # fmt: skip
    for device in ("h100", "a100"):
        there = replace(machine, device=device)
        found, expected = (
            step.priced(hardware(there.device), there, RANKS) for step in (scaling.at(lengths[-1]), walked)
        )
        np.testing.assert_allclose(found[0].seconds, expected[0].seconds, rtol=1e-12)
        assert found[1].flops == expected[1].flops > 0
        assert found[1].seconds == pytest.approx(expected[1].seconds, rel=1e-12)
    return again.at(lengths[-1]), walked


def assert_same(found: Step, walked: Step) -> None:
    assert differences(found, walked) == []


SHORT = (4096, 8192, 16384, 28672)
PAGES = (16384, 32768, 49152, 114688)
"""Of recipes whose LSEs are on the host, in whole pages."""


@pytest.mark.parametrize("recipe", mostly_long(RECIPE_NAMES, RECIPE_NAMES.index("tiling")))
def test_every_named_recipe_scales(recipe):
    lengths = PAGES if recipe in ("fast", "streamed", "long") else SHORT
    assert_same(*scaled_and_walked(partial(job_of, recipe=recipe), lengths, workspace=True))


@pytest.mark.long
def test_a_plan_without_cudas_workspace_scales():
    assert_same(*scaled_and_walked(job_of, SHORT, workspace=False))


MODELS = {
    "windows": (small_config(MistralConfig, sliding_window=512), (262144, 327680, 393216, 524288)),
    "windows and none": (
        small_config(
            Gemma3TextConfig, sliding_window=512, layer_types=["sliding_attention", "full_attention"]
        ),
        (262144, 327680, 393216, 524288),
    ),
    "experts": (
        small_config(Qwen3MoeConfig, num_experts=6, num_experts_per_tok=2),
        (49152, 98304, 147456, 245760),
    ),
    "experts, sinks and windows": (
        small_config(GptOssConfig, num_local_experts=6, num_experts_per_tok=2, sliding_window=128),
        (393216, 589824, 786432, 983040),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["upipe", "streamed"])
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_scales(name, recipe):
    model, lengths = MODELS[name]
    model.num_hidden_layers = 2
    assert_same(*scaled_and_walked(partial(job_of, recipe=recipe, model=model), lengths, workspace=True))


@pytest.mark.long
def test_windows_and_sinks_in_a_gather_scale():
    model = small_config(GptOssConfig, num_local_experts=6, num_experts_per_tok=2, sliding_window=128)
    job = partial(
        job_of, recipe="checkpoint", model=model, ulysses=1, ring=2, ring_exchange="gather", loss_tile=1024
    )
    assert_same(*scaled_and_walked(job, multiples(262144, 4, 5, 6, 8), workspace=True))


SETTINGS = {
    "a ring": {"ulysses": 2, "ring": 2},
    "a gather": {"recipe": "checkpoint", "ulysses": 2, "ring": 2, "ring_exchange": "gather"},
    "a gather with tiles": {"ulysses": 2, "ring": 2, "ring_exchange": "gather", "attention_tile": 512},
    "rows": {"rows": 3},
    "micro-batches": {"accumulate": 2},
    "adapters": {"lora": "r=4"},
    "bfloat16": {"dtype": "bfloat16", "compute_dtype": "bfloat16"},
    "tiles by hand": {"mlp_tile": 256, "norm_tile": 512, "loss_tile": 256},
    "overlap": {"overlap": True, "head_chunk": 4},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_every_kind_of_job_scales(name):
    job = partial(job_of, **SETTINGS[name])
    assert_same(*scaled_and_walked(job, (16384, 24576, 32768, 65536), workspace=True))


def one_layer(family: type[PretrainedConfig] = LlamaConfig, **fields: Any) -> PretrainedConfig:
    return small_config(family, num_hidden_layers=1, **fields)


def multiples(of: int, *numbers: int, more: int = 0) -> list[int]:
    return [of * number + more for number in numbers]


GATHER = {"ring": 4, "ring_exchange": "gather"}
WHOLE = {"mlp_tile": None, "norm_tile": None, "loss_tile": None}
NO_TILES = {**WHOLE, "recipe": "upipe"}
STREAMED = {"recipe": "streamed", "loss_tile": None, "attention_tile": None}
WINDOW = one_layer(MistralConfig, sliding_window=1536)
SINKS = one_layer(GptOssConfig, num_local_experts=4, layer_types=["full_attention"])
UNLIKE: dict[str, tuple[PretrainedConfig, list[int], dict[str, Any]]] = {
    # 42 windows are a piece of 64512 tokens.
    "the last piece of windows": (WINDOW, multiples(3072, 85, 86, 87), {"recipe": "plain"}),
    "few pieces of windows": (WINDOW, multiples(64512, 2, 3), {"recipe": "plain"}),
    "a window that is longer than the context": (
        one_layer(MistralConfig, sliding_window=16384), multiples(4096, 1, 2, 4, 8), {"recipe": "plain"},
    ),
    "a loss of several rows": (
        one_layer(), multiples(4096, 1, 2), {**NO_TILES, "rows": 4, "loss_tile": 4096},
    ),
    "a part of the tokens in norms over all heads": (
        one_layer(Olmo2Config), multiples(1024, 2, 3, 4), NO_TILES,
    ),
    "a part of the tokens in clipping": (
        one_layer(OlmoConfig, clip_qkv=8.0), multiples(1024, 2, 3, 4), NO_TILES,
    ),
    "a part of the tokens in norms with scales of each head": (
        one_layer(CohereConfig, use_qk_norm=True), multiples(1024, 2, 3, 4), NO_TILES,
    ),
    "a part of the tokens that is less than a tile": (
        one_layer(Olmo2Config), multiples(24576, 2, 3),
        {**STREAMED, "ranks": 1, "head_chunk": 4, "stream": 6144, "norm_tile": 6144},
    ),
    "a part of the tokens that is as much as a tile": (
        one_layer(Olmo2Config), multiples(8192, 3, 4),
        {**STREAMED, "ranks": 1, "head_chunk": 12, "stream": 4096, "norm_tile": 4096},
    ),
    "pages of the kernel's LSE": (
        one_layer(num_attention_heads=2, num_key_value_heads=2), multiples(512, 4, 5, 6),
        {**NO_TILES, "ranks": 2, "offload": "attention"},
    ),
    "pages of a narrow hidden state": (
        small_config(hidden_size=12), multiples(512, 4, 6, 8, 9), {"recipe": "offload", "ranks": 2},
    ),
    "tiles of half the tokens in a ring": (
        one_layer(), multiples(1536, 16, 18, 20, 23),
        {"recipe": "ulysses", "ranks": 6, "ulysses": 2, "ring": 3, "attention_tile": 512},
    ),
    "half the tokens in a ring": (
        one_layer(), multiples(1024, 2, 3, 4, more=-8),
        {"recipe": "ulysses", "ulysses": 1, "ring": 4, "compute_dtype": None},
    ),
    "few tiles": (one_layer(), multiples(4096, 2, 3), {**NO_TILES, "mlp_tile": 1024}),
    "a short last tile": (one_layer(), multiples(4096, 5, 6, 7, 45), {**NO_TILES, "mlp_tile": 1000}),
    "a part of the products of sinks": (SINKS, multiples(1024, 33, 35, 36, 43), {"recipe": "plain"}),
    "few parts of the products of sinks": (SINKS, multiples(8192, 2, 3), {"recipe": "plain"}),
    "windows of a piece in a gather": (
        WINDOW, multiples(64512, 8, 9, 10, 12), {"recipe": "ulysses", "ulysses": 1, **GATHER},
    ),
    "sinks in a ring": (
        SINKS, multiples(8192, 16, 17, 18, 20, more=1024), {"recipe": "plain", "ulysses": 1, "ring": 4},
    ),
}  # fmt: skip
"""A model, lengths and a recipe: the step at the last length does not follow from the others."""


@pytest.mark.parametrize("name", UNLIKE)
def test_lengths_whose_steps_are_not_alike_are_of_several_classes(name):
    model, lengths, settings = UNLIKE[name]
    shape = lab.models.shape_of(model)
    jobs = [job_of(tokens, model=model, **settings) for tokens in lengths]
    assert len({str(length_class(job, shape)) for job in jobs}) > 1


@pytest.mark.long
@pytest.mark.parametrize("name", UNLIKE)
def test_the_steps_of_several_classes_are_not_alike(name):
    model, lengths, settings = UNLIKE[name]
    jobs = [job_of(tokens, model=model, **settings) for tokens in lengths]
    steps = [fake_step(job, model.num_hidden_layers, workspace=True, ring_rank=0) for job in jobs]
    with suppress(LookupError):
        scaling = scaling_of(lengths[:3], steps[:3])
        assert len(lengths) > 3
        assert not scaling.agrees(lengths[3], steps[3])


def test_sizes_that_are_no_integers_are_refused():
    texts = ("8x6", "16x6")
    kinds = [TensorKind((size, 6), "float32", "aten.mm", "") for size in (8, 16)]
    scaling = Scaling((1024, 1040), ())
    assert scaling._text(*texts, 1048) == "20x6"
    assert scaling._kind(*kinds, 1048).shape == (20, 6)
    assert replace(scaling, exact=False)._text(*texts, 1041) == "16x6"
    for sizes in (partial(scaling._text, *texts), partial(scaling._kind, *kinds)):
        with pytest.raises(LookupError):
            sizes(1041)


def test_sizes_are_right_where_their_products_have_more_than_64_bits():
    """The difference of the bytes, times that of the lengths in steps of 256 tokens, is 2**64."""
    scaling = Scaling((2**19, 2**20), ())
    one, two = (np.array([2**23 * tokens]) for tokens in scaling.tokens)
    tokens = 2**30 - 256
    assert scaling._affine(one, two, tokens).tolist() == [2**23 * tokens]


@pytest.mark.long
def test_the_fourth_length_is_not_walked_but_one_that_is_not_alike(walks):
    plan = partial(lab.plan, small_config(num_hidden_layers=1, vocab_size=104), "upipe", ranks=RANKS)
    plans = [plan(tokens=tokens) for tokens in SHORT]
    assert walks == [*SHORT[:3]]
    assert [plan.lengths for plan in plans] == [(), (), (), SHORT[:3]]
    for tokens, more in ((SHORT[3] + 4, {}), (2048, {}), (SHORT[3], {"rows": 2})):
        assert plan(tokens=tokens, **more).lengths == ()
        assert walks[-1] == tokens
    assert len(walks) == 6
    own = whole_step.walk(plans[3].job, workspace=True)
    assert own.steps[0].priced(H100, Machine(), RANKS)[0].device_peak == plans[3].timeline.device_peak


@pytest.mark.long
def test_a_length_on_the_other_side_of_a_window_is_walked(walks):
    config = small_config(MistralConfig, num_hidden_layers=1, sliding_window=16384)
    for tokens in (4096, 8192, 12288):
        lab.plan(config, "upipe", tokens=tokens, ranks=RANKS)
    walks.clear()
    lab.plan(config, "upipe", tokens=65536, ranks=RANKS)
    assert walks == [65536]


@pytest.mark.long
def test_a_length_that_disagrees_is_kept_for_itself(walks, monkeypatch):
    """The step of the third length holds one byte more: no further length is scaled."""

    def walked(job, layers, **settings):
        if walks[-1:] != [job.tokens]:
            walks.append(job.tokens)
        step = fake_step(job, layers, **settings)
        if job.tokens != SHORT[2]:
            return step
        storages = step.timeline.storages
        storages = replace(storages, size=storages.size + (np.arange(len(storages)) == 7))
        return step._replace(timeline=replace(step.timeline, storages=storages))

    monkeypatch.setattr(whole_step, "fake_step", walked)
    config = small_config(num_hidden_layers=1, vocab_size=104)
    for tokens in (*SHORT[:3], SHORT[2]):
        lab.plan(config, "upipe", tokens=tokens, ranks=RANKS)
    assert walks == [*SHORT[:3]]
    # Some lengths of the class are not alike, so nothing follows from it.
    further = (SHORT[3], 20480, SHORT[2], 20480)
    plans = [lab.plan(config, "upipe", tokens=tokens, ranks=RANKS) for tokens in further]
    assert walks == [*SHORT[:3], SHORT[3], 20480]
    assert not any(plan.lengths for plan in plans)


@pytest.mark.long
def test_a_technique_that_holds_one_tensor_more_changes_every_answer(monkeypatch, tmp_path, walks):
    config, run_in_tiles = small_config(num_hidden_layers=1, vocab_size=104), tiling.run_in_tiles
    asked = {"ranks": 2, "workspace": False, "ulysses": 2}

    def answers_now() -> dict[str, Any]:
        walks.clear()
        plans = [lab.plan(config, "tiling", tokens=tokens, **asked) for tokens in SHORT]
        assert walks == [*SHORT[:3]]
        longest = lab.max_context(config, "tiling", device_memory="64MiB", host_memory="64GiB", **asked)
        job = make_job(config, "offload", tokens=SHORT[0], ranks=2, loss_tile=64)
        freed = cheapest_changes(job, 1, partial(plan_job, machine=Machine(workspace=False)))
        return {
            "a plan": plans[0].device_peak,
            "a plan at a further length": plans[3].device_peak,
            "the longest context": longest.tokens,
            "what knobs free": freed,
        }

    before = answers_now()

    def with_one_more(fn, module, x, *, tile):
        kept = x.new_zeros(64, *x.shape)
        return run_in_tiles(fn, module, x, tile=tile) + kept.sum()

    monkeypatch.setattr(tiling, "run_in_tiles", with_one_more)
    monkeypatch.setattr(plan_cache, "folder", lambda kind: tmp_path / "changed" / kind)
    after = answers_now()
    assert [name for name in before if after[name] == before[name]] == []


def test_streamed_layers_without_chunks_are_of_the_class_that_their_norms_cut():
    """Norms over all heads see an eighth of the local tokens at once, which is less than a tile or not."""
    config = small_config(Olmo2Config, num_attention_heads=8, head_dim=16, num_key_value_heads=8)
    tiles = dict.fromkeys(("stream", "norm_tile", "loss_tile"), 16384)
    recipe = Recipe(fsdp=True, ulysses=8, checkpoint=True, offload="inputs", **tiles)
    jobs = [make_job(config, recipe, tokens=tokens, ranks=8) for tokens in ("640K", "2M")]
    shape = lab.models.shape_of(config)
    assert len({str(length_class(job, shape)) for job in jobs}) == 2


def test_tiles_of_attention_that_hold_half_the_tokens_of_a_ring_are_told_apart():
    config = small_config(num_attention_heads=24, num_key_value_heads=24)
    jobs = [
        make_job(config, Recipe(fsdp=True, ulysses=24, ring=2, attention_tile=tile), tokens=8160, ranks=48)
        for tile in (2048, 3072)
    ]
    shape = lab.models.shape_of(config)
    assert len({str(length_class(job, shape)) for job in jobs}) == 2
