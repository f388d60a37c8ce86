"""Applies a recipe to a model that Accelerate prepares, and lists which steps Accelerate does itself."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lab.decoder import Patch, check_materialized
from lab.errors import RecipeError
from lab.hf.accelerate_settings import check_parallelism
from lab.hf.batches import BATCH_KEYS, shard_rows
from lab.hf.choice import RecipeChoice
from lab.hf.saving import save_by_all_ranks, whole_state
from lab.recipe.recipe import Recipe
from lab.step.compose import apply_recipe, apply_techniques, check_inputs
from lab.techniques.exchange import sum_over_ranks
from lab.techniques.loss import IGNORED
from lab.techniques.rope import check_lengths
from lab.techniques.sharding import OPTIMIZER_BEFORE, reshape_mesh
from lab.torch_private import runs_inside_ddp

Sharding = Literal["lab", "accelerate"]
"""The library that combines the gradients of the ranks: the lab sums them, and accelerate averages them by
DDP."""


@dataclass(frozen=True, eq=False)
class LongContextModel:
    """A model with a recipe, on this rank.

    Letters: P ranks, C Ulysses degree, R ring degree.

    Attributes:
        inner: The transformers model; if there are adapters, the one inside PEFT's model.
        recipe: The recipe.
        mesh: A mesh of all P ranks.
        sequence: The group of C*R ranks that share a sequence; None if that is one rank.
        sharding: The library that combines the gradients of the ranks.
        accelerator: The accelerator that prepares the model.
        outstanding: For the numbers of labels that ``count`` has returned: how many micro-batches of the
            update have no loss yet.
    """

    inner: PreTrainedModel
    recipe: Recipe
    mesh: DeviceMesh
    sequence: dist.ProcessGroup | None
    sharding: Sharding
    accelerator: Accelerator
    outstanding: dict[float, int] = field(default_factory=dict)

    @property
    def shared(self) -> int:
        """The number of ranks that share a sequence, C*R."""
        return self.recipe.ulysses * self.recipe.ring

    def shard(self, inputs: Any) -> dict[str, Any]:
        """Return this rank's part of a batch; see ``shard_rows``.

        Raises:
            LabError: See ``shard_rows``.
            RecipeError: The rows of a rank have a length that ``RotaryForward`` refuses.
        """
        recipe, everyone = self.recipe, self.mesh.get_group()
        part = shard_rows(
            inputs,
            ulysses=recipe.ulysses,
            ring=recipe.ring,
            exchange=recipe.ring_exchange,
            index=self.mesh.get_local_rank() % self.shared,
            vocab_size=self.inner.config.vocab_size,
            sequence=self.sequence,
            everyone=everyone,
        )
        check_lengths(self.inner, inputs["input_ids"].shape[1], everyone)
        return part

    def count(self, parts: Iterable[Mapping[str, Any]]) -> int:
        """Return the number of labels on all ranks; every rank calls this.

        Args:
            parts: What ``shard`` returned for each micro-batch of an update.
        """
        own = [_labels_in(part) for part in parts]
        total = self._sum_of(sum(own))
        self.outstanding[total] = len(own)
        return total

    def _sum_of(self, labels: int) -> int:
        """Return the sum over all ranks of a number of labels."""
        total = torch.tensor(labels, device=self.accelerator.device)
        dist.all_reduce(total, group=self.mesh.get_group())
        return int(total)

    def loss(self, model: nn.Module, part: Mapping[str, Any], labels: float) -> Tensor:
        """Return the sum of the cross-entropies of all ranks over ``labels``, the same number on every rank.

        ``accelerator.backward`` of this loss gives the exact gradients. Where the lab sums gradients over the
        ranks, those of a rank are the gradients of its own labels. Where accelerate averages them, they are
        multiplied by P before. ``accelerator.backward`` also divides by accelerate's
        ``gradient_accumulation_steps``. The gradients are multiplied by this number before, because
        ``labels`` is the number of labels in all micro-batches already.

        An update of several micro-batches calls ``optimizer.step()`` once, after ``backward`` of the last.
        ``accelerator.no_sync(model)`` around the others saves sums over the ranks where DDP combines
        gradients. ``accelerator.accumulate`` is right only if the loop has not read the last batch of the
        loader before: from then on it takes each micro-batch for the last of an update.

        Without any label the loss is 0, and so is every gradient.

        Args:
            model: The model as accelerate returned it.
            part: What ``shard`` returned.
            labels: The number of labels on all ranks, in all micro-batches of an update; see ``count``.

        Raises:
            RecipeError: A scheduler that accelerate steps once for each rank; a model to train that DDP does
                not wrap, where DDP combines gradients; ``accelerator.accumulate`` ends an update at another
                micro-batch than the last one that was counted.
        """
        self._check_schedulers()
        # The wrapper of torch.compile may be around DDP.
        self._check_wrapped(any(isinstance(one, DistributedDataParallel) for one in model.modules()))
        self._check_accumulation(labels)
        own = (self.inner if self.sharding == "lab" else model)(**part).loss
        return self._mean(own, labels, self.accelerator.gradient_accumulation_steps)

    def _mean(self, own: Tensor, labels: float, factor: int) -> Tensor:
        """Return the sum of the ranks' sums over ``labels``, and multiply its gradient by ``factor``."""
        total = sum_over_ranks(own, self.mesh.get_group())
        if self.sharding == "accelerate":
            factor *= self.mesh.size()
        if factor > 1:
            # The value stays that of the sum; the gradient is multiplied by the factor.
            total = total + (factor - 1) * (total - total.detach())
        return total / max(labels, 1)

    def accept_whole_batches(self) -> None:
        """Let ``model(**batch).loss`` be the mean over the labels of all ranks, as in a loop of Accelerate.

        A batch with ``labels`` or ``shift_labels`` is a whole one, of which this rank takes its part. There
        are no logits. A part, which ``loss`` gives, has ``shifted_labels``.
        """
        checked: Callable[..., Any] = self.inner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal checked
            if getattr(checked, "sequence", None) is None:
                # The checks record the modules as accelerate has changed them, so ``apply`` does not add
                # them where DDP combines gradients.
                self.inner.forward = checked
                check_inputs(self.inner, self.recipe, self.mesh)
                checked, self.inner.forward = self.inner.forward, patch
            if all(kwargs.get(name) is None for name in ("labels", "shift_labels")):
                return checked(*args, **kwargs)
            self._check_schedulers()
            self._check_wrapped(runs_inside_ddp())
            kwargs |= zip(("input_ids", "attention_mask", "position_ids"), args, strict=False)
            part = self.shard({name: kwargs.pop(name) for name in BATCH_KEYS if name in kwargs})
            own = checked(**part, **kwargs).loss
            return CausalLMOutputWithPast(loss=self._mean(own, self._sum_of(_labels_in(part)), 1))

        patch = Patch(torch.compiler.disable(forward), checked)
        patch.sequence = self.recipe.ulysses, self.recipe.ring
        self.inner.forward = patch

    def _check_wrapped(self, wrapped: bool) -> None:
        """Refuse to train a model that DDP does not wrap, where DDP combines gradients."""
        if self.sharding == "accelerate" and torch.is_grad_enabled() and not wrapped:
            raise RecipeError(
                f"a model without DDP, which combines the gradients of {self.mesh.size()} replicas: give the "
                "model to accelerator.prepare, and use what it returns"
            )

    def _check_accumulation(self, labels: float) -> None:
        """Refuse ``accelerator.accumulate`` if it does not end the update where ``count`` says it ends.

        A loop without it has one accumulation step, and there ``accelerator.step`` is 0.
        """
        if labels not in self.outstanding:
            return
        left = self.outstanding.pop(labels) - 1
        if left > 0:
            self.outstanding[labels] = left
        ends, steps = self.accelerator.sync_gradients, self.accelerator.gradient_accumulation_steps
        accumulates = steps > 1 or self.accelerator.step > 0
        if torch.is_grad_enabled() and (ends and accumulates if left else not ends):
            raise RecipeError(
                f"accelerator.accumulate {'ends' if ends else 'does not end'} an update of which {left} "
                "counted micro-batches are left (it ends one whenever the loader has been read to its end): "
                "leave it and gradient_accumulation_steps out, put accelerator.no_sync(model) around all "
                "micro-batches but the last, and call optimizer.step() after that"
            )

    def _check_schedulers(self) -> None:
        """Refuse a scheduler that accelerate steps C*R times for each batch.

        Accelerate assumes that every rank has a batch of its own, but C*R ranks share one.
        """
        for scheduler in self.accelerator._schedulers:
            if self.shared > 1 and scheduler.step_with_optimizer and not scheduler.split_batches:
                raise RecipeError(
                    "a scheduler that accelerate steps once for each rank, where ranks share a batch: do not "
                    "give it to accelerator.prepare, or set step_scheduler_with_optimizer=False"
                )


