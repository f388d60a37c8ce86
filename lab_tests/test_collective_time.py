"""The timeout of a collective: the seconds of a layer in the plan, and the calls that use them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import lab
from lab.commands.cli import main
from lab.errors import LabError
from lab.memory.moment import Op
from lab.memory.timeline import TimelineBuilder
from lab.planning.costs import Costs
from lab.recipe.jobs import make_job
from lab.training import collective_time, planning_process, train
from lab.training.collective_time import layers_time
from lab.units import format_seconds
from lab_tests.support.gpus import H100
from lab_tests.support.models import small_config
from lab_tests.support.training import TOKENS


class EndOfCall(Exception):
    """Ends a call that was to be looked at."""


class GpuCluster:
    """Stands in for a cluster of two GPUs, with a name, which notes the timeout it is given."""

    device_type, started, ranks, interrupt = "cuda", True, 2, None

    def __init__(self, timeout):
        self.timeout = timeout

    def apply(self, function, *args, timeout=None, on_record=None):
        if function is torch.cuda.get_device_name:
            return [H100] * self.ranks
        raise EndOfCall(timeout)


def rows(*said):
    built = TimelineBuilder()
    for seconds, phase, module in said:
        built.add(seconds, (0,) * 8, 0, phase=phase, module=module, op=Op("-"), step=0)
    return built.since(0)


def test_the_longest_layer_of_a_plan():
    timeline = rows(
        (0.0, "forward", "model.embed_tokens"), (1.0, "forward", "model.layers.0"),
        (1.5, "forward", "model.layers.0.mlp"), (3.0, "forward", "model.layers.1.mlp"),
        (4.0, "forward", "lm_head"), (9.0, "backward", ""), (19.0, "backward", "model.layers.1"),
        (24.0, "backward", "model.layers.0.mlp"), (24.5, "backward", "model.layers.0"),
        (31.0, "optimizer", ""),
    )  # fmt: skip
    plan = lab.plan("tiny", "plain", tokens=64, ranks=2)
    even = replace(plan, timeline=timeline, costs=Costs(device_seconds=31.0, host_seconds=31.0))
    assert even.longest_layer == 7.0
    copying = replace(plan, timeline=timeline, costs=Costs(device_seconds=31.0, host_seconds=62.0))
    assert copying.longest_layer == 14.0
    assert replace(plan, timeline=timeline.rows([0, 4, 5])).longest_layer == 0.0
    assert 0 < plan.longest_layer < plan.step_seconds / 4


@pytest.mark.long
def test_three_layers_where_that_is_more(capsys):
    job = make_job(small_config(), "upipe", ranks=2, tokens=TOKENS)
    layer = lab.plan(small_config(), "upipe", tokens=TOKENS, ranks=2).longest_layer
    assert layers_time(job, H100, 3 * layer) is None
    assert capsys.readouterr() == ("", "")
    assert layers_time(job, H100, 2.9 * layer) == 3 * layer
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("a collective may take ")
    assert "3 times the longest layer of the plan, " in said
    assert said.endswith(" on NVIDIA H100 SXM 80GB\n")


@pytest.mark.parametrize("verb", ["run", "profile", "train"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_verbs_pass_the_timeout_on(monkeypatch, tmp_path, digits, verb, device):
    cluster = GpuCluster(timeout=1e-9)
    monkeypatch.setattr(cluster, "device_type", device)
    folder = {"checkpoint": tmp_path / "run"} if verb == "train" else {}
    job = {"tokens": TOKENS, "text": digits, "steps": 1, "cluster": cluster, **folder}
    with pytest.raises(EndOfCall) as asked:
        getattr(lab, verb)(small_config(), "upipe", **job)
    layer = lab.plan(small_config(), "upipe", tokens=TOKENS, ranks=2).longest_layer
    assert asked.value.args == ((3 * layer,) if device == "cuda" else (None,))


def test_trains_own_timeout_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(collective_time, "plan_job", lambda *_, **__: pytest.fail("planned"))
    cluster = GpuCluster(timeout=1e-9)
    with pytest.raises(EndOfCall) as asked:
        lab.train("tiny", tokens=128, steps=1, cluster=cluster, checkpoint=tmp_path, timeout=7)
    assert asked.value.args == (7,)


def gpu_rank(patch, default):
    """Stands in for a rank with a GPU, whose collectives take ``default`` seconds; it ends before a step."""
    limits = []

    def note(*_):
        limits.append(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        raise EndOfCall

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        patch.setattr(dist.distributed_c10d, name, getattr(dist.distributed_c10d, name))
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda: H100)
    patch.setitem(train.DEFAULT_SECONDS, "cuda", default)
    patch.setattr(train, "train_on_this_rank", note)
    return limits


def train_as_a_rank(digits, folder, timeout=None):
    job = {"tokens": TOKENS, "text": digits, "steps": 1, "checkpoint": folder, "cluster": None}
    lab.train(small_config(), "plain", **job, timeout=timeout)


@pytest.mark.long
def test_a_rank_of_torchruns_asks_a_plan(alone, digits, tmp_path, monkeypatch, capfd):
    """This process has joined a process group, so the plan is made in another one."""
    gpu_rank(monkeypatch, default=1e-9)
    limits = []
    monkeypatch.setattr(train, "set_timeout", limits.append)
    with pytest.raises(EndOfCall):
        train_as_a_rank(digits, tmp_path)
    [limit] = limits
    assert 1e-9 < limit < 1
    assert f"a collective may take {format_seconds(limit)} and not " in capfd.readouterr().err


def test_a_plan_that_fails_is_a_line_on_every_rank(alone, digits, tmp_path, monkeypatch):
    gpu_rank(monkeypatch, default=1e-9)
    monkeypatch.setattr(planning_process, "watched", lambda _: ["false"])
    with pytest.raises(LabError, match="how long a collective may take failed: its process ended with code"):
        train_as_a_rank(digits, tmp_path)


def test_a_rank_of_torchruns_takes_the_timeout_that_is_given(alone, digits, tmp_path, monkeypatch):
    limits = gpu_rank(monkeypatch, default=1e-9)
    monkeypatch.setattr(train, "on_this_rank", lambda *_: pytest.fail("planned"))
    with pytest.raises(EndOfCall):
        train_as_a_rank(digits, tmp_path, timeout=7.0)
    assert limits == [7.0]


def test_the_command_passes_the_timeout_on(monkeypatch, tmp_path):
    given = []

    def apply(self, *_, timeout, **__):
        given.append(timeout)
        raise EndOfCall

    monkeypatch.setattr("cluster.ranks.Cluster.start", lambda self: self)
    monkeypatch.setattr("cluster.ranks.Cluster.stop", lambda self: None)
    monkeypatch.setattr("cluster.ranks.Cluster.apply", apply)
    words = ["train", "tiny", "--tokens", "64", "--steps", "1", "--ranks", "2", "--checkpoint", str(tmp_path)]
    CliRunner().invoke(main, [*words, "--timeout", "1500"])
    assert given == [1500.0]
