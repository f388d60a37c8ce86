"""Adapters that are asked for: the text, the model that has them, its first values, and its plans."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab import models
from lab.commands.cli import main
from lab.errors import LabError, ModelError
from lab.memory.meter import Meter
from lab.models.first_values import shard_of
from lab.models.lora import Lora, is_adapter, parse_lora, plain_name
from lab.planning.answers import entry_files
from lab.planning.plan import plan_job
from lab.planning.start import start_of
from lab.planning.whole_step import fake_model
from lab.recipe.jobs import Machine, make_job
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.step.compose import start
from lab.step.one_rank import one_rank
from lab.step.training_step import loss, train_step
from lab.torch_private import local_part
from lab.units import MiB
from lab_tests.proofs.cases import answers, differences, fill
from lab_tests.proofs.input_cases import expected_result, gradients_of, token_ids
from lab_tests.support import reference
from lab_tests.support.models import small_config

SMALL = small_config()
LORA = Lora(4, 12)


def test_a_text_names_the_adapters():
    assert parse_lora("r=16") == Lora(16)
    asked = parse_lora("r=16, alpha=32, targets=q_proj+v_proj")
    assert asked == Lora(16, 32, ("q_proj", "v_proj"))
    assert parse_lora(str(asked)) == asked
    assert (asked.scale, Lora(16).scale) == (2.0, 1.0)
    narrow = parse_lora("r=16,dtype=bfloat16")
    assert narrow == Lora(16, dtype="bfloat16") == parse_lora(str(narrow))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lora='' names no adapters: write r=16, or"),
        ("alpha=4", "names no adapters"),
        ("r=4,r=5", "names no adapters"),
        ("r=4,rank=5", "names no adapters"),
        ("r=٣", "names no adapters"),
        ("r=0", "lora: r=0"),
        ("r=1000000", "give a rank from 1 to 65536"),
        ("r=4,alpha=0", "alpha=0: give a finite number above 0"),
        ("r=4,alpha=inf", "alpha=inf: give a finite number above 0"),
        ("r=4,dtype=float8", "lora: dtype='float8': give bfloat16 or float32, or leave it out"),
        (
            "r=4,targets=lm_head",
            "no projection 'lm_head' in the layers of this model: targets are",
        ),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ModelError, match=message) as refusal:
        make_job("tiny", "upipe", tokens=64, ranks=2, lora=text)
    assert "\n" not in str(refusal.value)


def test_a_callable_adds_its_own_adapters():
    with pytest.raises(ModelError, match="let it add the adapters to the model that it returns"):
        lab.plan(lambda: models.build(SMALL), "fsdp", tokens=64, ranks=2, lora="r=4")


def test_without_peft_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LabError, match=r"LoRA adapters need PEFT.*pip install -e '\.\[hf\]'"):
        models.build(SMALL, lora=LORA)


@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_the_adapters_are_trained_and_the_rest_is_the_model_without_them(family):
    own = reference.config(family)
    adapted, plain = models.build(own, lora=LORA, seed=3), models.build(own, seed=3)
    without = dict(plain.named_parameters())
    shape = models.shape_of(own)
    names = {name for name, _ in adapted.named_parameters()}
    assert {plain_name(name) for name in names if not is_adapter(name)} == set(without)
    assert sum(map(is_adapter, names)) == 2 * len(shape.projections) * shape.L
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == is_adapter(name)
        if not is_adapter(name):
            assert torch.equal(parameter, without[plain_name(name)]), name
        elif ".lora_B." in name:
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(1 / 4, rel=0.25)


def test_a_directory_in_bf16_keeps_its_weights_and_gets_adapters_in_fp32(tmp_path):
    models.save(models.build(SMALL, seed=5).to(torch.bfloat16), tmp_path)
    adapted, plain = models.build(tmp_path, lora=LORA), models.build(tmp_path)
    for name, parameter in adapted.named_parameters():
        if is_adapter(name):
            assert parameter.dtype == torch.float32
            assert parameter.any() == (".lora_A." in name)
        else:
            assert torch.equal(parameter, plain.get_parameter(plain_name(name)))


def test_adapters_have_the_dtype_that_was_asked_for(tmp_path):
    models.save(models.build(SMALL, seed=5).to(torch.bfloat16), tmp_path)
    narrow = Lora(4, 12, dtype="bfloat16")
    adapted, usual = (models.build(tmp_path, lora=lora) for lora in (narrow, LORA))
    for name, parameter in adapted.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert torch.equal(parameter, usual.get_parameter(name).to(torch.bfloat16)), name
    with pytest.raises(ModelError, match=r"dtype=bfloat16 in a model in float32: .* make the model bfloat16"):
        models.build(SMALL, lora=narrow)


NARROW = "r=3,alpha=7,dtype=bfloat16"
IN_BF16 = {
    "plain": {"rows": 4},
    "fsdp": {"rows": 2, "loss_tile": 7, "checkpoint": True},
    "upipe": {"ulysses": 2, "ring": 2, "rows": 2, "loss_tile": 7},
    "streamed": {"ulysses": 2, "ring": 1, "optimizer": "host", "replicas": 2, "rows": 2},
}


def far_from_fp32(folder):
    """Runs on each rank: errors of PEFT's own adapters in bf16 against fp32, and those under each recipe.

    Also what differs between the meter of a step and the plan.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own, right = (models.build(folder, lora=parse_lora(NARROW)) for _ in range(2))
    found = {}
    for model, dtype in ((own, torch.bfloat16), (right.float(), torch.float32)):
        fill(model)
        found[dtype] = expected_result(model)[1]
        assert {gradient.dtype for gradient in found[dtype].values()} == {dtype}
    errors, told = {"PEFT": reference.error(found[torch.bfloat16], found[torch.float32])}, {}
    for name, knobs in IN_BF16.items():
        job = make_job(folder, name, tokens=22, ranks=4, lora=NARROW, compute_dtype=None, **knobs)
        applied = start(job.model, job.recipe, mesh, lora=job.lora)
        fill(applied.model)
        batch = shard_batch(token_ids()[: job.rows].repeat(job.rows, 1)[: job.rows], job.recipe, mesh)
        optimizer = applied.make_optimizer(learning_rate=1e-3)
        assert {x.dtype for of in optimizer.state.values() for x in of.values() if x.dim()} == {
            torch.bfloat16
        }
        meter = Meter()
        train_step(applied.model, optimizer, batch, meter=meter)
        told[name] = answers(meter.timeline())
        fill(applied.model)
        for key, parameter in applied.model.named_parameters():
            if ".lora_A." in key:
                whole = models.build(folder, lora=job.lora).get_parameter(key)
                local, first = shard_of(parameter)
                with torch.no_grad():
                    local.copy_(whole[first : first + len(local)])
        loss(applied.model, shard_batch(token_ids(), job.recipe, mesh)).backward()
        errors[name] = reference.error(gradients_of(applied.model), found[torch.float32])
    return errors, told