def _labels_in(part: Mapping[str, Any]) -> int:
    return int((part["shifted_labels"] != IGNORED).sum())


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside PEFT's model, or the model itself."""
    inner: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator, assignment]
    return inner


def mesh_of_all(accelerator: Accelerator) -> DeviceMesh:
    """Return a mesh of all ranks. If there is no process group, make one of this process alone."""
    _end_groups_at_exit()
    device_type = accelerator.device.type
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return init_device_mesh(device_type, (dist.get_world_size(),))


@cache
def _end_groups_at_exit() -> None:
    """Destroy gloo's groups before the process ends, because running threads of gloo would abort it."""

    def end() -> None:
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()

    atexit.register(end)


def apply(
    model: nn.Module, recipe: str | Recipe, accelerator: Accelerator, *, tokens: int | str | None = None
) -> LongContextModel:
    """Apply a recipe to a model before accelerate prepares it; every rank calls this.

    From then on, ``model(**batch).loss`` of a whole batch is the mean over the labels of all ranks. A loop
    whose updates have several micro-batches calls ``shard``, ``count`` and ``loss`` of what this returns.

    The lab shards or replicates the parameters, also if accelerate has an FSDP plugin: accelerate would make
    the head an FSDP unit of its own, but the tiles of the loss need the head whole. Only replicas that
    compute in the parameters' own dtype are left to DDP.

    Args:
        model: A transformers model, or PEFT's model around one.
        recipe: The recipe, or the name of one. A named recipe computes in bf16 if the accelerator's
            ``mixed_precision`` is bf16, and in the parameters' own dtype if it is not set.
        accelerator: The accelerator that will prepare the model.
        tokens: The number of tokens in the longest row, from which the tiles of a named recipe derive.

    Raises:
        LabError: A name without ``tokens``; see ``lab.apply_recipe`` and ``check_parallelism``; parameters
            outside the transformers model, such as those of prompt tuning; PEFT's model with accelerate's
            FSDP; an optimizer of the model that was prepared before.
    """
    inner, mesh = inner_model(model), mesh_of_all(accelerator)
    if not set(model.parameters()) <= set(inner.parameters()):
        raise RecipeError(
            f"a {type(model).__name__} with parameters around the model: prompt and prefix tuning are not "
            "supported; use LoRA"
        )
    check_materialized(inner)
    if isinstance(recipe, str):
        dtype = "bfloat16" if accelerator.mixed_precision == "bf16" else None
        recipe = RecipeChoice.of(recipe, tokens, {"compute_dtype": dtype}).resolve(inner.config, mesh.size())
    check_parallelism(recipe, accelerator)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and inner is not model:
        raise RecipeError(
            f"accelerate's FSDP with a {type(model).__name__}: it would shard the adapters again; leave "
            "accelerate's FSDP out, and the recipe's fsdp=True shards them"
        )
    by_ddp = combined_by_ddp(recipe, mesh.size())
    sharding: Sharding = "accelerate" if by_ddp else "lab"
    if by_ddp:
        apply_techniques(inner, recipe, mesh)
        # The next trainer of this model asks for it: these parameters have no hooks that sum gradients.
        inner.lab_sharding = sharding  # type: ignore[assignment]
    else:
        if recipe.fsdp or recipe.compute_dtype is not None:
            _refuse_optimizers(inner, accelerator)
        apply_recipe(inner, recipe, mesh)
        _leave_as_it_is(model, accelerator)
    applied = LongContextModel(inner, recipe, mesh, _sequence_group(recipe, mesh), sharding, accelerator)
    applied.accept_whole_batches()
    return applied


