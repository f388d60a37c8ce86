"""The dtype of the parameters is the config's, or the one that was asked for; each answer says which."""

import json
from functools import partial

import pytest
import torch

import lab
from lab import models
from lab.errors import CheckpointError, LabError
from lab.planning.plan import plan_ladder
from lab_tests.support.models import small_config

small = partial(small_config, num_attention_heads=24, vocab_size=104)
ASKED = {"tokens": 64, "ranks": 4, "workspace": False}
HELD = "parameters, gradients and optimizer state"


@pytest.fixture
def folder(tmp_path):
    """A directory whose weights are bf16."""
    models.save(models.build(small(dtype=torch.bfloat16, vocab_size=260)), tmp_path)
    return tmp_path


def document(folder):
    return json.loads((folder / "config.json").read_text())


def write(folder, **fields):
    kept = {name: value for name, value in {**document(folder), **fields}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_a_config_alone_is_planned_as_the_directory_with_its_weights(folder):
    whole = lab.plan(folder, "fsdp", **ASKED)
    (folder / "model.safetensors").unlink()
    for model in (folder, models.config_of(folder)):
        alone = lab.plan(model, "fsdp", **ASKED)
        assert (alone.device_peak, alone.state) == (whole.device_peak, whole.state)
    assert whole.state == f"bfloat16 {HELD} (its config says so)"
    write(folder, dtype=None)
    wide = lab.plan(folder, "fsdp", **ASKED)
    assert wide.device_peak > whole.device_peak
    assert wide.state == f"float32 {HELD} (its config names none)"


def test_presets_are_fp32_and_a_callable_says_for_itself():
    assert lab.plan("tiny", "fsdp", **ASKED).state == f"float32 {HELD} (presets are fp32)"
    made = lab.plan(lambda: models.build(small(dtype=torch.bfloat16)), "fsdp", **ASKED)
    assert made.state == f"bfloat16 {HELD} (the callable made them so)"


def test_adapters_are_fp32_beside_frozen_weights_in_bf16():
    assert lab.plan("tiny", "fsdp", lora="r=2", dtype="bfloat16", **ASKED).state == (
        "bfloat16 frozen parameters; float32 trained ones, gradients and optimizer state (as was asked for)"
    )


@pytest.mark.long
def test_every_planning_verb_takes_a_dtype_and_says_it():
    """Half of the state: 8 bytes a parameter, over 4 ranks."""
    said, name = f"bfloat16 {HELD} (as was asked for)", "tiny in bfloat16"
    wide, half = (lab.plan("tiny", "fsdp", dtype=dtype, **ASKED) for dtype in (None, "bfloat16"))
    assert wide.timeline.peak.by_category["optimizer"] == pytest.approx(
        2 * half.timeline.peak.by_category["optimizer"], rel=1e-3
    )
    assert (half.state, half.to_json()["state"]) == (said, said)
    assert half.title.startswith(name)
    assert f"\nstate         {said}\n" in repr(half)
    rungs = plan_ladder("tiny", dtype="bfloat16", **ASKED)
    assert {rung.state for rung in rungs.values()} == {said}
    assert rungs["fsdp"].device_peak == half.device_peak


@pytest.mark.parametrize("verb", ["plan", "fit", "max_context", "rehearse"])
def test_a_dtype_that_is_none_is_refused_and_so_is_one_for_a_callable(verb):
    tokens = {} if verb == "max_context" else {"tokens": 64}
    ask = partial(getattr(lab, verb), ranks=4, **tokens)
    told = r"^dtype='fp8': it takes float32, bfloat16, float16 or float64; the lab has no float8: use compute"
    with pytest.raises(LabError, match=told):
        ask("tiny", dtype="fp8")
    with pytest.raises(LabError, match=r"^dtype='bfloat16' for a callable: let it return a model with"):
        ask(lambda: models.build("tiny"), dtype="bfloat16")


@pytest.mark.long
def test_a_config_with_a_dtype_of_no_training_is_refused_until_one_is_given(folder):
    (folder / "model.safetensors").unlink()
    write(folder, dtype="float8_e4m3fn")
    with pytest.raises(LabError, match=r"^dtype=torch\.float8_e4m3fn in the config: .* give one of these as"):
        lab.plan(folder, "fsdp", **ASKED)
    assert lab.plan(folder, "fsdp", dtype="bfloat16", **ASKED).fits


@pytest.mark.parametrize("said", [{"quant_method": "fp8"}, "fp8"])
def test_a_quantized_config_alone_is_planned_as_if_dequantized_where_a_dtype_is_given(folder, said):
    plain = lab.plan(folder, "fsdp", **ASKED)
    write(folder, quantization_config=said)
    # With its weights it is refused in any case.
    for dtype in (None, "bfloat16"):
        with pytest.raises(LabError, match=r"^a checkpoint with quantized weights"):
            lab.plan(folder, "fsdp", dtype=dtype, **ASKED)
    (folder / "model.safetensors").unlink()
    with pytest.raises(LabError, match=r"quantized weights \('?fp8'?\): give dtype='bfloat16', or --dtype"):
        lab.plan(folder, "fsdp", **ASKED)
    planned = lab.plan(folder, "fsdp", dtype="bfloat16", **ASKED)
    assert planned.device_peak == plain.device_peak
    assert planned.state.endswith("(as was asked for, as if dequantized)")
    assert planned.title.startswith(f"{folder.name} in bfloat16 as if dequantized · ")


def test_a_quantized_config_object_is_the_same():
    config = small(dtype=torch.bfloat16)
    plain = lab.plan(config, "fsdp", **ASKED)
    config.quantization_config = {"quant_method": "fp8"}
    assert lab.plan(config, "fsdp", dtype="bfloat16", **ASKED).device_peak == plain.device_peak
    assert config.quantization_config == {"quant_method": "fp8"}


# ---- searches ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_longest_context_is_that_of_the_dtype():
    asked = {"ranks": 4, "workspace": False, "device_memory": "40MiB"}
    found = lab.max_context("tiny", "upipe", dtype="bfloat16", **asked)
    assert (found.plan.fits, found.next_plan.fits) == (True, False)
    assert found.to_json()["state"] == f"bfloat16 {HELD} (as was asked for)"
    # No pair of degrees fits more, nor fp32 as much.
    more = found.tokens + max(1024, found.tokens // 64)
    for ulysses, ring in ((4, 1), (2, 2), (1, 4)):
        degrees = {"ulysses": ulysses, "ring": ring}
        assert not lab.plan("tiny", "upipe", tokens=more, dtype="bfloat16", **asked, **degrees).fits
    assert not lab.plan("tiny", "upipe", tokens=found.tokens, **asked).fits


# ---- on ranks ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["plain", "fsdp", "upipe", "long"])
def test_a_run_in_bf16_holds_what_is_planned(ranks4, recipe):
    planned = lab.plan("tiny", recipe, tokens=256, ranks=4, dtype="bfloat16", workspace=False)
    run = lab.run("tiny", recipe, tokens=256, cluster=ranks4, dtype="bfloat16", steps=2)
    assert run.device_peak == planned.timeline.device_peak
    assert run.host_peak == planned.host_peak
    assert run.title.startswith("tiny in bfloat16 · ")


@pytest.mark.long
def test_a_rehearsal_in_bf16_holds_what_is_planned():
    for layers in (None, 1):
        asked = {"tokens": 256, "ranks": 4, "dtype": "bfloat16", "layers": layers}
        rehearsed = lab.rehearse("tiny", "fsdp", machine="cpu", steps=0, **asked)
        assert rehearsed.plan_over_measured == 1.0
        assert rehearsed.to_json()["state"] == f"bfloat16 {HELD} (as was asked for)"


@pytest.mark.long
def test_weights_are_cast_to_the_dtype_and_a_checkpoint_keeps_its_own(ranks4, folder, tmp_path):
    asked = {"tokens": 64, "cluster": ranks4, "checkpoint": tmp_path / "kept", "recipe": "fsdp"}
    lab.train(folder, steps=1, dtype="float32", **asked)
    with pytest.raises(CheckpointError, match=r"has parameters of float32, and the model of bfloat16: give"):
        lab.train(folder, steps=2, resume=True, **asked)
    lab.train(folder, steps=2, dtype="float32", resume=True, **asked)


# ---- what doctor says ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "count"), [("bfloat16", 8), ("float32", 16), (None, 16)])
def test_doctor_counts_the_state_of_a_weight_by_its_dtype(folder, dtype, count):
    from lab.commands.doctor import model_report

    write(folder, dtype=dtype)
    why = "its config says so" if dtype else "its config names none"
    expected = f"A weight has {count} bytes of state in training in {dtype or 'float32'} ({why}), which"
    assert expected in " ".join(model_report(folder).split())
