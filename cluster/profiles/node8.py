"""The eight GPUs of one node: a rank each, near its GPU's NUMA node, with allocator and NCCL set for them."""

from dataclasses import dataclass

from cluster.errors import ClusterError
from cluster.profiles.base import option
from cluster.profiles.local import Local

NODE_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Node8(Local):
    """Up to eight ranks of one node, a GPU each; without GPUs, CPU ranks with the same settings."""

    name = "node8"
    where = "one node of 8 GPUs, which you are logged in to"

    numa: bool = option(True, "bind each rank to the cores of its GPU's NUMA node: offload crosses no socket")
    allocator: str = option(
        "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
        "PYTORCH_ALLOC_CONF: segments that grow, as tiles of many sizes fragment fixed ones; host "
        "memory that eight threads a rank touch before it is pinned, for all ranks pin in the first step",
    )
    nvls: bool = option(
        False,
        "NCCL_NVLS_ENABLE: NVLink SHARP speeds up all-reduces, which long contexts hardly use, "
        "and takes device memory outside torch's view for each group",
    )
    infiniband: bool = option(
        False, "NCCL_IB_DISABLE=1 when off: on one node everything goes over NVLink, no adapter is asked"
    )

    def check_ranks(self, ranks: int) -> None:
        """Raise ClusterError unless the node has room for so many."""
        if ranks > NODE_RANKS:
            raise ClusterError(
                f"ranks={ranks}: profile {self.name!r} is one node of {NODE_RANKS}; ranks={NODE_RANKS} would "
                "work, or profile='slurm', 'mpi' or 'ssh' over several nodes"
            )
        super().check_ranks(ranks)

    def settings(self) -> dict[str, str]:
        """Return the variables that every rank gets."""
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "PYTORCH_ALLOC_CONF": self.allocator,
            "NCCL_NVLS_ENABLE": str(int(self.nvls)),
            "NCCL_IB_DISABLE": str(int(not self.infiniband)),
            **super().settings(),
        }

    def reasons(self) -> dict[str, str]:
        """Return why each of them is set."""
        return {
            "CUDA_DEVICE_ORDER": "device numbers are nvidia-smi's, by which NUMA nodes are looked up",
            "PYTORCH_ALLOC_CONF": "segments that grow, as tiles of many sizes fragment fixed ones; "
            "and threads that pin host memory, for all ranks pin in the first step",
            "NCCL_NVLS_ENABLE": "NVLink SHARP would take device memory outside torch's view",
            "NCCL_IB_DISABLE": "one node needs no network adapter",
        }
