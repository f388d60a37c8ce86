"""What the tests of training share: a small model, a text for it, and this process as the only rank."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

TOKENS, ROWS = 40, 3


def small(family=LlamaConfig, **more):
    return family(
        **{
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 12,
            "num_key_value_heads": 6, "head_dim": 10, "vocab_size": 101, **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "digits.txt"
    path.write_text("".join(str(n**3 % 977) for n in range(2000)))
    return path


@pytest.fixture(scope="module")
def alone():
    """This process as the only rank."""
    threads = torch.get_num_threads()
    # So small a model is slower on more.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
