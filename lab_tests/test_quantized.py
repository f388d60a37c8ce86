"""Quantized weights are refused by that name: a config, a note of ModelOpt or the headers of files say so.

Each was seen red: read and trained as weights, or refused by another name.
"""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lab import models
from lab.commands.cli import main
from lab.decoder import FAMILIES
from lab.errors import ModelError
from lab.models.quantized import quantization_of
from lab.planning import plan_cache
from lab_tests.support import reference
from lab_tests.support.models import small_config

PROJECTION = "model.layers.1.mlp.down_proj"
REMEDY = r": the lab trains plain weights; give a checkpoint that was dequantized to bf16$"


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    models.build(small_config()).save_pretrained(place)
    return place


def change(folder, **tensors):
    """Replace the weight of one projection by these tensors, by the ends of their names."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weight = weights.pop(f"{PROJECTION}.weight")
    save_file({**weights, **{f"{PROJECTION}.{end}": make(weight) for end, make in tensors.items()}}, file)


def as_it_is(weight):
    return weight


def to(dtype):
    return lambda weight: weight.to(dtype)


def scale(weight):
    return torch.ones(1)


FORMATS = {
    "fp8 with scales": {"weight": to(torch.float8_e4m3fn), "weight_scale": scale},
    "fp8 in blocks": {"weight": to(torch.float8_e4m3fn), "weight_scale_inv": scale},
    "fp8 alone": {"weight": to(torch.float8_e5m2)},
    "NVFP4": {"weight": to(torch.uint8), "weight_scale": to(torch.float8_e4m3fn), "weight_scale_2": scale},
    "MXFP4": {"weight_blocks": to(torch.uint8), "weight_scales": to(torch.uint8)},
    "GPTQ": {
        "qweight": to(torch.int32),
        "qzeros": to(torch.int32),
        "scales": scale,
        "g_idx": to(torch.int32),
    },
    "bitsandbytes": {"weight": to(torch.int8), "SCB": scale},
    "packed": {"weight_packed": to(torch.int32), "weight_scale": scale},
    "scales of plain weights": {"weight": as_it_is, "weight_scale": scale},
}


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_files_are_refused_by_that_name(folder, name):
    change(folder, **FORMATS[name])
    for call in (
        models.config_of,
        models.shape_of,
        models.build,
        lambda one: models.build(one, weights=False),
    ):
        with pytest.raises(
            ModelError, match=rf"quantized weights \({PROJECTION}\.\w+, \w+ in its files\){REMEDY}"
        ):
            call(folder)


def test_an_index_says_it_before_its_files_are_there(folder):
    (folder / "model.safetensors").unlink()
    places = {f"{PROJECTION}.weight_scale_inv": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=rf"\({PROJECTION}\.weight_scale_inv in its files\)"):
        models.config_of(folder)


NOTES = {
    '{"quantization": {"quant_algo": "NVFP4"}}': "NVFP4 by its hf_quant_config.json",
    '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}': None,
    "{": "hf_quant_config.json",
    "[]": "hf_quant_config.json",
}


@pytest.mark.parametrize("note", NOTES)
def test_the_note_of_modelopt_says_it(folder, note):
    (folder / "hf_quant_config.json").write_text(note)
    assert quantization_of({}, folder) == NOTES[note]


@pytest.mark.parametrize(
    ("field", "how"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_algo": "FP8", "config_groups": {}}, "FP8"),
        ({"bits": 4}, "{'bits': 4}"),
        ({"quant_method": 3}, "{'quant_method': 3}"),
        ("fp8", "'fp8'"),
        ({}, None),
        (None, None),
    ],
)
def test_a_config_says_it_for_itself_or_for_its_text_model(field, how):
    assert quantization_of({"quantization_config": field}, None) == how
    assert quantization_of({"text_config": {"quantization_config": field}}, None) == how


def test_the_older_name_of_the_field_is_read(folder):
    """Seen red: not read, and the numbers of the files were trained as weights."""
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**document, "quantization_config": None, "compression_config": {"bits": 4}})
    )
    with pytest.raises(ModelError, match="quantized weights"):
        models.config_of(folder)
    config = small_config()
    config.compression_config = {"bits": 4}
    with pytest.raises(ModelError, match="quantized weights"):
        models.config_of(config)
    assert models.is_quantized(config)
    assert not hasattr(models.config_of(config, "bfloat16"), "compression_config")


def test_scales_of_a_cache_beside_plain_weights_are_left_out(folder):
    """Seen red: refused as quantized weights, which nobody can dequantize."""
    whole = models.build(folder).model.layers[1].mlp.down_proj.weight
    file, weights = folder / "model.safetensors", load_file(folder / "model.safetensors")
    scales = ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale")
    save_file({**weights, **{f"model.layers.1.self_attn.{name}": torch.ones(1) for name in scales}}, file)
    assert torch.equal(models.build(folder).model.layers[1].mlp.down_proj.weight, whole)


def test_plain_weights_are_not_quantized(tmp_path):
    for number, family in enumerate(FAMILIES):
        folder = tmp_path / str(number)
        models.save(reference.build(reference.config(family), torch.float32), folder)
        assert quantization_of({"model_type": family}, folder) is None


def test_a_saved_answer_is_not_that_of_the_files_of_today(folder, tmp_path, monkeypatch):
    """Seen red: the answer of the plain weights came back for the quantized ones by the same names."""
    monkeypatch.setattr(plan_cache, "folder", lambda kind: tmp_path / "made" / kind)
    (folder / "a link to nothing").symlink_to("nothing")
    words = ["plan", str(folder), "--tokens", "64", "--ranks", "2", "--recipe", "fsdp"]
    assert "device peak" in CliRunner().invoke(main, words).stdout
    change(folder, **FORMATS["fp8 alone"])
    run = CliRunner().invoke(main, words)
    assert (run.exit_code, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("lab: a checkpoint with quantized weights (")