@pytest.mark.long
def test_adapters_in_bf16_are_as_near_to_fp32_as_those_of_peft_and_as_large_as_planned(ranks4, tmp_path):
    models.save(reference.build(reference.config("qwen3"), torch.bfloat16), tmp_path)
    for rank, (errors, told) in enumerate(ranks4.apply(far_from_fp32, tmp_path)):
        for name, knobs in IN_BF16.items():
            assert 1e-4 < errors[name] < 1.5 * errors["PEFT"], (name, errors)
            job = make_job(tmp_path, name, tokens=22, ranks=4, lora=NARROW, compute_dtype=None, **knobs)
            planned = plan_job(job, Machine(workspace=False))
            if rank == planned.ring_rank * job.recipe.ulysses:
                assert differences(answers(planned.timeline), told[name]) == [], name


def test_ranks_with_other_seeds_for_their_adapters_differ(tmp_path):
    models.save(models.build(SMALL), tmp_path)
    origins = {models.build_on_meta(tmp_path, lora=LORA, seed=seed).origin() for seed in (1, 2)}
    assert len(origins) == 2
    assert len({models.build_on_meta(tmp_path, seed=seed).origin() for seed in (1, 2)}) == 1


def test_the_planned_start_has_the_moments_of_the_adapters_alone(monkeypatch):
    job, machine = make_job(SMALL, Recipe(fsdp=True), tokens=64, ranks=2, lora=LORA), Machine(workspace=False)
    # Without the scratch memory of first values, the start is highest when the optimizer has its state.
    monkeypatch.setattr("lab.planning.start.piece_elements", lambda _: 1)
    planned = start_of(job, fake_model(job), workspace=machine.workspace)
    with one_rank(job.recipe, 2, "loopback") as mesh:
        started = start(SMALL, job.recipe, mesh, lora=LORA)
        optimizer = started.make_optimizer(learning_rate=1e-3)
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        buffers = sum(buffer.nbytes for buffer in started.model.buffers())
        parameters, moments = (
            sum(local_part(tensor).nbytes for tensor in tensors)
            for tensors in (started.model.parameters(), state)
        )
    assert planned.op == "make_optimizer"
    assert planned.by_category["parameters"] == parameters + buffers
    assert planned.by_category["optimizer"] == moments