def combined_by_ddp(recipe: Recipe, ranks: int) -> bool:
    """Return whether DDP, and not the lab, combines the gradients of the ranks."""
    return ranks > 1 and not recipe.fsdp and recipe.compute_dtype is None


def applied_before(model: nn.Module, recipe: Recipe, accelerator: Accelerator) -> LongContextModel | None:
    """Describe a model to which ``lab.apply_recipe`` or another trainer has applied a recipe.

    Returns:
        The model, whose gradients are combined as before; None for a model without a recipe.

    Raises:
        RecipeError: The model has other degrees than the recipe; DDP combines its gradients, but not those of
            the recipe; accelerate has an FSDP plugin; see ``check_parallelism``.
    """
    inner = inner_model(model)
    degrees = getattr(inner.forward, "sequence", None)
    if degrees is None:
        return None
    if degrees != (recipe.ulysses, recipe.ring):
        raise RecipeError(
            f"a model with a recipe of ulysses={degrees[0]}, ring={degrees[1]}, and arguments with one of "
            f"ulysses={recipe.ulysses}, ring={recipe.ring}: give the arguments the recipe that was applied"
        )
    check_parallelism(recipe, accelerator)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        raise RecipeError(
            "accelerate's FSDP with a model that a recipe has sharded: leave accelerate's FSDP out"
        )
    mesh = mesh_of_all(accelerator)
    sharding: Sharding = getattr(inner, "lab_sharding", "lab")
    if sharding == "lab":
        _leave_as_it_is(model, accelerator)
    elif not combined_by_ddp(recipe, mesh.size()):
        raise RecipeError(
            "a model of which DDP keeps replicas equal, and arguments with a recipe of "
            f"fsdp={recipe.fsdp}, compute_dtype={recipe.compute_dtype}: give the arguments fsdp=False and no "
            "bf16, or build the model again"
        )
    return LongContextModel(inner, recipe, mesh, _sequence_group(recipe, mesh), sharding, accelerator)


