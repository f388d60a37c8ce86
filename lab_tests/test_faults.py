"""A rank that fails, runs out of memory, is stopped or interrupted: the message, and what the run keeps."""

import importlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from transformers import PretrainedConfig, PreTrainedModel

import lab
from cluster import registry, remote
from cluster.errors import RankError
from cluster.ranks import Cluster
from lab import models
from lab.commands.cli import main
from lab.memory.meter import Meter
from lab.memory.out_of_memory import OutOfMemory
from lab.training.rank_out_of_memory import RankOutOfMemory
from lab.training.records import Run, Started
from lab.training.run import Interrupted
from lab_tests.support.models import small_config

TOKENS = 1024


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Cluster]:
    """Ranks new to torch: after dozens of calls torch now and then keeps a sharded parameter, and with it a
    group that was left, so that its peers wait on and are told to recover.
    """
    with Cluster(ranks=2) as cluster:
        yield cluster


def small() -> PretrainedConfig:
    """So small that a step takes a moment, at a size where each technique saves."""
    return small_config(
        hidden_size=64, intermediate_size=224, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=4, head_dim=4, vocab_size=1024,
    )  # fmt: skip


def failing_model() -> PreTrainedModel:
    """Its second layer raises on rank 1."""
    model = models.build(small())

    def refuse(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise ArithmeticError("7 is not 11")

    model.model.layers[1].mlp.register_forward_pre_hook(refuse)
    return model


@pytest.mark.slow
def test_a_failed_run_keeps_what_was_measured(two_ranks: Cluster) -> None:
    seen: list[Any] = []
    with pytest.raises(RankError, match=r"^rank 1 failed first: ArithmeticError: 7 is not 11") as caught:
        lab.run(failing_model, "ulysses", tokens=TOKENS, cluster=two_ranks, watch=seen.append)
    kept = caught.value.partial
    assert isinstance(kept, Run)
    assert kept is seen[-1], "the watcher is told too, and draws it"
    assert not kept.complete
    assert kept.title.endswith("failed in step 1 of 3")
    assert len(kept.timelines) == 2
    assert "model.layers.0.mlp" in kept.timelines[1].modules
    assert "model.layers.2.mlp" not in kept.timelines[1].modules
    assert not two_ranks.broken


def test_leaving_the_process_groups_holds_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last object may be a part of a model, and the model holds its process groups.
    importlib.import_module("torch.distributed.tensor._redistribute")
    looked_at, alive = [Last()], []
    kept = weakref.ref(looked_at[0])
    monkeypatch.setattr(remote.gc, "get_objects", lambda: [looked_at.pop()])
    monkeypatch.setattr(remote.gc, "collect", lambda: alive.append(kept()))
    remote.leave()
    assert alive == [None]


class Last:
    """Stands for the last object of all."""


@pytest.mark.slow
def test_a_rank_that_runs_out_says_in_what_and_what_would_have_fit(two_ranks: Cluster) -> None:
    whole = lab.run(small(), "ulysses", tokens=TOKENS, steps=1, cluster=two_ranks)
    limit = whole.device_peak * 2 // 3
    began = time.monotonic()
    with pytest.raises(RankOutOfMemory) as caught:
        lab.run(small(), "ulysses", tokens=TOKENS, steps=1, cluster=two_ranks, device_memory=limit)
    assert time.monotonic() - began < 30
    error, text = caught.value, str(caught.value)
    moment = error.moment
    assert moment.device > limit
    assert sum(moment.by_category.values()) == moment.device
    assert text.startswith(f"rank {error.rank}: out of memory in {moment.phase}, {moment.op}")
    assert f" in {moment.module}" in text
    assert all(f"\n  {category} " in text for category in moment.by_category)
    assert text.splitlines() == error._render_traceback_()

    # The timeline up to that instant: row by row that of the run which had the room.
    assert isinstance(error.partial, Run)
    timeline, full = error.partial.timelines[error.rank], whole.timelines[error.rank]
    # Of a run that failed, a tensor that was held still has the category that it had until then.
    assert np.array_equal(timeline.total, full.total[: len(timeline)])
    assert timeline.total[-1] == moment.device
    assert timeline.total[:-1].max() <= limit < full.device_peak

    # The rung that would have fit does, and the ones before it do not.
    assert error.rung is not None
    assert f"the cheapest rung that fits: {error.rung!r}" in text
    rungs = list(lab.ladder(small(), ranks=2, tokens=TOKENS))
    before = rungs[rungs.index(error.rung) - 1]
    with pytest.raises(RankOutOfMemory):
        lab.run(small(), before, tokens=TOKENS, steps=1, cluster=two_ranks, device_memory=limit)
    fits = lab.run(small(), error.rung, tokens=TOKENS, steps=1, cluster=two_ranks, device_memory=limit)
    assert error.plan is not None
    assert fits.device_peak == error.plan.device_peak <= limit


@pytest.mark.slow
def test_where_no_rung_fits_the_leanest_is_named(two_ranks: Cluster) -> None:
    with pytest.raises(
        RankOutOfMemory, match=r"no rung fits that, the leanest is 'streamed', planned at"
    ) as caught:
        lab.run(small(), "upipe", tokens=TOKENS, cluster=two_ranks, device_memory="256KiB")
    assert "before the first operator" in str(caught.value)
    assert not two_ranks.broken


def test_what_the_device_refuses_names_the_operator_too() -> None:
    model = torch.nn.Linear(3, 5)

    def refused(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        torch.ops.lab_tests.no_memory(args[0])

    with torch.library._scoped_library("lab_tests", "DEF") as library:
        library.define("no_memory(Tensor x) -> Tensor")
        library.impl("no_memory", no_memory, "CPU")
        model.register_forward_pre_hook(refused)
        meter = Meter()
        with (
            pytest.raises(OutOfMemory, match=r"lab_tests\.no_memory 2x3: .*CUDA out of memory") as caught,
            meter.measure(model),
            meter.phase("forward"),
        ):
            model(torch.ones(2, 3))
    assert caught.value.limit is None
    assert caught.value.moment.phase == "forward"


def no_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")


def after_a_step(act: Callable[[], None]) -> Callable[[Any], None]:
    """A watcher that acts once, when rank 0's loss has come; before that no step would be kept."""
    acted = threading.Event()

    def watch(message: Any) -> None:
        has_loss = getattr(message, "loss", None) is not None and message.rank == 0
        if has_loss and not acted.is_set():
            acted.set()
            act()

    return watch


@pytest.mark.slow
def test_a_stopped_run_is_what_it_measured(two_ranks: Cluster) -> None:
    stops: list[Callable[[], None]] = []
    stop_later = after_a_step(lambda: threading.Thread(target=stops[0]).start())

    def watch(message: Any) -> None:
        if isinstance(message, Started):
            stops.append(message.stop)
        stop_later(message)

    run = lab.run(small(), "upipe", tokens=TOKENS, steps=500, cluster=two_ranks, watch=watch)
    assert not run.complete
    assert 1 <= len(run.losses) == len(run.seconds) < 500
    assert f"stopped in step {len(run.losses) + 1} of 500" in run.title
    assert all(timeline.step.max() >= len(run.losses) - 1 for timeline in run.timelines)
    assert not two_ranks.broken
    again = lab.run(small(), "upipe", tokens=TOKENS, steps=1, cluster=two_ranks)
    assert again.losses[0] == run.losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_run_keeps_what_was_measured(two_ranks: Cluster) -> None:
    watch = after_a_step(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match=r"\.partial is what it measured: .* interrupted in step") as caught:
        lab.run(small(), "fsdp", tokens=TOKENS, steps=500, cluster=two_ranks, watch=watch)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.partial is not None
    assert len(caught.value.partial.losses) >= 1
    assert not two_ranks.broken


# ---- processes without an owner ---------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: tmp_path / name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_clean_ends_what_has_no_owner_and_nothing_else(state: Path) -> None:
    gone, orphan, bystander = sleeper(), sleeper(), sleeper()
    try:
        ours, theirs = state / "cluster-ours", state / "cluster-theirs"
        theirs.mkdir()
        registry.record("local", 2, {psutil.Process(bystander.pid)}, ours)
        registry.record("local", 3, {psutil.Process(orphan.pid)}, theirs)
        path = registry.folder() / "cluster-theirs.json"
        facts = json.loads(path.read_text())
        facts["owner"] = vars(registry.ProcessId.of(psutil.Process(gone.pid)))
        # An id that has a new bearer: created at another time, it is another process.
        facts["processes"].append({"pid": bystander.pid, "created": facts["started"] - 900})
        path.write_text(json.dumps(facts))
        gone.kill()
        gone.wait()

        lines = registry.status_text().splitlines()
        assert any("cluster-ours" in line and "2 ranks" in line and "alive, 1 of 1" in line for line in lines)
        assert any("cluster-theirs" in line and "gone, 1 of 2" in line for line in lines)
        assert lines[-1] == "lab cluster clean ends the clusters whose owner is gone"

        assert registry.clean() == [("cluster-theirs", 1)]
        assert orphan.wait(5) != 0
        assert bystander.poll() is None
        assert not theirs.exists()
        assert [entry.name for entry in registry.entries()] == ["cluster-ours"]
        assert registry.clean() == []
        registry.forget(ours)
        assert registry.status_text() == "no cluster is running"
    finally:
        for process in (gone, orphan, bystander):
            process.kill()
            process.wait()


def test_clean_removes_what_an_owner_left_that_was_killed_before_it_was_registered(state: Path) -> None:
    """Its directory has keys, and nothing else names it."""
    gone = sleeper()
    abandoned, ours, elsewhere, other = (state / f"cluster-{name}" for name in ("a", "ours", "host", "b"))
    for directory in (abandoned, ours, elsewhere, other):
        directory.mkdir()
        registry.claim(directory)
    owner = {"host": socket.gethostname(), **vars(registry.ProcessId.of(psutil.Process(gone.pid)))}
    (abandoned / registry.OWNER).write_text(json.dumps(owner))
    (elsewhere / registry.OWNER).write_text(json.dumps(owner | {"host": "another"}))
    (other / registry.OWNER).unlink()
    assert registry.clean() == []
    gone.kill()
    gone.wait()
    assert registry.clean() == [("cluster-a", 0)]
    assert sorted(path.name for path in state.glob("cluster-*")) == [
        "cluster-b",
        "cluster-host",
        "cluster-ours",
    ]


def test_an_entry_that_was_written_by_hand_removes_no_directory_of_others(state: Path) -> None:
    gone, precious, link = sleeper(), state / "precious", state / "cluster-link"
    precious.mkdir()
    link.symlink_to(precious)
    for name, directory in (("cluster-a", precious), ("cluster-b", link), ("cluster-c", state / "c")):
        registry.record("local", 1, set(), state / name)
        path = registry.folder() / f"{name}.json"
        owner = vars(registry.ProcessId.of(psutil.Process(gone.pid)))
        facts = json.loads(path.read_text()) | {"directory": str(directory), "owner": owner}
        # The last one has no time, so it is damaged, and no entry.
        path.write_text(json.dumps(facts | ({"started": "noon"} if name == "cluster-c" else {})))
    gone.kill()
    gone.wait()
    assert len(registry.entries()) == 2
    registry.clean()
    assert precious.is_dir()
    assert link.is_symlink()


@pytest.mark.slow
def test_two_labs_at_once(state: Path) -> None:
    with Cluster(ranks=1) as one, Cluster(ranks=1) as other:
        names = {entry.name for entry in registry.entries()}
        assert len(names) == 2
        assert all(len(entry.running()) >= 3 for entry in registry.entries()), (
            "a controller, an engine, a nanny"
        )
        assert registry.clean() == []
        one.stop()
        assert other.apply(dist.get_rank) == [0]
        assert len(registry.entries()) == 1
    assert registry.entries() == []


def test_the_commands_report_and_end_what_has_no_owner(state: Path) -> None:
    assert CliRunner().invoke(main, ["cluster", "status"]).output == "no cluster is running\n"
    assert CliRunner().invoke(main, ["cluster", "clean"]).output == "nothing to clean\n"
    orphan, gone = sleeper(), sleeper()
    try:
        registry.record("local", 3, {psutil.Process(orphan.pid)}, state / "cluster-a")
        path = registry.folder() / "cluster-a.json"
        facts = json.loads(path.read_text()) | {
            "owner": vars(registry.ProcessId.of(psutil.Process(gone.pid)))
        }
        path.write_text(json.dumps(facts))
        gone.kill()
        gone.wait()
        assert CliRunner().invoke(main, ["cluster", "clean"]).output == (
            "cluster-a: 1 processes ended, its directory removed\n"
        )
        assert orphan.wait(5) != 0
    finally:
        for process in (orphan, gone):
            process.kill()
            process.wait()
