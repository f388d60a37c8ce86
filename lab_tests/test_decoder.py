"""Families of models are accepted by name, with every field of their configs; others are refused."""

import pytest
import torch
from click.testing import CliRunner
from transformers import (
    CONFIG_MAPPING,
    CohereConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    SmolLM3Config,
)

import lab
from lab import decoder, models
from lab.bench.reference import build, config
from lab.commands.cli import main
from lab.decoder import FAMILIES, check_config, config_fields, decoder_of
from lab.errors import ModelError


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_that_the_installed_transformers_declares_is_in_a_group(kind):
    unknown = [name for name, _ in config_fields(CONFIG_MAPPING[kind]) if not FAMILIES[kind].knows(name)]
    assert not unknown, f"put {unknown} of {kind} in a group, each after reading what it does"


def test_a_field_in_no_group_is_refused_unless_it_is_at_its_default(monkeypatch):
    fields = decoder.config_fields
    monkeypatch.setattr(decoder, "config_fields", lambda kind: [*fields(kind), ("logit_twist", 0.0)])
    check_config(LlamaConfig())
    with pytest.raises(
        ModelError, match=r"logit_twist=0\.5 in the config of a Llama model: .*logit_twist=0\.0"
    ):
        check_config(LlamaConfig(logit_twist=0.5))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, family in FAMILIES.items() for name in family.only]
)
def test_each_field_that_is_right_at_one_value_is_refused_at_another(kind, name):
    made = CONFIG_MAPPING[kind]()
    for field, values in FAMILIES[kind].only.items():
        setattr(made, field, [values[0]] if field == "layer_types" else values[0])
    check_config(made)
    setattr(made, name, ["sliding_attention"] if name == "layer_types" else 3)
    with pytest.raises(ModelError, match=f"{name}=.* the lab computes it right only with {name}="):
        check_config(made)


@pytest.mark.parametrize("made", [CohereConfig(), SmolLM3Config()], ids=["cohere", "smollm3"])
def test_another_family_is_refused_by_every_door_alike(made, tmp_path):
    said = f"{made.model_type} is not a family that the lab computes right: Arcee, Granite, Llama, Mistral, "
    made.save_pretrained(tmp_path)
    for call in (
        lambda: models.config_of(made),
        lambda: lab.plan(made, tokens=64, ranks=2),
        lambda: lab.fit(tmp_path, tokens=64, ranks=2),
        lambda: lab.max_context(tmp_path, ranks=2),
        lambda: lab.show.tuner(tmp_path),
        lambda: lab.rehearse(tmp_path, tokens=64, ranks=2, machine="cpu"),
    ):
        with pytest.raises(ModelError) as caught:
            call()
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)
    for words in (
        ["plan", "--tokens", "64", "--ranks", "2"],
        ["fit", "--tokens", "64", "--ranks", "2"],
        ["max-context", "--ranks", "2"],
        ["train", "--tokens", "64", "--steps", "1", "--checkpoint", str(tmp_path / "run")],
    ):
        result = CliRunner().invoke(main, [words[0], str(tmp_path), *words[1:]])
        assert result.exit_code == 2, words
        assert result.stderr.startswith(f"lab: {said}"), words


def test_the_shape_and_the_parts_of_a_model():
    model = build(config("qwen3", 24, 6))
    found = decoder_of(model)
    shape = found.shape
    assert (shape.L, shape.E, shape.H, shape.K, shape.D, shape.I, shape.V) == (2, 48, 24, 6, 10, 72, 101)
    assert (shape.matrices, shape.head_norms, shape.tied) == (3, True, False)
    assert len(found.norms) == 5
    assert found.attentions == [layer.self_attn for layer in model.model.layers]
    hidden = torch.randn(1, 3, 48, dtype=torch.float64)
    granite = build(config("granite"))
    torch.testing.assert_close(decoder_of(granite).logits(hidden), granite.lm_head(hidden) / 1.7)
    assert decoder_of(build(config("arcee"))).shape.matrices == 2


def test_another_class_of_a_family_is_refused():
    model = LlamaForSequenceClassification(config())
    with pytest.raises(ModelError, match=r"a LlamaForSequenceClassification: .*takes LlamaForCausalLM"):
        decoder_of(model)
    with pytest.raises(ModelError, match="a Linear is not a transformers model"):
        decoder_of(torch.nn.Linear(2, 2))


def test_a_forward_that_was_replaced_is_refused():
    model = build(config())
    model.model.layers[1].mlp.forward = lambda x: 2 * x
    with pytest.raises(ModelError, match=r"the forward of model\.layers\.1\.mlp has been replaced"):
        decoder_of(model)


def test_a_window_is_refused_in_the_same_words_by_the_config_and_by_the_recipe():
    with pytest.raises(ModelError) as by_config:
        models.config_of(MistralConfig())
    with pytest.raises(ModelError) as by_recipe:
        lab.Recipe().check(MistralConfig(), 1)
    assert str(by_config.value) == str(by_recipe.value)
