"""Dispatch modes that observe the operators of a block."""

from collections import Counter
from typing import Any, ClassVar

from torch.utils._python_dispatch import TorchDispatchMode

from lab.memory.categories import HOST
from lab.memory.meter import Meter


class Calls(TorchDispatchMode):
    """Counts the operators that are called: ``with Calls() as calls: ...; calls["aten.mm"]``.

    Three of them have a shorter name: ``calls["all_to_all"]``.
    """

    NAMES: ClassVar[dict[str, str]] = {
        "all_to_all": "c10d.alltoall_base_",
        "attention forward": "aten._scaled_dot_product_flash_attention_for_cpu",
        "attention backward": "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __getitem__(self, name: str) -> int:
        assert name in self.NAMES or "." in name
        return self.counts[self.NAMES.get(name, name)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


class TransfersAndAttention(TorchDispatchMode):
    """Lists the transfers to and from the host and the attention operators, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("lab::to_host", "lab::from_host") or "flash_attention_for_cpu" in func.name():
            self.order.append(func.name().removeprefix("lab::").removeprefix("aten::_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


class BytesAtAttention(TorchDispatchMode):
    """Lists the device bytes of the meter around it after each forward of attention."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu":
            self.seen.append(sum(self.meter._bytes[:HOST]))
        return result
