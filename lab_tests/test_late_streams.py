"""Copies and exchanges that run as late, or as early, as their events allow change no bit of a step.

``MUTANTS`` lists the waits and references on which that depends; a step without any one of them must be
caught. Three waits of the lab are not in the list, because no number depends on them: they free what a copy
has read. Tests of exact bytes see those of ``_with_offload``, and of all but the two newest tiles in
``HostCopier.write``. That of ``run_stages`` frees the LSEs before the tail of a layer begins.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.one_rank import one_rank
from lab.step.training_step import loss
from lab.techniques import exchange, host_state, host_tiles, ring
from lab.techniques.host_transfer import HostCopier, HostTensor
from lab.techniques.streaming import layer, passes
from lab.techniques.streaming.tensors import HostTensors
from lab.techniques.upipe.buffers import StageBuffers
from lab.torch_private import local_part
from lab_tests.support import reference
from lab_tests.support.late_streams import EXCHANGE, FETCH, SCHEDULES, SEND, Race, late_streams

TOKENS = 48
CONFIG = reference.config(heads=8, kv_heads=4, layers=3)
RING = {"ulysses": 2, "ring": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in RECIPE_NAMES} | {
    "tiling, ring": ("tiling", RING),
    "upipe, overlap": ("upipe", {"overlap": True}),
    "fast, frozen": ("fast", {}),
    "fsdp, host, twice": ("fsdp", {"optimizer": "host"}),
    "fast, documents": ("fast", {}),
    "fast, overlap, ring": ("fast", {"overlap": True, **RING}),
    "streamed, overlap, ring": ("streamed", {"overlap": True, **RING}),
    "streamed, overlap, documents": ("streamed", {"overlap": True}),
    "streamed, overlap, two stages": ("streamed", {"overlap": True, "head_chunk": 4}),
    "streamed, one tile": ("streamed", {"stream": TOKENS}),
    "streamed, segments": ("streamed", {"segment": 2}),
    "streamed, attention, segments": ("streamed", {"offload": "attention", "segment": 2}),
}
"""A recipe by name, with knobs."""


def step(case: str) -> dict[str, Tensor]:
    """Return the loss and all gradients of one rank, whose peers are simulated."""
    name, knobs = CASES[case]
    ranks, rows = 6 if "ring" in case else 2, 2 if "documents" in case else 1
    recipe = resolve_recipe(name, CONFIG, ranks, TOKENS, compute_dtype=None, **knobs)
    ids = torch.randint(0, reference.VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    documents = [[20, 1, 27], [48]] if "documents" in case else None
    with one_rank(recipe, ranks, "loopback") as mesh:
        model = reference.build(CONFIG)
        if "frozen" in case:
            for part in (model.model.embed_tokens, model.model.layers[0]):  # type: ignore[union-attr]
                part.requires_grad_(False)
        apply_recipe(model, recipe, mesh)
        batch = shard_batch(ids, recipe, mesh, documents=documents)
        for _ in range(2 if "twice" in case else 1):
            value = loss(model, batch)
            value.backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {"loss": value.detach(), **{name: local_part(p.grad).clone() for name, p in trained.items()}}  # type: ignore[arg-type]


expected = cache(step)


def is_equal(found: dict[str, Tensor], case: str) -> bool:
    assert all(t.isfinite().all() for t in expected(case).values())
    return all(torch.equal(found[name], right) for name, right in expected(case).items())


SLOW = (
    "long", "fast, documents", "streamed, overlap, documents", "streamed, overlap, two stages",
    "streamed, one tile", "streamed, attention, segments", "streamed", "streamed, segments", "fast",
    "streamed, overlap, ring", "tiling, ring", "offload",
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in SLOW)) for case in CASES]
)
def test_a_step_is_the_same_to_the_bit(case: str) -> None:
    for early in SCHEDULES.values():
        with late_streams(*early) as streams:
            assert is_equal(step(case), case)
        name, knobs = CASES[case]
        on_host = name not in ("plain", "fsdp", "ulysses", "checkpoint")
        assert bool(streams.counts[FETCH]) == on_host
        assert bool(streams.counts[SEND]) == on_host or "optimizer" in knobs
        assert bool(streams.counts[EXCHANGE]) == ("overlap" in knobs or "ring" in knobs)
        if not any(streams.counts.values()):
            break  # Nothing runs beside the computing stream.


# ---- what must be caught -----------------------------------------------------------------------------------


def received(name: str, *, as_sent: bool = True) -> str:
    """Return source for what a ``Shift`` receives, without a wait."""
    return f"{name}._exchange._tensors[1]" + f".view({name}._shape)" * as_sent


MUTANTS: list[tuple[Callable[..., Any], str, str, str]] = [
    # The order of the streams of copies.
    (HostCopier._on_copy_stream, ".wait_stream(torch.cuda.current_stream(x.device))", "", "offload"),
    (HostCopier.wait_until_sent, ".wait_event(sent)", "", "offload"),
    (HostTensor.get, ".wait_event(self._arrival)", "", "offload"),
    (HostTensor.__del__, ".wait()", "", "fast, frozen"),
    (host_tiles.read_tiles, ".wait_event(arrival)", "", "streamed"),
    # References to what is sent.
    (HostCopier.send, "append((x,", "append((None,", "fast"),
    (HostCopier.write, "append((x,", "append((None,", "streamed"),
    # Two buffers for tiles that are read.
    (host_tiles.read_tiles, "number % 2", "0", "streamed"),
    # The waits of streamed layers.
    (layer._StreamedLayer.forward, ".wait_until_sent()", "", "streamed"),
    (passes.run_tail, ".wait_until_written()", "", "streamed, segments"),
    (passes._tail_backward, ".wait_until_sent()", "", "streamed, overlap, two stages"),
    (HostTensors._send, ".wait_until_written()", "", "streamed"),
    (HostTensors.write_query_grads, ".wait_until_written()", "", "streamed, one tile"),
    # The gradients of FSDP's shards.
    (host_state.copy_by_operators, "reduced.record_stream(stream)", "pass", "fsdp, host, twice"),
    (host_state.copy_by_operators, "stream.synchronize()", "pass", "fsdp, host, twice"),
    # Exchanges in the background: their own wait, those of a ring, and those of the stages of UPipe.
    (exchange.AllToAll.wait, "._work.wait()", "._work", "tiling, ring"),
    (exchange.Shift.wait, "self._exchange.wait()", "self._exchange._tensors[1]", "tiling, ring"),
    (ring.ring_forward, "shift.wait()", received("shift"), "tiling, ring"),
    (ring.ring_backward, "keys_values = shift.wait()", f"keys_values = {received('shift')}", "tiling, ring"),
    (ring.ring_backward, "sums = sums_shift.wait()", f"sums = {received('sums_shift')}", "tiling, ring"),
    (ring.ring_backward, "dv = sums_shift.wait()", f"dv = {received('sums_shift')}", "tiling, ring"),
    (StageBuffers.send, "arrived = wait()", "arrived = transfer.received", "upipe, overlap"),
    (StageBuffers.to_heads, "        wait()\n", "", "upipe, overlap"),
    # A buffer is released when it has been sent.
    (StageBuffers.to_heads, "    def arrive", "    self.release(send)\n    def arrive", "upipe, overlap"),
]  # fmt: skip
"""A function, a text in its source, the text that replaces it, and a case that must catch the change."""


@contextmanager
def changed(function: Callable[..., Any], text: str, new: str) -> Iterator[None]:
    """Run this block with another source of a function."""
    function = inspect.unwrap(function)
    code, source = function.__code__, textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1
    source = "from __future__ import annotations\n" + source[source.index("def ") :].replace(text, new)
    scope: dict[str, Any] = {}
    exec(compile(source, "<a mutant>", "exec"), function.__globals__, scope)
    function.__code__ = scope[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = code


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant[0].__qualname__}: {mutant[1].strip()}"
)
def test_a_removed_wait_or_reference_is_caught(mutant: tuple[Callable[..., Any], str, str, str]) -> None:
    *change, case = mutant
    expected(case)
    assert any(is_caught(change, case, early) for early in SCHEDULES.values())


def is_caught(change: list[Any], case: str, early: tuple[str, ...]) -> bool:
    with changed(*change):
        try:
            with late_streams(*early):
                return not is_equal(step(case), case)
        except Race:
            return True
