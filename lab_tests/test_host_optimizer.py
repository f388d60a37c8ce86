"""The optimizer on the host: the bytes of each memory, what is copied, and the same training bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab import models
from lab.errors import RecipeError
from lab.memory.meter import FROM_HOST, TO_HOST, Meter
from lab.memory.timeline import Timeline
from lab.planning.costs import HOST_MEMORY, HOST_MEMORY_SHARE
from lab.planning.start import start_of
from lab.planning.whole_step import fake_model
from lab.recipe.jobs import Job
from lab.recipe.recipe import Recipe
from lab.step.one_rank import one_rank
from lab.step.training_step import NoMeter, gradient_norm, train_step
from lab.techniques.host_transfer import PinnedMemory
from lab_tests.proofs.input_cases import EVERY_LINEAR, token_ids, with_lora
from lab_tests.support.costs import FP32, RANKS, D, E, H, I, K, L, S, V, model_config, planned_costs
from lab_tests.support.models import small_config
from lab_tests.support.operators import Calls
from lab_tests.support.recipes import EVERYTHING
from lab_tests.support.reference import config
from lab_tests.support.training import ROWS, TOKENS

HOST = Recipe(fsdp=True, optimizer="host")
LAYER = FP32 * (2 * E * H * D + 2 * E * K * D + 3 * E * I + 2 * E) // RANKS
ROOT = FP32 * (2 * V * E + E) // RANKS
STATE = L * LAYER + ROOT
"""The bytes of a rank's parameters in fp32: of a layer, of the rest, of all. The rows divide by the ranks."""

FREQUENCIES = FP32 * D
"""The bytes of the buffers: of each of two, D/2 frequencies."""

COUNTERS = FP32 * (9 * L + 3)
"""The bytes of Adam's counters, one for each parameter."""


def plan_of(recipe: Recipe) -> Any:
    return lab.plan(model_config(), recipe, tokens=S, ranks=RANKS, workspace=False)


def test_the_host_holds_the_state_and_the_device_none_of_it():
    here, there = (plan_of(recipe).timeline for recipe in (HOST, replace(HOST, optimizer="device")))

    def at(timeline: Timeline, phase: str, end: int) -> tuple[int, int]:
        """The bytes of the device and of the host at the first or last row of a phase."""
        row = [row for row, p in enumerate(timeline.phase) if timeline.phases[p] == phase][end]
        return int(timeline.total[row]), int(timeline.host[row])

    for phase, end, bytes_per_weight in (("forward", 0, 12), ("backward", 0, 12), ("backward", -1, 16)):
        state = bytes_per_weight * STATE // FP32 + COUNTERS
        assert at(here, phase, end)[1] == state
        assert at(there, phase, end)[1] == 0
        if phase == "forward" or end == -1:
            assert at(there, phase, end)[0] - at(here, phase, end)[0] == state
    # The norms of the gradients are on the host, too, and the device's bytes do not change.
    assert 4 * STATE + COUNTERS < here.host_peak < 4 * STATE + 4 * COUNTERS
    optimizer = [here.phases[p] == "optimizer" for p in here.phase]
    # Only the loss is added there, on the first two rows: a scalar in place of two.
    assert len(set(here.rows(optimizer).total.tolist()[2:])) == 1
    held = here.moment(-1).by_category
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (FREQUENCIES, 0, 0)


def test_gradients_reach_the_host_in_the_parameters_dtype():
    """A cast on the host could begin before the copy from a GPU has ended."""
    model, meter = models.build(model_config()).bfloat16(), Meter()
    with one_rank(HOST, RANKS, "loopback") as mesh:
        lab.apply_recipe(model, HOST, mesh)
        batch = lab.shard_batch(torch.zeros(1, S, dtype=torch.int64), HOST, mesh)
        with meter.measure(model), meter.phase("backward"):
            lab.loss(model, batch).backward()
    # Two bytes per weight of parameters, and two of gradients.
    assert meter.timeline().host_peak == meter.timeline().host[-1] == STATE


def test_the_names_of_what_the_host_holds():
    timeline = plan_of(HOST).timeline
    [*held] = timeline.holders(at=0.0, memory="host")
    embedding = [h.bytes for h in held if h.name == "model.embed_tokens.weight" and h.shape]
    assert len(embedding) == 3  # the parameter and two moments
    assert {h.category for h in held} == {"host"}
    assert all(h.name for h in held)


class Memories(Meter):
    """A meter that refuses an operator on tensors of both memories, as CUDA does."""

    copied = 0

    def observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().observe(func, args, kwargs)
        if str(func.overloadpacket) in (*TO_HOST, FROM_HOST):
            self.copied += 1
            return result
        flat = torch.utils._pytree.tree_leaves((args, kwargs, result))
        memories = {self.on_host((x,)) for x in flat if isinstance(x, torch.Tensor) and x.dim()}
        assert len(memories) < 2, func
        return result


