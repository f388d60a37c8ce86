"""``torch.compile`` of norms and MLPs: fused operators read and write memory once, and not once each."""

from __future__ import annotations

import shutil

import torch
from torch import Tensor, nn

from lab.decoder import Patch, decoder_of
from lab.errors import RecipeError
from lab.torch_private import get_current_dispatch_mode


def apply_compiled(model: nn.Module, *, mlps: bool) -> None:
    """Compile the forward of every norm over the hidden size, and with ``mlps`` of every MLP.

    Each of these modules maps [b, t, E] to [b, t, E]: b rows, t tokens (of a tile if it is tiled), and
    hidden size E.

    Under a meter and in a plan, the module's own forward runs instead, because a compiled function does not
    show its operators. The bytes are then those of a step without compilation.

    Saves:
        Passes over memory. The eight operators of a norm become one kernel, and so do the activation and the
        product in an MLP. Matrix products do not change. ``lab bench compile`` measures one tile on this
        machine.
    Costs:
        Seconds in the first step, once for each shape and machine. Rounding differs: inside a fused kernel,
        intermediate results are not rounded to the compute dtype. Torch compiles the forward of a class at
        most eight times per process (for new shapes, dtypes, or with and without gradients), which is enough
        for about three models. After that, torch prints a warning and runs the forward uncompiled.
    Source:
        Ansel et al., "PyTorch 2" (ASPLOS 2024): TorchDynamo and TorchInductor.
    Composes with:
        Tiling, applied after, so that a tile runs compiled code; and every technique that is applied later.

    Raises:
        RecipeError: There is no compiler. Torch needs a C compiler for a GPU and a C++ compiler for CPU.
    """
    on_gpu = next(model.parameters()).is_cuda
    language, programs = ("C", ("cc", "gcc", "clang")) if on_gpu else ("C++", ("c++", "g++", "clang++"))
    if not any(map(shutil.which, programs)):
        raise RecipeError(
            f"compile: torch.compile needs a {language} compiler, none of {', '.join(programs)} is on the "
            "PATH; install one (Debian: build-essential), or set compile='none'"
        )
    decoder = decoder_of(model)
    for module in [*decoder.norms, *(layer.mlp for layer in decoder.layers if mlps)]:
        _compile(module)


def _compile(module: nn.Module) -> None:
    eager = module.forward
    # Compile in this process, because worker processes would outlive a rank.
    compiled = torch.compile(eager, options={"compile_threads": 1})

    def forward(x: Tensor) -> Tensor:
        out: Tensor = (eager if get_current_dispatch_mode() is not None else compiled)(x)
        return out

    module.forward = Patch(forward, eager)
