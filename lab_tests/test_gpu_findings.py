"""`lab doctor` on a GPU machine; stand-ins for what torch and nvidia-smi answer there."""

import subprocess
from types import SimpleNamespace

import psutil
import pytest
import torch

import lab
from cluster import host, limits
from lab.bench.copies import copy_rate
from lab.commands import doctor, gpu_findings
from lab.techniques.host_memory import local_ranks, pinnable
from lab.techniques.host_transfer import PINNED_MEMORY, HostCopier
from lab.units import GiB, Mi, parse_tokens
from lab_tests.support.gpus import H100, TOO_OLD, patch_gpus

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{}\tNV18\tPIX\t0-47\t0
GPU1\t{}\t X \tNV18\tNODE\t0-47\t0
GPU2\tNV18\tNV18\t X \tSYS\t0-47\t0
NIC0\tPIX\tNODE\tSYS\t X \t\t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""
LINKS = "0, 5, 16\n1, 5, 16\n2, 4, 8\n"


def smi(patch, pair="NV18", links=LINKS):
    """Stands in for nvidia-smi on a host of three GPUs, all of them visible."""
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(torch.cuda, "device_count", lambda: 3)

    def run(command, **_):
        if command[1:] == ["topo", "-m"]:
            return SimpleNamespace(stdout=TOPOLOGY.format(pair, pair))
        if command[1] == "--query-gpu=index,uuid":
            return SimpleNamespace(stdout="0, GPU-a1\n1, GPU-b2\n2, GPU-c3\n")
        assert command[1] == "--query-gpu=index,pcie.link.gen.max,pcie.link.width.max"
        return SimpleNamespace(stdout=links)

    patch.setattr(subprocess, "run", run)


def machine(patch, tmp_path, *, available=2048 * GiB, copied=(51e9, 50e9)):
    """Stands in for the host's memory and for the copies."""
    memory = psutil.virtual_memory()._replace(total=2304 * GiB, available=available)
    patch.setattr(psutil, "virtual_memory", lambda: memory)
    patch.setattr(limits, "CGROUP", tmp_path)
    patch.setattr(gpu_findings, "copy_rates", lambda: copied)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: H100)


def planned(patch):
    """Stands in for the plan that says what a node offloads, which takes seconds."""
    patch.setattr(gpu_findings, "plan_job", lambda *_: SimpleNamespace(host_peak_per_node=256 * GiB))


def one_of_eight(patch):
    """Stands in for a rank of eight on this host, which sees its own GPU only."""
    patch.setenv("LOCAL_WORLD_SIZE", "8")
    patch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_node_with_nvlink(monkeypatch, tmp_path):
    smi(monkeypatch)
    machine(monkeypatch, tmp_path)
    planned(monkeypatch)
    found = list(gpu_findings.gpu_findings(3))
    assert found[:4] == [
        ("links", "NV18 between 3 pairs: all-to-alls take NVLink, as plans assume"),
        ("pcie", "generation 5 x16 of 2 GPUs, at most 63.0 GB/s each way"),
        ("pcie", "generation 4 x8 of 1 GPU, at most 15.8 GB/s each way"),
        (
            "copies",
            "51.0 GB/s to the device, 50.0 GB/s to pinned memory, GPU 0 alone: a layer's attention hides the "
            "offload of its input from 12320 tokens on",
        ),
    ]
    [pinned] = found[4:]
    assert pinned[1].endswith(": llama3-8b with offload on 3 ranks can offload up to 7372K tokens")


def test_links_that_are_no_nvlink(monkeypatch):
    smi(monkeypatch, pair="SYS")
    assert gpu_findings._links(3) == (
        "NV18 between 2 pairs, SYS between 1 pairs: without NVLink all-to-alls take longer than plans for "
        "GPUs that have it; the longest context stays the same"
    )


