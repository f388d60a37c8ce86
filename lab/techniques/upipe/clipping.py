"""The gradient of projections whose outputs are clipped, for stages that compute a few heads at a time."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from lab.techniques.slices import slices


def clip_backward_(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, *, clip: float, part: int
) -> None:
    """Set the gradient of a clipped projection to zero where its output was clipped.

    The output is computed again, a part of the tokens after the other.

    Letters: b rows, s tokens of one rank, E hidden size, N outputs of the projection.

    Args:
        x: The input of the projection, [b, s, E].
        weight: The weight of the projection, [N, E].
        bias: Its bias, [N], or None.
        grad: The gradient of the clipped output, [b, s, N].
        clip: The largest absolute value that is not clipped.
        part: How many tokens are computed at once.
    """
    for start, length in slices(x.shape[1], part):
        raw = linear(x.narrow(1, start, length), weight, bias)
        grad.narrow(1, start, length).masked_fill_(raw.abs_() > clip, 0.0)
        # Free this part before the next one is computed.
        del raw
