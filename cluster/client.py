"""The ipyparallel client, with everything the ranks say put into one queue for the thread that waits."""

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import ipyparallel
from ipyparallel.serialize import deserialize_object

from cluster.live import DATA_KEY
from cluster.remote import run


@dataclass(frozen=True)
class Published:
    """A record or end marker from a rank, still pickled."""

    data: bytes


@dataclass(frozen=True)
class Returned:
    """A rank's call has come to its end: `call` holds a cluster.remote.Answer or raises."""

    run: str
    rank: int
    call: Any


class RankClient(ipyparallel.Client):  # type: ignore[misc]
    """A client whose io thread does nothing but fill `inbox`."""

    inbox: SimpleQueue[Published | Returned]

    def create_message_futures(self, *args: Any, **kwargs: Any) -> Any:
        """Listen to what a message's task publishes from before the message is sent."""
        futures = super().create_message_futures(*args, **kwargs)
        futures[0].iopub_callbacks.append(self._on_iopub)
        return futures

    def _on_iopub(self, message: dict[str, Any]) -> None:
        if message["header"]["msg_type"] == "data_message":
            data, _ = deserialize_object(message["buffers"])
            if DATA_KEY in data:
                self.inbox.put(Published(data[DATA_KEY]))

    def forget(self, rank: int) -> None:
        """Have the controller take `rank`, whose process is gone, off its list."""
        self._send(self._query_stream, "unregistration_request", content={"id": rank})

    def send(self, rank: int, payload: bytes, run_id: str) -> None:
        """Have `rank` run a payload of cluster.remote.run; what comes of it arrives in `inbox`."""
        call = self[rank].apply_async(run, payload, run_id, rank)
        call.add_done_callback(lambda done: self.inbox.put(Returned(run_id, rank, done)))

    def signal(self, rank: int, number: int) -> None:
        """Have the nanny of `rank` send it a signal, on whatever machine it is; no answer is waited for."""
        (ident,), _ = self._build_targets(rank)
        self._send(self._control_stream, "signal_request", content={"sig": int(number)}, ident=ident)
