"""The eight GPUs of one node, with one rank for each, and settings of the allocator and NCCL for them."""

from dataclasses import dataclass

from cluster.environment import Variable
from cluster.errors import ClusterError
from cluster.profiles.base import NODE_RANKS, option
from cluster.profiles.local import Local


@dataclass(frozen=True, kw_only=True)
class Node8(Local):
    """Runs up to eight ranks on one node, each with a GPU. Without GPUs, CPU ranks have the same settings.

    Attributes:
        numa: Whether each rank is bound to the cores of its GPU's NUMA node.
        allocator: The settings of torch's allocator.
        nvls: Whether NCCL uses NVLink SHARP.
        infiniband: Whether NCCL uses InfiniBand.
    """

    name = "node8"
    where = "one node of 8 GPUs, which you are logged in to"

    numa: bool = option(
        True, "bind each rank to the cores of its GPU's NUMA node, so that offload crosses no socket"
    )
    allocator: str = option(
        "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
        "PYTORCH_ALLOC_CONF: segments that grow, because tiles of many sizes fragment fixed segments; and "
        "eight threads a rank that pin host memory, because all ranks pin it in the first step",
    )
    nvls: bool = option(
        False,
        "NCCL_NVLS_ENABLE: NVLink SHARP speeds up all-reduces, which long contexts hardly use, "
        "and takes device memory for each group that torch does not see",
    )
    infiniband: bool = option(
        False,
        "NCCL_IB_DISABLE=1 when false: on one node all traffic goes over NVLink, without a network adapter",
    )

    def check_ranks(self, ranks: int) -> None:
        """Check that one node has enough GPUs.

        Raises:
            ClusterError: There are more ranks than a node has GPUs, or than this machine can run.
        """
        if ranks > NODE_RANKS:
            raise ClusterError(
                f"ranks={ranks}: profile {self.name!r} is one node of {NODE_RANKS}; ranks={NODE_RANKS} would "
                "work, or profile='slurm', 'mpi' or 'ssh' over several nodes"
            )
        super().check_ranks(ranks)

    def settings(self) -> list[Variable]:
        """Return the environment variables of every rank. The field of each has the longer reason."""
        order = "the device numbers of nvidia-smi, by which the NUMA nodes are looked up"
        return [
            Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", order),
            Variable("PYTORCH_ALLOC_CONF", self.allocator, "see the field allocator"),
            Variable("NCCL_NVLS_ENABLE", str(int(self.nvls)), "see the field nvls"),
            Variable("NCCL_IB_DISABLE", str(int(not self.infiniband)), "see the field infiniband"),
            *super().settings(),
        ]
