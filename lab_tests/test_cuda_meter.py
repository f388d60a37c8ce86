"""The meter of CUDA with a scripted allocator: its bytes, and the names of the meter."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import lab
from lab.errors import LabError
from lab.memory import cuda
from lab.memory.cuda import AllocatedPeak, CudaAllocator, CudaMeter, Event, History, limit_memory
from lab.memory.meter import Meter
from lab.memory.stopwatch import Stopwatch
from lab.recipe.jobs import TrainSettings, make_job
from lab.step import on_ranks
from lab.step.on_ranks import RankState
from lab.techniques.host_transfer import to_host
from lab.training import run, train_loop
from lab.training.records import Run
from lab.units import GiB
from lab_tests.support.gpus import Card
from lab_tests.support.metered_step import TwoLayers, metered_step
from lab_tests.support.models import small_config
from lab_tests.support.training import TOKENS

MIB = 2**20


class ScriptedAllocator:
    """An allocator that holds 7 MiB at first, and takes and gives back as it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.began = self.ended = 0

    def now(self, action: str, size: int) -> None:
        # Rounded up: the row of an operator that ended within this microsecond comes before the event.
        self.events.append({"action": action, "size": size, "time_us": -(-time.time_ns() // 1000)})

    def begin(self) -> int:
        self.began += 1
        return 7 * MIB

    def end(self) -> History:
        self.ended += 1
        return History(self.events, 12 * MIB, 20 * MIB, 4, 3 * MIB)


class Inside(TorchDispatchMode):
    """Entered around the meter: ``calls[n]`` is called while the n-th call of ``operator`` runs."""

    def __init__(self, operator: OpOverload[..., Any], calls: dict[int, Callable[[], None]]) -> None:
        super().__init__()
        self.operator, self.calls, self.seen = operator, calls, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self.operator:
            self.calls.get(self.seen, lambda: None)()
            self.seen += 1
        return func(*args, **(kwargs or {}))


def metered_product() -> tuple[CudaMeter, ScriptedAllocator]:
    """A step in which the product of the second module takes 5 MiB inside, and a doubling in place 1 MiB."""
    allocator = ScriptedAllocator()
    model = TwoLayers()

    def product() -> None:
        allocator.now("alloc", 5 * MIB)
        allocator.now("segment_alloc", 20 * MIB)
        allocator.now("free_requested", 5 * MIB)
        allocator.now("alloc", 2 * MIB)
        allocator.now("free_completed", 5 * MIB)

    meter = CudaMeter(allocator)
    with (
        Inside(torch.ops.aten.mm.default, {1: product}),
        Inside(torch.ops.aten.mul_.Tensor, {0: lambda: allocator.now("alloc", MIB)}),
        meter.measure(model),
        meter.phase("forward"),
    ):
        x = model(torch.randn(11, 5))
        x.detach().mul_(2)
        kept = to_host(x, [False])
        allocator.now("free_requested", MIB)
    assert kept[0].nbytes == 4096
    return meter, allocator


def test_each_event_is_a_row_with_the_allocators_bytes() -> None:
    meter, allocator = metered_product()
    timeline = meter.timeline()
    # The copy to the host has a row, though the allocator is not called in it.
    assert timeline.total.tolist() == [12 * MIB, 7 * MIB, 9 * MIB, 10 * MIB, 10 * MIB, 9 * MIB]
    history = meter.history
    assert timeline.device_peak == history.device_peak == 12 * MIB
    assert (history.reserved_peak, history.retries, history.outside_torch) == (20 * MIB, 4, 3 * MIB)
    assert (allocator.began, allocator.ended) == (1, 1)


def test_events_have_the_names_of_the_meter() -> None:
    """An event that falls into an operator is that operator's, also of one that changes no bytes itself."""
    timeline = metered_product()[0].timeline()
    rows = [timeline.moment(row) for row in range(len(timeline))]
    named = [(row.module, row.op) for row in rows]
    assert named == [("second", "aten.mm")] * 3 + [("", "aten.mul_"), ("", "lab.to_host"), ("", "-")]
    assert [row.host for row in rows] == [0, 0, 0, 0, 4096, 4096]
    moves = timeline.storages.moves[:, 1:].tolist()
    assert sorted(moves) == [[4, 0], [4, 1]]
    peak = timeline.peak
    assert (peak.phase, peak.module, peak.op, peak.shapes) == ("forward", "second", "aten.mm", "11x7 7x3")
    weights = sum(p.nbytes for p in TwoLayers().parameters())
    assert peak.by_category["parameters"] == weights
    known = sum(size for name, size in peak.by_category.items() if name != "other")
    assert peak.by_category["other"] == 12 * MIB - known > 4 * MIB


def test_names_do_not_depend_on_how_long_the_meter_takes_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's clock and the meter's have one zero, also where the process waits between two lines."""

    made = Meter.__init__

    def slowly(self: Meter, **settings: Any) -> None:
        made(self, **settings)
        time.sleep(0.2)

    monkeypatch.setattr(Meter, "__init__", slowly)
    test_events_have_the_names_of_the_meter()


def test_bytes_that_were_given_back_are_not_counted_twice() -> None:
    """The allocator holds less than the meter knows of: the split still adds up, and nothing is negative."""
    allocator = ScriptedAllocator()
    model = TwoLayers()
    meter = CudaMeter(allocator)
    with meter.measure(model), meter.phase("forward"):
        kept = model.first(torch.randn(11, 5))
        allocator.now("free_requested", 7 * MIB - 400)
    assert kept.numel()
    row = meter.timeline().moment(-1)
    weights = sum(p.nbytes for p in model.parameters())
    assert row.device == 400
    assert row.by_category["parameters"] == weights < 400
    assert row.by_category["other"] == 0
    assert row.by_category["temporary buffers"] + row.by_category["activations"] == 400 - weights


def test_the_record_ends_with_a_step_that_fails() -> None:
    allocator = ScriptedAllocator()
    meter = CudaMeter(allocator)
    with pytest.raises(ZeroDivisionError), meter.measure(TwoLayers()):
        raise ZeroDivisionError
    assert allocator.ended == 1


def test_torch_is_asked_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that the real allocator makes, in their order, and what it makes of the answers."""
    calls: list[object] = []

    def answer(name: str, value: object) -> None:
        def told(*args: object, **kwargs: object) -> object:
            calls.append((name, *args, *kwargs.items()))
            return value

        module = torch.cuda.memory if name.startswith("_") else torch.cuda
        monkeypatch.setattr(module, name, told)

    events = [{"action": "alloc", "size": 1, "time_us": 2}]
    for name, value in {
        "synchronize": None, "reset_peak_memory_stats": None, "_record_memory_history": None,
        "memory_allocated": 11, "_snapshot": {"device_traces": [[], events]}, "current_device": 1,
        "mem_get_info": (100, 180), "memory_reserved": 50, "memory_snapshot": [
            {"device": device, "stream": stream, "segment_type": pool, "total_size": size}
            for device, stream, pool, size in (
                (1, 0, "large", 20), (1, 71, "large", 2), (0, 0, "large", 9), (1, 0, "large", 4),
                (1, 0, "small", 3), (1, 60, "large", 7),
            )
        ],
    }.items():  # fmt: skip
        answer(name, value)
    stats = {"allocated_bytes.all.peak": 40, "reserved_bytes.all.peak": 60, "num_alloc_retries": 7}
    monkeypatch.setattr(torch.cuda, "memory_stats", stats.copy)
    allocator = CudaAllocator()
    assert allocator.begin() == 11
    stats["num_alloc_retries"] += 2
    pools = {"stream 0 large": 24, "stream 2 large": 2, "stream 0 small": 3, "stream 1 large": 7}
    assert allocator.end() == History(events, 40, 60, 2, 180 - 100 - 50, pools)
    history = [call for call in calls if call[0] == "_record_memory_history"]  # type: ignore[index]
    assert history == [
        ("_record_memory_history", "all", ("context", None)),
        ("_record_memory_history", None),
    ]


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_environment_sets_the_allocator(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "backend:native")
    sizes = (3, 0, False), (5, 0, True), (7, 1, False)
    segments = [dict(zip(("allocated_size", "device", "is_expandable"), size, strict=True)) for size in sizes]
    monkeypatch.setattr(cuda, "set_expandable_segments", calls.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    # Another allocator than torch's own has no snapshot, and raises an error.
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pytest.fail("asked") if name else segments)
    assert cuda.use_expandable_segments() == (0 if name else 3)
    assert calls == ([] if name else ["emptied", True])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_segments_of_a_rank_grow_before_its_model_is_made(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``lab.run``, ``train`` and ``rehearse`` from Python too. Seen red: from the commands alone."""
    calls: list[str] = []

    def start(*_: object, **__: object) -> None:
        calls.append("start")
        raise InterruptedError

    monkeypatch.setattr(on_ranks, "use_expandable_segments", lambda: calls.append("grow"))
    monkeypatch.setattr(on_ranks, "start", start)
    job = make_job(small_config(), "fsdp", tokens=TOKENS, ranks=1)
    with pytest.raises(InterruptedError):
        on_ranks.make_rank_state(job, TrainSettings(steps=1), SimpleNamespace(device_type=device))  # type: ignore[arg-type]
    assert calls == (["grow", "start"] if device == "cuda" else ["start"])


class Starting:
    """Stands in for torch's caching allocator: a start holds 90 MiB for a moment, each step after it 50."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.peak = 0
        made, stepped = module.make_rank_state, RankState.train_step
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.hold(0))
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        patch.setattr(module, "AllocatedPeak", lambda _: AllocatedPeak(torch.device("cuda")))
        patch.setattr(
            module, "make_rank_state", lambda *told, **kw: (self.hold(90 * MIB), made(*told, **kw))[1]
        )
        patch.setattr(
            RankState, "train_step", lambda *args, **kw: (self.hold(50 * MIB), stepped(*args, **kw))[1]
        )

    def hold(self, size: int) -> None:
        self.peak = max(self.peak, size) if size else 0


def test_the_peak_of_training_is_that_of_its_steps(
    alone: None, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Starting(monkeypatch, train_loop)
    trained = lab.train(
        small_config(), "plain", tokens=TOKENS, text=digits, steps=2, checkpoint=tmp_path, cluster=None
    )
    assert [step.device_peak for step in trained.steps] == [50 * MIB] * 2


def test_a_run_brings_the_allocators_peak_with_it(
    alone: None, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, settings = make_job(small_config(), "plain", ranks=1, tokens=TOKENS), TrainSettings(1, digits)
    result = run._train(job, settings, None, None)
    assert result.allocated is None
    timeline = result.timeline
    assert Run("", job, settings, (), (), (timeline,)).device_peak == timeline.device_peak
    Starting(monkeypatch, run)
    result = run._train(job, settings, None, None)
    assert result.allocated == 50 * MIB > timeline.device_peak
    held = Run("", job, settings, (), (), (timeline, timeline), allocated=(result.allocated, 40 * MIB))
    assert held.device_peak == 50 * MIB


def test_a_cap_leaves_what_is_outside_torch_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    with limit_memory(40 * GiB, absent=3 * GiB):
        assert card.fractions == [pytest.approx((40 - 0.75 - 3) / 79)]
    assert card.fractions[1:] == [1.0]
    said = r"^device_memory=3.50 GiB: 3.75 GiB are in use outside torch's allocator"
    with pytest.raises(LabError, match=said) as caught, limit_memory(7 * GiB // 2, absent=3 * GiB):
        pass
    assert "\n" not in str(caught.value)


def test_a_phase_of_the_stopwatch_has_the_seconds_of_all_micro_batches() -> None:
    """Seen red: those of the last one alone."""
    watch = Stopwatch()
    with watch.measure():
        for seconds in (0.3, 0.0):
            with watch.phase("forward"):
                time.sleep(seconds)
    assert 0.3 <= watch.seconds[0]["forward"] < 5


def test_the_stopwatch_has_seconds_by_phase_and_sees_no_operator() -> None:
    model, watch = TwoLayers(), Stopwatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        metered_step(watch, model, optimizer, torch.randn(11, 5))
    assert len(watch.seconds) == 2
    assert all(list(step) == ["forward", "backward", "optimizer"] for step in watch.seconds)
    assert all(0 < seconds < 5 for step in watch.seconds for seconds in step.values())
