"""Recipes inside transformers' Trainer and TRL's SFTTrainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import has_length

from lab.errors import CheckpointError, RecipeError
from lab.hf.accelerate_settings import refuse_launched_parallelism
from lab.hf.applying import LongContextModel, applied_before, apply, inner_model
from lab.hf.batches import flattens
from lab.hf.saving import (
    FOLDER,
    load_optimizer,
    load_whole_state,
    newest_checkpoint,
    save_optimizer,
    whole_state,
)
from lab.hf.shared_sequences import SharedSequences, parallelism
from lab.hf.training_arguments import check_arguments, check_optimizer, check_trained
from lab.memory.cuda import use_expandable_segments
from lab.recipe.recipe import Recipe
from lab.step.training_step import gradient_norm, make_moments
from lab.techniques.loss import IGNORED
from lab.units import format_bytes

if TYPE_CHECKING:
    Base = Trainer
else:
    # The class is mixed into Trainer, or into a subclass of it.
    Base = object

KNOWN = {
    "transformers.trainer": {"Trainer"},
    "trl.trainer.sft_trainer": {"SFTTrainer"},
    "trl.trainer.base_trainer": {"_BaseTrainer"},
}
"""The trainers, by module, with which the losses were compared."""

NEVER_CALLED = {"compute_loss", "compute_loss_context_manager"}
REPLACED = {"training_step", "prediction_step"}
"""The methods of Trainer that make a loss: those that ``LongContext`` calls nowhere, and those that it
replaces in the classes behind it."""


class LongContext(Base):
    """A recipe in ``Trainer`` or ``SFTTrainer``: ``class Trainer(lab.hf.LongContext, SFTTrainer): ...``.

    ``lab.hf.arguments`` makes the arguments, which have the recipe. Losses, gradients, gradient norms and
    evaluations are those of the plain trainer in one process, if its batches have the rows of all groups of
    C*R ranks that share a sequence: ``per_device_train_batch_size`` rows for each group. C is the recipe's
    ``ulysses``, and R is its ``ring``.

    1. The ranks of a group get the same batch. Labels are shifted, and each rank takes its part of every row.
    2. The model's forward returns the sum of the losses of a rank's labels. The sum over all ranks is divided
       by the number of labels on all ranks, in all micro-batches of the update.
    3. The lab shards or replicates the parameters, as the recipe says, and sums gradients, also if the
       arguments have ``fsdp``. Only replicas that compute in the parameters' own dtype are left to DDP.

    Saving writes the files that ``save_pretrained`` writes. SFTTrainer's logs lack the entropy and the token
    accuracy, which need the logits of all tokens, and the number of tokens, which Trainer counts by
    ``include_num_input_tokens_seen``.

    Raises:
        RecipeError: Arguments without a recipe, or with settings that do not go with one, see
            ``lab.hf.arguments``; another trainer, such as DPO's; ``compute_loss_func``, ``compute_metrics``;
            a ``compute_loss`` or a ``training_step`` that would not be called; an optimizer that is not
            AdamW, or that was made before the recipe replaced the parameters.
        LabError: See ``lab.apply_recipe``.
    """

    if TYPE_CHECKING:
        # Trainer declares these as optional, because it makes them after its constructor has run.
        args: Any
        model: Any
        optimizer: Any
        lr_scheduler: Any

    _applied: LongContextModel | None = None
    _counts = True  # Whether the batch that was evaluated last has a label.
    _resumes = False  # Whether a training resumes, and has not read a batch yet.
    _make_empty_copy: Callable[[], PreTrainedModel] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(LongContext):
            raise RecipeError(
                f"{cls.__name__} with LongContext after a trainer, whose methods would run in its place: "
                "write LongContext first"
            )
        for place, base in enumerate(order):
            foreign = base.__module__.partition(".")[0] in ("trl", "transformers") and issubclass(
                base, Trainer
            )
            if foreign and base.__name__ not in KNOWN.get(base.__module__, ()):
                raise RecipeError(
                    f"LongContext with {base.__name__}: its loss was not compared; use Trainer or SFTTrainer"
                )
            unused = NEVER_CALLED if place < order.index(LongContext) else NEVER_CALLED | REPLACED
            for name in () if foreign or base is LongContext else sorted(unused & vars(base).keys()):
                raise RecipeError(
                    f"{name} of {base.__name__} with LongContext, which would not call it: the loss is the "
                    "model's cross-entropy; leave it out"
                )

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if args is None:
            raise RecipeError(
                "no arguments: make them by lab.hf.arguments(TrainingArguments, recipe='upipe', ...)"
            )
        check_arguments(args)
        fixed = use_expandable_segments() if args.device.type == "cuda" else 0
        if fixed:
            get_logger(__name__).warning(
                "lab.hf.LongContext: %s of tensors are in segments of fixed sizes, so the step may run out "
                "of memory: set PYTORCH_ALLOC_CONF=expandable_segments:True before Python starts",
                format_bytes(fixed),
            )
        super().__init__(model, args, *rest, **kwargs)
        for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(self, name) is not None:
                raise RecipeError(
                    f"{name} with a recipe: it takes the logits of all tokens, which never exist; leave "
                    "it out"
                )
        if self.args.n_gpu > 1:
            raise RecipeError(
                f"one process that sees {self.args.n_gpu} GPUs: start one process for each GPU by torchrun"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Resolve the recipe for this model and number of ranks, and make an accelerator for it."""
        if self.model is None:
            raise RecipeError("model_init with a recipe: give the model itself")
        inner = inner_model(self.model)
        # SFTTrainer later replaces the model's forward by one that computes entropies. The recipe is applied
        # to the forward that the model has now.
        self._forward = vars(inner).get("forward")
        self.recipe = self.recipe_for(self.args.world_size)
        given = self.args.parallelism_config
        if given is not None and not isinstance(given, SharedSequences):
            raise RecipeError(
                f"a parallelism_config of cp_size={given.cp_size}, sp_size={given.sp_size}, "
                f"tp_size={given.tp_size} together with a recipe, which makes its own: leave it out"
            )
        refuse_launched_parallelism()
        self.args.parallelism_config = parallelism(self.recipe, self.args.world_size)
        config = self.args.accelerator_config
        # A stream would be read by the first process alone, which gives each rank other rows.
        config.dispatch_batches = False
        if self.recipe.fsdp:
            # Without this setting, FSDP would hold unsharded gradients from one micro-batch to the next.
            config.gradient_accumulation_kwargs = {
                **(config.gradient_accumulation_kwargs or {}),
                "sync_each_batch": True,
            }
        super().create_accelerator_and_postprocess()
        if self.recipe.fsdp:
            # Trainer writes a number of steps here, and would refuse the same arguments the next time.
            del config.gradient_accumulation_kwargs["num_steps"]

    @property
    def _applied_by_hand(self) -> bool:
        """Whether the caller has applied ``lab.apply_recipe`` to the model."""
        return getattr(self._forward, "sequence", None) is not None

    def recipe_for(self, ranks: int) -> Recipe:
        """Return the recipe of the arguments for this model on a number of ranks."""
        return check_arguments(self.args).resolve(inner_model(self.model).config, ranks)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # A model on the meta device has no values to move; it can be planned.
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    def _apply_recipe(self) -> None:
        """Apply the recipe to the model, if that has not been done."""
        if self._applied is None:
            self._make_empty_copy = self.make_empty_copy
            self._undo_forward()
            self._applied = applied_before(self.model, self.recipe, self.accelerator) or apply(
                self.model, self.recipe, self.accelerator
            )

    @property
    def applied(self) -> LongContextModel:
        """The model with its recipe.

        Raises:
            RecipeError: Neither a training nor an evaluation has begun, which apply the recipe.
        """
        if self._applied is None:
            raise RecipeError("a trainer that has not applied its recipe yet: call train or evaluate before")
        return self._applied

    @property
    def make_empty_copy(self) -> Callable[[], PreTrainedModel] | None:
        """A function that makes copies without values of the model, as it was when the recipe was applied.

        Before that, they are copies of the model as it is. It is None for a model that was given with a
        recipe.
        """
        if self._applied is not None or self._applied_by_hand:
            return self._make_empty_copy
        self._undo_forward()
        return _empty_copies_of(inner_model(self.model))

    def _undo_forward(self) -> None:
        """Give the model the forward back that SFTTrainer has replaced."""
        inner = inner_model(self.model)
        if self._forward is None:
            vars(inner).pop("forward", None)
        else:
            inner.forward = self._forward

    # ---- training ----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with True, resume from the newest complete checkpoint in ``output_dir``.

        Raises:
            CheckpointError: There is no complete checkpoint, or it belongs to another trainer or model.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_checkpoint(Path(self.args.output_dir)))
        self._resumes = bool(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # The recipe is applied here, because next the optimizer is made, of parameters that must be sharded.
        check_trained(self.model)
        self._apply_recipe()
        return super()._prepare_for_training(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make AdamW and its state, which plans count from the first step on."""
        # The recipe replaces the parameters by their shards, so it is applied before.
        self._apply_recipe()
        optimizer = super().create_optimizer(*args, **kwargs)
        check_optimizer(optimizer, self.model)
        if self.applied.sharding == "lab":
            make_moments(optimizer)
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's parts of an update's micro-batches, and the number of labels on all ranks."""
        samples, count = super().get_batch_samples(*args, **kwargs)
        if not samples:
            if self._resumes:
                raise RecipeError(
                    "a stream that ends before the batches that the checkpoint has trained: the order of its "
                    "rows in a later epoch cannot be resumed; give a dataset with a length, or set "
                    "ignore_data_skip=True to begin at its first row"
                )
            # A stream ends, and the next epoch begins.
            return samples, count
        self._resumes = False
        if count is None:
            raise RecipeError("batches without labels: give a collator for language modeling")
        # Only the last batch that was read may be the last one of the dataset.
        own = [None] * (len(samples) - 1) + [self._own_rows(samples[-1])]
        for sample, rows in zip(samples, own, strict=True):
            before = self.state.num_input_tokens_seen
            super()._track_num_input_tokens(
                sample if rows is None else {name: value[:rows] for name, value in sample.items()}
            )
            # Each of the ranks that share a sequence has counted all of its tokens.
            added = self.state.num_input_tokens_seen - before
            self.state.num_input_tokens_seen = before + added // self.applied.shared
        parts = [self._part(sample, rows) for sample, rows in zip(samples, own, strict=True)]
        return parts, float(count if own[-1] is None else self.applied.count(parts))

    def _part(self, batch: Any, rows: int | None) -> dict[str, Tensor]:
        """Return this rank's part of a batch, of which only the first ``rows`` rows have labels."""
        part = self.applied.shard(self._prepare_inputs(batch))
        if rows is not None:
            part["shifted_labels"][rows:] = IGNORED
        return part

    def _own_rows(self, batch: Any) -> int | None:
        """Return how many rows the batch that was read last has of its own; None stands for all.

        Accelerate fills the last batch of a dataset with rows of the first one, so that all groups of ranks
        have as many. The plain trainer has no such rows.

        Raises:
            RecipeError: It cannot be known, because the dataset has no length, or because the rows of the
                last batch are documents of one row.
        """
        groups, state = self.applied.mesh.size() // self.applied.shared, self.accelerator.gradient_state
        if groups == 1 or not state.in_dataloader or self.args.dataloader_drop_last:
            return None
        if flattens(self.data_collator):
            if state.end_of_dataloader and state.remainder != 0:
                raise RecipeError(
                    "a last batch of documents in one row, where groups of ranks have rows of their own: "
                    "accelerate would repeat documents in it; set dataloader_drop_last=True, or give as many "
                    "rows as batches of all groups take"
                )
            return None
        dataset, each = state.active_dataloader.dataset, len(batch["input_ids"])
        if not has_length(dataset):
            raise RecipeError(
                "a dataset without a length, where groups of ranks have rows of their own: accelerate would "
                "repeat rows in the last batch; set dataloader_drop_last=True"
            )
        remaining = len(dataset) % (groups * each)
        if not state.end_of_dataloader or remaining == 0:
            return None
        before = self.applied.mesh.get_local_rank() // self.applied.shared * each
        return max(0, min(remaining - before, each))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count nothing. ``get_batch_samples`` counts, because a rank's part does not say what is padding."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Add this micro-batch's gradients, and return its share of the update's loss."""
        model.train()
        loss = self.applied.loss(model, inputs, num_items_in_batch)
        self.backward(loss)
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Run backward. ``MemoryTimeline`` replaces this method to see when backward begins and ends."""
        if self.applied.sharding == "lab":
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.applied.sharding == "accelerate":
            return super()._clip_grad_norm(model)
        norm = gradient_norm(self.applied.inner)
        nn.utils.clip_grads_with_norm_(
            self.applied.inner.parameters(), self.args.max_grad_norm, norm, foreach=True
        )
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self.applied.sharding == "lab":
            return gradient_norm(self.applied.inner)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    # ---- evaluation --------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on all ranks; losses only, as ``prediction_loss_only`` says."""
        self._apply_recipe()
        self.gather_function = self._gather_losses
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            if self.applied.sharding == "accelerate" and self.model_wrapped is self.model:
                # Accelerate has prepared the model without DDP. Without this, a later training would have no
                # DDP either.
                self.model._is_accelerate_prepared = False  # type: ignore[assignment]
                self.accelerator._models = [one for one in self.accelerator._models if one is not self.model]

    def _gather_losses(self, losses: Tensor) -> Tensor:
        """Return the losses of all rows. Of the ranks that share a sequence, the losses of one are taken."""
        gathered: Tensor = self.accelerator.gather(losses)
        once = gathered.view(-1, len(losses))[:: self.applied.shared].flatten()
        if not self._counts:
            return once[:0]
        state = self.accelerator.gradient_state
        # Accelerate fills the last batch with rows of the first; ``remainder`` rows are its own.
        return once[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else once

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Return the mean loss over the labels of this batch on all ranks; without any, it does not count."""
        part = self._part(inputs, self._own_rows(inputs))
        labels = self.applied.count([part])
        self._counts = labels > 0
        with torch.no_grad():
            return self.applied.loss(model, part, labels), None, None

    # ---- saving and resuming -----------------------------------------------------------------------------

    @property
    def _sharded(self) -> bool:
        """Whether the lab shards or replicates the model. This class then saves the model, not Trainer."""
        return self._applied is not None and self._applied.sharding == "lab"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as ``save_pretrained`` does; every rank calls this."""
        if not self._sharded:
            super().save_model(output_dir, _internal_call)
            return
        state = whole_state(self.model, keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_optimizer(Path(output_dir) / FOLDER, self.applied.inner, self.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._sharded or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, scheduler = Path(checkpoint) / FOLDER, Path(checkpoint) / SCHEDULER_NAME
        if not folder.is_dir() or not scheduler.is_file():
            raise CheckpointError(
                f"{checkpoint} has no {FOLDER} and {SCHEDULER_NAME}: it was saved with another recipe or "
                "with save_only_model; resume from a checkpoint of this trainer"
            )
        load_optimizer(folder, self.applied.inner, self.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._applied_by_hand:
            self._apply_recipe()
        if not self._sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        load_whole_state(self.model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if not self._sharded:
            super()._load_best_model()
            return
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _empty_copies_of(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """Return a function that makes copies of a model without the values of its parameters and buffers.

    A copy has the model's modules and adapters, and its parameters have the same shapes and dtypes and are
    frozen where the model's are.
    """

    def without_values(source: nn.Module, device: str) -> PreTrainedModel:
        # deepcopy takes an object's copy from its memo where there is one, so it copies no value.
        memo: dict[int, Any] = {}
        for tensor in (*source.parameters(), *source.buffers()):
            empty = torch.empty_like(tensor, device=device, requires_grad=False)
            trained = tensor.requires_grad
            memo[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
        copied: PreTrainedModel = copy.deepcopy(source, memo)  # type: ignore[assignment]
        return copied

    skeleton = without_values(model, "meta")
    return lambda: without_values(skeleton, "cpu")
