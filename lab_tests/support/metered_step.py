"""A step of two linear layers under a meter."""

from typing import Any

import torch
from torch import Tensor, nn

FP32 = 4
"""Bytes of a number."""


class TwoLayers(nn.Module):
    """x [11, 5] -> relu(x W1^T) W2^T, W1 [7, 5], W2 [3, 7]: no two sizes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.second = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


def metered_step(meter: Any, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    with meter.measure(model, optimizer):
        with meter.phase("forward"):
            loss = model(x).sum()
        with meter.phase("backward"):
            loss.backward()
        with meter.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
