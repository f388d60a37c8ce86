"""Each name that ``lab.hf`` uses of a package, and that the package does not promise, is as it is used.

A release that moved one of them fails one test, whose message names the package, its version and the hook.
"""

import ast
import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lab_tests.support.models import small_config

try:
    from lab.hf.ranks import fresh_process
    from lab.hf.shared_sequences import SharedSequences
    from lab.hf.trainer import KNOWN
except ImportError:
    # test_a_name_is_where_it_is_looked_for says why.
    KNOWN = {}

# ---- names -------------------------------------------------------------------------------------------------


def names_used():
    """The names that files of ``lab.hf`` import from these packages, and their modules."""
    found = {("accelerate.state", f"{state}._reset_state") for state in ("AcceleratorState", "GradientState")}
    for file in Path(find_spec("lab.hf").origin).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = getattr(node, "module", None) or ""
            if module.partition(".")[0] in ("accelerate", "peft", "transformers", "trl"):
                found |= {(module, alias.name) for alias in node.names}
    return sorted(found)


USED = names_used()


def is_there(module, name):
    try:
        attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize(("module", "name"), USED)
def test_a_name_is_where_it_is_looked_for(module, name):
    package = module.partition(".")[0]
    assert is_there(module, name), f"{package} {version(package)} has no {module}.{name}, which lab.hf uses"


@pytest.fixture(scope="module")
def _names():
    missing = [f"{module}.{name}" for module, name in USED if not is_there(module, name)]
    if missing:
        pytest.skip(f"lab.hf cannot be used without {', '.join(missing)}")


HOOKS: list[tuple[str, str, Callable[[Any], None]]] = []


class NotCalled(Exception):
    """A method of Trainer that was not called, and its name."""


def hook(package, name):
    """Registers a check of one hook; it gets the calls of the trainer that was watched."""

    def register(check):
        HOOKS.append((package, name, check))
        return check

    return register


# ---- transformers: what Trainer calls, when, and with what -------------------------------------------------


class Call:
    """One call of a method: its arguments by name, its result, and the trainer's attributes then."""

    def __init__(self, name, arguments, had):
        self.name, self.arguments, self.had, self.result, self.inside = name, arguments, had, None, []
        self.trainer = arguments["self"]


class Watched(Trainer):
    """Notes the calls of its methods that ``LongContext`` overrides."""

    def __init__(self, *args, **kwargs):
        self.calls, self.open = [], []
        super().__init__(*args, **kwargs)


OVERRIDDEN = (
    "create_accelerator_and_postprocess", "_prepare_for_training", "create_optimizer", "get_batch_samples",
    "_get_num_items_in_batch", "training_step", "compute_loss", "_clip_grad_norm", "_get_grad_norm",
    "evaluation_loop", "prediction_step", "save_model", "_save", "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model", "_move_model_to_device",
    "_run_epoch",
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
def calls(_names, tmp_path_factory):
    """The calls of a trainer that resumes, accumulates, evaluates, saves and loads the best model."""
    folder = tmp_path_factory.mktemp("watched")
    row = torch.arange(1, 12)
    rows = [{"input_ids": row, "labels": row.masked_fill(row < 4, -100)} for _ in range(6)]

    def trainer(steps):
        arguments = TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1, report_to=[],
            use_cpu=True, load_best_model_at_end=True, prediction_loss_only=True, disable_tqdm=True,
            max_grad_norm=0.3, accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        )  # fmt: skip
        return Watched(llama(), arguments, train_dataset=rows, eval_dataset=rows[:3])

    with fresh_process():
        trainer(1).train()
        resumed = trainer(2)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        resumed.gather_function = lambda losses: losses
        resumed.evaluate()
    return resumed


def every(trainer, name):
    found = [call for call in trainer.calls if call.name == name]
    if not found:
        raise NotCalled(name)
    return found


def first(trainer, name):
    return every(trainer, name)[0]


def comes_before(trainer, one, other):
    return trainer.calls.index(first(trainer, one)) < trainer.calls.index(first(trainer, other))


def called(name, needed, is_so):
    """Registers a check of the first call of a method of Trainer, and what lab.hf needs of it."""

    @hook("transformers", f"Trainer.{name}")
    def _(trainer):
        assert is_so(first(trainer, name)), needed


for each in (
    "create_accelerator_and_postprocess", "_prepare_for_training", "create_optimizer", "_load_best_model",
    "_load_optimizer_and_scheduler",
):  # fmt: skip
    called(each, "it is called once", lambda call: len(every(call.trainer, call.name)) == 1)