@pytest.mark.parametrize("visible", ["2, 0", "GPU-c3,GPU-a1"])
def test_two_visible_gpus_of_three(monkeypatch, visible):
    smi(monkeypatch, pair="SYS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_findings._links(2) == "NV18 between 1 pairs: all-to-alls take NVLink, as plans assume"
    assert list(gpu_findings._pcie()) == [
        "generation 5 x16 of 1 GPU, at most 63.0 GB/s each way",
        "generation 4 x8 of 1 GPU, at most 15.8 GB/s each way",
    ]


def test_a_machine_whose_nvidia_smi_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_findings._links(3) == "nvidia-smi topo -m does not say what joins the GPUs"
    assert list(gpu_findings._pcie()) == []
    assert host.ask_gpus("index") == []
    smi(monkeypatch, links="0, [N/A], [N/A]\n")
    assert list(gpu_findings._pcie()) == []


@pytest.mark.long
def test_the_context_whose_offload_the_host_can_hold_is_the_plans(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, available=64 * GiB)
    said = gpu_findings._pinned(8)
    assert said.startswith(
        "64.0 GiB of 2.25 TiB can be pinned: llama3-8b with offload on 8 ranks can offload up to "
    )
    longest = parse_tokens(said.split()[-2])
    # Of two layers one input is on the host, and of all 32 layers there are 31.
    two_layers = lab.models.config_of("llama3-8b")
    two_layers.num_hidden_layers = 2
    plan = lab.plan(two_layers, "upipe", tokens=Mi, ranks=8, workspace=False, compute_dtype="bfloat16")
    assert longest == pytest.approx(64 * GiB * Mi / (31 * plan.host_peak_per_node), rel=0.01)


def test_what_a_container_leaves_can_be_pinned(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, available=64 * GiB)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{3 * GiB}\n")
    assert pinnable() == 64 * GiB
    (tmp_path / "memory.max").write_text(f"{40 * GiB}\n")
    assert pinnable() == 32 * GiB
    (tmp_path / "memory.current").write_text(f"{13 * GiB}\n")
    assert pinnable() == 27 * GiB
    # The page cache is given up when memory is asked for.
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {GiB}\ninactive_file {2 * GiB}\n")
    assert pinnable() == 30 * GiB
    assert pinnable(ranks=2, pinned=GiB) == 16 * GiB
    assert pinnable(ranks=5, pinned=GiB // 8) == 6 * GiB + GiB // 8
    (tmp_path / "memory.current").write_text(f"{44 * GiB}\n")
    assert pinnable() == 0


def test_the_ranks_of_a_host_share_what_can_be_pinned(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, available=2200 * GiB)
    assert local_ranks() == 1
    one_of_eight(monkeypatch)
    assert local_ranks() == 8
    share = HostCopier()._limit
    assert share == pinnable(ranks=8) == int(0.8 * 2304 * GiB) // 8
    # 5M tokens of Llama3-8B take 1.21 TiB per node.
    assert 8 * share > 1.21 * 1024 * GiB
    # What this process has pinned before is part of its share.
    machine(monkeypatch, tmp_path, available=800 * GiB)
    monkeypatch.setattr(PINNED_MEMORY, "nbytes", 30 * GiB)
    assert HostCopier()._limit == 130 * GiB


def test_a_gpu_that_is_not_in_the_table_has_no_rate(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA L40")
    assert gpu_findings._copies() == "51.0 GB/s to the device, 50.0 GB/s to pinned memory, GPU 0 alone"


@pytest.mark.long
def test_the_rate_is_that_of_the_bytes_copied():
    source = torch.ones(gpu_findings.COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    assert 1e8 < copy_rate(target, source) < 1e12
    assert target.all()


def test_copies_that_fail_are_said(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path)

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.\nmore")

    monkeypatch.setattr(gpu_findings, "copy_rates", full)
    assert gpu_findings._copies() == "not measured: CUDA out of memory. Tried to allocate 256.00 MiB."


def test_the_doctor_of_a_gpu_machine(monkeypatch, tmp_path):
    patch_gpus(monkeypatch, 2, taken=3 * GiB)
    machine(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=H100))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (77 * GiB, 80 * GiB))
    monkeypatch.setattr(doctor, "gpu_findings", lambda count: [("links", f"of {count}")])
    monkeypatch.setattr(doctor, "_attention", lambda device: [("attention", device.type)])
    lines = [line.split(maxsplit=1) for line in doctor.report().splitlines()]
    for number in "01":
        assert ["gpu", f"{number}          {H100}, 80.0 GiB, 77.0 GiB free"] in lines
    assert ["links", "of 2"] in lines
    assert ["attention", "cuda"] in lines
    assert ["ranks", "one a GPU, joined by nccl"] in lines


def test_the_doctor_says_what_keeps_torch_from_the_gpus(monkeypatch):
    patch_gpus(monkeypatch, 8, usable=False)
    said = [line for line in doctor.report().splitlines() if line.startswith("gpu")]
    assert len(said) == 1
    assert TOO_OLD.split(". ")[0] in said[0]


def test_the_doctor_of_a_gpu_that_another_process_holds(monkeypatch, tmp_path):
    patch_gpus(monkeypatch, 2)
    machine(monkeypatch, tmp_path)
    planned(monkeypatch)
    smi(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def busy(*_):
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    for name in ("get_device_properties", "mem_get_info", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, busy)
    monkeypatch.setattr(gpu_findings, "copy_rates", busy)
    report = doctor.report()
    why = "cannot be used: CUDA error: out of memory; nvidia-smi lists the processes that use it"
    lines = [line.split(maxsplit=1) for line in report.splitlines()]
    for number in "01":
        assert ["gpu", f"{number}          {why}"] in lines
    assert ["copies", "not measured: CUDA error: out of memory"] in lines
    assert ["attention", "the fastest kernel is not known: CUDA error: out of memory"] in lines
    assert "\ntorch " in report
    assert "\ncompiler " in report
