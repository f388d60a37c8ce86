"""Families of models are accepted by name, with every field of their configs; others are refused."""

import copy
import math
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    OlmoConfig,
    Qwen2Config,
    SmolLM3Config,
    StableLmConfig,
)

import lab
from lab import decoder, models
from lab.commands.cli import main
from lab.decoder import FAMILIES, check_config, config_fields, decoder_of, shape_of, windows_of
from lab.decoder.config import number_of
from lab.decoder.families import ONLY
from lab.errors import ModelError, RecipeError
from lab.step.one_rank import one_rank
from lab.techniques.rope import apply_rope
from lab_tests.support.reference import build, config


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_that_the_installed_transformers_declares_is_in_a_group(kind):
    unknown = [name for name, _ in config_fields(CONFIG_MAPPING[kind]) if not FAMILIES[kind].knows(name)]
    assert not unknown, f"put {unknown} of {kind} in a group, each after reading what it does"


def test_a_field_in_no_group_is_refused_unless_it_is_at_its_default(monkeypatch):
    fields = decoder.config_fields
    monkeypatch.setattr(
        "lab.decoder.config.config_fields", lambda kind: [*fields(kind), ("logit_twist", 0.0)]
    )
    check_config(LlamaConfig())
    with pytest.raises(
        ModelError, match=r"logit_twist=0\.5 in the config of a Llama model: .*logit_twist=0\.0"
    ):
        check_config(LlamaConfig(logit_twist=0.5))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, family in FAMILIES.items() for name in family.fields if name in ONLY],
)
def test_each_field_that_is_right_at_one_value_is_refused_at_another(kind, name):
    made = CONFIG_MAPPING[kind]()
    layers = made.num_hidden_layers
    for field in filter(ONLY.get, FAMILIES[kind].fields):
        setattr(made, field, [ONLY[field][0]] * layers if field == "layer_types" else ONLY[field][0])
    made.attention_dropout = 0.0
    check_config(made)
    # transformers checks the type of a field that is set as an attribute.
    vars(made)[name] = ["chunked_attention"] * layers if name == "layer_types" else 3
    with pytest.raises(ModelError, match=f"{name}(=| has ).* the lab computes it right only with "):
        check_config(made)


@pytest.mark.parametrize("made", [StableLmConfig(), Glm4MoeConfig()], ids=["stablelm", "glm4_moe"])
def test_another_family_is_refused_by_every_door_alike(made, tmp_path):
    said = f"{made.model_type} is not a family that the lab computes right: Arcee, "
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
    assert (shape.matrices, shape.head_norms, shape.tied) == (3, "each", False)
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


def test_a_value_is_refused_in_the_same_words_by_the_config_and_by_the_recipe():
    config = MistralConfig(attention_dropout=0.1)
    with pytest.raises(ModelError) as by_config:
        models.config_of(config)
    with pytest.raises(ModelError) as by_recipe:
        lab.Recipe().check(config, 1)
    assert str(by_config.value) == str(by_recipe.value)


