"""The callback that shows the memory of a Trainer's step: losses, files, logs, and what is refused."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import lab.hf
from lab.errors import LabError
from lab.hf import timeline as module
from lab.hf.ranks import fresh_process
from lab.memory.timeline import Timeline
from lab.show.live import timeline as live_timeline
from lab.show.live import widget as live_widget
from lab_tests.support.models import small_config
from lab_tests.support.small_trainings import QUIET, LongTrainer

ROWS, TOKENS = 2, 20


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    with fresh_process():
        yield


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(small_config())


def trainer(folder: Path, *callbacks: TrainerCallback, recipe: Any = None, **settings: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 101, (TOKENS,), generator=generator) for _ in range(24)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    common = {"output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": ROWS, **QUIET}
    settings = {**common, **settings}
    if recipe is None:
        kind, args = Trainer, TrainingArguments(**settings)
    else:
        kind = LongTrainer
        args = lab.hf.arguments(TrainingArguments, recipe=recipe, tokens=TOKENS, bf16=False, **settings)
    return kind(small_model(), args, train_dataset=data, eval_dataset=data[:3], callbacks=list(callbacks))


def logged(trained: Trainer, name: str) -> dict[int, float]:
    return {log["step"]: log[name] for log in trained.state.log_history if name in log}


def check_left(trained: Trainer) -> None:
    """Nothing that the callback put around the training is left."""
    assert not vars(trained).keys() & {"training_step", "_run_epoch"}
    assert "backward" not in vars(trained.accelerator)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    hooks = [hook for part in trained.model.modules() for hook in part._forward_pre_hooks.values()]
    assert hooks == []


# ---- what it measures ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_plain_trainer_has_a_timeline_files_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "gradient_accumulation_steps": 2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    plain = trainer(tmp_path / "plain", **settings)
    plain.train()

    seconds = iter(range(100))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(seconds) / 2))
    callback, folder = lab.hf.MemoryTimeline(), tmp_path / "metered"
    metered = trainer(folder, callback, report_to=["tensorboard"], **settings)
    capsys.readouterr()
    metered.train()

    for name, count in {"loss": 2, "grad_norm": 2, "eval_loss": 4}.items():
        assert len(logged(plain, name)) == count
        assert logged(metered, name) == logged(plain, name)
    timeline = callback.timeline
    assert timeline is not None
    # Two micro-batches, and no evaluation.
    phases = [timeline.phases[phase] for phase, _ in groupby(timeline.phase.tolist())]
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]
    assert set(timeline.step.tolist()) == {1}
    operators = [timeline.ops[op].name for op in timeline.op]
    assert operators.count("aten.embedding") == 2
    assert timeline.highest(module="model.layers.1.mlp").device > 0
    state = 4 * sum(p.numel() for p in metered.model.parameters())
    first = timeline.moment(0).by_category
    assert first["parameters"] - state == 2 * 5 * 4  # buffers of the rotary positions
    assert 2 * state <= first["optimizer"] < 2 * state + 100
    assert timeline.end_of("backward").by_category["gradients"] == state

    text = (folder / "memory_timeline.json").read_text()
    stored = Timeline.from_json(text)
    assert np.array_equal(stored.device, timeline.device)
    assert stored.holders().total == timeline.device_peak
    assert (folder / "memory_timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "memory_timeline.trace.json").read_text())["traceEvents"]
    assert "Memory timeline of Trainer · step 2 of 4: peaks at" in capsys.readouterr().out

    [events] = folder.glob("runs/*")
    reported = EventAccumulator(str(events)).Reload()
    scalars = {tag: {e.step: e.value for e in reported.Scalars(tag)} for tag in reported.Tags()["scalars"]}
    assert scalars["train/loss"] == pytest.approx(logged(plain, "loss"))
    assert scalars["train/device_peak_bytes"] == {2: timeline.device_peak}
    rate = 2 * ROWS * TOKENS / 0.5
    assert scalars["train/tokens_per_second"] == {2: rate, 4: rate}
    assert logged(metered, "tokens_per_second") == {2: rate, 4: rate}
    assert logged(metered, "device_peak_bytes") == {2: timeline.device_peak}
    assert not any("eval_loss" in log and "tokens_per_second" in log for log in metered.state.log_history)
    check_left(metered)


def test_a_recipe_is_measured_as_it_is_planned(tmp_path: Path) -> None:
    recipe = lab.Recipe(checkpoint=True, offload="inputs", mlp_tile=8)
    planned = lab.plan(small_config(), recipe, tokens=TOKENS, ranks=1, rows=ROWS, workspace=False).timeline
    plain = trainer(tmp_path, recipe=recipe)
    plain.train()
    callback = lab.hf.MemoryTimeline(step=3)
    metered = trainer(tmp_path, callback, recipe=recipe)
    metered.train()
    assert len(logged(plain, "loss")) == 4
    for name in ("loss", "grad_norm"):
        assert logged(metered, name) == logged(plain, name)
    measured = callback.timeline
    assert measured is not None
    assert set(measured.step) == {2}
    assert measured.host_peak == planned.host_peak > 0
    assert logged(metered, "host_peak_bytes") == {3: planned.host_peak}
    for at in ("forward", "backward", "optimizer", "peak"):
        # Trainer and accelerate hold scalars of their own: the count of labels, and the loss that they scale.
        sizes = [[one.bytes for one in of.holders(at).items if one.bytes > 8] for of in (measured, planned)]
        assert len(sizes[0]) > 40
        assert sorted(sizes[0]) == sorted(sizes[1])
    check_left(metered)


class Adapted(nn.Module):
    """Stands for PEFT's model around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_base_model(self) -> nn.Module:
        return self.inner


