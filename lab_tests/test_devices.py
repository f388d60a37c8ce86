"""GPUs that cannot be used are refused in one line; stand-ins give the answers of torch and nvidia-smi."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from transformers import TrainingArguments

import lab
import lab.hf
from cluster import capacity, devices, remote, torchrun
from cluster.errors import ClusterError
from cluster.network import reserved_ports
from cluster.ranks import Cluster
from lab.commands.cli import main
from lab.rehearsing.rehearse import machine_for
from lab.units import GiB
from lab_tests.support.gpus import patch_gpus
from lab_tests.support.on_ranks import wait_until


def as_torchruns(patch, rank, ranks):
    """The variables that torchrun sets."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    for name, value in told.items():
        patch.setenv(name, str(value))


def refusal(run):
    with pytest.raises(ClusterError) as error:
        run()
    assert "\n" not in str(error.value)
    return str(error.value)


def rehearse():
    lab.rehearse("tiny", "upipe", tokens=64, ranks=2)


def join():
    with torchrun.process_group():
        pass


def wait_for_nobody(patch):
    for module in ("cluster.devices", "lab.rehearsing.rehearse"):
        patch.setattr(f"{module}.FREE_SECONDS", 0)


def patch_group(patch):
    """Stands in for the process group; the timeouts that are set for it, in seconds."""
    limits = []
    patch.setattr(dist, "init_process_group", lambda *_, **__: None)
    patch.setattr(dist, "destroy_process_group", lambda: None)
    patch.setattr(dist, "get_rank", lambda: 0)
    patch.setattr(torchrun, "set_timeout", limits.append)
    return limits