def test_windows_are_those_of_the_layers():
    assert windows_of(MistralConfig(num_hidden_layers=2, sliding_window=7)) == (7, 7)
    mixed = config("qwen2", layers=3, use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert windows_of(mixed) == (None, 32, 32)
    assert [layer.window for layer in decoder_of(AutoModelForCausalLM.from_config(mixed)).layers] == [
        None, 32, 32,
    ]  # fmt: skip
    # The field alone gives no layer a window.
    assert windows_of(Qwen2Config(sliding_window=32, num_hidden_layers=2)) == (None, None)
    assert windows_of(LlamaConfig(sliding_window=32, num_hidden_layers=2)) == (None, None)


def test_a_scale_of_the_logits_that_is_none_is_refused():
    for made, name, value in (
        (CohereConfig(), "logit_scale", None),
        (Cohere2Config(), "logit_scale", 0.0),
        (GraniteConfig(), "logits_scaling", 0.0),
    ):
        check_config(made)
        vars(made)[name] = value
        with pytest.raises(ModelError, match=f"^{name}={value}: it scales the logits; give the number with"):
            check_config(made)


def test_a_cap_of_the_logits():
    made = Gemma3TextConfig()
    assert number_of(made, "final_logit_softcapping") is None
    made.final_logit_softcapping = 30.0
    check_config(made)
    assert number_of(made, "final_logit_softcapping") == 30
    assert decoder_of(build(config("gemma3_text"))).logits_cap == 1.5
    made.final_logit_softcapping = 0.0
    with pytest.raises(ModelError, match=r"^final_logit_softcapping=0\.0: it caps the logits; give the num"):
        check_config(made)


def test_a_clip_of_q_k_and_v():
    made = OlmoConfig(num_hidden_layers=2)
    assert not shape_of(made).clipped
    made.clip_qkv = 8.0
    check_config(made)
    assert shape_of(made).clipped
    assert [layer.clip for layer in decoder_of(build(config("olmo"))).layers] == [0.9, 0.9]
    made.clip_qkv = 0.0
    with pytest.raises(ModelError, match=r"^clip_qkv=0\.0: it is the largest absolute value of q, k and v; "):
        check_config(made)


def test_q_k_and_v_are_clipped_in_a_part_of_their_elements():
    """A share of each, so that a parity test of this model would fail if one of them were not."""
    model = build(config("olmo"))
    x = torch.randn(1, 40, 48, dtype=torch.float64)
    for layer in decoder_of(model).layers:
        for heads in layer.head(x):
            assert 0.2 < (heads.abs() == 0.9).double().mean() < 0.9


def test_a_layer_without_a_value_is_refused():
    config = SmolLM3Config(num_hidden_layers=4)
    check_config(config)
    config.no_rope_layers = [1, 1, 0]
    with pytest.raises(ModelError, match="no_rope_layers has 3 values for 4 layers: give one for each"):
        check_config(config)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"sliding_window": None}, "layer_types has 'sliding_attention', and sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 values for 2 layers"),
    ],
)
def test_windows_that_cannot_be_are_refused(changed, said):
    config = Qwen2Config(use_sliding_window=True, max_window_layers=1, num_hidden_layers=2)
    for name, value in changed.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=said):
        check_config(config)


def test_a_field_of_another_family_changes_nothing():
    """transformers keeps such a field in the config, and its model does not read it."""
    others = {
        "no_rope_layers": [0, 1], "layer_types": ["sliding_attention", "full_attention"],
        "decoder_sparse_step": 2, "mlp_only_layers": [1], "attention_bias": True, "attention_out_bias": True,
        "mlp_bias": True, "use_bias": True,
    }  # fmt: skip
    for kind, family in FAMILIES.items():
        made = config(kind, layers=2, **({"sliding_window": 3} if family.knows("sliding_window") else {}))
        before = shape_of(made)
        for name, value in others.items():
            if not family.knows(name):
                setattr(made, name, value)
        assert shape_of(made) == before, kind


def test_windows_and_rotations_are_those_that_transformers_computes():
    """Streamed layers compute their windows and positions themselves, and not by the model's forward."""
    ids = torch.arange(13)[None] * 5 % 31
    for kind, changed in (
        ("llama", {"no_rope_layers": [0, 1]}),
        ("phi3", {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}),
    ):
        made = config(kind, layers=2, vocab_size=31, **changed)
        expected = build(made)(input_ids=ids, labels=ids, use_cache=False).loss
        model = build(made)
        recipe = lab.Recipe(head_chunk=4, checkpoint=True, offload="inputs", stream=5)
        with one_rank(recipe, 1, "loopback") as mesh:
            lab.apply_recipe(model, recipe, mesh=mesh)
            found = lab.loss(model, lab.shard_batch(ids, recipe, mesh))
        torch.testing.assert_close(found.detach().float(), expected.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        ("granite", "attention_multiplier", -1.0, "it scales the scores of attention; give a number above 0"),
        ("granite", "attention_multiplier", 0.0, "it scales the scores of attention"),
        ("gemma3_text", "query_pre_attn_scalar", 0, "it scales the scores of attention"),
        ("gemma3_text", "query_pre_attn_scalar", -4, "it scales the scores of attention"),
        ("gemma3_text", "final_logit_softcapping", float("nan"), "it caps the logits"),
        ("cohere", "logit_scale", float("inf"), "it scales the logits"),
        ("granite", "residual_multiplier", float("nan"), "give a finite number"),
        ("granite", "embedding_multiplier", float("inf"), "give a finite number"),
        ("gpt_oss", "sliding_window", None, "transformers' class needs a number of keys"),
    ],
)
def test_a_number_that_no_model_was_trained_with_is_refused(kind, name, value, said):
    made = config(kind)
    if name == "sliding_window":
        made.layer_types = ["full_attention"] * made.num_hidden_layers
    setattr(made, name, value)
    with pytest.raises(ModelError, match=f"^{name}={value}.*{said}"):
        check_config(made)


def test_layers_of_other_sizes_are_refused():
    made = LlamaConfig(num_hidden_layers=2, per_layer_config={"1": {"intermediate_size": 40}})
    with pytest.raises(ModelError, match=r"^per_layer_config: the lab computes models"):
        check_config(made)


