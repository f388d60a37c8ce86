"""The start, the optimizer and the forward of recipes on fake ``cuda`` tensors, without a driver.

``python -m lab_tests.fake_cuda`` needs torch's CUDA build, for the schemas of its CUDA kernels and their fake
results, and a machine without a GPU. All branches for CUDA run but those of backward: the autograd engine
asks the driver for its threads. Streams and events are stand-ins that are counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import fake_tensor

RANKS, TOKENS = 8, 4096

DOCUMENTS = (1000, 3000, 96)

CASES: tuple[tuple[str, dict[str, Any], tuple[int, ...] | None], ...] = (
    *((name, {}, None) for name in ("plain", "tiling", "upipe", "offload", "fast", "streamed", "long")),
    ("upipe", {"kernel": "torch"}, None),
    ("upipe", {"overlap": True}, None),
    ("upipe", {"ring": 2, "ulysses": 4}, None),
    ("streamed", {"segment": 2, "offload": "attention"}, None),
    ("upipe", {}, DOCUMENTS),
    ("streamed", {}, DOCUMENTS),
)

CALLS: Counter[str] = Counter()


class _Event:
    def record(self, *_: Any) -> None:
        CALLS["record"] += 1

    wait = synchronize = record

    def query(self) -> bool:
        return True


class _Stream:
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        CALLS["streams"] += 1

    def wait_stream(self, _: Any) -> None:
        CALLS["waits for streams"] += 1

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, _Event)
        CALLS["waits for events"] += 1

    def record_event(self, *_: Any) -> _Event:
        CALLS["events"] += 1
        return _Event()

    def synchronize(self) -> None:
        CALLS["synchronizations"] += 1


def install() -> None:
    """Let this process take fake ``cuda`` tensors for those of an H100. Nothing else can run in it."""
    current = _Stream()
    torch._C._ensureCUDADeviceGuardSet()

    @contextmanager
    def stream(_: Any) -> Any:
        yield

    stand_ins = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda _: None, "is_initialized": lambda: True, "_lazy_init": lambda: None,
        "Stream": _Stream, "Event": lambda **_: _Event(), "current_stream": lambda _=None: current,
        "default_stream": lambda _=None: current, "stream": stream, "synchronize": lambda _=None: None,
        "get_device_capability": lambda _=None: (9, 0), "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    fake_tensor.init_gpu_context = lambda *_: None
    torch.Tensor.record_stream = lambda *_: CALLS.update(["tensors recorded"])  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.is_pinned = lambda *_: True  # type: ignore[method-assign]
    to, tensor = torch.Tensor.to, torch.tensor

    def indexed(x: Any) -> Any:
        """Give a device its index, for which torch would ask the driver."""
        return (
            torch.device("cuda", 0) if x in ("cuda", torch.device("cuda")) and not torch.is_tensor(x) else x
        )

    torch.Tensor.to = lambda self, *a, **k: to(  # type: ignore[method-assign]
        self, *map(indexed, a), **{name: indexed(value) for name, value in k.items()}
    )

    def made(data: Any, *, device: Any = None, **settings: Any) -> Any:
        x = tensor(data, **settings)
        return x if device is None else x.to(device)

    torch.tensor = made  # type: ignore[assignment]


def run(recipe_name: str, knobs: dict[str, Any], documents: tuple[int, ...] | None) -> dict[str, int]:
    """Run a case; return the number of operators by name, and of calls of streams and events."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lab import models
    from lab.models import load
    from lab.recipe.jobs import make_job
    from lab.step.batches import shard_batch
    from lab.step.compose import start
    from lab.step.one_rank import one_rank
    from lab.step.training_step import loss, update
    from lab.techniques.slices import short_loops
    from lab.torch_private import PlanningMode, cached_layouts

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators[str(func).removesuffix(".default")] += 1
            return func(*args, **(kwargs or {}))

    operators: Counter[str] = Counter()
    CALLS.clear()
    load.fill = lambda *_, **__: None  # type: ignore[assignment]
    shape = models.shape_of(models.config_of("tiny"))
    job = make_job("tiny", recipe_name, tokens=TOKENS, ranks=RANKS, rows=1, lora=None, shape=shape, **knobs)
    recipe = replace(job.recipe, compute_dtype="bfloat16")
    with (
        one_rank(recipe, RANKS, "fake", "cuda") as mesh,
        PlanningMode(allow_non_fake_inputs=True),
        short_loops(),
        cached_layouts(),
    ):
        applied = start(job.model, recipe, mesh)
        optimizer = applied.make_optimizer(learning_rate=1e-3)
        for parameter in applied.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        update(applied.model, optimizer, clip_norm=1.0)
        rows = None if documents is None else [list(documents)]
        batch = shard_batch(torch.zeros(1, TOKENS, dtype=torch.int64), recipe, mesh, documents=rows)
        with Count(), torch.no_grad():
            result = loss(applied.model, batch)
        devices = {parameter.device.type for parameter in applied.model.parameters()}
    on_host = recipe.optimizer == "host"
    assert devices == {"cpu" if on_host else "cuda"}, devices
    assert result.device.type == "cuda"
    # A copy waits for what was computed before it, and what is recorded is waited for.
    assert CALLS["waits for streams"] >= operators["lab.write_host"] + operators["lab.to_host"], CALLS
    assert CALLS["waits for events"] >= CALLS["events"], CALLS
    return dict(operators) | dict(CALLS)


def main() -> None:
    """Run all cases; print what each has called."""
    install()
    for recipe, knobs, documents in CASES:
        counts = run(recipe, dict(knobs), documents)
        shown = {
            name: n for name, n in counts.items() if "attention" in name or "lab." in name or " " in name
        }
        attention = [name for name in counts if "attention" in name]
        assert attention == ["aten._scaled_dot_product_flash_attention"], attention
        print(recipe, knobs, documents or "", shown, flush=True)


if __name__ == "__main__":
    main()
