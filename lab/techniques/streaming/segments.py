"""Segments: of several streamed layers in a row, only the input of the first is kept for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lab.techniques.host_tiles import HostTiles
from lab.techniques.streaming.passes import Positions, StreamedLayer, run_stages, run_tail
from lab.techniques.streaming.tensors import HostTensors


class Segment:
    """The tensors that the layers of one segment keep for the backward of one forward pass.

    Args:
        keeps_outputs: Whether each layer keeps the outputs of its heads and the LSEs, so that its attention
            is not computed again.
    """

    def __init__(self, keeps_outputs: bool) -> None:
        self._keeps_outputs = keeps_outputs
        self._layers: list[StreamedLayer] = []
        # Their cosines and sines may be others in each layer.
        self._positions: list[Positions] = []
        self._inputs: list[HostTiles | None] = []
        self._tensors: list[HostTensors | None] = []

    def __len__(self) -> int:
        """Return the number of layers that have run forward."""
        return len(self._layers)

    def keep(self, layer: StreamedLayer, x: Tensor, positions: Positions, tensors: HostTensors) -> None:
        """Keep what backward needs of the next layer: of the first one, start to send x to the host.

        The caller keeps x until it is sent.
        """
        kept = None
        if not self._layers:
            kept = tensors.new_input()
            kept.write_all(x)
        tensors.x = None
        self._layers.append(layer)
        self._positions.append(positions)
        self._inputs.append(kept)
        self._tensors.append(tensors if self._keeps_outputs else None)

    def prepare(self, place: int) -> HostTensors:
        """Return the tensors of a layer for its backward: its input, the outputs of its heads, and the LSEs.

        The last layer of a segment, whose backward runs first, runs all of the segment forward again.
        """
        for i, layer in enumerate(self._layers[: place + 1]):
            if self._tensors[i] is not None and (i == place or self._inputs[i + 1] is not None):
                continue
            with _whole_parameters(layer.parts.module, gathered=i == place):
                self._run_again(i, layer, last=i == place)
        tensors = self._tensors[place]
        assert tensors is not None
        tensors.x = self._inputs[place]
        return tensors

    def release(self, place: int) -> None:
        """Drop the tensors of a layer whose backward has run."""
        self._inputs[place] = self._tensors[place] = None

    def _run_again(self, i: int, layer: StreamedLayer, *, last: bool) -> None:
        """Compute a layer's outputs of its heads, and unless it is the last one, the next layer's input."""
        x = self._inputs[i]
        assert x is not None
        tensors = self._tensors[i] or run_stages(layer, x, self._positions[i])
        tensors.x = x
        self._tensors[i] = tensors
        if not last:
            following = self._inputs[i + 1] = tensors.new_input()
            run_tail(layer, tensors, following)


@contextmanager
def _whole_parameters(module: nn.Module, *, gathered: bool) -> Iterator[None]:
    """Gather the parameters of a layer of FSDP for the block, unless its backward has gathered them.

    The hooks of FSDP gather the parameters of the layer whose backward runs, and of no other.
    """
    if gathered or not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
