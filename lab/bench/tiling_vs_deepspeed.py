"""This lab's tiled MLP and tiled loss compared with DeepSpeed's and TRL's, on one model and one input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from lab import models
from lab.bench.gradients import error
from lab.bench.software import device_and_versions
from lab.bench.table import Row, Say
from lab.bench.timing import rounds
from lab.decoder import Patch, decoder_of
from lab.memory.meter import Meter
from lab.techniques.deepspeed import sequence_parallel
from lab.techniques.loss import apply_tiled_loss, summed_cross_entropy
from lab.techniques.tiling import apply_tiled_mlp

FIGURES = (
    "theirs, s", "ours, s", "ours / theirs", "theirs, bytes", "ours, bytes", "theirs, error", "ours, error",
)  # fmt: skip
REPEATS = 9
TOKENS, HIDDEN, TILES = 4096, 256, 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def compare_tiles(
    say: Say, *, tokens: int = TOKENS, hidden: int = HIDDEN, tiles: int = TILES, repeats: int = REPEATS
) -> Iterator[Row]:
    """Compare seconds, peak bytes and the errors of gradients of tiled functions, in three dtypes.

    The functions are DeepSpeed's ``TiledMLP``, ``sequence_tiled_compute`` (with an MLP) and
    ``TiledFusedLogitsLoss``, and TRL's chunked head. All have the weights of one model with hidden size E,
    intermediate size 3.5*E (as Llama3-8B) and a vocabulary of 16*E, and one input [1, S, E]. DeepSpeed and
    this lab divide the tokens into the same tiles. TRL divides the vocabulary, into as many chunks.

    The seconds are those of forward and backward together. In a round, each of the two functions runs once.
    The ratio is the median of the ratios of the rounds, so that a machine that slows down slows both.

    The bytes are the highest that the meter counts in forward and backward: the input, the gradient of the
    output, the output until it is dropped, and all that the function allocates, including the gradients of
    the input and of the weights. The weights are not counted.

    The error is the largest relative error of a gradient, that of the input or of a weight, in the Frobenius
    norm. The reference is the function without tiles in fp64, with the same weights and the same input.

    Args:
        say: Shows what is measured now.
        tokens: S.
        hidden: E.
        tiles: The number of tiles, which divides S.
        repeats: The number of rounds; 0 measures no seconds.

    Yields:
        A row for each function of DeepSpeed and TRL and each dtype. If TRL is not installed, its rows say so,
        and have figures of this lab alone.

    Raises:
        RecipeError: DeepSpeed is not installed.
    """
    machine = f"{torch.get_num_threads()} threads, {device_and_versions('cpu')}"
    for dtype in DTYPES:
        label = str(dtype).removeprefix("torch.")
        model, x, labels = _problem(tokens, hidden, dtype)
        exact = _plain(copy.deepcopy(model).double(), labels)
        ours = _ours(copy.deepcopy(model), labels, tokens // tiles)
        for name, part, theirs in _theirs(model, labels, tiles):
            say(f"{name}, {label}")
            dout = torch.randn_like(x) if part == "mlp" else torch.ones(())
            expected = exact[part].gradients(x.double(), dout.double())
            both = (theirs, ours[part])
            seconds = _compare_seconds(theirs, ours[part], x, dout, repeats) if theirs and repeats else ()
            peaks = [None if of is None else of.peak(x, dout) for of in both]
            errors = [None if of is None else error(of.gradients(x, dout), expected) for of in both]
            figures = (*(seconds or (None,) * 3), *peaks, *errors)
            against = name if theirs else f"{name} (not installed)"
            row = dict(zip(FIGURES, figures, strict=True))
            yield {"against": against, "dtype": label, **row, "machine": machine}


@dataclass(frozen=True)
class _Function:
    """A function of a hidden state [1, S, E].

    Attributes:
        module: The module whose weights it uses.
        call: Returns the output of an MLP, [1, S, E], or the sum of the losses of all tokens.
    """

    module: nn.Module
    call: Callable[[Tensor], Any]

    def run(self, x: Tensor, dout: Tensor) -> Tensor:
        """Run forward and backward, and return the leaf that has the gradient of x."""
        self.module.zero_grad()
        x = x.detach().requires_grad_()
        out = self.call(x)
        # The next module takes the output and drops it, so in backward only its gradient exists.
        edge = get_gradient_edge(out)
        del out
        torch.autograd.backward(edge, dout)
        return x

    def peak(self, x: Tensor, dout: Tensor) -> int:
        self.module.zero_grad()
        meter = Meter()
        with meter.measure(self.module), meter.phase("tiles"):
            self.run(x, dout)
        return meter.timeline().device_peak - sum(p.nbytes for p in self.module.parameters())

    def gradients(self, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
        found = {"x": self.run(x, dout).grad} | {name: p.grad for name, p in self.module.named_parameters()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}


def _problem(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[PreTrainedModel, Tensor, Tensor]:
    """Return a model of one layer, a hidden state [1, S, E], and labels [1, S]."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16 * hidden,
    )  # fmt: skip
    torch.manual_seed(0)
    x, labels = torch.randn(1, tokens, hidden), torch.randint(0, config.vocab_size, (1, tokens))
    model: Any = models.build(config)
    return model.to(dtype), x.to(dtype), labels


