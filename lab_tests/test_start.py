"""A start under FSDP: each rank makes or reads its own shard of the model."""

import gc
import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

import lab
from lab import models
from lab.commands import report
from lab.errors import LabError, ModelError
from lab.memory.meter import Meter
from lab.models import weight_files
from lab.models.first_values import piece_elements
from lab.planning.start import start_of
from lab.planning.whole_step import fake_model
from lab.recipe.jobs import TrainSettings, make_job
from lab.recipe.ladder import resolve_recipe
from lab.recipe.recipe import Recipe
from lab.step.compose import start
from lab.step.one_rank import one_rank
from lab.techniques.sharding import apply_replication
from lab.training.run import _train as train_on_rank
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config

FSDP = Recipe(fsdp=True)
MODELS = {
    "rows that no number of ranks divides": small_config(vocab_size=101, head_dim=6, pad_token_id=55),
    "a tied head": small_config(tie_word_embeddings=True),
    "biases": small_config(Qwen2Config),
    "norms of heads": small_config(Qwen3Config),
}
SCRATCH = 33 * piece_elements("cpu")


def shards(model):
    return {name: p.to_local().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shards_of_any_number_of_ranks_are_the_whole_model(config, ranks):
    whole = models.build(config, seed=3)
    made = []
    for rank in range(ranks):
        # A ring, for its ranks can be taken one by one.
        with one_rank(Recipe(ring=ranks), ranks, "loopback", ring_rank=rank) as mesh:
            model = start(config, FSDP, mesh, seed=3).model
            made.append(shards(model))
            assert model.training
            for buffer, other in zip(model.buffers(), whole.buffers(), strict=True):
                assert torch.equal(buffer, other)
    assert list(made[0]) == [name for name, _ in whole.named_parameters()]
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([one[name] for one in made]), parameter), name


def losses(model, recipe, **settings):
    """Runs on every rank: the losses of two steps."""
    job = make_job(model, recipe, ranks=dist.get_world_size(), tokens=40, rows=3)
    return train_on_rank(job, TrainSettings(2, **settings), None, None).losses


def test_a_start_by_shards_trains_as_one_of_the_whole_model(ranks4, digits):
    config = MODELS["a tied head"]
    by_shards = ranks4.apply(losses, config, FSDP, text=digits)
    whole = ranks4.apply(losses, lambda: models.build(config), FSDP, text=digits)
    assert by_shards == whole


def peaks(model, recipe, ranks=4):
    """Runs on every rank of four: what a start holds at most on the first ranks, then with the optimizer,
    and the bytes of the shard."""
    gc.collect()
    group = dist.new_group(range(ranks))
    if dist.get_rank() >= ranks:
        return None
    meter, other = Meter(), Meter()
    with meter.measure(nn.Module()), meter.phase("start"):
        applied = start(model, recipe, DeviceMesh.from_group(group, "cpu"))
    with other.measure(applied.model), other.phase("start"):
        applied.make_optimizer(learning_rate=1e-3)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in applied.model.parameters()]
    held = sum(p.untyped_storage().nbytes() for p in local)
    return meter.timeline().device_peak, other.timeline().device_peak, held


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fsdp", "upipe"])
def test_a_start_holds_its_shard_and_one_piece(ranks4, recipe):
    chosen = resolve_recipe(recipe, "tiny", 4, 512)
    whole = sum(p.nbytes for p in models.build("tiny").parameters())
    planned = lab.plan("tiny", chosen, tokens=512, ranks=4, workspace=False)
    for peak, with_optimizer, held in ranks4.apply(peaks, "tiny", chosen):
        assert held == whole // 4
        assert held < peak <= held + SCRATCH + 1024
        assert 3 * held <= with_optimizer <= 3 * held + 1024
        assert planned.start.device == with_optimizer
    assert planned.peak == planned.timeline.peak


