"""Segments: of several streamed layers in a row, only the input of the first is kept for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lab.techniques.host_tiles import HostTiles
from lab.techniques.streaming.passes import Tables, run_stages, run_tail
from lab.techniques.streaming.tensors import HostTensors, StreamedLayer


@dataclass(eq=False)
class LayerRun:
    """One forward pass of a layer, and what its backward needs of it.

    Attributes:
        layer: The layer, with the documents of this pass.
        tables: Those of the positions, which may be others in each layer.
        before: The passes of the layers before it in its segment, in order.
        awaits_backward: Whether a backward follows, and has not begun.
        x: The input, on the host; None if it is computed again, from that of the layer before it.
        tensors: The outputs of the heads and the LSEs; None if they are computed again.
    """

    layer: StreamedLayer
    tables: Tables
    before: tuple[LayerRun, ...]
    awaits_backward: bool
    x: HostTiles | None = None
    tensors: HostTensors | None = None

    def keep(self, x: Tensor, tensors: HostTensors) -> None:
        """Keep what backward needs: if this layer is the first of its segment, start to send x to the host.

        The caller keeps x until it is sent.
        """
        tensors.x = None
        if not self.before:
            self.x = tensors.new_input()
            self.x.write_all(x)
        if self.layer.keeps_outputs:
            self.tensors = tensors

    def prepare(self) -> HostTensors:
        """Return the tensors for the backward: the input, the outputs of the heads, and the LSEs.

        The last layer of a segment, whose backward runs first, runs all of the segment forward again.
        """
        for run, following in pairwise((*self.before, self)):
            if following.x is None:
                # The hooks of FSDP gather the parameters of the layer whose backward runs, and of no other.
                with _whole_parameters(run.layer.parts.module):
                    tensors = run.run_again()
                    following.x = tensors.new_input()
                    run_tail(tensors, following.x)
        return self.run_again()

    def run_again(self) -> HostTensors:
        """Compute the outputs of the heads and the LSEs from the input, unless they are there."""
        assert self.x is not None
        if self.tensors is None:
            self.tensors = run_stages(self.layer, self.x, self.tables)
        self.tensors.x = self.x
        return self.tensors

    def release(self) -> None:
        """Drop the tensors, when backward has run."""
        self.x = self.tensors = None


@contextmanager
def _whole_parameters(module: nn.Module) -> Iterator[None]:
    """Gather the parameters of a layer of FSDP for the block."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
