"""The answers of a plan: what fits and what limits it; its refusals; and nothing remains after it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import lab
from lab.commands.report import plan_text
from lab.errors import LabError
from lab.planning.hardware import hardware
from lab.planning.whole_step import fake_model, whole_step
from lab.recipe.recipe import Recipe
from lab.step.one_rank import ring_ranks
from lab.techniques.host_memory import reserve
from lab.techniques.upipe.schedule import schedule
from lab.units import format_seconds
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config

small = partial(small_config, num_attention_heads=24, vocab_size=104)


@pytest.fixture(scope="module")
def offload_plan():
    """One layer's input on the host of each of 16 ranks."""
    return lab.plan(small(), "offload", tokens=128, ranks=16, workspace=False, ulysses=2, ring=1)


def on_machine(plan, **changes):
    return replace(plan, machine=replace(plan.machine, **changes))


def test_without_a_limit_nothing_is_said(offload_plan):
    assert (offload_plan.fits, offload_plan.limit) == (True, None)
    unlimited = on_machine(offload_plan, device_memory=None)
    assert (unlimited.fits, unlimited.limit, unlimited.verdict) == (None, None, "no memory was given")


@pytest.mark.parametrize(
    ("device", "host", "fits", "limit"),
    [
        (0, None, True, None), (-1, None, False, "device"),
        (None, 0, True, None), (None, -1, False, "host"),
        (0, 0, True, None), (0, -1, False, "host"), (-1, 0, False, "device"), (-1, -1, False, "device"),
    ],
)  # fmt: skip
def test_what_fits_to_the_byte(offload_plan, device, host, fits, limit):
    plan = on_machine(
        offload_plan,
        device_memory=None if device is None else offload_plan.device_peak + device,
        host_memory=None if host is None else offload_plan.host_peak_per_node + reserve(8) + host,
    )
    assert (plan.fits, plan.limit) == (fits, limit)


def test_the_verdict_counts_what_the_allocator_reserves():
    """To the byte. Seen red: tensors alone, one kind of segments alone, no limit of the allocator."""
    plan = lab.plan("tiny", "fsdp", tokens=4096, ranks=4)
    expandable, fixed = plan.reserved_peak(), plan.reserved_peak(expandable=False)
    assert plan.device_peak < expandable < fixed
    none, growing = "does not fit: device memory", "fits with expandable segments"
    alone = f"{none}, though its tensors alone would; "
    retries = f"{alone}retries of the allocator with expandable segments: 1"
    fails = f"{alone}with expandable segments the allocator runs out of memory"
    for memory, retried, fit, verdict in (
        (fixed, 0, "fits", "fits"),
        (fixed - 1, 0, growing, growing),
        (expandable, 0, growing, growing),
        (expandable - 1, 1, "does not fit", retries),
        (plan.device_peak, None, "does not fit", fails),
        (plan.device_peak - 1, None, "does not fit", none),
    ):
        asked = on_machine(plan, device_memory=memory)
        assert (asked.fit, asked.verdict, asked.fits) == (fit, verdict, fit != "does not fit")
        assert asked.to_json()["alloc_retries"] == asked.alloc_retries == retried
    # The lab sets expandable segments. Seen red: "fits", where these reserve more than those of fixed sizes.
    small = lab.plan("tiny", "checkpoint", tokens=256, ranks=1)
    asked = on_machine(small, device_memory=small.reserved_peak(expandable=False))
    assert small.reserved_peak() > asked.machine.device_memory > small.device_peak
    assert (asked.fit, asked.alloc_retries) == ("does not fit", None)
    # Without the bytes of CUDA there is no allocator.
    tensors = lab.plan("tiny", "fsdp", tokens=4096, ranks=4, workspace=False)
    assert on_machine(tensors, device_memory=tensors.device_peak).fit == "fits"