def test_a_start_from_files_holds_its_shard_and_maps_one_parameter(ranks4, tmp_path):
    models.save(models.build("tiny", seed=5), tmp_path)
    largest = models.build("tiny").lm_head.weight.nbytes
    for peak, _, held in ranks4.apply(peaks, tmp_path, FSDP):
        assert held < peak <= held + largest + 1024


@pytest.mark.long
def test_a_callables_model_arrives_whole(ranks4):
    whole = sum(p.nbytes for p in models.build("tiny").parameters())
    model, tokens = partial(models.build, "tiny"), 32
    planned = lab.plan(model, FSDP, tokens=tokens, ranks=4, workspace=False)
    for peak, _, _ in ranks4.apply(peaks, model, FSDP):
        assert peak > whole
        assert planned.start.device == pytest.approx(peak, abs=1024)
    # So few tokens need less than the start, and the plan says so.
    assert planned.timeline.device_peak < planned.device_peak == planned.start.device
    assert planned.peak.phase == "start"
    assert planned.limit is None
    assert "at the peak   start: check_same_model" in report.plan_text(planned)


@pytest.mark.parametrize("kind", mostly_long(["a config", "a tied model", "a bf16 directory"], 2))
def test_three_ranks_without_fsdp_compare_their_models(ranks4, tmp_path, kind):
    """The vocabulary is so large that the scratch of the comparison is above the optimizer's state."""
    model = small_config(vocab_size=2003, tie_word_embeddings=kind == "a tied model")
    if kind == "a bf16 directory":
        models.save(models.build(model).to(torch.bfloat16), tmp_path)
        model = tmp_path
    planned = lab.plan(model, Recipe(), tokens=9, ranks=3, workspace=False)
    assert planned.start.op == "check_same_model"
    for peak, with_optimizer, _ in ranks4.apply(peaks, model, Recipe(), 3)[:3]:
        assert planned.start.device == pytest.approx(max(peak, with_optimizer), abs=1024)


@pytest.mark.parametrize(("name", "gib"), [("qwen3-32b", 49.7), ("llama3-70b", 102.5)])
def test_the_start_of_a_large_model_is_its_shard_with_the_optimizers_state(name, gib):
    """The whole of qwen3-32b, 122 GiB, was on every device before; llama3-70b needs more than eight ranks."""
    job = make_job(name, FSDP, tokens=2**20, ranks=8)
    assert start_of(job, fake_model(job), workspace=True).device / 2**30 == pytest.approx(gib, abs=0.05)


# ---- from files ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    models.build(MODELS["rows that no number of ranks divides"], seed=8).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, **fields):
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | fields))


def of_rank(folder, rank, ranks=4):
    with one_rank(Recipe(ring=ranks), ranks, "loopback", ring_rank=rank) as mesh:
        return shards(start(folder, FSDP, mesh).model)


def whole_parameters(folder):
    made = [of_rank(folder, rank) for rank in range(4)]
    return {name: torch.cat([one[name] for one in made]) for name in made[0]}


def test_shards_of_a_directorys_weights_are_the_weights(folder):
    whole = models.build(folder)
    for name, parameter in whole_parameters(folder).items():
        assert torch.equal(parameter, whole.get_parameter(name)), name
    assert torch.equal(whole.lm_head.weight, models.build(models.config_of(folder), seed=8).lm_head.weight)


@pytest.mark.long
def test_weights_in_several_files_and_another_dtype(folder):
    whole = models.build(folder)
    (folder / "model.safetensors").unlink()
    whole.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]) > 3
    for name, parameter in whole_parameters(folder).items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.long
def test_weights_of_a_model_without_its_heads_prefix(folder):
    place = folder / "model.safetensors"
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(place).items()}
    expected = whole_parameters(folder)
    save_file(weights, place)
    for name, parameter in whole_parameters(folder).items():
        assert torch.equal(parameter, expected[name]), name


def test_weights_of_another_shape_are_refused(folder):
    edit_config(folder, intermediate_size=73)
    for call in (lambda: models.build(folder), lambda: of_rank(folder, 0)):
        with pytest.raises(
            ModelError, match=r"mlp.gate_proj.weight has shape \[72, 48\] there, and \[73, 48\]"
        ):
            call()