def test_adapters_are_named_as_in_the_model_inside() -> None:
    adapted = Adapted(small_model())
    assert module._measured_model(adapted) is adapted.inner
    # Prompt tuning has parameters around the model.
    adapted.prompt = nn.Parameter(torch.zeros(3))
    assert module._measured_model(adapted) is adapted


# ---- how it ends -----------------------------------------------------------------------------------------


class Failure(TrainerCallback):
    """Fails before the optimizer of a step, which the callback's own methods do not surround."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step - 1:
            raise RuntimeError("failed in the middle")


def fail(folder: Path, callback: lab.hf.MemoryTimeline) -> Trainer:
    """Train until the second step fails; return the trainer."""
    failing = trainer(folder, callback, Failure(step=2))
    with pytest.raises(RuntimeError, match=r"^failed in the middle$"):
        failing.train()
    check_left(failing)
    return failing


def test_an_error_in_the_step_passes_on_and_leaves_what_was_measured(tmp_path: Path) -> None:
    callback = lab.hf.MemoryTimeline()
    failing = fail(tmp_path, callback)
    assert callback.timeline is not None
    assert callback.timeline.phases == ("forward", "backward", "optimizer")
    stored = Timeline.from_json((tmp_path / "memory_timeline.json").read_text())
    assert stored.device_peak == callback.timeline.device_peak
    # The trainer can train again, and is measured again.
    failing.pop_callback(Failure)
    failing.train()
    assert len(callback.timeline) > len(stored)
    check_left(failing)


def test_an_error_in_another_step_leaves_nothing(tmp_path: Path) -> None:
    callback = lab.hf.MemoryTimeline(step=3)
    fail(tmp_path, callback)
    assert callback.timeline is None
    assert not (tmp_path / "memory_timeline.json").exists()


def test_a_step_that_never_comes_is_a_warning(tmp_path: Path) -> None:
    callback = lab.hf.MemoryTimeline(step=5)
    trained = trainer(tmp_path, callback)
    with pytest.warns(UserWarning, match=r"step=5.*ended after 4 steps; give an earlier step") as warned:
        trained.train()
    assert len(warned) == 1
    assert callback.timeline is None
    assert list(tmp_path.iterdir()) == []
    assert "device_peak_bytes" not in str(trained.state.log_history)
    check_left(trained)


def test_files_that_cannot_be_written_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "memory_timeline.json").mkdir()
    callback = lab.hf.MemoryTimeline(step=1)
    trained = trainer(tmp_path, callback, max_steps=2)
    with pytest.warns(UserWarning, match=r"could not write its files: .*memory_timeline\.json"):
        trained.train()
    assert callback.timeline is not None
    assert sorted(logged(trained, "loss")) == [1, 2]


def test_a_notebook_draws_the_step_while_it_runs_and_can_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, sent = [], []
    monkeypatch.setattr(live_timeline, "is_in_browser", lambda: True)
    monkeypatch.setattr(live_timeline, "_WARM_UP", 0.0)
    monkeypatch.setattr(live_widget, "display", lambda thing, **_: shown.append(thing))
    monkeypatch.setattr(live_widget.TimelineWidget, "send", lambda _, content, buffers: sent.append(content))

    class Button(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for widget in shown:
                widget._handle_custom_msg({"stop": True}, [])

    callback = lab.hf.MemoryTimeline()
    # The state of Adafactor has numbers and tensors.
    stopped = trainer(tmp_path, callback, Button(), optim="adafactor", gradient_accumulation_steps=2)
    stopped.train()
    widget, picture = shown
    assert isinstance(widget, live_widget.TimelineWidget)
    assert picture.text.startswith("Memory timeline of Trainer · step 2 of 4: peaks at")
    kinds = [content["kind"] for content in sent]
    assert kinds[0] == "rows"
    assert kinds[-2:] == ["recorded", "replaced"]
    assert (sent[0]["step"], sent[0]["steps"], sent[0]["ranks"]) == (1, 4, 1)
    assert stopped.state.global_step == 2


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, -2, 1.5, True, (2,), "2"])
def test_a_step_is_one_number(step: Any) -> None:
    with pytest.raises(LabError, match=r"^step=.*: give the number of one training step, counted from 1$"):
        lab.hf.MemoryTimeline(step)


def compiled(one: Any) -> Any:
    return patch.object(one, "model_wrapped", torch.compile(one.model, backend="eager"))


def of_fsdp(version: int) -> Callable[[Any], Any]:
    plugin = SimpleNamespace(fsdp_version=version)
    return lambda one: patch.dict(vars(one.accelerator.state), fsdp_plugin=plugin)


def offloading(device: str) -> Callable[[Any], Any]:
    args = {"n_gpu": 1, "torch_compile": False, "activation_offloading": True, "device": torch.device(device)}
    return lambda one: patch.object(one, "args", SimpleNamespace(**args))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: patch.object(type(one.args), "n_gpu", 3), "one process that sees 3 GPUs: start one"),
        (lambda one: patch.object(one, "is_deepspeed_enabled", True), "DeepSpeed's engine, .*: leave it out"),
        (of_fsdp(1), "FSDP version 1, .*: use version 2"),
        (compiled, "torch_compile=False"),
        (offloading("cuda"), "activation_offloading=True: .*; set it to False"),
        (of_fsdp(2), None),
        (offloading("cpu"), None),
    ],
)
def test_what_would_be_measured_wrongly_is_refused(
    change: Callable[[Any], Any], words: str | None, tmp_path: Path
) -> None:
    one = trainer(tmp_path, lab.hf.MemoryTimeline())
    module._check(one)
    with change(one), pytest.raises(LabError, match=words) if words else nullcontext():
        module._check(one)


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    twice = trainer(tmp_path, lab.hf.MemoryTimeline(), lab.hf.MemoryTimeline(step=3))
    with pytest.raises(LabError, match=r"^two MemoryTimelines in one trainer"):
        twice.train()
    check_left(twice)


def test_it_is_of_use_in_a_trainer_alone() -> None:
    with pytest.raises(LabError, match="outside of a Trainer"):
        lab.hf.MemoryTimeline().on_train_begin(None, None, None)
