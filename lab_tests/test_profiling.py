"""Seconds and bytes of one step: every operator, sums that agree, and the maker of what remains."""

import gzip
import json

import pytest
import torch

import lab
from lab import models
from lab.memory.meter import Meter
from lab.memory.profiling import Call, Profile, ProfilingMeter, name_of
from lab_tests.support.metered_step import FP32, TwoLayers, metered_step

pytestmark = pytest.mark.long

STEPS = 3


def profile_steps(model) -> Profile:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    meter = ProfilingMeter()
    for _ in range(STEPS - 1):
        metered_step(meter, model, optimizer, torch.randn(11, 5))
    with meter.profile_step() as result:
        metered_step(meter, model, optimizer, torch.randn(11, 5))
    return result[0]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_steps(TwoLayers())


def test_the_operators_that_ran_are_there_in_order_with_module_and_phase(profile):
    ran = [(c.phase, c.module, c.op) for c in profile.calls if c.op in ("aten.mm", "aten.relu")]
    assert ran == [
        ("forward", "first", "aten.mm"),
        ("forward", "", "aten.relu"),
        ("forward", "second", "aten.mm"),
        ("backward", "second", "aten.mm"),  # of the weight, then of the input
        ("backward", "second", "aten.mm"),
        ("backward", "first", "aten.mm"),
    ]
    assert [c.phase for c in profile.calls if c.op == "aten._fused_sgd_"] == ["optimizer"]
    starts = [c.start for c in profile.calls]
    assert starts == sorted(starts)


def test_the_text_of_a_profile_has_neither_its_calls_nor_its_trace(profile):
    assert repr(profile) == f"Profile(timeline={profile.timeline}, meter_seconds={profile.meter_seconds})"


def test_every_operator_of_the_meter_is_one_call_of_the_last_step_alone(profile):
    seen = []

    class Counting(Meter):
        def observe(self, func, args, kwargs):
            seen.append(str(func.overloadpacket))
            return super().observe(func, args, kwargs)

    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    metered_step(Counting(), model, optimizer, torch.randn(11, 5))
    # The optimizer marks its step for the profiler, which is no operator.
    assert [c.op for c in profile.calls] == [op for op in seen if not op.startswith("profiler.")]


def test_seconds_add_up_and_lie_inside_the_step(profile):
    assert profile.last.step.tolist() == [STEPS - 1] * len(profile.last)
    assert len(profile.timeline) > 2 * len(profile.last)
    first, end = profile.last.seconds[[0, -1]]
    assert all(first <= c.start and c.start + c.seconds <= end for c in profile.calls)
    # One operator at a time: their seconds and the meter's are parts of the step.
    spent = sum(c.seconds for c in profile.calls)
    assert 0 < spent < spent + profile.meter_seconds < profile.seconds
    for by in ("op", "module", "phase"):
        parts = profile.totals(by)
        assert sum(part.seconds for part in parts) == pytest.approx(spent)
        assert sum(part.calls for part in parts) == len(profile.calls)
        assert [part.seconds for part in parts] == sorted((p.seconds for p in parts), reverse=True)


def test_bytes_and_seconds_stand_on_one_clock(profile):
    """A row is added right after its operator: none begins before the operator that it names has ended."""
    relu = next(c for c in profile.calls if c.op == "aten.relu")
    after = next(c for c in profile.calls if c.start > relu.start)
    rows = profile.last
    row = [rows.ops[o].name for o in rows.op].index("aten.relu")
    assert relu.start + relu.seconds <= rows.seconds[row] <= after.start


def test_layers_count_as_one():
    def of(module):
        return name_of(Call("aten.mm", module, "forward", 0.0, 1.0), "module")

    assert of("model.layers.3.mlp.down_proj") == of("model.layers.0.mlp.down_proj") == "mlp.down_proj"
    assert [of("model.layers.3"), of("model.norm"), of("lm_head"), of("")] == [
        "layer", "norm", "lm_head", "no module"
    ]  # fmt: skip


def test_the_trace_is_json_with_the_meters_marks(profile):
    events = json.loads(gzip.decompress(profile.trace))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"aten::mm", "lab|forward|first|aten.mm", "lab|backward|first|aten.mm"} <= names
    assert profile.snapshot is None or torch.cuda.is_available()