def errors_and_updates(work: list[tuple[Any, Recipe, int]]) -> list[tuple[float, bool]]:
    """Runs on every rank: the norm's error, and whether both optimizers train alike, bit for bit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for make, recipe, backwards in work:
        trained, norms = [], []
        for place in ("device", "host"):
            chosen, model = replace(recipe, optimizer=place), make()
            optimizer = lab.apply_recipe(model, chosen, mesh).make_optimizer(learning_rate=1e-2)
            batch, meter = lab.shard_batch(token_ids(), chosen, mesh), Memories()
            for _ in range(backwards):
                with meter.measure(model, optimizer), meter.phase("backward"):
                    lab.loss(model, batch).backward()
            gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
            norms.append(abs(gradient_norm(model).item() / norm_of(gradients) - 1))
            values = [train_step(model, optimizer, batch, meter=m, clip_norm=0.1) for m in (meter, NoMeter())]
            weights = {name: p.full_tensor() for name, p in model.named_parameters()}
            gradients = {f"gradient of {name}": gradient for name, gradient in gradients.items()}
            trained.append({**weights, **gradients, "loss": sum(values)})
            assert bool(meter.copied) is (place == "host" or recipe.checkpoint)
        device, host = trained
        alike = device.keys() == host.keys() and all(torch.equal(device[name], host[name]) for name in host)
        results.append((max(norms), alike))
    return results


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return torch.cat([g.flatten().double() for g in gradients.values()]).norm().item()


def fp32() -> Any:
    return models.build(config("qwen3", tie_word_embeddings=True), seed=1)


def bf16() -> Any:
    return models.build(config("llama")).bfloat16()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_training_is_the_same_bit_for_bit_and_no_operator_sees_both_memories(ranks4):
    everything = replace(EVERYTHING, compute_dtype="bfloat16")
    work = {
        "everything, tied, bf16 from fp32": (fp32, everything, 1),
        "parameters in bf16": (bf16, HOST, 1),
        "adapters in fp64, accumulated": (with_lora(target_modules=EVERY_LINEAR, family="qwen3"), HOST, 2),
    }
    for rank in ranks4.apply(errors_and_updates, list(work.values())):
        for name, (norm, alike) in zip(work, rank, strict=True):
            assert alike, name
            assert norm < (1e-2 if "bf16" in name else 1e-5), name


def test_each_shard_is_copied_at_each_gather_and_the_gradients_of_a_unit_once():
    model, recipe = models.build(model_config()), HOST
    with one_rank(recipe, RANKS, "loopback") as mesh:
        lab.apply_recipe(model, recipe, mesh)
        batch = lab.shard_batch(torch.arange(S).view(1, S) % V, recipe, mesh)
        with Calls() as calls:
            lab.loss(model, batch).backward()
        # The embedding, the last norm and the head stay gathered.
        assert calls["lab.from_host"] == 2 * 9 * L + 3
        assert calls["lab.to_host_whole"] == L + 1


def test_costs_are_the_copies_and_the_hosts_memory():
    device, host = planned_costs(fsdp=True), planned_costs(fsdp=True, optimizer="host")
    assert host.host_bytes == 3 * L * LAYER + 2 * ROOT
    assert device.host_bytes == 0
    assert host.flops == device.flops
    # Adam alone touches weights, gradients and both moments.
    waited = 4 * STATE * RANKS / (HOST_MEMORY.value * HOST_MEMORY_SHARE.value)
    assert waited < host.device_seconds - device.device_seconds < 2.5 * waited


def test_a_start_holds_no_state_on_the_device():
    job = Job("llama3-8b", HOST, 1024, 8)
    moment = start_of(job, fake_model(job), workspace=False)
    assert moment.device < 1024  # rope's frequencies
    assert moment.host / 2**30 == pytest.approx(3 * 3.74, abs=0.01)


@pytest.mark.long
def test_a_run_goes_on_with_the_optimizer_elsewhere(ranks4, digits, tmp_path):
    settings = {"tokens": TOKENS, "rows": ROWS, "text": digits, "cluster": ranks4, "compute_dtype": None}
    unbroken = lab.train(small_config(), "fsdp", steps=4, checkpoint=tmp_path / "one", every=2, **settings)
    assert len(set(unbroken.losses)) == 4
    for first, second in (("host", "device"), ("device", "host")):
        folder = tmp_path / f"{first}-{second}"
        before = lab.train(
            small_config(), "fsdp", steps=2, checkpoint=folder, every=2, optimizer=first, **settings
        )
        after = lab.train(
            small_config(), "fsdp", steps=4, checkpoint=folder, every=2, optimizer=second, resume=True,
            **settings,
        )  # fmt: skip
        assert before.losses + after.losses == unbroken.losses


def test_what_is_pinned_is_counted_and_bounded():
    memory = PinnedMemory()
    assert memory.reserve([4096, 5000], limit=4096 + 8192)
    assert memory.nbytes == 4096 + 8192
    assert not memory.reserve([1], limit=4096 + 8192)
    assert memory.nbytes == 4096 + 8192


def test_one_rank_alone(alone):
    [(norm, alike)] = errors_and_updates([(fp32, HOST, 2)])
    assert alike
    assert norm < 1e-6


def test_refusals(alone, monkeypatch):
    with pytest.raises(
        RecipeError, match=r"^optimizer='host' without fsdp: .*; set fsdp=True with it, or opt"
    ):
        Recipe(optimizer="host")
    with pytest.raises(RecipeError, match=r"^optimizer='cpu': it takes 'device' or 'host'$"):
        Recipe(fsdp=True, optimizer="cpu")
    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(type(mesh), "device_type", "cuda")
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    with pytest.raises(RecipeError, match=r"in a process group of cuda:nccl: .*cpu:gloo,cuda:nccl"):
        lab.apply_recipe(models.build(small_config()), HOST, mesh)
