"""A rank that fails, runs out of memory, is stopped or interrupted: the message, and what the run keeps."""

import importlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from cluster import registry, remote, temporary
from cluster.errors import ClusterError, RankError
from cluster.ranks import Cluster
from cluster.watchdog import ProcessId
from lab import models
from lab.commands.cli import main
from lab.memory.meter import Meter
from lab.memory.out_of_memory import OutOfMemory
from lab.training.rank_out_of_memory import RankOutOfMemory
from lab.training.records import Run, Started
from lab.training.run import Interrupted
from lab_tests.support.models import small_config
from lab_tests.support.on_ranks import IN_TIME, in_time, ranks_kept

TOKENS = 1024


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Cluster]:
    """Ranks new to torch; see ``_fresh_ranks``."""
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


@pytest.mark.long
def test_a_failed_run_keeps_what_was_measured(two_ranks: Cluster) -> None:
    seen: list[Any] = []
    with (
        ranks_kept(two_ranks),
        pytest.raises(RankError, match=r"^rank 1 failed first: ArithmeticError: 7 is not 11") as caught,
    ):
        lab.run(failing_model, "ulysses", tokens=TOKENS, cluster=two_ranks, watch=seen.append)
    kept = caught.value.partial
    assert isinstance(kept, Run)
    assert kept is seen[-1], "the watcher is told too, and draws it"
    assert not kept.complete
    assert kept.title.endswith("failed in step 1 of 3")
    assert len(kept.timelines) == 2
    assert "model.layers.0.mlp" in kept.timelines[1].modules
    assert "model.layers.2.mlp" not in kept.timelines[1].modules


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


@pytest.mark.long
def test_a_rank_that_runs_out_says_in_what_and_what_would_have_fit(two_ranks: Cluster) -> None:
    whole = lab.run(small(), "ulysses", tokens=TOKENS, steps=1, cluster=two_ranks)
    limit = whole.device_peak * 2 // 3
    with in_time(), pytest.raises(RankOutOfMemory) as caught:
        lab.run(small(), "ulysses", tokens=TOKENS, steps=1, cluster=two_ranks, device_memory=limit)
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


@pytest.mark.long
def test_where_no_rung_fits_the_leanest_is_named(two_ranks: Cluster) -> None:
    with (
        ranks_kept(two_ranks),
        pytest.raises(
            RankOutOfMemory, match=r"no rung fits that, the leanest is 'streamed', planned at"
        ) as caught,
    ):
        lab.run(small(), "upipe", tokens=TOKENS, cluster=two_ranks, device_memory="256KiB")
    assert "before the first operator" in str(caught.value)


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


@pytest.mark.long
def test_a_stopped_run_is_what_it_measured(two_ranks: Cluster) -> None:
    stops: list[Callable[[], None]] = []
    stop_later = after_a_step(lambda: threading.Thread(target=stops[0]).start())

    def watch(message: Any) -> None:
        if isinstance(message, Started):
            stops.append(message.stop)
        stop_later(message)

    with ranks_kept(two_ranks):
        run = lab.run(small(), "upipe", tokens=TOKENS, steps=500, cluster=two_ranks, watch=watch)
    assert not run.complete
    assert 1 <= len(run.losses) == len(run.seconds) < 500
    assert f"stopped in step {len(run.losses) + 1} of 500" in run.title
    assert all(timeline.step.max() >= len(run.losses) - 1 for timeline in run.timelines)
    again = lab.run(small(), "upipe", tokens=TOKENS, steps=1, cluster=two_ranks)
    assert again.losses[0] == run.losses[0]


@pytest.mark.long
@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_run_keeps_what_was_measured(two_ranks: Cluster) -> None:
    watch = after_a_step(lambda: signal.raise_signal(signal.SIGINT))
    with (
        ranks_kept(two_ranks),
        pytest.raises(Interrupted, match=r"\.partial is what it measured: .* interrupted in step") as caught,
    ):
        lab.run(small(), "fsdp", tokens=TOKENS, steps=500, cluster=two_ranks, watch=watch)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.partial is not None
    assert len(caught.value.partial.losses) >= 1


# ---- processes without an owner ---------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: tmp_path / name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary, "places", lambda: [str(tmp_path)])
    return tmp_path


