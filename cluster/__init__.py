"""The ranks of one process group, as engines of ipyparallel. This package imports nothing of `lab`."""

from typing import TYPE_CHECKING, Any

from cluster.errors import ClusterError, RankError
from cluster.live import publish

if TYPE_CHECKING:
    from cluster.ranks import Cluster

__all__ = ["Cluster", "ClusterError", "RankError", "publish"]


def load_ipython_extension(shell: Any) -> None:
    """Register the `%%ranks` cell magic. IPython calls this function for `%load_ext cluster`."""
    from cluster.magic import load

    load(shell)


def __getattr__(name: str) -> Any:
    """Import `Cluster` when it is first used, because torch and ipyparallel are imported with it."""
    if name == "Cluster":
        from cluster.ranks import Cluster

        return Cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