def test_a_clean_step_leaves_nothing_and_what_is_kept_has_its_maker(profile):
    assert profile.leftovers == ()
    model = TwoLayers()
    kept = []
    model.first.register_forward_hook(lambda module, args, out: kept.append(out.detach().double()))
    left = profile_steps(model).leftovers
    assert [one.bytes for one in left] == [11 * 7 * 8] * STEPS
    assert sorted(one.first_seen.step for one in left) == list(range(STEPS))
    for one in left:
        seen = one.first_seen
        origin = (one.category, seen.phase, seen.op, seen.shapes, seen.module)
        assert origin == ("activations", "forward", "aten._to_copy", "11x7", "first")


# ---- on ranks, with hogs -----------------------------------------------------------------------------------

TOKENS = 64
RECIPE = lab.Recipe(fsdp=True, ulysses=2, compute_dtype="bfloat16")
"""On four ranks: two groups of two, s = 32. Few, for a matmul in bf16 takes a CPU long."""


def small():
    config = models.config_of("tiny")
    config.num_hidden_layers = LAYERS
    return config


def model_with_hook(hook, places):
    def build():
        model = models.build(small())
        for module in places(model):
            module.register_forward_hook(hook)
        return model

    return build


def keep_logits(module, args, out):
    module.seen = out.detach()


def keep_fp32(module, args, out):
    module.wide = out.detach().float()


def keep_losses(module, args, out):
    module.__dict__.setdefault("log", []).append(out.logsumexp(-1).mean())


def head(model):
    return [model.lm_head]


def inside_mlps(model):
    return [layer.mlp.act_fn for layer in model.model.layers]


LOCAL, LAYERS = TOKENS // 2, 2
LOGITS = LOCAL * 4096 * 2
HOGS = {
    "logits": (model_with_hook(keep_logits, head), [LOGITS], {"aten.mm"}, {"lm_head"}),
    "fp32": (
        model_with_hook(keep_fp32, inside_mlps),
        [LOCAL * 896 * FP32] * LAYERS,
        {"aten._to_copy"},
        {f"model.layers.{layer}.mlp.act_fn" for layer in range(LAYERS)},
    ),
    "losses": (
        model_with_hook(keep_losses, head),
        [LOGITS] * STEPS + [LOCAL * 2] * STEPS + [2] * STEPS,
        {"aten.mm", "aten.logsumexp", "aten.mean"},
        {"lm_head"},
    ),
}


@pytest.fixture(scope="module")
def clean(ranks4):
    return lab.profile(small(), RECIPE, tokens=TOKENS, rows=2, steps=STEPS, cluster=ranks4)


@pytest.mark.parametrize("name", HOGS)
def test_each_hog_is_found_on_every_rank_by_its_maker_and_to_the_byte(ranks4, clean, name):
    model, sizes, ops, modules = HOGS[name]
    hog = lab.profile(model, RECIPE, tokens=TOKENS, rows=2, steps=STEPS, cluster=ranks4)
    for one, without in zip(hog.profiles, clean.profiles, strict=True):
        assert [left.bytes for left in one.leftovers] == sizes
        assert {left.first_seen.op for left in one.leftovers} == ops
        assert {left.first_seen.module for left in one.leftovers} == modules
        assert one.timeline.device_peak == without.timeline.device_peak + sum(sizes)


def test_a_clean_run_profiled_is_the_run(ranks4, clean, tmp_path):
    run = lab.run(small(), RECIPE, tokens=TOKENS, rows=2, steps=STEPS, cluster=ranks4)
    assert clean.losses == run.losses

    def bytes_of(timelines):
        steps = [[t.rows(t.step == k) for k in range(STEPS)] for t in timelines]
        return [
            [
                (s.device_peak, s.peak.op, kept(s.moment(0).by_category), kept(s.moment(-1).by_category))
                for s in rank
            ]
            for rank in steps
        ]

    def kept(by_category):
        # Not the others between steps, which the peaks hold: what a collective sent is gloo's too, until a
        # thread of its own has run on.
        return {name: size for name, size in by_category.items() if name != "other"}

    assert bytes_of(clean.timelines) == bytes_of(run.timelines)
    assert all(not profile.leftovers for profile in clean.profiles)
    files = clean.save(tmp_path / "new" / "folder")
    assert [file.name for file in files] == [f"rank{rank}.json.gz" for rank in range(4)]
    assert [file.read_bytes() for file in files] == [profile.trace for profile in clean.profiles]


def test_collectives_belong_to_the_module_that_asked_for_them(clean):
    for profile in clean.profiles:
        exchanges = [call for call in profile.calls if call.op == "gloo:all_to_all"]
        # q, k, v and the output of each layer, there and in backward.
        assert len(exchanges) == 2 * 4 * LAYERS
        assert {name_of(call, "module") for call in exchanges} == {"self_attn"}
        assert {call.phase for call in exchanges} == {"forward", "backward"}