@pytest.mark.parametrize(
    "joins", [join, lambda: lab.hf.arguments(TrainingArguments, recipe="upipe", tokens=64)]
)
def test_a_launchers_variables_of_a_host_that_is_gone(monkeypatch, joins):
    as_torchruns(monkeypatch, 0, 2)
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("torch waits"))
    monkeypatch.setattr(torchrun, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(torchrun, "RENDEZVOUS_SECONDS", 1.0)
    tried = []

    def gone(address, **_):
        tried.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", gone)
    assert refusal(joins) == (
        "MASTER_ADDR=node7, MASTER_PORT=29500: the host of rank 0 cannot be reached (Name or service not "
        "known); unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start this process by torchrun again"
    )
    assert len(tried) > 2
    assert {*tried} == {("node7", 29500)}


def test_a_name_that_no_host_can_have(monkeypatch):
    as_torchruns(monkeypatch, 0, 2)
    monkeypatch.setenv("MASTER_ADDR", "a..b")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it is not tried again"))
    assert "the host of rank 0 cannot be reached" in refusal(join)


def test_an_error_of_nccl_is_not_one_of_the_variables(monkeypatch):
    as_torchruns(monkeypatch, 0, 1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    error = dist.DistBackendError("NCCL error\nLast error: a socket")
    with pytest.raises(dist.DistBackendError, match="Last error"), torchrun.rendezvous():
        raise error


def test_a_host_that_refuses_a_connection_is_there(monkeypatch):
    """Rank 0 may start later."""
    as_torchruns(monkeypatch, 1, 2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with reserved_ports(1) as [port]:
        monkeypatch.setenv("MASTER_PORT", str(port))
        with torchrun.rendezvous():
            pass


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("MASTER_PORT", "99999", "1 to 65535"),
        ("MASTER_PORT", "abc", "1 to 65535"),
        ("RANK", "2", "0 to 1"),
        ("RANK", "-1", "0 to 1"),
        ("WORLD_SIZE", "0", "1 to 999999"),
        ("LOCAL_RANK", "abc", "0 to 1"),
        ("LOCAL_WORLD_SIZE", "3", "1 to 2"),
    ],
)
def test_a_launchers_variable_that_is_no_number_of_its_kind(monkeypatch, name, value, takes):
    as_torchruns(monkeypatch, 0, 2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "_reach", lambda *_: None)
    monkeypatch.setattr(torchrun, "join_group", lambda _: pytest.fail("it is refused before"))
    assert refusal(join).startswith(f"{name}={value}: {name} must be a whole number from {takes}; unset RANK")


def test_a_port_that_another_program_has_is_one_line(monkeypatch):
    as_torchruns(monkeypatch, 0, 1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert "EADDRINUSE" in refusal(join)


def test_ranks_that_do_not_come_are_said(monkeypatch):
    """A process waits for them for half an hour, and cannot know whether they start."""
    as_torchruns(monkeypatch, 0, 2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(torchrun, "SILENT_SECONDS", 0.2)
    said = []
    monkeypatch.setattr(torchrun, "notify", said.append)

    def timers():
        return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]

    with reserved_ports(1) as [port]:
        monkeypatch.setenv("MASTER_PORT", str(port))
        with torchrun.rendezvous():
            wait_until(lambda: said, "the line")
        monkeypatch.setattr(torchrun, "SILENT_SECONDS", 60)
        with torchrun.rendezvous():
            assert timers()
        wait_until(lambda: not timers(), "the end of the timer")
    [line] = said
    where = f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
    assert line.startswith(
        f"rank 0 of 2 waits to join the others at {where}; if they do not start, unset RANK"
    )


def test_a_driver_older_than_torchs_cuda(monkeypatch):
    patch_gpus(monkeypatch, 8, usable=False)
    as_torchruns(monkeypatch, 0, 8)
    said = [refusal(run) for run in (lambda: Cluster(ranks=8), rehearse, join, devices.check_driver)]
    assert set(said) == {
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the 8 GPUs here: The "
        "NVIDIA driver on your system is too old (found version 12020); a newer driver would work, or the "
        "CPU with CUDA_VISIBLE_DEVICES set to an empty text"
    }
    run = CliRunner().invoke(main, ["rehearse", "tiny", "--tokens", "64", "--ranks", "2"])
    assert (run.exit_code, run.stdout, run.stderr) == (2, "", f"lab: {said[0]}\n")
    patch_gpus(monkeypatch, 1, usable=False)
    assert "cannot use the 1 GPU here: " in refusal(devices.check_driver)
    patch_gpus(monkeypatch, 8)
    devices.check_driver()
    patch_gpus(monkeypatch, 0, usable=False)
    devices.check_driver()


def test_a_gpu_that_another_process_fills(monkeypatch):
    wait_for_nobody(monkeypatch)
    patch_gpus(monkeypatch, 1, taken=61 * GiB + GiB // 2)
    as_torchruns(monkeypatch, 0, 1)
    said = {refusal(run) for run in (rehearse, join, devices.check_free)}
    assert said == {
        "NVIDIA H100 80GB HBM3: other processes use 61.5 of its 80.0 GiB; end them (nvidia-smi "
        "lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
    }
    # What this process holds is its own, and so is a context.
    patch_gpus(monkeypatch, 1, taken=62 * GiB, reserved=61 * GiB)
    devices.check_free()
    patch_gpus(monkeypatch, 1, taken=10 * GiB)
    assert "10.0 of its 80.0 GiB" in refusal(devices.check_free)


@pytest.mark.parametrize("failing", ["set_device", "mem_get_info"])
def test_a_gpu_that_cuda_refuses(monkeypatch, failing):
    """One that is full to the last byte, or that another process holds in exclusive mode."""
    wait_for_nobody(monkeypatch)
    patch_gpus(monkeypatch, 1)
    as_torchruns(monkeypatch, 0, 1)

    def busy(*_):
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch")

    monkeypatch.setattr(torch.cuda, failing, busy)
    end = (
        " cannot be used: CUDA error: CUDA-capable device(s) is/are busy or unavailable; end the processes "
        "that use it (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
    )
    assert refusal(join) == f"cuda:0{end}"
    if failing == "mem_get_info":
        assert {refusal(rehearse), refusal(devices.check_free)} == {f"the GPU{end}"}


def test_a_rank_and_a_rehearsal_wait_for_a_process_that_was_killed_and_is_leaving(monkeypatch):
    patch_gpus(monkeypatch, 1)
    as_torchruns(monkeypatch, 0, 1)
    limits = patch_group(monkeypatch)
    slept = []
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    for wait in (lambda: devices.check_free(wait=10), join, lambda: machine_for(None)):
        asked = iter([GiB, 2 * GiB, 79 * GiB])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda asked=asked: (next(asked), 80 * GiB))
        wait()
        assert next(asked, None) is None
    assert slept == [devices.POLL_SECONDS] * 6
    # As its two backends, gloo and NCCL, have half an hour by default.
    assert limits == [600], "a rank of torchrun's has a cluster's timeout"
    patch_gpus(monkeypatch, 0, usable=False)
    limits = patch_group(monkeypatch)
    join()
    assert limits == [60]


@pytest.mark.parametrize(
    ("visible", "rows", "named"),
    [
        (None, [("0", "GPU-a1", "Disabled"), ("1", "GPU-b2", "Enabled")], "GPU 1"),
        ("GPU-b2,GPU-a1", [("0", "GPU-a1", "Enabled"), ("1", "GPU-b2", "[N/A]")], "GPU 0"),
        ("MIG-c3,MIG-d4", [], "MIG-c3"),
        ("GPU-a1, MIG-d4", [], "MIG-d4"),
        ("1, 0", [("0", "GPU-a1", "Enabled"), ("1", "GPU-b2", "Disabled")], "GPU 0"),
    ],
)
def test_mig_slices(monkeypatch, visible, rows, named):
    patch_gpus(monkeypatch, 2, rows=rows)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert refusal(lambda: Cluster(ranks=2)) == (
        f"ranks=2: {named} is a MIG slice or is divided into slices, and NCCL joins whole GPUs only; ranks=1 "
        "would work, or MIG switched off by nvidia-smi -mig 0"
    )
    Cluster(ranks=1)


def test_a_gpu_with_slices_that_is_not_visible_is_nobodys(monkeypatch):
    rows = [("0", "GPU-a1", "Enabled"), ("1", "GPU-b2", "Disabled"), ("2", "GPU-c3", "Disabled")]
    patch_gpus(monkeypatch, 2, rows=rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    Cluster(ranks=2)


def test_eight_ranks_on_seven_gpus(monkeypatch):
    patch_gpus(monkeypatch, 7)
    capacity.check_capacity(7)
    for profile in ("local", "node8"):
        said = refusal(lambda profile=profile: Cluster(ranks=8, profile=profile))
        assert said.startswith("ranks=8: each rank needs a GPU and this process sees 7; ranks=7 would work")
    as_torchruns(monkeypatch, 7, 8)
    assert refusal(join) == (
        "rank 7 is number 8 on its host and sees 7 GPUs; torchrun --nproc-per-node 7 would work"
    )


def join_beside_another(rank, *told):
    """Stands in for `remote.join` on a host whose second GPU is in use."""
    if rank == 1:
        raise ClusterError("NVIDIA H100 80GB HBM3: other processes use 61.5 of its 80.0 GiB")
    return remote.join(rank, *told)


@pytest.mark.long
def test_what_a_rank_finds_ends_the_start_in_one_line(monkeypatch):
    monkeypatch.setattr(remote, "join", join_beside_another)
    cluster = Cluster(ranks=2)
    said = refusal(cluster.start)
    assert said == "rank 1: NVIDIA H100 80GB HBM3: other processes use 61.5 of its 80.0 GiB"
    assert not cluster.started
