"""The tensors of a streamed layer in host memory, which its stages read and write.

Letters: b rows, s tokens of one rank, t tokens of a tile, E hidden size, H query heads, K key/value heads, D
head_dim, C ranks in the Ulysses group, n query heads of a rank in a stage, m slots in memory (a slot is one
of the key/value heads that a rank attends to).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.techniques.attention.kernel import Gradients
from lab.techniques.host_tiles import WRITTEN, HostTiles, TileCopiers, read_tiles
from lab.techniques.host_transfer import HostTensor
from lab.techniques.rope import rotate_
from lab.techniques.slices import slices
from lab.techniques.upipe.schedule import Stage
from lab.techniques.upipe.settings import LayerSettings


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamedLayer(LayerSettings):
    """A decoder layer and how it is streamed.

    Attributes:
        tile: The tokens of a tile.
        copiers: Make the copies from and to the host.
        keeps_outputs: Whether the outputs of the heads and the LSEs are kept from forward to backward, so
            that attention is not computed again.
    """

    tile: int
    copiers: TileCopiers
    keeps_outputs: bool


class HostTensors:
    """The tensors of one layer in one pass: a ``LayerTensors`` in host memory.

    The heads of a stage are in one tensor [C, b, s, n, D]. In backward, dq is written over the outputs: those
    of a stage are not needed after that stage.

    Attributes:
        shape: b and s.
        outputs: The outputs of each stage's query heads, and in backward their dq.
        output_grads: The gradients of these outputs. Those of a stage are freed when the stage has read them.
        slot_grads: The gradients of the rotated keys, and of the values, of each set of slots.

    Args:
        layer: The layer.
        x: The input of the layer, [b, s, E], on the device or on the host. From forward to backward the
            attribute is None.
    """

    def __init__(self, layer: StreamedLayer, x: Tensor | HostTiles) -> None:
        self.layer = layer
        self.x: Tensor | HostTiles | None = x
        self.shape = (x.shape[0], x.shape[1])
        self._input_shape = tuple(x.shape)
        self._like = torch.empty(0, dtype=x.dtype, device=x.device)
        self.outputs: dict[Stage, HostTiles] = {}
        self.output_grads: dict[Stage, HostTiles] = {}
        self.slot_grads: list[tuple[HostTiles, HostTiles]] = []
        self.lses: list[HostTensor] = []

    # ---- what the stages call --------------------------------------------------------------------------

    def input_tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token of each tile, and the normalized input of the tile, [b, t, E]."""
        for start, x, _ in self.tiles():
            yield start, self.layer.parts.normalize(0, x)

    def write_outputs(self, stage: Stage, outputs: Tensor) -> None:
        """Copy the outputs of the stage's query heads to the host."""
        self.outputs[stage] = self._send(outputs)

    def read_output_grads(self, stage: Stage, target: Tensor) -> None:
        """Copy the gradients of the stage's outputs to ``target``, and free them on the host."""
        _read(self.output_grads.pop(stage), target)

    def read_outputs(self, stage: Stage, target: Tensor) -> None:
        """Copy the outputs of the stage's query heads to ``target``."""
        _read(self.outputs[stage], target)

    def write_query_grads(self, stage: Stage, dq: Tensor, scratch: Tensor) -> None:
        """Copy the gradient of the stage's rotated queries to the host, over the stage's outputs."""
        del scratch
        self.outputs[stage].write_all(dq)
        self.outputs[stage].wait_until_written()

    def write_slot_grads(self, slots: range, dk: Tensor, dv: Tensor, scratch: Tensor) -> None:
        """Copy the gradients of the slots' rotated keys, and of their values, to the host."""
        del slots, scratch
        self.slot_grads.append((self._send(dk), self._send(dv)))

    def _send(self, heads: Tensor) -> HostTiles:
        tiles = HostTiles(self.layer.copiers, heads.shape, heads, dim=2, tile=self.layer.tile)
        tiles.write_all(heads)
        tiles.wait_until_written()
        return tiles

    # ---- tiles of the layer's input, with the heads of all stages ---------------------------------------

    def tiles(self, *more: HostTiles, different: int = 1) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
        """Yield the first token of each tile, the input of the tile [b, t, E], and the tiles of ``more``.

        Args:
            *more: Tensors with as many tokens, in tiles of one length.
            different: See ``slices``.
        """
        assert self.x is not None
        if isinstance(self.x, HostTiles):
            for start, _, (x, *rest) in read_tiles(self.x, *more, different=different):
                yield start, x, rest
        elif more:
            for start, length, rest in read_tiles(*more, different=different):
                yield start, self.x.narrow(1, start, length), rest
        else:
            for start, length in slices(self.shape[1], self.layer.tile, different=different):
                yield start, self.x.narrow(1, start, length), []

    def output_tiles(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each tile's first token, its input [b, t, E] and the outputs of all its heads [b, t, H*D].

        What the caller computes from them, it may write to the host.
        """
        for start, x, parts in self.tiles(*self.outputs.values(), different=WRITTEN):
            yield start, x, self._join_stages(parts)

    def gradient_tiles(self, tables: tuple[Tensor, Tensor]) -> Iterator[tuple[int, Tensor, Gradients]]:
        """Yield the first token of each tile, its input, and the gradients of the projected q, k and v.

        They are [b, t, E], [b, t, H*D] and [b, t, K*D]. The rotation by ``tables`` is undone.
        """
        stages, pairs = len(self.outputs), len(self.slot_grads)
        keys, values = zip(*self.slot_grads, strict=True)
        for start, x, parts in self.tiles(*self.outputs.values(), *keys, *values):
            dq = self._join_stages(parts[:stages])
            dk, dv = _join_slots(parts[stages : stages + pairs]), _join_slots(parts[stages + pairs :])
            cos, sin = (t.narrow(1, start, x.shape[1]) for t in tables)
            for grad in (dq, dk):
                heads = grad.unflatten(-1, (-1, self.layer.head_dim))
                rotate_(heads, cos, sin, rotation=self.layer.parts.rotation, transposed=True)
            yield start, x, (dq, dk, dv)

    def allocate_output_grads(self) -> None:
        """Allocate the memory of ``output_grads`` on the host."""
        for stage, outputs in self.outputs.items():
            self.output_grads[stage] = HostTiles(
                self.layer.copiers, outputs.shape, self._like, dim=2, tile=self.layer.tile
            )

    def write_output_grads(self, start: int, grads: Tensor) -> None:
        """Start the copy of a tile of the gradients of all heads' outputs, [b, t, H*D], to the host."""
        for stage, target in self.output_grads.items():
            part = grads.new_empty(target.tile_shape(grads.shape[1]))
            self.layer.heads.read_columns(grads, stage, part)
            target.write(start, part)

    def new_input(self) -> HostTiles:
        """Return host memory for a tensor of the shape of the input."""
        return HostTiles(self.layer.copiers, self._input_shape, self._like, dim=1, tile=self.layer.tile)

    def _join_stages(self, parts: Iterable[Tensor]) -> Tensor:
        """Join the heads of all stages, [C, b, t, n, D] each, to [b, t, H*D] in the order of the model."""
        parts = list(parts)
        _, b, t, _, head_dim = parts[0].shape
        full = parts[0].new_empty(b, t, self.layer.schedule.heads * head_dim)
        for stage, part in zip(self.outputs, parts, strict=True):
            self.layer.heads.write_columns(full, stage, part)
        return full


def _read(source: HostTiles, target: Tensor) -> None:
    for start, length, (tile,) in read_tiles(source):
        target.narrow(2, start, length).copy_(tile)


def _join_slots(parts: list[Tensor]) -> Tensor:
    """Join the slots of all head groups, [C/replicas, b, t, m, D] each, to [b, t, K*D]."""
    in_order = [part.permute(1, 2, 3, 0, 4) for part in parts]
    return torch.cat(in_order, 2).flatten(2)
