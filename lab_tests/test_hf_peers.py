"""A trainer with a recipe beside DeepSpeed's own run, as in DeepSpeed's ``test_ulysses_sp_hf``.

The models are the lab's own, and tolerances are those of float32.
"""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lab.hf
from lab_tests.support.models import small_config
from lab_tests.support.reference import error
from lab_tests.support.small_trainings import QUIET, tokenizer
from lab_tests.support.trainers import Gradients, launch

pytestmark = pytest.mark.long

VOCAB = 67


class LongTrainer(lab.hf.LongContext, Trainer):
    """A trainer with a recipe, which keeps what this rank has of each micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = []

    def training_step(self, model, inputs, *args, **kwargs):
        self.parts.append(inputs)
        return super().training_step(model, inputs, *args, **kwargs)


def llama():
    torch.manual_seed(1)
    # Of two key/value heads each rank has one.
    config = small_config(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def train(folder, recipe):
    """Trains without a change of the weights, and returns the losses and gradients of two updates."""
    args = lab.hf.arguments(
        TrainingArguments, recipe=recipe, tokens=len(ROWS[0]), knobs={"ulysses": 2, "compute_dtype": None},
        output_dir=str(folder), per_device_train_batch_size=1, learning_rate=0.0, max_steps=2,
        train_sampling_strategy="sequential", max_grad_norm=0, **QUIET,
    )  # fmt: skip
    gradients, collate = Gradients(), DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    rows = [{"input_ids": row} for row in ROWS]
    trainer = LongTrainer(llama(), args, collate, train_dataset=rows, callbacks=[gradients])
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"losses": losses, "gradients": gradients.updates, "parts": trainer.parts}


def what_accelerate_sees():
    state, one = PartialState(cpu=True), torch.ones(1)
    dist.all_reduce(one)
    return state.num_processes, state.process_index, int(one), os.environ["LOCAL_RANK"]


def test_accelerate_takes_two_ranks_for_processes_of_torchrun(ranks4):
    assert launch(ranks4, 2, what_accelerate_sees) == [(2, rank, 2, str(rank)) for rank in range(2)]
    assert ranks4.apply(dist.get_world_size) == [4] * 4
    assert ranks4.apply(os.environ.get, "LOCAL_RANK") == [None] * 4


ROWS = [[1, 10, 10, 10, 2, 2], [1, 20, 20, 20, 2, 2]]
PARTS = [
    [{"input_ids": [[1, a, a]], "position_ids": [[0, 1, 2]], "shifted_labels": [[a, a, a]]},
     {"input_ids": [[a, 2, 2]], "position_ids": [[3, 4, 5]], "shifted_labels": [[2, 2, -100]]}]
    for a in (10, 20)
]  # fmt: skip
"""The rows of their test, and what each rank has of them."""

ZERO2 = {
    "train_micro_batch_size_per_gpu": 1,
    "sequence_parallel_size": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}},
}

SUMMED = 2
"""How many times the gradient of the loss DeepSpeed's run has, which is that of the plain model in ours.

Both ranks compute the loss of all labels from what ``all_gather`` brought. Its backward sums what the ranks
have, and ZeRO sums over the ranks of a sequence again, where it averages over others.
"""


def deepspeed_run():
    """The losses, whole gradients and parts of DeepSpeed's engine, adapter and attention on this rank."""
    with patch.dict(os.environ, DS_ACCELERATOR="cpu"), patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping):
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (
            UlyssesSPAttentionHF,
            UlyssesSPDataLoaderAdapter,
        )
        from deepspeed.utils import safe_get_full_grad

        # With its own operator for ranks of one host DeepSpeed would be compiled first.
        with patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False):
            deepspeed.comm.init_distributed("gloo", verbose=False)
        model, rank = llama(), dist.get_rank()
        groups = UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
        )
        engine, *_ = deepspeed.initialize(
            config=ZERO2, model=model, model_parameters=model.parameters(), mpu=groups
        )
        row = torch.tensor([ROWS[rank]])
        loader = DataLoader([{"input_ids": row, "labels": row, "position_ids": torch.arange(6)[None]}], None)
        group = groups.get_sequence_parallel_group()
        losses, gradients, parts = [], [], []
        for part in UlyssesSPDataLoaderAdapter(loader, rank, group, 2, torch.device("cpu")):
            labels = part.pop("shift_labels")
            own = model.loss_function(engine(**part).logits, None, VOCAB, shift_labels=labels)
            count = (labels != -100).sum()
            means = all_gather(own, group)
            counts = all_gather(count, group)
            loss = sum(map(torch.mul, means, counts)) / sum(counts)
            engine.backward(loss)
            losses.append(loss.detach())
            parts.append({**part, "shifted_labels": labels})
            gradients.append({name: safe_get_full_grad(p).clone() for name, p in model.named_parameters()})
            engine.step()
        engine.destroy()
    return {"losses": torch.stack(losses).tolist(), "gradients": gradients, "parts": parts}


@pytest.fixture(scope="module")
def theirs(ranks4, _fresh_ranks_after_deepspeed):
    return launch(ranks4, 2, deepspeed_run)


@pytest.mark.parametrize("recipe", ["ulysses", "upipe"])
def test_loss_and_gradients_are_those_of_deepspeeds_own_run(recipe, theirs, ranks4, tmp_path):
    ours = launch(ranks4, 2, train, tmp_path, recipe)
    for rank, (got, wanted) in enumerate(zip(ours, theirs, strict=True)):
        for run in (got, wanted):
            parts = [{n: part[n].tolist() for n in PARTS[0][0]} for part in run["parts"]]
            assert parts == [row[rank] for row in PARTS]
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        for mine, right in zip(got["gradients"], wanted["gradients"], strict=True):
            # Both runs compute in fp32.
            assert error({name: SUMMED * gradient for name, gradient in mine.items()}, right) <= 3e-6
