"""The memory of one step of a Trainer, measured by a callback."""

from __future__ import annotations

import inspect
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lab.errors import LabError
from lab.hf.applying import inner_model
from lab.hf.trainer import LongContext
from lab.memory.cuda import AllocatedPeak
from lab.memory.export import write_chrome_trace
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.show.figures import timeline as draw
from lab.show.live.timeline import live
from lab.torch_private import uncompiled
from lab.training.records import Ended, Progress, Started

FILE = "memory_timeline"
"""The beginning of the names of the files in the output directory."""


@dataclass(frozen=True, eq=False)
class MeteredStep:
    """One measured step, in the form that ``lab.show`` draws; ``timelines`` has only that of this rank."""

    title: str
    timelines: tuple[Timeline, ...]


class MemoryTimeline(TrainerCallback):
    """Measures the memory of a training step: ``Trainer(..., callbacks=[lab.hf.MemoryTimeline()])``.

    It works with ``Trainer`` and ``SFTTrainer``, with and without ``lab.hf.LongContext``. It changes neither
    losses nor gradients. Every operator of one optimizer step is measured, from the first forward of its
    micro-batches to the optimizer; evaluation is not. The measured step takes longer. The other steps take
    as long as without the callback.

    - In a notebook, the timeline is drawn while the step runs. After the step it is displayed as a figure in
      which a click shows the tensors that are held. In a script, one line with the peak is printed.
    - ``args.output_dir`` gets ``memory_timeline.json``, which ``Timeline.from_json`` reads,
      ``memory_timeline.png``, and ``memory_timeline.trace.json`` for https://ui.perfetto.dev. These files are
      those of rank 0. Rank 1 writes ``memory_timeline_rank1.json``, and so on. If the step fails, the files
      have what was measured until then.
    - Trainer's logs, which ``report_to`` gets, have these values in addition:

      - ``tokens_per_second``: the tokens of all ranks, with padding, divided by the seconds of the steps
        since the last log. The measured step is left out, and so is the time between steps, such as that of
        an evaluation.
      - ``device_peak_bytes``, and ``host_peak_bytes`` if it is not 0: the most bytes that a rank held in the
        measured step. Only the first log after the step has them.
      - ``allocated_peak_bytes`` on CUDA: the most bytes that a rank's allocator has held since training
        began. The allocator's peak is reset when training begins.

    Args:
        step: The optimizer step to measure, counted from 1 where training begins or resumes. The default is
            the second, because the first one makes the optimizer's state.

    Attributes:
        step: The argument ``step``.
        timeline: The timeline of this rank; None until the step has run.

    Raises:
        LabError: ``step`` is not an integer of at least 1. When training begins: a second MemoryTimeline; one
            process that trains on several GPUs; DeepSpeed's engine, FSDP version 1, a compiled model, or
            TRL's offloading of activations on CUDA, whose bytes the meter would miss or count wrongly.
    """

    def __init__(self, step: int = 2) -> None:
        if type(step) is not int or step < 1:
            raise LabError(f"step={step!r}: give the number of one training step, counted from 1")
        self.step = step
        self.timeline: Timeline | None = None
        # ``_training`` is closed when training ends, and ``_measured`` when the measured step ends.
        self._training, self._measured = ExitStack(), ExitStack()

    # ---- Trainer's events --------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Find the trainer, and wrap its methods in which tokens are counted and errors are noticed."""
        trainer = _calling_trainer()
        _check(trainer)
        self._training.close()
        self._trainer, self.timeline = trainer, None
        # The button of the live timeline sets the event, from any thread. Training ends after this step.
        self._first, self._stopped = state.global_step, Event()
        self._live: Callable[[Any], None] = live() if state.is_world_process_zero else lambda _: None
        self._allocated = AllocatedPeak(args.device)
        self._step_tokens = self._tokens = 0
        self._seconds, self._peaks = 0.0, (0, 0)
        # Callbacks run in the order of this list. This one is moved to its beginning, so that the others
        # report the values that it adds to the logs.
        handler = trainer.callback_handler
        handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]
        for name, wrap in {
            "training_step": self._count_tokens,
            "_run_epoch": self._leave_after_errors,
        }.items():
            self._training.enter_context(patch.object(trainer, name, wrap(getattr(trainer, name))))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Begin the measurement, if this is the step to measure."""
        if state.global_step == self._first + self.step - 1:
            self._measured.enter_context(self._measurement(state))
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the measurement, or add the time and the tokens of another step."""
        if state.global_step == self._first + self.step:
            self._measured.close()
        else:
            if args.device.type == "cuda":
                torch.cuda.synchronize()
            self._seconds += time.perf_counter() - self._began
            self._tokens += self._step_tokens
        self._step_tokens = 0
        control.should_training_stop |= self._stopped.is_set()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add values to the logs of training, which all ranks make at the same time.

        Logs of evaluation stay as they are.
        """
        if not logs or not logs.keys() & {"learning_rate", "train_runtime"}:
            return
        accelerator = self._trainer.accelerator
        own = [self._tokens, *self._peaks, self._allocated.bytes() or 0]
        ranks = accelerator.gather(torch.tensor(own, device=accelerator.device)).view(-1, len(own))
        names = "device_peak_bytes", "host_peak_bytes", "allocated_peak_bytes"
        values = dict(zip(names, ranks[:, 1:].amax(0).tolist(), strict=True))
        if self._seconds:
            tokens = int(ranks[:, 0].sum()) // _ranks_of_a_batch(self._trainer)
            values["tokens_per_second"] = tokens / self._seconds
        values = {name: value for name, value in values.items() if value}
        logs.update(values)
        # Trainer has copied the logs into its history before it called this.
        state.log_history[-1].update(values)
        self._tokens, self._seconds, self._peaks = 0, 0.0, (0, 0)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Warn if training ended before the step to measure."""
        self._training.close()
        if self.timeline is None:
            warnings.warn(
                f"MemoryTimeline(step={self.step}) measured nothing: training ended after "
                f"{state.global_step - self._first} steps; give an earlier step",
                stacklevel=2,
            )

    # ---- the measured step -------------------------------------------------------------------------------

    @contextmanager
    def _measurement(self, state: TrainerState) -> Iterator[None]:
        """Measure the step that runs in this context, and show the timeline if it ends or fails."""
        trainer, step, steps = self._trainer, state.global_step, state.max_steps
        title = f"{type(trainer).__name__} · step {step + 1} of {steps}"
        self._live(Started(self._stopped.set, 1))
        meter = Meter(lambda rows: self._live(Progress(0, 1, step, steps, None, rows)), first_step=step)
        phase = ExitStack()

        def enter(name: str) -> None:
            phase.close()
            phase.enter_context(meter.phase(name))

        owner = trainer if isinstance(trainer, LongContext) else trainer.accelerator
        backward = owner.backward

        def named_backward(*args: Any, **kwargs: Any) -> None:
            enter("backward")
            backward(*args, **kwargs)
            # The optimizer's phase begins with the clipping of gradients, after the last micro-batch.
            enter("optimizer" if trainer.accelerator.sync_gradients else "forward")

        try:
            with (
                meter.measure(_measured_model(trainer.model), trainer.optimizer),
                phase,
                patch.object(owner, "backward", named_backward),
            ):
                enter("forward")
                yield
        except BaseException:
            self._keep(title, meter.timeline())
            raise
        # Where the data end in the middle of a step, it is measured again.
        if state.global_step > step:
            self._keep(title, meter.timeline())

    def _keep(self, title: str, timeline: Timeline) -> None:
        """Keep the timeline, write the files and show the figure."""
        self.timeline, self._peaks = timeline, (timeline.device_peak, timeline.host_peak)
        if not len(timeline):
            self._live(Ended("failed"))
            return
        step = MeteredStep(title, (timeline,))
        try:
            args = self._trainer.args
            _write(step, Path(args.output_dir or "."), args.process_index)
        except (OSError, LabError) as error:
            warnings.warn(f"MemoryTimeline could not write its files: {error}", stacklevel=2)
        self._live(step)

    # ---- what runs inside Trainer's own methods ----------------------------------------------------------

    def _count_tokens(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
            self._step_tokens += tokens.numel() if isinstance(tokens, torch.Tensor) else 0
            return training_step(model, inputs, *args, **kwargs)

        return run

    def _leave_after_errors(self, run_epoch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``run_epoch`` so that the measurement ends if the epoch ends inside the measured step.

        An error ends an epoch there, and so does the end of the data.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return run_epoch(*args, **kwargs)
            except BaseException:
                self._measured.__exit__(*sys.exc_info())
                self._training.close()
                raise
            finally:
                self._measured.close()

        return run


def _calling_trainer() -> Trainer:
    """Return the trainer that calls a callback now, from the frames of its callers.

    No argument of a callback's methods refers to the trainer.

    Raises:
        LabError: No trainer called this.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise LabError("MemoryTimeline outside of a Trainer: give it as Trainer(..., callbacks=[...])")


def _check(trainer: Trainer) -> None:
    """Refuse a trainer whose memory would be measured wrongly.

    Raises:
        LabError: See ``MemoryTimeline``.
    """
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if sum(isinstance(one, MemoryTimeline) for one in trainer.callback_handler.callbacks) > 1:
        raise LabError("two MemoryTimelines in one trainer would measure each other: give one")
    if args.n_gpu > 1:
        raise LabError(
            f"MemoryTimeline in one process that sees {args.n_gpu} GPUs: start one process for each GPU by "
            "torchrun"
        )
    if trainer.is_deepspeed_enabled:
        raise LabError(
            "MemoryTimeline with DeepSpeed's engine, whose buffers have no parameter's name: leave it out"
        )
    if plugin is not None and plugin.fsdp_version != 2:
        raise LabError(
            "MemoryTimeline with FSDP version 1, whose flat parameters hide the weights: use version 2"
        )
    if args.torch_compile or uncompiled(trainer.model_wrapped) is not trainer.model_wrapped:
        raise LabError(
            "MemoryTimeline with a compiled model, whose operators cannot be seen: set torch_compile=False"
        )
    if getattr(args, "activation_offloading", False) and args.device.type == "cuda":
        raise LabError(
            "MemoryTimeline with activation_offloading=True: its host memory would count as the device's; "
            "set it to False"
        )


def _measured_model(model: Any) -> Any:
    """Return the model whose modules and parameters the timeline names: the one inside PEFT's model."""
    inner = inner_model(model)
    # Prompt tuning has parameters outside it.
    return inner if set(model.parameters()) <= set(inner.parameters()) else model


def _ranks_of_a_batch(trainer: Trainer) -> int:
    """Return how many ranks count the same tokens."""
    # With LongContext, each rank counts its own part.
    return 1 if isinstance(trainer, LongContext) else trainer.get_cp_size() * trainer.get_tp_size()


def _write(step: MeteredStep, folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    [timeline] = step.timelines
    name = f"{FILE}_rank{rank}.json" if rank else f"{FILE}.json"
    (folder / name).write_text(json.dumps(timeline.to_json()))
    if rank == 0:
        (folder / f"{FILE}.png").write_bytes(draw(step).png)
        write_chrome_trace([timeline], folder / f"{FILE}.trace.json")
