"""Ranks of one process group, as ipyparallel engines; knows nothing of what runs on them."""

from typing import TYPE_CHECKING, Any

from cluster.errors import ClusterError, RankError
from cluster.live import publish

if TYPE_CHECKING:
    from cluster.ranks import Cluster

__all__ = ["Cluster", "ClusterError", "RankError", "publish"]


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext cluster`: gives a notebook the `%%ranks` cell."""
    from cluster.magic import load

    load(shell)


def __getattr__(name: str) -> Any:
    """Import `Cluster`, and torch and ipyparallel with it, when it is first asked for."""
    if name == "Cluster":
        from cluster.ranks import Cluster

        return Cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
