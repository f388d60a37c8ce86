"""GPUs, what connects them, and one disk: each figure with its source; and machines that are made of them.

Estimates of time divide work by these rates. No figure is fitted to a published training run: those are kept
to compare with. A source that says *assumed*, or names another device, is a measurement of something else.
The bytes that CUDA takes behind the dispatcher's back are in ``cuda_workspace.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lab.errors import LabError
from lab.recipe.jobs import Disk, Machine
from lab.units import GiB, MiB, check_counts, parse_bytes, parse_disk, parse_rate


@dataclass(frozen=True)
class Figure:
    """A number, its unit ("FLOP/s", "B/s", "B", or "1" for counts and shares), and where it comes from."""

    value: float
    unit: str
    source: str


_ENGINEERING = "ml-engineering (S. Bekman)"
_FIO = f"{_ENGINEERING}, storage, fio on a Samsung 980 PRO 2TB, PCIe Gen4, a file of 1 GB"

NVME_WRITE = Figure(1943.9 * MiB, "B/s", f"{_FIO}: 1943.9 MiB/s")
NVME_READ = Figure(2762.0 * MiB, "B/s", f"{_FIO}: 2762.0 MiB/s")

PAGEABLE_RATE = Figure(
    2.8e9,
    "B/s",
    "assumed for every device: sgl-project/sglang pull request 32032, torch's copies from an H200 to host "
    "memory that is not pinned: 2.8 GB/s",
)
"""The rate of copies between a device and host memory that is not pinned, each direction."""


@dataclass(frozen=True)
class Hardware:
    """One GPU and what connects it. A share is what real software reaches of the figure above it.

    Attributes:
        memory: bytes that torch reports as the device's total, less than the name promises.
        matmul: dense bf16 peak; ``matmul_share`` of large matrices.
        attention_forward, attention_backward: flash attention in half precision, head_dim 128, long causal
            sequences, counting half of the square of scores; no share, because it is measured.
        memory_rate: of the device's own memory; ``memory_share`` of a large copy, reads and writes counted.
        link: to the other GPUs of a node, each direction; ``link_share`` of NCCL, all-reduce left aside.
        network: to other nodes, each GPU, each direction.
        host_link: to host memory, each direction; ``host_link_share`` of pinned copies, one GPU copying.
            Eight at once are also bounded by host memory, which is not modelled. Copies of memory that is not
            pinned have ``PAGEABLE_RATE``.
        disk_write, disk_read: one NVMe drive of the node, which all its GPUs share. It is the same for all
            devices.
    """

    name: str
    memory: Figure
    matmul: Figure
    matmul_share: Figure
    attention_forward: Figure
    attention_backward: Figure
    memory_rate: Figure
    memory_share: Figure
    link: Figure
    link_share: Figure
    network: Figure
    network_share: Figure
    host_link: Figure
    host_link_share: Figure
    disk_write: Figure = NVME_WRITE
    disk_read: Figure = NVME_READ


def _based_on(sibling: Hardware, reason: str, *, name: str, **own: Figure) -> Hardware:
    """A device with its own figures, and for the rest those of a sibling, whose sources give the reason."""
    inherited = {
        field: replace(figure, source=f"{reason}: {figure.source}")
        for field, figure in vars(sibling).items()
        if isinstance(figure, Figure) and not field.startswith("disk")
    }
    return replace(sibling, name=name, **inherited | own)


def _from(reason: str, figure: Figure) -> Figure:
    return replace(figure, source=f"{reason}: {figure.source}")


_MATMULS = f"{_ENGINEERING}, compute/accelerator, table of maximum achievable matmul FLOPS, bf16"
_AZURE = "Azure AI-benchmarking-guide, Azure_Results"
_CAPACITY = "the total capacity in torch's out-of-memory message"

# ---- Hopper ------------------------------------------------------------------------------------------------

_H100 = Hardware(
    name="NVIDIA H100 SXM 80GB",
    memory=Figure(81089 * MiB, "B", "torch device properties of an H100 80GB HBM3, total_memory=81089MB"),
    matmul=Figure(
        989e12, "FLOP/s", "datasheet: NVIDIA H100 SXM, 1979 TFLOP/s with sparsity, half when dense"
    ),
    matmul_share=Figure(794.5 / 989, "1", f"{_MATMULS}: 794.5 of 989"),
    attention_forward=Figure(616e12, "FLOP/s", "FlashAttention-3, arXiv 2407.08608, figure 5d: causal, 16k"),
    attention_backward=Figure(
        561e12,
        "FLOP/s",
        "FlashAttention-3, arXiv 2407.08608, figure 6b, 16k; assumed for causal: it plots no causal backward",
    ),
    memory_rate=Figure(3.35e12, "B/s", "datasheet: NVIDIA H100 SXM"),
    memory_share=Figure(2.90 / 3.35, "1", f"{_AZURE}, ND_H100_v5, HBM bandwidth, copy: 2.90 TB/s"),
    link=Figure(450e9, "B/s", "datasheet: NVIDIA H100 SXM, NVLink 900 GB/s, both directions together"),
    link_share=Figure(370 / 450, "1", "NVIDIA/nccl-tests issue 212, a maintainer: 370 GB/s of busbw"),
    network=Figure(50e9, "B/s", "datasheet: NVIDIA DGX H100, one 400 Gb/s NDR InfiniBand adapter per GPU"),
    network_share=Figure(48.5 / 50, "1", "NVIDIA/nccl-tests issue 267, a maintainer: 48 to 49 GB/s a NIC"),
    host_link=Figure(64e9, "B/s", "datasheet: NVIDIA H100 SXM, PCIe Gen5 128 GB/s, both directions together"),
    host_link_share=Figure(51 / 64, "1", f"{_AZURE}, ND_H100_v5, nvbandwidth: 51 GB/s to the device"),
)

_H200 = _based_on(
    _H100,
    "as the H100, the same cores and links",
    name="NVIDIA H200 SXM 141GB",
    memory=Figure(143156 * MiB, "B", "torch device properties of an H200, total_memory=143156MB"),
    memory_rate=Figure(4.8e12, "B/s", "datasheet: NVIDIA H200 SXM"),
    memory_share=Figure(4.01 / 4.8, "1", f"{_AZURE}, ND_H200_v5, HBM bandwidth, copy: 4.01 TB/s"),
    host_link_share=Figure(52 / 64, "1", f"{_AZURE}, ND_H200_v5, nvbandwidth: 52 GB/s each way"),
)

# The superchip with 96 GB of HBM3, which is the one that clouds rent. It is a node of one GPU.
_GH200 = _based_on(
    _H100,
    "assumed as the H100, the same cores",
    name="NVIDIA GH200 96GB",
    memory=Figure(94.50 * GiB, "B", f"{_CAPACITY} on an NVIDIA GH200 480GB: 94.50 GiB"),
    memory_rate=Figure(4.0e12, "B/s", "datasheet: NVIDIA GH200 with HBM3"),
    memory_share=Figure(
        2.979 / 4.0, "1", "UoB-HPC/BabelStream issue 194, copy on a GH200: 2.979 TB/s of the datasheet's 4.0"
    ),
    host_link=Figure(450e9, "B/s", "datasheet: NVIDIA GH200, NVLink-C2C 900 GB/s, both directions together"),
    host_link_share=Figure(
        346 / 450,
        "1",
        "NVIDIA/nvbandwidth issue 23, a GH200's copy engine: 346 GB/s to the device, 15% less to the host",
    ),
)

# ---- Ampere ------------------------------------------------------------------------------------------------

_FLASH_2 = "FlashAttention-2, arXiv 2307.08691, figure 4d: causal, 16k, forward and backward together"

_A100 = Hardware(
    name="NVIDIA A100 SXM 80GB",
    memory=Figure(
        81050 * MiB, "B", "ml-engineering, training/performance, mem_get_info on an A100: 79.15GiB"
    ),
    matmul=Figure(312e12, "FLOP/s", "datasheet: NVIDIA A100 80GB SXM"),
    matmul_share=Figure(271.2 / 312, "1", f"{_MATMULS}: 271.2 of 312"),
    attention_forward=Figure(189e12, "FLOP/s", _FLASH_2),
    attention_backward=Figure(189e12, "FLOP/s", _FLASH_2),
    memory_rate=Figure(2.039e12, "B/s", "datasheet: NVIDIA A100 80GB SXM"),
    memory_share=Figure(1.61 / 2.039, "1", f"{_AZURE}, ND_A100_v4, HBM bandwidth, copy: 1.61 TB/s"),
    link=Figure(300e9, "B/s", "datasheet: NVIDIA A100 80GB SXM, NVLink 600 GB/s, both directions together"),
    # No NVLink SHARP on this generation: an all-reduce tells what the wire carries.
    link_share=Figure(231.58 / 300, "1", f"{_AZURE}, ND_A100_v4, NCCL all-reduce, 8 GB: 231.58 of busbw"),
    network=Figure(25e9, "B/s", "datasheet: NVIDIA DGX A100, one 200 Gb/s HDR InfiniBand adapter per GPU"),
    network_share=_from("assumed from NDR", _H100.network_share),
    host_link=Figure(32e9, "B/s", "datasheet: NVIDIA A100 80GB SXM, PCIe Gen4 64 GB/s, both directions"),
    host_link_share=Figure(26.28 / 32, "1", f"{_AZURE}, ND_A100_v4, nvbandwidth, to the device: 26.28 GB/s"),
)

# ---- Blackwell ---------------------------------------------------------------------------------------------

_FLASH_4 = (
    "Dao-AILab/flash-attention pull request 2280: FlashAttention-4, 2-CTA, causal, 8k; assumed on a B200, "
    "for it names the compute capability alone"
)

_B200 = Hardware(
    name="NVIDIA B200 SXM 180GB",
    memory=Figure(182642 * MiB, "B", "torch device properties of a B200, total_memory=182642MB"),
    matmul=Figure(
        2250e12, "FLOP/s", "datasheet: NVIDIA HGX B200, 4.5 PFLOP/s per GPU with sparsity, half when dense"
    ),
    matmul_share=Figure(1745 / 2250, "1", f"{_MATMULS}: 1745 of 2250"),
    attention_forward=Figure(1418.1e12, "FLOP/s", _FLASH_4),
    attention_backward=Figure(1208.6e12, "FLOP/s", _FLASH_4),
    memory_rate=Figure(8.0e12, "B/s", "datasheet: NVIDIA DGX B200, 64 TB/s for eight GPUs"),
    memory_share=_from("assumed from the H200", _H200.memory_share),
    link=Figure(900e9, "B/s", "datasheet: NVIDIA DGX B200, NVLink 1.8 TB/s per GPU, both ways together"),
    link_share=Figure(
        682.2 / 900,
        "1",
        f"{_ENGINEERING}, network, SHARP: all-reduce of 8 GiB on 8 x B200 without it, 682.2 of busbw",
    ),
    network=Figure(50e9, "B/s", "datasheet: NVIDIA DGX B200, one 400 Gb/s adapter per GPU"),
    network_share=_from("assumed from NDR on Hopper", _H100.network_share),
    host_link=Figure(64e9, "B/s", "datasheet: NVIDIA HGX B200, PCIe Gen5 128 GB/s, both directions together"),
    host_link_share=_from("assumed from the H200, PCIe Gen5 too", _H200.host_link_share),
)

_B300 = _based_on(
    _B200,
    "assumed as the B200, the same generation of cores and links",
    name="NVIDIA B300 SXM 288GB",
    memory=Figure(267.69 * GiB, "B", f"{_CAPACITY} on an NVIDIA B300 SXM6 AC: 267.69 GiB"),
    matmul=Figure(2250e12, "FLOP/s", "datasheet: NVIDIA DGX B300, bf16 as the B200's"),
    matmul_share=Figure(1769 / 2250, "1", f"{_MATMULS}: 1769 of 2250"),
    memory_rate=Figure(8.0e12, "B/s", f"{_ENGINEERING}, compute/accelerator, table of memory: 8.00 TB/s"),
    network=Figure(100e9, "B/s", "datasheet: NVIDIA DGX B300, one 800 Gb/s adapter per GPU"),
)

_GB200 = _based_on(
    _B200,
    "assumed as the B200, the same generation of cores and links",
    name="NVIDIA GB200 186GB",
    memory=Figure(184.31 * GiB, "B", f"{_CAPACITY} on an NVIDIA GB200: 184.31 GiB"),
    matmul=Figure(
        2500e12, "FLOP/s", "datasheet: NVIDIA GB200 NVL72, 5 PFLOP/s per GPU with sparsity, half when dense"
    ),
    matmul_share=Figure(1822 / 2500, "1", f"{_MATMULS}: 1822 of 2500"),
    host_link=Figure(
        450e9, "B/s", f"{_ENGINEERING}, network, NVLink-C2C: Grace and Blackwell, 450 GB/s each direction"
    ),
    host_link_share=Figure(
        359.05 / 450,
        "1",
        f"{_ENGINEERING}, network, NVLink-C2C, nvbandwidth to the device: 359.05 GB/s; assumed, for it is "
        "half of a GB300, whose host memory no second GPU uses",
    ),
)

# ---- AMD ---------------------------------------------------------------------------------------------------

_AITER = "ROCm/aiter, op_tests/cpp/mha/README.md, MI300X, bf16, causal, 16k, 64 and 8 heads"

_MI300X = Hardware(
    name="AMD Instinct MI300X 192GB",
    memory=Figure(196592 * MiB, "B", "ROCm/ROCm issue 4203, torch device properties: total_memory=196592MB"),
    matmul=Figure(1307.4e12, "FLOP/s", "datasheet: AMD Instinct MI300X, bf16 without sparsity"),
    matmul_share=Figure(668.4 / 1307.4, "1", f"{_MATMULS}: 668.4 of 1300"),
    attention_forward=Figure(541.55e12, "FLOP/s", f"{_AITER}: 541.55 TFLOP/s"),
    attention_backward=Figure(412.04e12, "FLOP/s", f"{_AITER}, sums in fp32: 412.04 TFLOP/s"),
    memory_rate=Figure(5.3e12, "B/s", "datasheet: AMD Instinct MI300X"),
    memory_share=Figure(4.2 / 5.3, "1", "ROCm/ROCm issue 5070, roofline of an MI300X: 4.2 TB/s"),
    link=Figure(
        448e9, "B/s", "datasheet: AMD Instinct MI300X platform, Infinity Fabric, 64 GB/s to each of 7 GPUs"
    ),
    link_share=Figure(
        312.912 / 448, "1", f"{_ENGINEERING}, network: all-reduce of 4 GiB on 8 x MI300X, 312.912 of busbw"
    ),
    network=_from("assumed as the H100", _H100.network),
    network_share=_from("assumed as the H100", _H100.network_share),
    host_link=Figure(64e9, "B/s", "datasheet: AMD Instinct MI300X, PCIe Gen5 x16, one direction"),
    host_link_share=_from("assumed from the H100, PCIe Gen5 too", _H100.host_link_share),
)

# ---- without NVLink: the GPUs of a node talk over PCIe -----------------------------------------------------

_MATMUL_REPORTS = "zzc0721/torch-performance-test-data"
_TVM = "apache/tvm, tl_doc/flash_perf.md, FlashAttention-2 on an RTX 4090, fp16, causal, 2k"

_RTX5090_NCCL = Figure(
    28 / 64,
    "1",
    "NVIDIA/nccl issue 1639: all-reduce on 8 x RTX 5090, 28 GB/s of busbw",
)

_RTX4090 = Hardware(
    name="NVIDIA GeForce RTX 4090 24GB",
    memory=Figure(23.64 * GiB, "B", f"{_CAPACITY} on an RTX 4090, ali-vilab/VGen issue 104: 23.64 GiB"),
    matmul=Figure(
        165.2e12, "FLOP/s", "NVIDIA Ada GPU architecture whitepaper: RTX 4090, bf16 summed in fp32, dense"
    ),
    matmul_share=Figure(158.54 / 165.2, "1", f"{_MATMUL_REPORTS} issue 78, bf16, 10240 squared: 158.54"),
    attention_forward=Figure(151.19e12, "FLOP/s", f"{_TVM}: 151.19 TFLOP/s"),
    attention_backward=Figure(99.23e12, "FLOP/s", f"{_TVM}: 99.23 TFLOP/s"),
    memory_rate=Figure(1008e9, "B/s", "NVIDIA Ada GPU architecture whitepaper: RTX 4090, GDDR6X"),
    memory_share=_from("assumed from the A100", _A100.memory_share),
    link=Figure(32e9, "B/s", "NVIDIA Ada GPU architecture whitepaper: RTX 4090, PCIe Gen4 x16; no NVLink"),
    link_share=_from("assumed as the RTX 5090, PCIe too", _RTX5090_NCCL),
    network=Figure(1.25e9, "B/s", "assumed: 10 Gb/s Ethernet per GPU, as on the mainboard of a workstation"),
    network_share=_from("assumed from NDR", _H100.network_share),
    host_link=Figure(32e9, "B/s", "NVIDIA Ada GPU architecture whitepaper: RTX 4090, PCIe Gen4 x16"),
    host_link_share=_from("assumed from the A100, PCIe Gen4 too", _A100.host_link_share),
)

_RTX5090 = _based_on(
    _RTX4090,
    "assumed as the RTX 4090",
    name="NVIDIA GeForce RTX 5090 32GB",
    memory=Figure(
        31.36 * GiB,
        "B",
        f"{_CAPACITY} on an RTX 5090, issue 20 of TrajectoryCrafter: 31.36 GiB",
    ),
    matmul=Figure(
        209.5e12, "FLOP/s", "NVIDIA RTX Blackwell whitepaper: RTX 5090, bf16 summed in fp32, dense"
    ),
    matmul_share=Figure(
        178.86 / 209.5,
        "1",
        f"{_MATMUL_REPORTS} issue 200, bf16, 10240 squared: 178.86; cards with higher clocks pass the peak",
    ),
    attention_forward=Figure(
        186.73e12,
        "FLOP/s",
        "gau-nernst's blog, flash attention for 5090: torch's flash kernel, 4k by 8k; assumed for causal",
    ),
    attention_backward=Figure(
        186.73e12 * 99.23 / 151.19,
        "FLOP/s",
        f"assumed: its forward's rate, times backward over forward of the RTX 4090: {_TVM}",
    ),
    memory_rate=Figure(1792e9, "B/s", "NVIDIA RTX Blackwell whitepaper: RTX 5090, GDDR7"),
    link=Figure(64e9, "B/s", "NVIDIA RTX Blackwell whitepaper: RTX 5090, PCIe Gen5 x16; no NVLink"),
    link_share=_RTX5090_NCCL,
    host_link=Figure(64e9, "B/s", "NVIDIA RTX Blackwell whitepaper: RTX 5090, PCIe Gen5 x16"),
    host_link_share=_from("assumed from the H100, PCIe Gen5 too", _H100.host_link_share),
)

_L40S = _based_on(
    _RTX4090,
    "assumed as the RTX 4090, the same generation of cores and the same PCIe",
    name="NVIDIA L40S 48GB",
    memory=Figure(45589 * MiB, "B", "torch device properties of an L40S, total_memory=45589MB"),
    matmul=Figure(362e12, "FLOP/s", "datasheet: NVIDIA L40S, 733 TFLOP/s with sparsity, half when dense"),
    matmul_share=_from("assumed from the H100", _H100.matmul_share),
    attention_forward=_from("assumed as the A100", _A100.attention_forward),
    attention_backward=_from("assumed as the A100", _A100.attention_backward),
    memory_rate=Figure(864e9, "B/s", "datasheet: NVIDIA L40S, GDDR6"),
    link=Figure(32e9, "B/s", "datasheet: NVIDIA L40S, PCIe Gen4 x16, 64 GB/s both directions; no NVLink"),
    link_share=_from("assumed from its copies to the host", _A100.host_link_share),
    network=_from("assumed as the A100", _A100.network),
    host_link=Figure(32e9, "B/s", "datasheet: NVIDIA L40S, PCIe Gen4 x16, 64 GB/s both directions"),
)

HARDWARE = {
    "a100": _A100,
    "h100": _H100,
    "h200": _H200,
    "gh200": _GH200,
    "b200": _B200,
    "b300": _B300,
    "gb200": _GB200,
    "mi300x": _MI300X,
    "l40s": _L40S,
    "rtx4090": _RTX4090,
    "rtx5090": _RTX5090,
}
"""The devices by short name."""

_OTHER_CHIPS = {"d", "laptop"}
"""Words after which the name of a GeForce means another chip than without them."""


def hardware(name: str) -> Hardware:
    """The device of this name.

    Raises:
        LabError: a name that is not in the table, and those that are.
    """
    if name not in HARDWARE:
        raise LabError(f"no device named {name!r}: the table has {', '.join(sorted(HARDWARE))}")
    return HARDWARE[name]


def nearest(torch_name: str) -> str:
    """The short name of the device that torch calls ``torch_name``; the slowest device's if it is unknown."""
    return of_name(torch_name) or min(HARDWARE, key=lambda name: HARDWARE[name].matmul.value)


