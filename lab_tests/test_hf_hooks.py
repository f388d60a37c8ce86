"""Each name that ``lab.hf`` uses of a package, and that the package does not promise, is as it is used.

A release that moved fails the test of the hook, whose message names the package, its version and the hook.
"""

import inspect
import warnings
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from trl.trainer.utils import add_fused_lm_head

from lab.hf.ranks import fresh_process
from lab.hf.shared_sequences import SharedSequences
from lab.hf.trainer import KNOWN
from lab_tests.support.models import small_config

HOOKS: dict[str, tuple[str, Callable[[Any], None]]] = {}


def hook(package, name):
    """Registers a check of one hook; it gets the calls of the trainer that was watched."""

    def register(check):
        HOOKS[name] = package, check
        return check

    return register


# ---- transformers: what Trainer calls, when, and with what -------------------------------------------------


class Call:
    """One call of a method: its arguments by name, its result, and the trainer's attributes then."""

    def __init__(self, name, arguments, had):
        self.name, self.arguments, self.had, self.result, self.inside = name, arguments, had, None, []


class Watched(Trainer):
    """Notes the calls of its methods that ``LongContext`` overrides."""

    def __init__(self, *args, **kwargs):
        self.calls, self.open = [], []
        super().__init__(*args, **kwargs)


OVERRIDDEN = (
    "create_accelerator_and_postprocess", "_prepare_for_training", "create_optimizer", "get_batch_samples",
    "_get_num_items_in_batch", "training_step", "compute_loss", "_clip_grad_norm", "_get_grad_norm",
    "evaluation_loop", "prediction_step", "save_model", "_save", "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model",
)  # fmt: skip


def watch(name):
    original = getattr(Trainer, name, None)

    def method(self, *args, **kwargs):
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        call = Call(name, dict(arguments), set(vars(self)))
        self.calls.append(call)
        for outer in self.open:
            outer.inside.append(name)
        self.open.append(call)
        try:
            call.result = original(self, *args, **kwargs)
        finally:
            self.open.pop()
        return call.result

    if original is not None:
        setattr(Watched, name, method)


for each in OVERRIDDEN:
    watch(each)