SIGNATURES = {
    "_track_num_input_tokens": "inputs",
    "_move_model_to_device": "model device",
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "_save": "output_dir state_dict",
    "save_model": "output_dir _internal_call",
    "_clip_grad_norm": "model",
    "training_step": "model inputs num_items_in_batch",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_method_of_trainer_has_its_parameters(name):
    found = list(inspect.signature(getattr(Trainer, name)).parameters)
    assert found == ["self", *SIGNATURES[name].split()], f"of transformers {version('transformers')}"


CALLED = [
    ("create_accelerator_and_postprocess", "it is called with the model and the arguments",
     lambda call: {"model", "args"} <= call.had),
    ("create_accelerator_and_postprocess", "it makes the accelerator",
     lambda call: "accelerator" not in call.had),
    ("_move_model_to_device", "it is called", lambda call: "device" in call.arguments),
    ("_run_epoch", "the steps of an epoch run in it", lambda call: "training_step" in call.inside),
    ("_prepare_for_training", "the optimizer is made in it", lambda call: "create_optimizer" in call.inside),
    ("_prepare_for_training", "there is no optimizer before",
     lambda call: "optimizer" not in call.had or comes_before(call.trainer, call.name, "create_optimizer")),
    ("create_optimizer", "it returns it", lambda call: isinstance(call.result, torch.optim.AdamW)),
    ("_clip_grad_norm", "its norm goes to _get_grad_norm",
     lambda call: first(call.trainer, "_get_grad_norm").arguments["grad_norm"] is call.result),
    ("_clip_grad_norm", "it takes the model", lambda call: set(call.arguments) == {"self", "model"}),
    ("_get_grad_norm", "it returns the norm to log", lambda call: call.result is call.arguments["grad_norm"]),
    ("evaluation_loop", "it calls prediction_step", lambda call: "prediction_step" in call.inside),
    ("prediction_step", "it returns a loss alone",
     lambda call: (call.result[0].dim(), *call.result[1:]) == (0, None, None)),
    ("_save", "save_model writes by it", lambda call: "_save" in first(call.trainer, "save_model").inside),
    ("save_model", "a checkpoint's weights are written by it",
     lambda call: call.arguments["output_dir"].endswith("checkpoint-2") and call.arguments["_internal_call"]),
    ("_save_optimizer_and_scheduler", "it gets the checkpoint's folder",
     lambda call: call.arguments["output_dir"].endswith("checkpoint-2")),
    ("_load_optimizer_and_scheduler", "it gets the checkpoint that is resumed",
     lambda call: call.arguments["checkpoint"].endswith("checkpoint-1")),
    ("_load_optimizer_and_scheduler", "there is an optimizer to load into",
     lambda call: comes_before(call.trainer, "create_optimizer", call.name)),
    ("_load_from_checkpoint", "it gets the checkpoint that is resumed",
     lambda call: call.arguments["resume_from_checkpoint"].endswith("checkpoint-1")),
    ("_load_from_checkpoint", "weights are loaded before",
     lambda call: comes_before(call.trainer, call.name, "_prepare_for_training")),
    ("_load_best_model", "the trainer knows which is the best",
     lambda call: "checkpoint-" in call.trainer.state.best_model_checkpoint),
]  # fmt: skip
for each in CALLED:
    called(*each)


@hook("transformers", "AcceleratorConfig.gradient_accumulation_kwargs")
def _(trainer):
    found = trainer.args.accelerator_config.gradient_accumulation_kwargs
    assert found == {"sync_each_batch": True, "num_steps": 1}, "Trainer adds the number of steps"


@hook("transformers", "Trainer.get_cp_size and get_tp_size")
def _(trainer):
    assert (trainer.get_cp_size(), trainer.get_tp_size()) == (1, 1)


@hook("transformers", "Trainer.get_batch_samples")
def _(trainer):
    samples, count = first(trainer, "get_batch_samples").result
    parts = [call.arguments for call in every(trainer, "compute_loss")][:2]
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
    steps = [call.arguments for call in every(trainer, "training_step")][: len(samples)]
    for sample, step in zip(samples, steps, strict=True):
        assert set(step) == {"self", "model", "inputs", "num_items_in_batch"}
        assert step["inputs"] is sample, "it gets what get_batch_samples returns"
        assert step["num_items_in_batch"] is count, "it gets the count that get_batch_samples returns"


@hook("transformers", "Trainer.gather_function")
def _(trainer):
    assert trainer.gather_function == trainer.accelerator.gather_for_metrics, "evaluation_loop sets it again"


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
    assert other._is_accelerate_prepared, "a model is marked when it is prepared"


@hook("accelerate", "Accelerator._models")
def _(_):
    model, accelerator = nn.Linear(2, 2), Accelerator(cpu=True)
    accelerator.prepare_model(model, evaluation_mode=True)
    assert accelerator._models == [model]


@hook("accelerate", "ParallelismConfig.build_device_mesh and _validate_accelerator")
def _(_):
    called = []

    class Noting(SharedSequences):
        def build_device_mesh(self, device_type):
            called.append("build_device_mesh")
            return super().build_device_mesh(device_type)

        def _validate_accelerator(self, accelerator):
            called.append("_validate_accelerator")

    accelerator = Accelerator(cpu=True, parallelism_config=Noting(dp_shard_size=1, cp_size=1))
    assert set(called) == {"build_device_mesh", "_validate_accelerator"}, "an Accelerator calls them"
    assert accelerator.state.device_mesh.mesh_dim_names[:2] == ("dp_shard", "cp"), "its mesh is kept"


@hook("accelerate", "ParallelismConfig.cp_enabled and total_size")
def _(_):
    assert SharedSequences.__base__(cp_size=2, dp_shard_size=3).cp_enabled
    assert not SharedSequences(cp_size=2, dp_shard_size=3).cp_enabled
    assert SharedSequences(cp_size=2, dp_shard_size=3).total_size == 6


class Mesh:
    """A mesh of which the names and sizes are read."""

    mesh_dim_names = ("dp_shard", "cp")

    def __getitem__(self, name):
        return SimpleNamespace(size=lambda: {"dp_shard": 2, "cp": 3}[name])


@hook("accelerate", "prepare_data_loader")
def _(_):
    from accelerate.data_loader import prepare_data_loader

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
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    model = fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (1,)))
    assert fsdp2_prepare_model(None, model) is model, "a model that is sharded is left alone"