def of_name(torch_name: str) -> str | None:
    """The short name of the device that torch calls ``torch_name``; None if it is not in the table.

    Words are compared, for a part of a name is often the name of another device: GB200 and B200.
    """
    words = torch_name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    if _OTHER_CHIPS & {*words}:
        return None
    return next((name for name in HARDWARE if name in words), None)


def make_machine(
    *,
    device: str = Machine.device,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ranks_per_node: int = 8,
    workspace: bool = True,
    disk: int | str | None = None,
    disk_rate: int | str | None = None,
) -> Machine:
    """Read the sizes, which may be texts such as "80GiB"; that of a disk, "4TB", and its rate, "3GB/s".

    Without ``device_memory``, a device has the memory that the table says.

    Raises:
        LabError: a device that is not in the table; a size that cannot be read, or ranks that are no count; a
            rate of no disk.
    """
    check_counts({"ranks_per_node": ranks_per_node})
    of_table = int(hardware(device).memory.value)
    device_bytes = of_table if device_memory is None else parse_bytes(device_memory)
    host_bytes = None if host_memory is None else parse_bytes(host_memory)
    if disk_rate is not None and disk is None:
        raise LabError(f"disk_rate={disk_rate!r} without a disk: give its size too, such as disk=4TB")
    rate = None if disk_rate is None else parse_rate(disk_rate)
    given = None if disk is None else Disk(parse_disk(disk), rate)
    return Machine(device, device_bytes, host_bytes, ranks_per_node, workspace, given)