def llama():
    torch.manual_seed(1)
    config = small_config(vocab_size=67, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The calls of a trainer that resumes, accumulates, evaluates, saves and loads the best model."""
    folder = tmp_path_factory.mktemp("watched")
    row = torch.arange(1, 12)
    rows = [{"input_ids": row, "labels": row.masked_fill(row < 4, -100)} for _ in range(6)]

    def trainer(steps):
        arguments = TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1, report_to=[],
            use_cpu=True, load_best_model_at_end=True, prediction_loss_only=True, disable_tqdm=True,
            max_grad_norm=0.3,
        )  # fmt: skip
        return Watched(llama(), arguments, train_dataset=rows, eval_dataset=rows[:3])

    with fresh_process():
        trainer(1).train()
        resumed = trainer(2)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        resumed.gather_function = lambda losses: losses
        resumed.evaluate()
    return resumed


def only(trainer, name):
    [call] = [call for call in trainer.calls if call.name == name]
    return call


def first(trainer, name):
    return next(call for call in trainer.calls if call.name == name)


def comes_before(trainer, one, other):
    names = [call.name for call in trainer.calls]
    return names.index(one) < names.index(other)


@hook("transformers", "Trainer.create_accelerator_and_postprocess")
def _(trainer):
    had = only(trainer, "create_accelerator_and_postprocess").had
    assert {"model", "args"} <= had, "it is called with the model and the arguments"
    assert "accelerator" not in had, "it makes the accelerator"


@hook("transformers", "Trainer._prepare_for_training")
def _(trainer):
    call = only(trainer, "_prepare_for_training")
    assert "create_optimizer" in call.inside, "the optimizer is made in it"
    assert "optimizer" not in call.had or comes_before(trainer, "_prepare_for_training", "create_optimizer")


@hook("transformers", "Trainer.create_optimizer")
def _(trainer):
    assert isinstance(only(trainer, "create_optimizer").result, torch.optim.AdamW), "it returns the optimizer"


@hook("transformers", "Trainer.get_batch_samples")
def _(trainer):
    samples, count = first(trainer, "get_batch_samples").result
    parts = [call.arguments for call in trainer.calls if call.name == "compute_loss"][:2]
    for sample, part in zip(samples, parts, strict=True):
        assert part["inputs"]["labels"] is sample["labels"], "compute_loss gets what it returns"
        assert part["num_items_in_batch"] is count, "compute_loss gets the count that it returns"


@hook("transformers", "Trainer._get_num_items_in_batch")
def _(trainer):
    labels = torch.tensor([[5, -100, 7, 8, -100]])
    PartialState(cpu=True)
    count = trainer._get_num_items_in_batch([{"labels": labels}] * 2, trainer.args.device)
    assert int(count) in (4, 6), "it counts labels"


@hook("transformers", "Trainer.training_step")
def _(trainer):
    samples, count = first(trainer, "get_batch_samples").result
    steps = [call.arguments for call in trainer.calls if call.name == "training_step"][: len(samples)]
    for sample, step in zip(samples, steps, strict=True):
        assert set(step) == {"self", "model", "inputs", "num_items_in_batch"}
        assert step["inputs"] is sample, "it gets what get_batch_samples returns"
        assert step["num_items_in_batch"] is count, "it gets the count that get_batch_samples returns"


@hook("transformers", "Trainer._clip_grad_norm")
def _(trainer):
    clipped, logged = first(trainer, "_clip_grad_norm"), first(trainer, "_get_grad_norm")
    assert set(clipped.arguments) == {"self", "model"}, "it takes the model"
    assert logged.arguments["grad_norm"] is clipped.result, "its norm goes to _get_grad_norm"


@hook("transformers", "Trainer._get_grad_norm")
def _(trainer):
    call = first(trainer, "_get_grad_norm")
    assert call.result is call.arguments["grad_norm"], "it returns the norm to log"


@hook("transformers", "Trainer.gather_function")
def _(trainer):
    assert trainer.gather_function == trainer.accelerator.gather_for_metrics, "evaluation_loop sets it again"


@hook("transformers", "Trainer.evaluation_loop")
def _(trainer):
    assert "prediction_step" in first(trainer, "evaluation_loop").inside, "it calls prediction_step"


@hook("transformers", "Trainer.prediction_step")
def _(trainer):
    call = first(trainer, "prediction_step")
    names = ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"]
    assert list(inspect.signature(Trainer.prediction_step).parameters) == names
    loss, logits, labels = call.result
    assert (loss.dim(), logits, labels) == (0, None, None), "it returns a loss alone"


@hook("transformers", "Trainer._save")
def _(trainer):
    assert "_save" in first(trainer, "save_model").inside, "save_model writes by it"
    assert list(inspect.signature(Trainer._save).parameters) == ["self", "output_dir", "state_dict"]


@hook("transformers", "Trainer.save_model")
def _(trainer):
    call = first(trainer, "save_model")
    assert call.arguments["output_dir"].endswith("checkpoint-2"), "a checkpoint's weights are written by it"
    assert call.arguments["_internal_call"] is True
    assert list(inspect.signature(Trainer.save_model).parameters) == ["self", "output_dir", "_internal_call"]


@hook("transformers", "Trainer._save_optimizer_and_scheduler")
def _(trainer):
    folder = first(trainer, "_save_optimizer_and_scheduler").arguments["output_dir"]
    assert folder.endswith("checkpoint-2"), "it gets the checkpoint's folder"
    assert SCHEDULER_NAME == "scheduler.pt"


@hook("transformers", "Trainer._load_optimizer_and_scheduler")
def _(trainer):
    call = only(trainer, "_load_optimizer_and_scheduler")
    assert call.arguments["checkpoint"].endswith("checkpoint-1"), "it gets the checkpoint that is resumed"
    assert comes_before(trainer, "create_optimizer", call.name), "there is an optimizer to load into"


@hook("transformers", "Trainer._load_from_checkpoint")
def _(trainer):
    assert (
        first(trainer, "_load_from_checkpoint").arguments["resume_from_checkpoint"].endswith("checkpoint-1")
    )
    assert comes_before(trainer, "_load_from_checkpoint", "_prepare_for_training"), (
        "weights are loaded before"
    )


@hook("transformers", "Trainer._load_best_model")
def _(trainer):
    only(trainer, "_load_best_model")
    assert "checkpoint-" in trainer.state.best_model_checkpoint


# ---- accelerate --------------------------------------------------------------------------------------------


@hook("accelerate", "_is_accelerate_prepared")
def _(_):
    marked, other = nn.Linear(2, 3), nn.Linear(2, 3)
    marked._is_accelerate_prepared = True
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.prepare_model(marked) is marked
    assert accelerator.prepare_model(other) is other
    assert ("forward" in vars(marked), "forward" in vars(other)) == (False, True), (
        "a marked model is left alone"
    )


class Noting(SharedSequences):
    """Notes which of its methods accelerate calls."""

    called: list[str]

    def build_device_mesh(self, device_type):
        self.called.append("build_device_mesh")
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator):
        self.called.append("_validate_accelerator")
        assert self.total_size == accelerator.num_processes


@hook("accelerate", "ParallelismConfig.build_device_mesh and _validate_accelerator")
def _(_):
    config = Noting(dp_shard_size=1, cp_size=1)
    config.called = []
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    assert config.called == ["build_device_mesh", "_validate_accelerator"]
    assert accelerator.state.device_mesh.mesh_dim_names[:2] == ("dp_shard", "cp")


@hook("accelerate", "ParallelismConfig.cp_enabled and _sizes")
def _(_):
    assert ParallelismConfig(cp_size=2, dp_shard_size=3).cp_enabled
    config = SharedSequences(cp_size=2, dp_shard_size=3)
    assert not config.cp_enabled
    assert {size for size in config._sizes.items() if size[1] > 1} == {("cp", 2), ("dp_shard", 3)}
    assert config.total_size == 6


class Mesh:
    """A mesh of which the names and sizes are read."""

    mesh_dim_names = ("dp_shard", "cp")

    def __getitem__(self, name):
        return SimpleNamespace(size=lambda: {"dp_shard": 2, "cp": 3}[name])


@hook("accelerate", "prepare_data_loader")
def _(_):
    Accelerator(cpu=True)
    seen = [
        [batch.tolist() for batch in prepare_data_loader(
            DataLoader(range(8), batch_size=2), num_processes=6, process_index=index, torch_device_mesh=Mesh()
        )]
        for index in range(6)
    ]  # fmt: skip
    assert seen[:3] == [[[0, 1], [4, 5]]] * 3, "the ranks of 'cp' have one batch"
    assert seen[3:] == [[[2, 3], [6, 7]]] * 3, "those of 'dp_shard' have different ones"


@hook("accelerate", "GradientState.end_of_dataloader and remainder")
def _(_):
    accelerator = Accelerator(cpu=True)
    states = []
    for _batch in accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2)):
        states.append((accelerator.gradient_state.end_of_dataloader, accelerator.gradient_state.remainder))
    assert states == [(False, 1), (False, 1), (True, 1)]


@hook("accelerate", "fsdp2_prepare_model")
def _(_):
    model = fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (1,)))
    assert fsdp2_prepare_model(None, model) is model, "a model that is sharded is left alone"


@hook("accelerate", "Accelerator._schedulers")
def _(_):
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    scheduler = LambdaLR(torch.optim.AdamW([nn.Parameter(torch.ones(2))]), lambda _: 1.0)
    prepared = accelerator.prepare_scheduler(scheduler)
    assert accelerator._schedulers == [prepared]
    assert (prepared.step_with_optimizer, prepared.split_batches) == (False, False)


# ---- TRL and PEFT ------------------------------------------------------------------------------------------


@hook("trl", "add_fused_lm_head")
def _(_):
    model = llama()
    assert "forward" not in vars(model)
    add_fused_lm_head(model)
    assert "forward" in vars(model), "it replaces the model's forward"


@pytest.mark.parametrize("module", KNOWN)
def test_trainers_are_where_they_are_looked_for(module):
    package = module.partition(".")[0]
    for name in KNOWN[module]:
        kind = getattr(pytest.importorskip(module), name, None)
        assert kind is not None, f"{package} {version(package)} has no {module}.{name}"
        assert kind.__module__ == module, f"{package} {version(package)} has {name} in {kind.__module__}"


def adapted(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


@hook("peft", "get_base_model")
def _(_):
    model = llama()
    assert adapted(model).get_base_model() is model


@hook("peft", "get_peft_model_state_dict")
def _(_):
    model = adapted(llama())
    state = model.state_dict(keep_vars=True)
    stored = get_peft_model_state_dict(model, state, adapter_name="default", save_embedding_layers=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = {id(tensor) for tensor in stored.values()}
    assert {id(parameter) for parameter in trained} <= found <= {id(tensor) for tensor in state.values()}, (
        "it returns the tensors that it is given"
    )


@hook("transformers", "_track_num_input_tokens")
def _(calls):
    assert callable(Trainer._track_num_input_tokens)
    assert list(inspect.signature(Trainer._track_num_input_tokens).parameters) == ["self", "inputs"]


@hook("accelerate", "_is_accelerate_prepared")
def _(_):
    model, accelerator = nn.Linear(2, 2), Accelerator(cpu=True)
    accelerator.prepare_model(model, evaluation_mode=True)
    assert model._is_accelerate_prepared
    assert accelerator._models == [model]


# ---- the test ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.usefixtures("alone")
def test_a_hook_is_as_it_is_used(name, calls):
    package, check = HOOKS[name]
    try:
        with fresh_process():
            check(calls)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise AssertionError(
            f"{package} {version(package)} has another {name} than lab.hf uses ({reason})"
        ) from error