def test_plans_of_other_adapters_are_other_plans():
    jobs = [
        make_job(SMALL, "fsdp", tokens=64, ranks=2, lora=lora)
        for lora in (None, "r=4", "r=4,alpha=8", "r=4,targets=q_proj")
    ]
    assert len({entry_files(job, workspace=True, shipped=False)[0] for job in jobs}) == 4


@pytest.mark.long
def test_the_state_of_llama3_8b_is_4_bytes_a_parameter():
    of_model, of_adapters = (
        lab.plan("llama3-8b", "fsdp", tokens=8192, ranks=8, workspace=False, lora=lora).start.by_category
        for lora in (None, "r=16")
    )
    parameters, adapters = 8_030_261_248, 41_943_040
    # The counters of Adam's steps and the tables of the positions take the rest, less than a MiB.
    for held, expected in (
        (of_model["parameters"], 4 * parameters // 8),
        (of_model["optimizer"], 8 * parameters // 8),
        (of_adapters["parameters"], 4 * (parameters + adapters) // 8),
        (of_adapters["optimizer"], 8 * adapters // 8),
    ):
        assert 0 <= held - expected < MiB


SOME = "r=4,targets=q_proj+v_proj"

COMMANDS = {
    "plan": "plan tiny --tokens 64 --ranks 2",
    "ladder": "ladder tiny --tokens 64 --ranks 2",
    "max-context": "max-context tiny --ranks 2 --device-memory 1GiB",
    "fit": "fit tiny --tokens 64 --ranks 2 --device-memory 1GiB",
    "rehearse": "rehearse tiny --tokens 64 --ranks 2 --machine cpu",
    "run": "run tiny --tokens 64 --ranks 2 --steps 1",
}
"""The commands that take adapters."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lora='' names no adapters: write r=16, or"),
        ("r=4,targets=lm_head", "lora: no projection 'lm_head' in the layers of this model: targets are"),
    ],
)
def test_a_command_refuses_other_adapters_in_one_line(monkeypatch, command, text, said):
    monkeypatch.setattr("cluster.ranks.Cluster.start", lambda self: pytest.fail("started"))
    run = CliRunner().invoke(main, [*COMMANDS[command].split(), "--lora", text])
    assert (run.exit_code, run.stdout, run.stderr.count("\n")) == (2, "", 1), run.output
    assert run.stderr.startswith(f"lab: {said}")


@pytest.mark.long
def test_the_command_plans_adapters():
    arguments = ["plan", "tiny", "--tokens", "64", "--ranks", "2", "--recipe", "fsdp", "--json"]

    def answer(*more):
        return json.loads(CliRunner().invoke(main, [*arguments, *more]).output)

    of_model, *of_adapters = answer(), answer("--lora", "r=4"), answer("--lora", SOME)
    for planned in of_adapters:
        assert planned["by_category"]["optimizer"] < of_model["by_category"]["optimizer"] / 20