def _leave_as_it_is(model: nn.Module, accelerator: Accelerator) -> None:
    """Make ``accelerator.prepare`` return the model unchanged.

    Accelerate returns a model that has this attribute, and with FSDP also one that is sharded.
    """
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    if _is_sharded(model):
        # PEFT's merge_and_unload returns the inner model.
        for one in {model, inner_model(model)}:
            save_by_all_ranks(one)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        # The policy would look for classes of layers by their names, which FSDP has changed.
        plugin.auto_wrap_policy = None
        return
    # Without its plugin, accelerate takes the shards for whole parameters.
    plain = accelerator.get_state_dict

    def get_state_dict(model: nn.Module, unwrap: bool = True) -> Any:
        if _is_sharded(model):
            return whole_state(accelerator.unwrap_model(model), keep=accelerator.is_main_process)
        return plain(model, unwrap)

    accelerator.get_state_dict = get_state_dict
    accelerator.register_save_state_pre_hook(_refuse_states)
    accelerator.register_load_state_pre_hook(_refuse_states)


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _refuse_states(models: list[nn.Module], *_: Any) -> None:
    """Refuse to save or to load accelerate's state, which has the optimizer's shards of one rank alone."""
    if any(map(_is_sharded, models)):
        raise RecipeError(
            "accelerator.save_state or load_state with a model that the lab has sharded: they know the "
            "optimizer's state of one rank alone; use get_state_dict and set_state_dict of "
            "torch.distributed.checkpoint.state_dict"
        )


def _refuse_optimizers(model: nn.Module, accelerator: Accelerator) -> None:
    """Refuse optimizers that accelerate has prepared, of parameters that the recipe is about to replace."""
    parameters = set(model.parameters())
    for optimizer in accelerator._optimizers:
        if any(not parameters.isdisjoint(group["params"]) for group in optimizer.param_groups):
            raise RecipeError(OPTIMIZER_BEFORE)


def _sequence_group(recipe: Recipe, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    shared = recipe.ulysses * recipe.ring
    if shared == 1:
        return None
    return reshape_mesh(mesh, (-1, shared), ("data", "sequence")).get_group("sequence")
