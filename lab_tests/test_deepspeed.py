"""DeepSpeed's Ulysses in a model: the loss and gradients of the plain model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from transformers import GptOssConfig, LlamaConfig, MinistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lab.errors import RecipeError
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.deepspeed import apply_deepspeed_ulysses
from lab.techniques.offload import apply_offload
from lab_tests.support.models import small_config, small_decoder
from lab_tests.support.reference import error

TOKENS, VOCAB = 40, 67
FAMILIES = {
    "llama": (LlamaConfig, {"num_key_value_heads": 4}),
    "kv-replicated": (LlamaConfig, {"num_key_value_heads": 2}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 12, "head_dim": None}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 4}),
    "ministral": (
        MinistralConfig,
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 4,
        },
    ),
}

# The first use compiles an operator on this machine.
pytestmark = [pytest.mark.usefixtures("_fresh_ranks_after_deepspeed"), pytest.mark.timeout(600)]


def decoder(family="llama", dtype=torch.float64, **changed):
    kind, further = FAMILIES[family]
    config = small_config(
        kind, vocab_size=VOCAB, intermediate_size=88, use_cache=False, **(further | changed)
    )
    return small_decoder(config, dtype)


def batch(rows):
    torch.manual_seed(rows)
    return {name: torch.randint(0, VOCAB, (rows, TOKENS)) for name in ("input_ids", "labels")}


def steps(model, shard):
    """Two batches with different numbers of rows, their gradients added up."""
    loss = torch.zeros((), dtype=torch.float64)
    for rows in (1, 3):
        part = {name: shard(t) for name, t in batch(rows).items()}
        positions = shard(torch.arange(TOKENS)[None]).expand(rows, -1)
        each = model(position_ids=positions, **part).loss
        each.backward()
        loss += each.detach()
    return {"loss": loss, **{name: p.grad for name, p in model.named_parameters()}}


def steps_on_rank(family, dtype, size, checkpoint, kept):
    everyone = [dist.new_group(list(range(at, at + size))) for at in range(0, dist.get_world_size(), size)]
    group = everyone[dist.get_rank() // size]
    before = dict(ALL_ATTENTION_FUNCTIONS.items()), "DS_ACCELERATOR" in os.environ
    model = decoder(family, dtype)
    apply_deepspeed_ulysses(model, group=group)
    if checkpoint:
        apply_checkpointing(model)
    if kept:
        apply_offload(model, attention=True)
    got = steps(model, lambda t: t.chunk(size, dim=1)[dist.get_rank(group)])
    for tensor in got.values():
        dist.all_reduce(tensor, group=group)
    assert (dict(ALL_ATTENTION_FUNCTIONS.items()), "DS_ACCELERATOR" in os.environ) == before
    kinds = {type(m.self_attn.lab_attention._attention).__module__ for m in model.model.layers}
    return got, kinds


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype", "size", "checkpoint", "kept"),
    [
        ("llama", torch.float64, 2, False, False),
        ("llama", torch.float64, 4, True, False),
        ("llama", torch.float32, 4, False, False),
        ("kv-replicated", torch.float64, 4, False, False),
        ("qwen2", torch.float64, 4, False, False),
        ("qwen3", torch.float64, 4, True, True),
        ("ministral", torch.float64, 2, False, False),
        ("gpt_oss", torch.float64, 4, True, False),
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_plain_models(family, dtype, size, checkpoint, kept, ranks4):
    wanted = steps(decoder(family, dtype), lambda t: t)
    tolerance = 1e-9 if dtype == torch.float64 else 5e-6
    for got, kinds in ranks4.apply(steps_on_rank, family, dtype, size, checkpoint, kept):
        assert kinds == {"deepspeed.runtime.sequence_parallel.ulysses_sp"}
        assert error(got, wanted) <= tolerance


def refusals():
    said = {}
    with FakeTensorMode():
        fake = decoder()
    heads = decoder("qwen2", num_attention_heads=6, num_key_value_heads=6)
    for name, model in {"fake": fake, "heads": heads}.items():
        try:
            apply_deepspeed_ulysses(model, group=dist.group.WORLD)
        except RecipeError as error:
            said[name] = str(error)
    return said


@pytest.mark.long
def test_fake_tensors_and_degrees_that_heads_do_not_allow_are_refused(ranks4):
    for said in ranks4.apply(refusals):
        assert "ulysses_backend='lab'" in said["fake"]
        assert "ulysses=4" in said["heads"]
        assert "1, 2, 3, 6" in said["heads"]


ALONE = """
import sys

import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from lab.errors import RecipeError
from lab.techniques.deepspeed import apply_deepspeed_ulysses

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = AutoModelForCausalLM.from_config(
    LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
)
for without in ("a compiler", "DeepSpeed"):
    if without == "DeepSpeed":
        sys.modules["deepspeed.comm"] = None
    try:
        apply_deepspeed_ulysses(model, group=dist.group.WORLD)
    except RecipeError as error:
        print("without", without, str(error).replace(chr(10), " "))
"""


@pytest.mark.long
def test_without_a_compiler_or_deepspeed_the_backend_is_refused(tmp_path):
    nothing = {"PATH": str(tmp_path), "CXX": "nothing", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    ran = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=Path(__file__).parent.parent, env=os.environ | nothing,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    refusals = [line for line in ran.stdout.splitlines() if line.startswith("without")]
    assert len(refusals) == 2, ran.stdout + ran.stderr
    assert "C++ compiler and ninja" in refusals[0]
    assert "install deepspeed>=0.19" in refusals[1]
    assert all("ulysses_backend='lab'" in line for line in refusals)
