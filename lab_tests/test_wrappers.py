"""A wrapper's directory is read as its text model: its config, and its weights without the other parts.

Each was seen red: refused, or with another loss.
"""

import json
import pathlib
from itertools import product

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

import lab
from lab import models
from lab.commands.cli import main
from lab.errors import ModelError
from lab.models.unread import WRAPPERS

SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 67,
}  # fmt: skip
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 28, "patch_size": 14}  # fmt: skip


def gemma3(**fields):
    text = {**SIZES, "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 10}
    vision = {**SMALL, "model_type": "siglip_vision_model"}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **fields)
    )


def mistral3(**fields):
    text = {**SIZES, "model_type": "mistral", "sliding_window": None}
    vision = {**SMALL, "model_type": "pixtral", "head_dim": 8}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, **fields))


CASES = {
    "gemma3": gemma3,
    "mistral3": mistral3,
    "mistral3 with a head of its own": lambda: mistral3(tie_word_embeddings=False),
}


def saved(name, folder):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = CASES[name]().to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def test_every_wrapper_has_a_case():
    assert {name.split()[0] for name in CASES} == set(WRAPPERS)
    for name, make in CASES.items():
        assert type(make()).__name__ == WRAPPERS[name.split()[0]]


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_wrapper_on_text(tmp_path, name, newer):
    wrapper = saved(name, tmp_path)
    if newer:
        # transformers names the tensors as in the model; it saves them by their older names.
        file = tmp_path / "model.safetensors"
        assert any(key.startswith("language_model.") for key in load_file(file))
        values = {key: value.contiguous() for key, value in wrapper.state_dict().items()}
        if wrapper.config.tie_word_embeddings:
            del values["lm_head.weight"]
        save_file(values, file, metadata={"format": "pt"})
    wrapper = type(wrapper).from_pretrained(tmp_path)
    text = models.build(tmp_path)
    assert text.config.model_type == wrapper.config.text_config.model_type
    assert text.dtype == torch.bfloat16
    assert (text.lm_head.weight is text.model.embed_tokens.weight) == wrapper.config.tie_word_embeddings
    ids = torch.arange(24).remainder(60)[None]
    extra = {"token_type_ids": torch.zeros_like(ids)} if name == "gemma3" else {}
    with torch.no_grad():
        theirs = wrapper(input_ids=ids, labels=ids, **extra).loss
        ours = text(input_ids=ids, labels=ids).loss
    assert theirs == ours


def test_absent_fields_have_the_defaults_of_transformers(tmp_path):
    """The config.json of gemma-3-4b-it leaves out its heads and its vocabulary."""
    document = {
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(document))
    shape = models.shape_of(tmp_path)
    assert (shape.H, shape.K, shape.D, shape.V, shape.tied) == (8, 4, 256, 262208, True)
    assert shape.weights == 3_880_263_168
    config = models.config_of(tmp_path)
    assert config.dtype == torch.bfloat16
    theirs = CONFIG_MAPPING["gemma3"](
        **{key: value for key, value in document.items() if key != "model_type"}
    )
    fields = theirs.text_config.to_dict() | {"dtype": "bfloat16"}
    assert config.to_dict() == fields


def test_a_head_is_tied_where_the_wrapper_or_else_its_text_says_so(tmp_path):
    for of_wrapper, of_text, tied in ((None, None, False), (None, True, True), (True, False, True),
                                      (False, True, False)):  # fmt: skip
        document = {"model_type": "mistral3", "text_config": {**SIZES, "model_type": "mistral"}}
        for fields, value in ((document, of_wrapper), (document["text_config"], of_text)):
            if value is not None:
                fields["tie_word_embeddings"] = value
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert models.shape_of(tmp_path).tied == tied


@pytest.mark.long
@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("make", [gemma3, mistral3])
def test_a_head_of_files_is_tied_as_transformers_ties_it_or_refused(tmp_path, make, in_files):
    """Where the wrapper does not say it, transformers' default is tied, and the files of Mistral Small 3.1,
    whose text model does not say it either, have a head of their own, which transformers keeps.
    """
    wrapper = make(tie_word_embeddings=in_files)
    wrapper.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    built = 0
    for values in product(({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}), repeat=2):
        for fields, value in zip((document, document["text_config"]), values, strict=True):
            fields.pop("tie_word_embeddings", None)
            fields.update(value)
        (tmp_path / "config.json").write_text(json.dumps(document))
        theirs = type(wrapper).from_pretrained(tmp_path)
        if models.shape_of(tmp_path).tied != in_files:
            with pytest.raises(ModelError, match=r"lack lm_head\.weight|set tie_word_embeddings to false"):
                models.build(tmp_path)
            continue
        ours = models.build(tmp_path)
        built += 1
        assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
        assert torch.equal(ours.model.embed_tokens.weight, theirs.get_input_embeddings().weight)
        assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == in_files
    assert built >= 4


def test_the_parts_that_are_left_out_are_named(tmp_path):
    saved("gemma3", tmp_path)
    said = "(the text model of Gemma3ForConditionalGeneration, without the vision tower and the projector of "
    said += "images)"
    for words in (["doctor", "--model"], ["plan", "--tokens", "64", "--ranks", "2", "--recipe", "fsdp"]):
        run = CliRunner().invoke(main, [*words, str(tmp_path)])
        assert " ".join(run.stdout.split()).count(said) == 1, run.output


def test_other_parts_are_left_out_of_their_wrapper_alone(tmp_path):
    saved("mistral3", tmp_path)
    config = models.config_of(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "audio_tower.weight": torch.ones(3)}, file)
    with pytest.raises(
        ModelError, match=r"hold audio_tower\.weight, for which a mistral model with this config"
    ):
        models.build(tmp_path)
    plain = {name.removeprefix("language_model."): weight for name, weight in weights.items()}
    save_file(plain, file)
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"hold multi_modal_projector\.\S+, .* and \d+ more, for which a mist"
    ):
        models.build(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no text_config, in which Mistral3ForConditionalGeneration has its text model"),
        ({"model_type": "ministral3"}, "ministral3 is not a family that the lab computes right: "),
        ({"model_type": "mistral", "quantization_config": {"quant_method": "fp8"}}, "weights (fp8)"),
        (
            {"model_type": "mistral", "auto_map": {"AutoConfig": "own.C"}},
            "transformers' own class of mistral",
        ),
        ({"model_type": "mistral", "num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_a_wrapper_is_refused_as_its_text_model(tmp_path, text, said):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    with pytest.raises(ModelError) as caught:
        models.config_of(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["llava", "a wrapper of somebody"])
def test_the_text_model_of_another_wrapper_can_be_planned(tmp_path, kind):
    """The line says how, and this does it."""
    own, text = tmp_path / "own", tmp_path / "text"
    own.mkdir()
    document = {"model_type": kind, "text_config": {**SIZES, "model_type": "llama"}}
    (own / "config.json").write_text(json.dumps(document))
    with pytest.raises(
        ModelError, match=rf"^\S+ is the config of '{kind}', .* write its config by "
    ) as caught:
        models.config_of(own)
    line = str(caught.value).partition(" write its config by ")[2].partition(", and give DIR")[0]
    exec(line, {"transformers": transformers, "json": json, "pathlib": pathlib, "DIR": text})
    shape = lab.plan(text, "fsdp", tokens=64, ranks=2).shape
    assert (shape.V, shape.D) == (67, 10)


def test_a_wrappers_config_in_python_has_its_text_config():
    with pytest.raises(ModelError, match=r"give the text model alone, whose config is text_config$"):
        models.config_of(gemma3().config)
    models.config_of(gemma3().config.text_config)
