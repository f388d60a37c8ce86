"""Recipes: their checks, their JSON, the ladder that names them, and the row of each knob."""

import dataclasses
import json
import re
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config

import lab
from lab import memory, models, planning, step, techniques
from lab.errors import LabError, RecipeError
from lab.models import shape_of
from lab.planning.fit import candidates, with_other_degrees
from lab.recipe.jobs import make_job
from lab.recipe.ladder import RECIPE_NAMES, RUNGS, ladder, resolve_recipe
from lab.recipe.recipe import BY_NAME, KNOBS, Recipe, parse_knobs
from lab.techniques.unsupported import UNSUPPORTED
from lab.units import Mi
from lab_tests.proofs.tables import README, TECHNIQUES, with_knobs, with_unsupported


def test_the_default_is_the_plain_model():
    assert Recipe() == resolve_recipe("plain", "tiny", 1, 64)


def test_the_last_rung_of_the_real_model_is_the_published_stack():
    assert ladder("llama3-8b", 8, 5 * Mi)["upipe"] == Recipe(
        fsdp=True, ulysses=8, checkpoint=True, offload="inputs", mlp_tile=16384, norm_tile=16384,
        loss_tile=16384, head_chunk=8, compute_dtype="bfloat16",
    )  # fmt: skip


def test_each_rung_adds_one_technique():
    rungs = ladder("tiny", 4, 1000)
    assert tuple(rungs) == RUNGS
    families = [
        {re.sub(r"(mlp|norm|loss)_", "", k) for k, v in above.to_json().items() if v != below.to_json()[k]}
        for below, above in pairwise(rungs.values())
    ]
    assert families == [
        {"fsdp"},
        {"ulysses"},
        {"checkpoint"},
        {"offload"},
        {"tile"},
        {"head_chunk"},
        {"stream", "attention_tile", "tile"},
    ]


def test_what_derives_from_a_knob_set_by_hand_follows_it():
    rungs = ladder("tiny", 8, 4096, ulysses=2)
    assert rungs["fsdp"].ulysses == 1
    assert rungs["upipe"].head_chunk == 2
    assert rungs["tiling"].ring == 4
    assert rungs["tiling"].mlp_tile == 4096 // 8 // 4
    assert resolve_recipe("upipe", "tiny", 8, 4096, ring=2).ulysses == 4
    assert resolve_recipe("tiling", "tiny", 8, 4096, ring=8, ulysses=1).loss_tile == 128
    assert resolve_recipe("plain", "tiny", 8, 4096, ring=2).ring == 2
    assert resolve_recipe(Recipe(fsdp=True), "tiny", 4, 64, checkpoint=True).checkpoint


def test_no_knob_set_by_hand_is_lost_on_the_ladder():
    by_hand = {"overlap": True, "kernel": "torch", "loss_kernel": "liger", "compile": "norms"}
    with pytest.raises(RecipeError, match=r"stream=256 with loss_kernel='liger': .*, or stream=None"):
        ladder("tiny", 4, 4096, **by_hand)
    top = ladder("tiny", 4, 4096, **by_hand, stream=None)["streamed"]
    assert {name: getattr(top, name) for name in by_hand} == by_hand
    deepspeed = {"ulysses_backend": "deepspeed", "head_chunk": None, "stream": None}
    assert ladder("tiny", 4, 4096, **deepspeed)["upipe"].head_chunk is None
    tiled = ladder("tiny", 4, 4096, mlp_tile=32, compile="tiles")
    assert [(tiled[name].mlp_tile, tiled[name].compile) for name in ("upipe", "streamed")] == [
        (32, "tiles"),
        (None, "none"),
    ]
    with pytest.raises(RecipeError, match=r"head_chunk=4.*: DeepSpeed's exchange knows neither"):
        ladder("tiny", 4, 4096, ulysses_backend="deepspeed")
    for ranks, tokens, said in ((0, 64, "ranks=0"), (4, "64", "tokens='64'")):
        with pytest.raises(LabError, match=f"{said}: it takes a whole number, 1 or more"):
            ladder("tiny", ranks, tokens)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "degree"), [(24, 6, 4, 2), (28, 4, 8, 4), (6, 2, 4, 2), (5, 5, 4, 1)]
)
def test_the_ladder_takes_the_largest_degree_that_the_heads_allow(heads, kv_heads, ranks, degree):
    config = LlamaConfig(
        hidden_size=heads * 10, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=10
    )
    assert ladder(config, ranks, 512)["upipe"].ulysses == degree


