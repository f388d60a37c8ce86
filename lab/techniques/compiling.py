"""torch.compile of what a tile runs: one pass over memory where its operators take one each."""

from __future__ import annotations

import shutil

import torch
from torch import Tensor, nn

from lab.decoder import Patch, decoder_of
from lab.errors import RecipeError
from lab.torch_private import get_current_dispatch_mode


def apply_compiled(model: nn.Module, *, mlps: bool) -> None:
    """Compile the forward of every norm over the hidden size, and of the MLPs too: ``[b, t, E]`` -> the same.

    Saves: passes over memory. A norm's eight operators become one kernel, an MLP's activation and product
    another; its matrix products stay what they were. ``lab bench compile`` says what that is worth on this
    machine, one tile by itself.
    Costs: seconds at the first step, once a shape and machine. Rounding: what is fused is not rounded to the
    compute dtype in between. Torch compiles one class's forward eight times a process (shapes, dtypes, with
    gradients or without), then says so and runs it uncompiled: some three models.
    Composes with: tiling (applied after, so that a tile runs compiled code), and what is applied after that.

    Whoever watches operators would see none inside a compiled one: under a meter, and in a plan, the modules'
    own forward runs, and bytes are those of a step that is not compiled.

    Raises:
        RecipeError: no compiler, of C for a GPU and of C++ for CPU, without which torch compiles nothing.
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
    # In this process: workers that compile would outlive a rank.
    compiled = torch.compile(eager, options={"compile_threads": 1})

    def forward(x: Tensor) -> Tensor:
        found: Tensor = (eager if get_current_dispatch_mode() is not None else compiled)(x)
        return found

    module.forward = Patch(forward, eager)
