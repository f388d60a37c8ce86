"""What the tests of training share: a model and a batch so small that many steps take a moment."""

from transformers import LlamaConfig

TOKENS, ROWS = 40, 3


def small(family=LlamaConfig, **more):
    return family(
        **{
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 12,
            "num_key_value_heads": 6, "head_dim": 10, "vocab_size": 101, **more,
        }
    )  # fmt: skip