def test_a_recipe_is_the_same_after_json():
    recipe = ladder("llama3-8b", 8, Mi)["upipe"]
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.from_json(json.dumps(recipe.to_json())) == recipe


def test_frozen_and_by_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().fsdp = True
    with pytest.raises(TypeError):
        Recipe(True)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"fsdp": "yes"}, "fsdp='yes': it takes True or False"),
        ({"checkpoint": 1}, "checkpoint=1: it takes True or False"),
        ({"ulysses": 0}, "ulysses=0: it takes a whole number, 1 or more"),
        ({"ring": 1.5}, "ring=1.5: it takes a whole number, 1 or more"),
        ({"mlp_tile": 0}, "mlp_tile=0: it takes a whole number, 1 or more, or None"),
        ({"loss_tile": -4}, "loss_tile=-4: it takes a whole number"),
        ({"norm_tile": True}, "norm_tile=True: it takes a whole number"),
        (
            {"compute_dtype": "float8"},
            "compute_dtype='float8': it takes None or 'float64' or 'float32'",
        ),
        ({"offload": "all"}, "offload='all': it takes 'none' or 'inputs'"),
        ({"offload": "inputs"}, "offload='inputs' without checkpointing: .* set checkpoint=True with it"),
        ({"ulysses_backend": "nccl"}, "ulysses_backend='nccl': it takes 'lab' or 'deepspeed'"),
        (
            {"ulysses_backend": "deepspeed", "head_chunk": 4, "ulysses": 2},
            "DeepSpeed's exchange knows neither; set head_chunk=None and ring=1",
        ),
        ({"overlap": 2, "head_chunk": 4}, "overlap=2: it takes True or False"),
        ({"replicas": 0, "fsdp": True}, "replicas=0: it takes a whole number, 1 or more"),
        ({"replicas": 2}, "replicas=2 without fsdp: .* set fsdp=True with it, or replicas=1"),
        ({"overlap": True}, "overlap=True without UPipe: .* set head_chunk with it, or overlap=False"),
        ({"tp": 2}, "no field 'tp'; the lab has no tensor parallelism: use fsdp=true for the parameters, "),
        ({"zero_stage": 1}, "no field 'zero_stage'; the lab has no ZeRO-1 or ZeRO-2: use fsdp=true, which"),
        (
            {"optimizer": "8bit"},
            "it takes 'device' or 'host'; the lab has no 8-bit AdamW: use optimizer=host",
        ),
        ({"fsdp2": True}, "a recipe has no field 'fsdp2': its fields are fsdp, replicas, ulysses"),
    ],
)
def test_a_knob_that_is_none_is_refused_with_the_values_that_work(knobs, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_json(knobs)


def llama(**changed):
    shape = {"hidden_size": 48, "num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 10}
    return LlamaConfig(**{**shape, **changed})


@pytest.mark.parametrize(
    ("config", "knobs", "ranks", "message"),
    [
        (llama(), {"ulysses": 5}, 5, "ulysses=5: it does not divide the 24 query heads; these work: 1, 2, 3"),
        (llama(), {"ulysses": 4}, 4, "of it and the 6 key/value heads neither divides the other; these work"),
        (llama(), {"ulysses": 2, "head_chunk": 3}, 2, "head_chunk=3: .* 2, 4, 6, 8, 12, 24"),
        (llama(), {"ulysses": 2, "head_chunk": 10}, 2, "head_chunk=10: .* 2, 4, 6, 8, 12, 24"),
        (llama(), {"ulysses": 2, "ring": 2}, 6, r"ulysses=2 x ring=2 on 6 ranks: .* work: 1, 2, 3, 6"),
        (
            llama(), {"fsdp": True, "replicas": 4, "ulysses": 2}, 12,
            "replicas=4 with ulysses=2, ring=1 on 12 ranks: .* these work: 1, 2, 3, 6",
        ),
        (MistralConfig(), {"ring": 2}, 2, "ring=2 with .* windows: .* set ring_exchange='gather', or ring=1"),
        (
            Qwen2Config(use_sliding_window=True, sliding_window=32, max_window_layers=1), {"ring": 4}, 4,
            "ring=4 with .* sliding windows: .* set ring_exchange='gather', or ring=1",
        ),
        (llama(attention_dropout=0.1), {}, 1, "attention_dropout=0.1 .*only with attention_dropout=0.0"),
        (
            llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 0.0}), {}, 1,
            "factor=0.0 and max_position_embeddings=2048 are not above 0",
        ),
    ],
)  # fmt: skip
def test_what_a_model_or_the_ranks_forbid_is_refused_before_launch(config, knobs, ranks, message):
    with pytest.raises(LabError, match=message):
        Recipe(**knobs).check(config, ranks)