def _plain(model: PreTrainedModel, labels: Tensor) -> dict[str, _Function]:
    """Return the functions without tiles, by the part of a model that each is."""
    mlp, head = _parts(model)
    return {
        "mlp": _Function(mlp, mlp),
        "head": _Function(head, lambda x: summed_cross_entropy(head(x), labels, head.out_features)),
    }


def _ours(model: PreTrainedModel, labels: Tensor, tile: int) -> dict[str, _Function]:
    """Return this lab's functions, by the part of a model that each is."""
    mlp, head = _parts(model)
    apply_tiled_mlp(model, tile=tile)
    apply_tiled_loss(model, tile=tile)
    # What the head gets from the model is x itself.
    inner: Any = model.model
    inner.forward = Patch(lambda x: BaseModelOutputWithPast(last_hidden_state=x), inner.forward)
    return {"mlp": _Function(mlp, mlp), "head": _Function(head, lambda x: model(x, labels=labels).loss)}


def _theirs(
    model: PreTrainedModel, labels: Tensor, tiles: int
) -> Iterator[tuple[str, str, _Function | None]]:
    """Yield the name of each function of DeepSpeed and TRL, the part of a model that it is, and itself."""
    mlp, head = _parts(model)
    forward = type(mlp).forward
    deepspeed = sequence_parallel(labels.device)

    def tiled_mlp(x: Tensor) -> Any:
        return deepspeed.TiledMLP.apply(forward, mlp, x, tiles, [*mlp.parameters()])

    def tiled_compute(x: Tensor) -> Any:
        return deepspeed.sequence_tiled_compute(
            forward, x.shape[1], tiles, {"x": x}, {"self": mlp}, "x", [*mlp.parameters()],
            output_reduction=None,
        )  # fmt: skip

    def token_losses(head: nn.Linear, x: Tensor, labels: Tensor) -> Tensor:
        return summed_cross_entropy(head(x), labels, head.out_features)

    def tiled_loss(x: Tensor) -> Any:
        return deepspeed.TiledFusedLogitsLoss.apply(
            token_losses, head, x, labels, None, tiles, [head.weight], "sum"
        )

    yield "TiledMLP", "mlp", _Function(mlp, tiled_mlp)
    yield "sequence_tiled_compute", "mlp", _Function(mlp, tiled_compute)
    yield "TiledFusedLogitsLoss", "head", _Function(head, tiled_loss)
    yield "TRL's chunked head", "head", _chunked_head(head, labels, tiles)


def _chunked_head(head: nn.Linear, labels: Tensor, chunks: int) -> _Function | None:
    """Return the sum of losses by TRL's chunked head, None if TRL is not installed."""
    try:
        # TRL is optional. By its name alone, it is no import of this package for import-linter, which lets
        # only one package import TRL.
        kernels = import_module("trl.kernels")
    except ModuleNotFoundError:
        return None

    def chunked(x: Tensor) -> Any:
        log_probabilities, *_ = kernels.ChunkedLogProbFunction.apply(
            x.flatten(0, 1), head.weight, None, labels.flatten(), 1.0, head.out_features // chunks, None, 1.0,
            (),
        )  # fmt: skip
        return -log_probabilities.sum()

    return _Function(head, chunked)


def _parts(model: PreTrainedModel) -> tuple[Any, Any]:
    """Return the MLP and the head."""
    decoder = decoder_of(model)
    return decoder.layers[0].mlp, decoder.head


def _compare_seconds(
    theirs: _Function, ours: _Function, x: Tensor, dout: Tensor, repeats: int
) -> tuple[float, ...]:
    """Return the seconds of theirs and of ours, and their ratio, after one round that is not measured."""
    _, *times = rounds(repeats + 1, *(partial(of.run, x, dout) for of in (theirs, ours)))
    ratios = [our_seconds / their_seconds for their_seconds, our_seconds in times]
    return (*map(median, zip(*times, strict=True)), median(ratios))
