"""Models by preset, config, directory or callable; anything else is refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    EuroBertConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    PretrainedConfig,
    Qwen3Config,
)

import lab
from lab import models
from lab.decoder import FAMILIES, head_dim_of
from lab.errors import ModelError, RecipeError
from lab.models.presets import PRESETS
from lab.recipe.recipe import Recipe
from lab_tests.support.models import small_config

PUBLISHED = {
    "llama3-8b": (8_030_261_248, 500_000.0, 128, False, 8192, 1e-5),
    "llama3-70b": (70_553_706_496, 500_000.0, 128, False, 8192, 1e-5),
    "llama3.2-1b": (1_235_814_400, 500_000.0, 64, True, 131072, 1e-5),
    "llama3.2-3b": (3_212_749_824, 500_000.0, 128, True, 131072, 1e-5),
    "qwen3-8b": (8_190_735_360, 1_000_000.0, 128, False, 40960, 1e-6),
    "qwen3-32b": (32_762_123_264, 1_000_000.0, 128, False, 40960, 1e-6),
    "mistral-7b": (7_248_023_552, 1_000_000.0, 128, False, 32768, 1e-5),
    "gemma3-27b": (27_009_346_304, 1_000_000.0, 128, True, 131072, 1e-6),
    "olmo2-7b": (7_298_617_344, 500_000.0, 128, False, 4096, 1e-6),
    "phi3-mini": (3_821_079_552, 10_000.0, 96, False, 4096, 1e-5),
    "mixtral-8x7b": (46_702_792_704, 1_000_000.0, 128, False, 32768, 1e-5),
    "qwen3-30b-a3b": (30_532_122_624, 1_000_000.0, 128, False, 40960, 1e-6),
    "gpt-oss-20b": (20_914_757_184, 150_000.0, 64, False, 131072, 1e-5),
    "command-r7b": (8_028_033_024, 50_000.0, 128, True, 132096, 1e-5),
}
"""The parameters, the base of the angles (of layers without a window), D, a tied head, the length, and the
norms' epsilon."""


def test_tiny_has_the_head_geometry_of_llama3_8b():
    tiny, llama = models.config_of("tiny"), models.config_of("llama3-8b")
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == (32, 8)
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (32, 8)
    assert tiny.num_hidden_layers == 4
    assert tiny.vocab_size >= 256


def test_every_preset_but_tiny_is_a_published_model():
    assert PRESETS.keys() == {"tiny", *PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_what_its_model_was_published_with(name):
    with torch.device("meta"):
        model = models.build(name)
    config = model.config
    of_all = config.rope_parameters.get("full_attention", config.rope_parameters)
    # A tied head is counted once, as the published numbers count it.
    assert PUBLISHED[name] == (
        sum(p.numel() for p in model.parameters()), of_all["rope_theta"], head_dim_of(config),
        config.tie_word_embeddings, config.max_position_embeddings,
        getattr(config, "layer_norm_eps", None) or config.rms_norm_eps,
    )  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_sharded_over_eight_ranks(name):
    config = models.config_of(name)
    Recipe(ulysses=8).check(config, 8)
    Recipe(ulysses=8, head_chunk=8).check(config, 8)
    with pytest.raises(RecipeError):
        Recipe(ulysses=7).check(config, 7)


def test_the_presets_have_their_windows_and_rotate_as_the_published_models_do():
    assert models.shape_of("gemma3-27b").windows == ((1024,) * 5 + (None,)) * 10 + (1024, 1024)
    assert set(models.shape_of("phi3-mini").windows) == {2047}
    assert models.shape_of("gpt-oss-20b").windows == (128, None) * 12
    assert models.shape_of("command-r7b").windows == ((4096,) * 3 + (None,)) * 8
    assert models.shape_of("command-r7b").rotates == ((True,) * 3 + (False,)) * 8
    assert models.config_of("llama3.2-1b").rope_parameters == {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_random_state():
    state = torch.random.get_rng_state()
    one, two, other = models.build("tiny", seed=3), models.build("tiny", seed=3), models.build("tiny", seed=4)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.lm_head.weight.dtype == torch.float32


def small():
    return small_config(
        Qwen3Config, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, vocab_size=260
    )


def test_the_callers_config_is_left_as_it_is():
    config = small()
    before = config.to_dict()
    built = models.build(config)
    assert built.config.use_cache is False
    assert config.to_dict() == before


def test_a_directory_gives_its_own_weights(tmp_path):
    saved = models.build(small(), seed=9)
    saved.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        loaded = models.build(place)
        assert type(loaded) is type(saved)
        for name, parameter in saved.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], parameter), name
        assert models.config_of(place).head_dim == 10