@pytest.mark.parametrize(
    ("kind", "module", "name", "value", "given"),
    [
        ("cohere", "", "logit_scale", 1.3, r"0\.\d+"),
        ("cohere", "model.layers.1.self_attn", "use_qk_norm", False, "True"),
        ("smollm3", "model.layers.0.self_attn", "use_rope", 1, "0"),
        ("gemma3_text", "model.layers.1.self_attn", "is_sliding", False, "True"),
        ("granite", "model.layers.1", "residual_multiplier", 0.5, r"0\.\d+"),
        ("mixtral", "model.layers.1.mlp", "jitter_noise", 0.1, r"0\.0"),
        ("qwen3_moe", "model.layers.0.mlp.gate", "norm_topk_prob", False, "True"),
        ("gpt_oss", "model.layers.0.mlp.experts", "has_bias", False, "True"),
        ("gpt_oss", "model.layers.0.mlp.experts", "limit", 1.0, r"\d+\.\d+"),
    ],
)
def test_an_attribute_that_was_changed_on_the_model_is_refused(kind, module, name, value, given):
    model = build(config(kind))
    decoder_of(model)
    setattr(model.get_submodule(module), name, value)
    with pytest.raises(
        ModelError,
        match=f"{module or 'the model'} has {name}={value}, and its config gives it {given}: set the config",
    ):
        decoder_of(model)


def own_config(kind, module, **changed):
    model = build(config(kind))
    owner = model.get_submodule(module)
    owner.config = copy.deepcopy(owner.config)
    vars(owner.config).update(changed)
    return model


def changed(kind, module, name, value):
    model = build(config(kind))
    setattr(model.get_submodule(module), name, value)
    return model


def without_activation(kind):
    model = build(config(kind))
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = lambda x: x.softmax(1)
    return model


def of_fewer_layers(kind):
    model = build(config(kind))
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(own_config, "mistral", "model", sliding_window=4), "^model has a config of its own, which"),
        (
            partial(own_config, "olmo", "model.layers.1.self_attn", clip_qkv=0.3),
            r"^model\.layers\.1\.self_attn has a config of its own",
        ),
        (
            partial(changed, "llama", "model.layers.1.mlp", "act_fn", nn.Softmax(1)),
            r"^model\.layers\.1\.mlp\.act_fn is a Softmax, and the model's config gives it a SiLU",
        ),
        (
            partial(without_activation, "llama"),
            r"^model\.layers\.1\.mlp\.act_fn is no module, and the model's",
        ),
        (
            partial(changed, "olmo2", "model.layers.0.self_attn", "q_norm", nn.Identity()),
            r"self_attn\.q_norm is a Identity, and the model's config gives it a Olmo2RMSNorm",
        ),
        (
            partial(changed, "llama", "model.layers.0.self_attn", "k_norm", nn.Identity()),
            r"^model\.layers\.0\.self_attn has other modules than the config gives it \(k_norm\)",
        ),
        (
            partial(changed, "llama", "model.layers.0.self_attn", "scaling", -0.7),
            r"^model\.layers\.0\.self_attn has scaling=-0\.7: it multiplies the scores",
        ),
        (
            partial(changed, "llama", "model.embed_tokens", "scale_grad_by_freq", True),
            r"^model\.embed_tokens has scale_grad_by_freq=True, sparse=False: a rank would count",
        ),
        (partial(of_fewer_layers, "llama"), "^a model of 2 layers, and num_hidden_layers=1 in its config"),
    ],
)
def test_a_module_that_is_not_as_the_config_says_is_refused(make, said):
    with pytest.raises(ModelError, match=said):
        decoder_of(make())


def test_rotary_frequencies_that_were_changed_in_place_are_refused():
    model = build(config("llama"))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(RecipeError, match=r"^the rotary embedding has other frequencies than config"):
        apply_rope(model)


def test_fields_that_json_cannot_hold_are_no_obstacle():
    limitless = config("olmo")
    limitless.clip_qkv = math.inf
    model = build(limitless)
    model.config.note = object()
    assert decoder_of(model).layers[0].clip == math.inf


def test_attributes_that_change_nothing_or_are_read_from_the_model_may_be_changed():
    model = build(config("llama"))
    # As a trainer does that was given a tokenizer with a padding token of its own.
    model.config.pad_token_id = model.config.vocab_size + 3
    model.config.use_cache = False
    model.model.layers[0].self_attn.scaling = 0.9
    model.resize_token_embeddings(71)
    assert decoder_of(model).shape.V == 71