@contextmanager
def sleepers(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that the block ends, or that end with it."""
    started = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(number)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def rewrite(name: str, process: subprocess.Popen[bytes], **facts: Any) -> None:
    """Give the entry of a cluster this process as its owner, and other facts."""
    path = registry.folder() / f"{name}.json"
    facts = {"owner": ProcessId.of(psutil.Process(process.pid)), **facts}
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def said_by(command: str) -> list[str]:
    return CliRunner().invoke(main, ["cluster", command]).output.splitlines()


def test_clean_ends_what_has_no_owner_and_nothing_else(state: Path) -> None:
    assert said_by("status") == ["no cluster is running"]
    with sleepers(3) as (gone, orphan, bystander):
        ours, theirs = state / "cluster-ours", state / "cluster-theirs"
        theirs.mkdir()
        registry.record("local", 2, {psutil.Process(bystander.pid)}, ours)
        registry.record("local", 3, {psutil.Process(orphan.pid)}, theirs)
        # An id that has a new bearer: started at another time, it is another process.
        ticks, boot = ProcessId.of(psutil.Process(bystander.pid)).started.split()
        again = ProcessId(bystander.pid, f"{int(ticks) - 1} {boot}")
        rewrite(theirs.name, gone, processes=[ProcessId.of(psutil.Process(orphan.pid)), again])
        assert said_by("clean") == ["nothing to clean"]
        gone.kill()
        gone.wait()

        *lines, advice = said_by("status")
        assert any("cluster-ours" in line and "2 ranks" in line and "alive, 1 of 1" in line for line in lines)
        assert any("cluster-theirs" in line and "gone, 1 of 2" in line for line in lines)
        assert advice == "lab cluster clean ends the clusters whose owner is gone"

        assert said_by("clean") == ["cluster-theirs: 1 processes ended, its directory removed"]
        assert orphan.wait(IN_TIME) != 0
        assert bystander.poll() is None
        assert not theirs.exists()
        assert [entry.name for entry in registry.entries()] == ["cluster-ours"]
        assert said_by("clean") == ["nothing to clean"]
        registry.forget(ours)
        assert said_by("status") == ["no cluster is running"]


def test_a_cluster_is_known_after_the_clock_was_set(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes seem to have started at another time then, because psutil adds that of the boot."""
    before = psutil.Process().create_time()
    registry.record("local", 1, {psutil.Process()}, state / "cluster-a")
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 3600.0)
    assert psutil.Process().create_time() < before - 3600
    assert "alive, 1 of 1" in said_by("status")[0]
    assert registry.clean() == []


def test_a_cluster_has_an_entry_before_it_has_a_process_or_a_key(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the directory of an owner that is killed at its start is removed, too."""
    seen: list[registry.Entry] = []

    def refuse(*_: Any) -> None:
        seen.extend(registry.entries())
        raise OSError("no controller")

    monkeypatch.setattr("ipyparallel.Cluster.start_controller", refuse)
    with pytest.raises(ClusterError, match="the controller did not start"):
        Cluster(ranks=2).start()
    [entry] = seen
    assert (entry.processes, entry.orphaned) == ((), False)
    assert Path(entry.directory).parent == state
    assert registry.entries() == []


def test_an_entry_that_was_written_by_hand_removes_no_directory_of_others(state: Path) -> None:
    precious, link = state / "precious", state / "cluster-link"
    precious.mkdir()
    link.symlink_to(precious)
    with sleepers(1) as [gone]:
        # The last three are no entries: they have no time, an owner that is none, and another host.
        for name, directory, facts in (
            ("cluster-a", precious, {}), ("cluster-b", link, {}), ("cluster-c", state, {"started": "noon"}),
            ("cluster-d", state, {"owner": ["one", 1.0]}), ("cluster-e", state, {"host": "another"}),
        ):  # fmt: skip
            registry.record("local", 1, set(), state / name)
            rewrite(name, gone, directory=str(directory), **facts)
    assert [entry.name for entry in registry.entries()] == ["cluster-a", "cluster-b"]
    assert registry.clean() == [("cluster-a", 0), ("cluster-b", 0)]
    assert precious.is_dir()
    assert link.is_symlink()


@pytest.mark.long
def test_two_labs_at_once(state: Path) -> None:
    with Cluster(ranks=1) as one, Cluster(ranks=1) as other:
        assert len({entry.name for entry in registry.entries()}) == 2
        least = min(len(entry.running()) for entry in registry.entries())
        assert least >= 3, "a controller, an engine, a nanny"
        assert registry.clean() == []
        one.stop()
        assert other.apply(dist.get_rank) == [0]
        assert len(registry.entries()) == 1
    assert registry.entries() == []