def test_a_directory_with_a_config_alone_gives_random_weights(tmp_path):
    small().save_pretrained(tmp_path)
    assert models.build(str(tmp_path), seed=1).config.head_dim == 10


def test_a_presets_name_is_the_preset_whatever_lies_in_the_working_directory(tmp_path, monkeypatch):
    models.build(small()).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert models.build("tiny").config.num_attention_heads == 32
    assert models.build("./tiny").config.num_attention_heads == 6


@pytest.fixture
def half(tmp_path):
    """A directory of bf16 weights that no seed gives."""
    model = models.build(small()).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    return tmp_path


def shapes(model):
    return {name: (p.shape, p.dtype) for name, p in model.named_parameters()}


def test_a_directory_without_its_weights_has_their_names_shapes_and_dtype(half):
    full, bare = models.build(half), models.build(half, seed=5, weights=False)
    assert shapes(bare) == shapes(full)
    assert {dtype for _, dtype in shapes(bare).values()} == {torch.bfloat16}
    assert full.lm_head.weight.unique().tolist() == [0.5]
    assert torch.equal(bare.lm_head.weight, models.build(half, seed=5, weights=False).lm_head.weight)
    assert len(bare.lm_head.weight.unique()) > 100


def test_weights_that_are_not_asked_for_are_not_read(half):
    (half / "model.safetensors").write_bytes(b"no weights")
    assert shapes(models.build(half, weights=False))["lm_head.weight"] == ((260, 48), torch.bfloat16)
    assert "the weights in " in refusal(lambda: models.build(half))


def test_a_config_alone_has_the_dtype_that_it_names(half):
    (half / "model.safetensors").unlink()
    for model in (half, models.config_of(half)):
        for weights in (True, False):
            built = models.build(model, weights=weights)
            assert {dtype for _, dtype in shapes(built).values()} == {torch.bfloat16}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_the_dtype_is_the_configs_with_the_weights_and_without(half, key):
    document = json.loads((half / "config.json").read_text())
    del document["dtype"]
    if key:
        document[key] = "bfloat16"
    (half / "config.json").write_text(json.dumps(document))
    dtype = torch.bfloat16 if key else torch.float32
    for weights in (True, False):
        assert models.build(half, weights=weights).lm_head.weight.dtype == dtype


def test_a_model_without_weights_can_be_fake(half):
    state = torch.random.get_rng_state()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = models.build(half, weights=False)
        preset = models.build("tiny", weights=False)
    assert all(isinstance(p, FakeTensor) for p in [*fake.parameters(), *preset.parameters()])
    assert shapes(fake) == shapes(models.build(half))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_callable():
    assert models.config_of(lambda: models.build(small())).hidden_size == 48
    assert models.build(lambda: models.build(small()), weights=False).config.hidden_size == 48


def refusal(call):
    with pytest.raises(ModelError) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said
    return said


def fail():
    raise OSError("No disk.\nLook behind the desk. It may be there.")


*_FIRST, _LAST = (family.name for family in FAMILIES.values())
NAMES = f"{', '.join(_FIRST)} and {_LAST}"
FAMILY = f"is not a family that the lab computes right: {NAMES} are"


@pytest.mark.first
def test_the_table_of_supported_inputs_has_all_families():
    table = Path(lab.techniques.__file__).with_name("README.md").read_text()
    assert f"| models | {NAMES}, in the shapes of any config" in table


class OwnConfig(LlamaConfig):
    """Of somebody's own, under a family's name."""


def change_config(name, value):
    config = small()
    setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "tinny",
            "unknown model 'tinny' (did you mean 'tiny'?): give one of tiny, llama3-8b, llama3-70b, "
            "llama3.2-1b, llama3.2-3b, qwen3-8b, qwen3-32b, mistral-7b, gemma3-27b, olmo2-7b, phi3-mini, "
            "mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b, command-r7b, "
            "or a directory that holds a config.json",
        ),
        (7, "a model of type int: give a name, a directory, a config, or a callable"),
        (lambda: 3, "the callable returned int, not a transformers model"),
        (lambda: None, "the callable returned NoneType, not a transformers model"),
        (fail, "the callable failed: OSError: No disk"),
        (lambda: {}["a"], "the callable failed: KeyError: 'a'"),
        (
            lambda: models.build(change_config("vocab_size", 0)),
            "vocab_size=0: it takes a whole number, 1 or more",
        ),
        (GPT2Config(), f"gpt2 {FAMILY}"),
        (BertConfig(), f"bert {FAMILY}"),
        (BartConfig(), f"bart {FAMILY}"),
        (EuroBertConfig(), f"eurobert {FAMILY}"),
        (
            LlavaConfig(),
            "llava holds a text model of Llama and other parts, which the lab does not compute: give the "
            "text model alone, whose config is text_config",
        ),
        (PretrainedConfig(), f"a model by {PretrainedConfig.__name__} {FAMILY}"),
        (OwnConfig(), f"llama by OwnConfig {FAMILY}"),
        (
            change_config("num_key_value_heads", -2),
            "num_key_value_heads=-2: it takes a whole number, 1 or more",
        ),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(model, said):
    for call in (models.config_of, models.build):
        assert refusal(lambda call=call: call(model)) == said


