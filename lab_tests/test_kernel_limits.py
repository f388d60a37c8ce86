"""A size that torch's attention kernel refuses on CUDA is refused before anything is planned."""

import pytest
import torch

import lab
from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.rehearsing import rehearse as rehearsing
from lab.techniques.attention.kernels import KernelSupport, kernel_support
from lab.training import collective_time, train
from lab.units import Mi
from lab_tests.support.gpus import Card
from lab_tests.support.models import small_config

TOO_MANY = r"^4 heads of 5242880 tokens in one call of torch's attention kernel on CUDA"
AMPERE = KernelSupport((8, 0), True, {"flash-attn-2": "no module", "flash-attn-3": "no module"})
HOPPER = KernelSupport((9, 0), True, {"flash-attn-2": "no module", "flash-attn-3": "no module"})


class Planned(Exception):
    """Ends a call that was not refused."""


class GpuCluster:
    """Stands in for a cluster of eight GPUs that says which machine its ranks run on."""

    device_type, started, ranks, interrupt, timeout = "cuda", True, 8, None, 600.0

    def __init__(self, machine):
        self.machine = machine

    def apply(self, function, *args, **_):
        if function is torch.cuda.get_device_name:
            return ["NVIDIA A100"] * self.ranks
        assert function is kernel_support
        return [self.machine] * self.ranks


def call(patch, verb, machine, kernel, folder):
    def planned(*_, **__):
        raise Planned

    patch.setattr(collective_time, "plan_job", planned)
    patch.setattr(rehearsing, "plan_job", planned)
    recipe = lab.ladder("llama3-8b", ranks=8, tokens=5 * Mi, kernel=kernel)["tiling"]
    if verb == "rehearse":
        patch.setattr(rehearsing, "machine_for", lambda _: "cuda")
        patch.setattr(rehearsing, "kernel_support", lambda _: machine)
        Card(patch)
        lab.rehearse("llama3-8b", recipe, tokens=5 * Mi, ranks=8)
    elif verb == "torchrun":
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(train, "kernel_support", lambda _: machine)
        patch.setattr(train, "on_this_rank", planned)
        patch.setattr(train.dist, "get_world_size", lambda: 8)
        patch.setattr(train, "from_first_rank", lambda work: work())
        lab.train("llama3-8b", recipe, tokens=5 * Mi, steps=1, cluster=None, checkpoint=folder)
    else:
        more = {"checkpoint": folder} if verb == "train" else {}
        getattr(lab, verb)("llama3-8b", recipe, tokens=5 * Mi, steps=1, cluster=GpuCluster(machine), **more)


@pytest.mark.parametrize("verb", ["rehearse", "run", "profile", "train", "torchrun"])
def test_the_verbs_refuse_too_many_tokens_for_the_kernel_before_a_plan(monkeypatch, tmp_path, verb):
    for machine, kernel in ((HOPPER, "torch"), (AMPERE, "auto")):
        with pytest.raises(RecipeError, match=TOO_MANY):
            call(monkeypatch, verb, machine, kernel, tmp_path / "run")
    with pytest.raises(Planned):
        call(monkeypatch, verb, HOPPER, "auto", tmp_path / "run")


@pytest.mark.long
def test_a_plan_names_the_attention_that_runs_for_its_dtype_and_head_dim():
    def notes(model, **knobs):
        return " ".join(lab.plan(model, Recipe(**knobs), tokens=64, ranks=1).notes)

    exact = "attention runs as matrix products on CUDA"
    assert exact not in notes(small_config(), compute_dtype="bfloat16")
    for knobs in ({}, {"compute_dtype": "float32"}):
        assert f"in float32 with head_dim=10 {exact}" in notes(small_config(), **knobs)
    said = notes(small_config(head_dim=264), compute_dtype="bfloat16")
    assert f"in bfloat16 with head_dim=264 {exact}" in said
    assert said.endswith("flash kernels take at most 256")