def test_an_unknown_name_of_a_recipe_is_refused():
    with pytest.raises(RecipeError, match="unknown recipe 'fdsp': give one of plain, fsdp"):
        resolve_recipe("fdsp", "tiny", 1, 64)
    with pytest.raises(RecipeError, match=r"recipe=3: give one of plain, fsdp, .*, or a Recipe"):
        resolve_recipe(3, "tiny", 1, 64)
    with pytest.raises(RecipeError, match="a recipe has no field 'tile'"):
        resolve_recipe("tiling", "tiny", 1, 64, tile=3)


def test_the_real_model_takes_every_chunk_between_the_degree_and_all_heads():
    config = models.config_of("llama3-8b")
    for chunk in (8, 16, 32):
        Recipe(ulysses=8, head_chunk=chunk).check(config, 8)


def test_public_names():
    for name in lab.__all__:
        assert getattr(lab, name) is not None
    with pytest.raises(AttributeError, match="module 'lab' has no attribute 'plam'"):
        lab.plam  # noqa: B018


@pytest.mark.parametrize("package", [memory, models, planning, step, techniques])
def test_no_public_name_of_a_package_is_that_of_a_module_in_it(package):
    """Importing the module would put it in the place of the name."""
    for name in package.__all__:
        if not isinstance(getattr(package, name), ModuleType):
            assert find_spec(f"{package.__name__}.{name}") is None, name


def test_the_documentation_of_a_recipe_has_what_each_knob_sets():
    assert f"Attributes:\n        fsdp: {BY_NAME['fsdp'].sets}.\n" in Recipe.__doc__
    assert Recipe.__doc__.count("\n        ") == len(KNOBS)


def test_the_rung_of_a_row_is_the_one_that_introduces_the_knob():
    """A knob set by hand stands on its own rung and on those after it, and on none before."""
    other = {"ulysses": 2, "ring": 2, "overlap": True, "compute_dtype": "float64", "compile": "norms"}
    for knob in KNOBS:
        value = other.get(knob.name, next((c for c in reversed(knob.choices) if c != knob.neutral), 8))
        # DeepSpeed's exchange has no stages, and layers that are streamed have none of these.
        excluded = {"head_chunk": None} if value == "deepspeed" else {}
        if knob.name in ("mlp_tile", "compile", "ulysses_backend", "loss_kernel"):
            excluded["stream"] = None
        if knob.name == "ring_exchange":
            excluded["ulysses"] = 4  # which leaves a ring of two
        rungs = ladder("tiny", 8, 4096, **excluded, **{knob.name: value})
        having = [name for name, recipe in rungs.items() if getattr(recipe, knob.name) == value]
        assert having == list(rungs)[list(rungs).index(knob.rung) :], knob.name


def test_fit_varies_the_knobs_that_are_searched_and_no_other():
    shape, job = shape_of("tiny"), make_job("tiny", "long", tokens=4096, ranks=2)
    named = {name: resolve_recipe(name, "tiny", 2, 4096) for name in RECIPE_NAMES[1:]}
    tried = [*candidates(named, shape, 128), *with_other_degrees(named, shape, 128, job)]
    recipes = [recipe.to_json() for recipe in tried]
    varied = {name for name in BY_NAME if len({recipe[name] for recipe in recipes}) > 1}
    assert varied == {knob.name for knob in KNOBS if knob.searched}


@pytest.mark.first
def test_the_table_of_the_readme_is_made_from_the_rows():
    text = README.read_text()
    assert with_knobs(text) == text
    assert with_knobs(text.replace("| `fsdp` | `true`", "| `fsdp` | `yes`")) == text


@pytest.mark.first
def test_the_table_of_what_is_not_supported_is_made_from_the_rows():
    text = TECHNIQUES.read_text()
    assert with_unsupported(text) == text
    assert with_unsupported(text.replace("| float8 |", "| float16 |")) == text


def test_no_word_of_what_is_not_supported_is_a_value_that_works():
    """Nor is a word in two rows; what is to be used instead names knobs with values that they take."""
    words = [word for row in UNSUPPORTED for word in row.words]
    assert len(set(words)) == len(words)
    values = {str(value).replace("_", "") for knob in KNOBS for value in (knob.name, *knob.choices)}
    assert values.isdisjoint(words)
    settings = [one for row in UNSUPPORTED for one in re.findall(r"`(\w+=\w+)`", row.instead)]
    assert len(settings) > 8
    for setting in settings:
        for name, value in parse_knobs([setting]).items():
            BY_NAME[name].check(value)