def test_host_memory_is_that_of_a_node(offload_plan):
    one_input = 8192  # 2 * (128 // 2) * 48 bytes of bf16, in whole pages
    assert offload_plan.host_peak == one_input
    assert offload_plan.host_peak_per_node == 8 * one_input
    assert on_machine(offload_plan, ranks_per_node=4).host_peak_per_node == 4 * one_input
    assert on_machine(offload_plan, ranks_per_node=64).host_peak_per_node == 16 * one_input


@pytest.mark.long
def test_notes_say_what_a_gpu_would_do_otherwise(offload_plan):
    assert offload_plan.notes == ()
    [note] = lab.plan(small(), "plain", tokens=32, ranks=1, kernel="cudnn").notes
    assert note == "the workspace of attention is that of torch's kernel; kernel='cudnn' may take another"
    [note] = lab.plan(small(), "plain", tokens=32, ranks=1, compute_dtype=None).notes
    assert note.startswith("in float32 with head_dim=10 attention runs as matrix products on CUDA")
    one_layer = lab.models.config_of("llama3-8b")
    one_layer.num_hidden_layers = 1
    first, second = lab.plan(one_layer, "ulysses", tokens="5M", ranks=8).notes
    assert "kernel='auto'" in first
    assert second.startswith("4 heads of 5242880 tokens in one call of torch's attention kernel")


@pytest.mark.filterwarnings("error")
def test_fewer_tokens_than_the_ring_has_ranks_have_seconds():
    plan = lab.plan("tiny", "plain", tokens=4, ranks=8, ulysses=1, ring=8, kernel="torch")
    assert plan.step_seconds > 0


def test_a_plan_has_the_seconds_of_each_kernel_that_was_measured():
    """Of the same work; where a recipe names a kernel, the step's seconds are with it."""
    asked = {"tokens": "256K", "ranks": 8}
    auto = lab.plan("llama3-8b", "fast", **asked)
    named = {kernel: lab.plan("llama3-8b", "fast", kernel=kernel, **asked) for kernel in ("cudnn", "torch")}
    assert auto.kernel_seconds == {kernel: plan.step_seconds for kernel, plan in named.items()}
    assert auto.step_seconds < auto.kernel_seconds["cudnn"] < auto.kernel_seconds["torch"]
    assert {plan.hardware.kernel: plan.kernel_seconds for plan in named.values()} == {
        "cudnn": {},
        "torch": {},
    }
    once, twice = (plan.to_json() for plan in (auto, named["torch"]))
    assert (once["kernel"], twice["kernel"], twice["step_seconds"]) == (
        "flash-attn-3", "torch", once["kernel_seconds"]["torch"]
    )  # fmt: skip
    said = f"{format_seconds(auto.step_seconds)} with flash-attn-3, "
    assert auto.seconds_text.startswith(said)
    assert auto.seconds_text.endswith(f", {format_seconds(named['torch'].step_seconds)} with torch")
    assert f"a step        {auto.seconds_text} on NVIDIA H100 SXM 80GB (estimate)\n" in plan_text(auto)


def test_the_longest_document_has_the_rate_of_its_length():
    whole, four = (
        lab.plan("tiny", "ulysses", tokens="1M", ranks=8, kernel="cudnn", documents=documents).hardware
        for documents in (None, "256K,256K,256K,256K")
    )
    rates = hardware("h100").kernels["cudnn"]
    assert [h.attention_forward.value for h in (whole, four)] == [rates.forward[2], rates.forward[1]]
    ring = lab.plan("tiny", "ulysses", tokens="1M", ranks=8, kernel="cudnn", ulysses=2, ring=4).hardware
    assert ring.attention_forward.value == rates.forward[1]