def test_a_model_itself_is_refused():
    with torch.device("meta"):
        model = models.build(small())
    for call in (models.config_of, models.build):
        assert refusal(lambda call=call: call(model)) == (
            "a model (Qwen3ForCausalLM) was given: give a callable that returns one"
        )


def test_a_callables_own_error_is_the_cause():
    with pytest.raises(ModelError) as caught:
        models.build(fail)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_callables_model_must_be_of_a_verified_family():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config())
    for call in (models.config_of, models.build):
        assert refusal(lambda call=call: call(lambda: model)) == f"gpt2 {FAMILY}"


SIZES = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 260,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", " cannot be read as JSON: Expecting value: line 1 column 1 (char 0)"),
        ("{5}", " cannot be read as JSON: Expecting property name enclosed in double quotes"),
        ("[5]", " has model_type=None: give the name of its family, such as llama"),
        (SIZES, " has model_type=None: give the name of its family, such as llama"),
        ({"model_type": ["llama"]}, " has model_type=['llama']: give the name of its family, such as llama"),
        ({"model_type": "llama", "hidden_size": 5}, " has no num_attention_heads: add the model's own"),
        ({**LLAMA, "vocab_size": None}, " has no vocab_size: add the model's own"),
        ({**LLAMA, "num_attention_heads": 0}, ": num_attention_heads=0: it takes a whole number, 1 or more"),
        ({**LLAMA, "vocab_size": -1}, ": vocab_size=-1: it takes a whole number, 1 or more"),
        ({**LLAMA, "hidden_size": "48"}, ": hidden_size='48': it takes a whole number, 1 or more"),
        ({**LLAMA, "num_hidden_layers": True}, ": num_hidden_layers=True: it takes a whole number"),
        ({**LLAMA, "num_key_value_heads": 0}, ": num_key_value_heads=0: it takes a whole number, 1 or more"),
        ({**LLAMA, "rms_norm_eps": "small"}, " is not a config that transformers can read: "),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    for place in (tmp_path, str(path)):
        for call in (models.config_of, models.build):
            assert refusal(lambda call=call, place=place: call(place)).startswith(f"{path}{said}")


@pytest.mark.parametrize("family", [GPT2Config, BertConfig, BartConfig])
def test_a_directory_of_another_family_is_refused_as_its_config_is(tmp_path, family):
    family().save_pretrained(tmp_path)
    said = refusal(lambda: models.config_of(family()))
    for call in (models.config_of, models.build):
        assert refusal(lambda call=call: call(tmp_path)) == said


def test_a_config_without_key_value_heads_has_as_many_as_query_heads(tmp_path):
    document = {name: said for name, said in LLAMA.items() if name != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert models.config_of(tmp_path).num_key_value_heads == 6


def test_a_model_transformers_cannot_make_is_refused_in_one_line(monkeypatch):
    def fails(*_, **__):
        raise KeyError("none")

    monkeypatch.setattr("lab.models.load.AutoModelForCausalLM.from_config", fails)
    said = refusal(lambda: models.build(LlamaConfig(**SIZES)))
    assert said.startswith("no llama model can be made from this config: KeyError: ")


def test_a_directory_without_a_config_is_refused(tmp_path):
    said = f"{tmp_path} holds no config.json: give a directory in the Hugging Face layout"
    assert refusal(lambda: models.config_of(tmp_path)) == said
    assert refusal(lambda: models.build(str(tmp_path))) == said
    missing = str(tmp_path / "config.json")
    assert refusal(lambda: models.build(missing)).startswith(f"unknown model {missing!r}: give one of tiny, ")


def test_weights_that_are_not_all_there_or_in_another_format(tmp_path):
    built = models.build("tiny")
    built.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name != "lm_head.weight"}  # noqa: SIM118
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack lm_head\.weight: give the config"):
        models.build(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, which may hold weights"):
        models.build(tmp_path)