def tied_by_config(folder, *, equal=False, without=None):
    """Save an untied model whose config says that it is tied; return what transformers reads of it."""
    models.build(small_config(), seed=8).save_pretrained(folder)
    place = folder / "model.safetensors"
    weights = load_file(place)
    if equal:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights.pop(without, None)
    save_file(weights, place, metadata={"format": "pt"})
    edit_config(folder, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_tied_model_whose_files_hold_another_head_is_refused(tmp_path):
    theirs = tied_by_config(tmp_path)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    for call in (lambda: models.build(tmp_path), lambda: of_rank(tmp_path, 0)):
        with pytest.raises(ModelError, match=r"ties lm_head.weight to model.embed_tokens.weight, and its "):
            call()
    edit_config(tmp_path, tie_word_embeddings=False)
    assert torch.equal(models.build(tmp_path).lm_head.weight, theirs.lm_head.weight)


@pytest.mark.parametrize("without", mostly_long([None, "lm_head.weight", "model.embed_tokens.weight"], 1))
def test_a_tied_model_may_have_its_head_in_the_files_twice_or_once_by_either_name(
    tmp_path, monkeypatch, without
):
    monkeypatch.setattr(weight_files, "COMPARED_ELEMENTS", 100)
    theirs = tied_by_config(tmp_path, equal=True, without=without)
    ours = models.build(tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name
    assert torch.equal(whole_parameters(tmp_path)["model.embed_tokens.weight"], theirs.lm_head.weight)


# ---- ranks that differ -----------------------------------------------------------------------------------


def refusal(models_by_rank, seeds):
    """Runs on every rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        start(models_by_rank[rank], FSDP, mesh, seed=seeds[rank])
    except LabError as error:
        return str(error)
    return None


def test_ranks_with_another_seed_are_refused(ranks4):
    said = (
        "the seed, or the files of the weights, differ on rank 2: give every rank the same seed, and a copy"
    )
    for error in ranks4.apply(refusal, [small_config()] * 4, [1, 1, 0, 1]):
        assert error.startswith(said)
    assert ranks4.apply(refusal, [small_config()] * 4, [1] * 4) == [None] * 4


def test_ranks_with_other_files_are_refused(ranks4, tmp_path):
    """The copy differs in one parameter, and not in its size."""
    places = [tmp_path / name for name in ("one", "other")]
    model = models.build(small_config())
    model.save_pretrained(places[0])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(1)
    model.save_pretrained(places[1])
    for error in ranks4.apply(refusal, [places[0], places[1], places[0], places[0]], [0] * 4):
        assert error.startswith("the seed, or the files of the weights, differ on rank 1")
    (places[1] / "model.safetensors").unlink()
    for error in ranks4.apply(refusal, [places[0], places[1], places[0], places[0]], [0] * 4):
        assert error is not None
    assert ranks4.apply(refusal, [places[0]] * 4, [0] * 4) == [None] * 4


# ---- without memory --------------------------------------------------------------------------------------


def test_a_model_without_memory_is_refused_without_fsdp():
    with one_rank(Recipe(), 2, "loopback") as mesh:
        for recipe in (Recipe(), Recipe(compute_dtype="bfloat16")):
            with pytest.raises(ModelError, match=r"embed_tokens.weight has no memory \(device meta\): load"):
                lab.apply_recipe(models.build_on_meta(small_config()).model, recipe, mesh)
        with pytest.raises(ModelError, match="has no memory"):
            apply_replication(models.build_on_meta(small_config()).model, mesh=mesh)


def test_a_model_may_be_given_memory_by_hand(alone):
    mesh = init_device_mesh("cpu", (1,))
    model = models.build_on_meta(small_config()).model
    lab.apply_recipe(model, FSDP, mesh)
    model.to_empty(device="cpu")
    assert all(isinstance(p, DTensor) and p.device.type == "cpu" for p in model.parameters())