def test_a_kernel_without_a_rate_is_said():
    """cuDNN takes no head of 256, and a plan of one does not have its seconds."""
    first, _ = lab.plan(small(), "plain", tokens=32, ranks=1, kernel="flash-attn-2").notes
    assert first == (
        "no rate of flash-attn-2 on NVIDIA H100 SXM 80GB is known: the seconds are with flash-attn-3"
    )
    [_] = lab.plan(small(), "plain", tokens=32, ranks=1, kernel="flash-attn-3").notes
    asked = {"tokens": 32, "ranks": 1, "kernel": "flash-attn-2"}
    assert lab.plan(small(), "plain", **asked, workspace=False).notes == (first,)
    assert [*lab.plan(small(), "plain", tokens=32, ranks=1).kernel_seconds] == ["cudnn", "torch"]
    wide = small(head_dim=256)
    assert [*lab.plan(wide, "plain", tokens=32, ranks=1).kernel_seconds] == ["torch"]
    assert lab.plan(small(), "plain", tokens=32, ranks=1, compute_dtype=None).kernel_seconds == {}
    assert lab.plan(small(), "plain", tokens=32, ranks=1, device="a100").kernel_seconds == {}


def test_json_holds_the_answers(offload_plan):
    document = on_machine(offload_plan, device_memory=1).to_json()
    assert list(document) == [
        "recipe", "state", "tokens", "documents", "ranks", "weights", "active_weights", "device_peak",
        "start_peak", "reserved_peak", "reserved_peak_fixed_segments", "alloc_retries", "host_peak",
        "host_peak_per_node", "disk_peak", "disk_peak_per_node", "fits", "verdict", "limit", "peak",
        "by_category", "flops", "link_bytes", "link_seconds", "host_bytes", "disk_seconds", "step_seconds",
        "kernel", "kernel_seconds", "model_flops", "mfu", "notes", "planning_seconds",
    ]  # fmt: skip
    peak = offload_plan.timeline.peak
    assert document["peak"] == {
        "op": peak.op, "shapes": peak.shapes, "module": peak.module, "phase": peak.phase
    }  # fmt: skip
    assert (
        sum(document["by_category"].values()) == document["device_peak"] == offload_plan.timeline.total.max()
    )
    assert (document["fits"], document["limit"]) == (False, "device")
    assert Recipe.from_json(document["recipe"]) == offload_plan.recipe
    assert document["step_seconds"] == offload_plan.costs.seconds > 0
    assert document["planning_seconds"] > 0
    assert (document["flops"], document["link_bytes"], document["host_bytes"]) == (
        offload_plan.costs.flops, offload_plan.costs.link_bytes, offload_plan.costs.host_bytes
    )  # fmt: skip


