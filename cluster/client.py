"""The ipyparallel client. It puts every message of the ranks into one queue, for the thread that waits."""

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import ipyparallel
from ipyparallel.serialize import deserialize_object

from cluster.live import DATA_KEY
from cluster.remote import run


@dataclass(frozen=True)
class RecordMessage:
    """A record or an end marker from a rank.

    Attributes:
        data: The pickled pair of stamp and record.
    """

    data: bytes


@dataclass(frozen=True)
class AnswerMessage:
    """The end of a call on one rank.

    Attributes:
        call_id: The id of the call.
        rank: The rank that ended it.
        result: The future of ipyparallel. It holds a `cluster.remote.Answer`, or raises an error.
    """

    call_id: str
    rank: int
    result: Any


@dataclass(frozen=True)
class OutputMessage:
    """A sign that a rank has printed something."""


Message = RecordMessage | AnswerMessage | OutputMessage


class RankClient(ipyparallel.Client):  # type: ignore[misc]
    """A client whose thread for input and output does nothing but fill `inbox`."""

    inbox: SimpleQueue[Message]

    def create_message_futures(self, *args: Any, **kwargs: Any) -> Any:
        """Make the futures of a message, and listen for records and output before the message is sent."""
        futures = super().create_message_futures(*args, **kwargs)
        futures[0].iopub_callbacks.append(self._on_iopub)
        return futures

    def _on_iopub(self, message: dict[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        if kind == "stream":
            self.inbox.put(OutputMessage())
        elif kind == "data_message":
            data, _ = deserialize_object(message["buffers"])
            if DATA_KEY in data:
                self.inbox.put(RecordMessage(data[DATA_KEY]))

    def forget(self, rank: int) -> None:
        """Ask the controller to remove `rank`, whose process is gone, from its list."""
        self._send(self._query_stream, "unregistration_request", content={"id": rank})

    def send(self, rank: int, payload: bytes, call_id: str) -> None:
        """Send a payload of `cluster.remote.run` to `rank`. Its records and its answer arrive in `inbox`."""
        future = self[rank].apply_async(run, payload, call_id, rank)
        future.add_done_callback(lambda result: self.inbox.put(AnswerMessage(call_id, rank, result)))

    def signal(self, rank: int, number: int) -> None:
        """Ask the nanny of `rank`, on any host, to send it a signal. Does not wait for an answer."""
        (ident,), _ = self._build_targets(rank)
        self._send(self._control_stream, "signal_request", content={"sig": int(number)}, ident=ident)
