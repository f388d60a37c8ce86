"""What the bytes of a timeline are for."""

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "recomputed activations",
    "gradients of activations",
    "temporary buffers",
    "other",
)
"""What device bytes are for, in the order in which figures stack them.

- *parameters*, *gradients* and *optimizer* are the model's state, sharded or whole, and its copies.
- *activations* outlive the module in whose forward they were made, or come back from the host;
  *recomputed activations* outlive it too, where backward runs that forward again.
- *gradients of activations* outlive the autograd node in whose backward they were made.
- *temporary buffers* are freed by the module or the node that made them.
- *other* is what no tensor holds: workspaces of kernels, and what CUDA and NCCL take.

A storage has one category from the time at which it is made until it is freed: what it turns out to be.
"""

OTHER = CATEGORIES.index("other")

HOST = len(CATEGORIES)
"""The category of storages in host memory, after those of the device."""

DISK = HOST + 1
"""The category of storages in a mapped file on a disk, after host memory."""

MEMORIES = (*CATEGORIES, "host", "disk")
"""The names of all categories of storages."""