@hook("accelerate", "Accelerator._schedulers and _optimizers")
def _(_):
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    scheduler = accelerator.prepare_scheduler(LambdaLR(optimizer, lambda _: 1.0))
    assert accelerator._schedulers == [scheduler]
    assert (scheduler.step_with_optimizer, scheduler.split_batches) == (False, False)
    assert [accelerator.prepare(optimizer)] == accelerator._optimizers


@hook("accelerate", "Accelerator.accumulate")
def _(_):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    seen = [(accelerator.step, accelerator.sync_gradients)]
    for _ in range(2):
        with accelerator.accumulate():
            seen.append((accelerator.step, accelerator.sync_gradients))
    assert seen == [(0, True), (1, False), (2, True)]


@hook("accelerate", "Accelerator.get_state_dict")
def _(_):
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 3)
    accelerator.get_state_dict = lambda model, unwrap=True: {"saved": model.weight + 1}
    with TemporaryDirectory() as folder:
        accelerator.save_model(model, folder)
        assert torch.equal(load_file(Path(folder) / "model.safetensors")["saved"], model.weight + 1)


# ---- TRL and PEFT ------------------------------------------------------------------------------------------


@hook("trl", "add_fused_lm_head")
def _(_):
    from trl.trainer.utils import add_fused_lm_head

    model = llama()
    assert "forward" not in vars(model)
    add_fused_lm_head(model)
    assert "forward" in vars(model), "it replaces the model's forward"


@pytest.mark.parametrize("module", KNOWN)
def test_trainers_are_where_they_are_looked_for(module):
    package = module.partition(".")[0]
    for name in KNOWN[module]:
        assert is_there(module, name), f"{package} {version(package)} has no {module}.{name}"
        kind = getattr(import_module(module), name)
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
    from peft import get_peft_model_state_dict

    model = adapted(llama())
    state = model.state_dict(keep_vars=True)
    stored = get_peft_model_state_dict(model, state, adapter_name="default", save_embedding_layers=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = {id(tensor) for tensor in stored.values()}
    assert {id(parameter) for parameter in trained} <= found <= {id(tensor) for tensor in state.values()}, (
        "it returns the tensors that it is given"
    )


# ---- the test ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "name", "check"), HOOKS)
@pytest.mark.usefixtures("alone")
def test_a_hook_is_as_it_is_used(package, name, check, calls):
    try:
        with fresh_process():
            check(calls)
    except Exception as error:
        if isinstance(error, NotCalled) and name != f"Trainer.{error}":
            pytest.skip(f"Trainer.{error} was not called, and has its own test")
        reason = f"{type(error).__name__}: {error}"
        raise AssertionError(
            f"{package} {version(package)} has another {name} than lab.hf uses ({reason})"
        ) from error