def test_the_clock_is_the_devices(offload_plan):
    seconds = offload_plan.timeline.seconds
    assert (seconds[1:] >= seconds[:-1]).all()
    assert seconds[0] == 0
    assert 0.5 * offload_plan.costs.device_seconds < seconds[-1] <= offload_plan.costs.device_seconds
    assert offload_plan.timeline.phases == ("forward", "backward", "optimizer")
    assert sorted(offload_plan.timeline.phase) == offload_plan.timeline.phase.tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": "abc"}, "'abc' is not a number of tokens: write 8192, 128K or 5M"),
        ({"model": "tinny"}, r"unknown model 'tinny' \(did you mean 'tiny'\?\)"),
        ({"ulysses": 3}, "ulysses=3 x ring=1 on 4 ranks: .* these products work: 1, 2, 4"),
        ({"device": "v100"}, "no device named 'v100': the table has a100, b200, .*, rtx5090"),
        ({"recipe": Recipe(ulysses=2, ulysses_backend="deepspeed")}, "deepspeed' cannot be planned.*'lab'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changed, message):
    asked = {"model": small(), "recipe": "upipe", "tokens": 64, "ranks": 4, **changed}
    with pytest.raises(LabError, match=message) as caught:
        lab.plan(asked.pop("model"), asked.pop("recipe"), **asked)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def test_degrees_that_the_heads_forbid_are_not_chosen():
    assert lab.plan(small(), "ulysses", tokens=64, ranks=4).recipe.ulysses == 2


def test_a_plan_needs_no_group_and_leaves_none():
    peaks = []
    for rows in (1, 3, 1):
        assert not dist.is_initialized()
        peaks.append(lab.plan(small(), "ulysses", tokens=64, ranks=4, rows=rows).device_peak)
    assert not dist.is_initialized()
    assert peaks[0] == peaks[2] < peaks[1]


@pytest.mark.parametrize(
    ("recipe", "lengths", "planned"),
    [
        (Recipe(fsdp=True, ulysses=4), [1], [0]),
        (Recipe(ring=2), [], [1, 0]),
        (Recipe(ring=3), [], [1, 0]),
        (Recipe(ring=4), [1], [1]),
        # Rank 2 has as many rows as rank 0; none where rank 0 has one.
        (Recipe(fsdp=True, ring=4, ulysses=2), [48, 101, 9, 3], [1]),
        (Recipe(fsdp=True, ring=4, ulysses=2), [48, 2], [1, 0]),
    ],
)
def test_which_ring_ranks_are_planned(recipe, lengths, planned):
    assert ring_ranks(recipe, lengths) == planned


@pytest.mark.parametrize("workspace", mostly_long([False, True], 0))
@pytest.mark.parametrize(
    ("recipe", "more"),
    mostly_long(
        [
            (Recipe(ring=2), {"num_key_value_heads": 8}),
            (Recipe(ring=3), {"num_key_value_heads": 8}),
            (Recipe(ring=3), {"num_key_value_heads": 2}),
            (Recipe(ring=5), {"num_key_value_heads": 8}),
            (Recipe(fsdp=True, ring=4, ulysses=2), {"num_key_value_heads": 1, "head_dim": 2}),
        ],
        0,
    ),
)
def test_no_ring_rank_holds_more_than_is_planned(recipe, more, workspace):
    model = small(num_hidden_layers=1, num_attention_heads=8, **more)
    ranks = recipe.ulysses * recipe.ring
    plan = lab.plan(model, recipe, tokens=480, ranks=ranks, rows=2, workspace=workspace)
    # What the plan has walked is read from disk.
    skeleton = fake_model(plan.job)
    steps = [
        whole_step(plan.job, skeleton, r, workspace=workspace).priced(hardware("h100"), plan.machine, ranks)[
            0
        ]
        for r in range(recipe.ring)
    ]
    assert max(step.device_peak for step in steps) == plan.device_peak
    assert steps[plan.ring_rank].device_peak == plan.device_peak
    assert {step.host_peak for step in steps} == {plan.host_peak}


@pytest.mark.long
def test_a_plan_checks_its_recipe_once_and_schedules_its_heads_once(monkeypatch):
    """Two steps are walked, of both ring ranks."""
    recipes, check = [], Recipe.check

    def checked(recipe, config, ranks):
        recipes.append(recipe)
        check(recipe, config, ranks)

    monkeypatch.setattr(Recipe, "check", checked)
    schedule.cache_clear()
    model = small(num_attention_heads=8, num_key_value_heads=4)
    plan = lab.plan(model, "upipe", tokens=72, ranks=4, ulysses=2, ring=2, head_chunk=4)
    assert recipes == [plan.recipe]
    assert schedule.cache_info().misses == 1


def test_a_plan_that_fails_leaves_no_group():
    calls = []

    def make():
        calls.append(dist.is_initialized())
        if dist.is_initialized():
            raise OSError("the third time")
        return lab.models.build(small())

    with pytest.raises(LabError, match="the callable failed: OSError: the third time"):
        lab.plan(make, "fsdp", tokens=64, ranks=4)
    assert calls[-1]
    assert not dist.is_initialized()


def test_among_ranks_a_plan_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(LabError, match="this process is one of a group of ranks"):
            lab.plan(small(), "plain", tokens=66, ranks=2)
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


def test_random_numbers_and_gradients_are_as_before():
    state = torch.get_rng_state()
    lab.plan(small(), "tiling", tokens=68, ranks=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_the_callers_config_is_kept():
    config = small()
    before = config.to_dict()
    lab.plan(config, "fsdp", tokens=70, ranks=4)
    assert config.to_dict() == before
