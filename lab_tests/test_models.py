import json

import pytest
import torch
from transformers import Qwen3Config

from lab import models
from lab.errors import ModelError


def test_tiny_has_the_head_geometry_of_llama3_8b():
    tiny, llama = models.config_of("tiny"), models.config_of("llama3-8b")
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == (32, 8)
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (32, 8)
    assert tiny.num_hidden_layers == 4
    assert tiny.vocab_size >= 256


def test_llama3_8b_has_its_published_number_of_parameters():
    with torch.device("meta"):
        model = models.build("llama3-8b")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_random_state():
    state = torch.random.get_rng_state()
    one, two, other = models.build("tiny", seed=3), models.build("tiny", seed=3), models.build("tiny", seed=4)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.lm_head.weight.dtype == torch.float32


def shrunken():
    return Qwen3Config(
        hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, vocab_size=260,
    )  # fmt: skip


def test_a_directory_gives_its_own_weights(tmp_path):
    saved = models.build(shrunken(), seed=9)
    saved.save_pretrained(tmp_path)
    loaded = models.build(tmp_path)
    assert type(loaded) is type(saved)
    for name, parameter in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name


def test_a_directory_with_a_config_alone_gives_random_weights(tmp_path):
    shrunken().save_pretrained(tmp_path)
    assert models.build(str(tmp_path), seed=1).config.head_dim == 10


def test_a_callable():
    assert models.config_of(lambda: models.build(shrunken())).hidden_size == 48
    with pytest.raises(ModelError, match="the callable returned int, not a transformers model"):
        models.build(lambda: 3)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ModelError, match=r"'tinny' \(did you mean 'tiny'\?\): give one of tiny, llama"):
        models.build("tinny")


def test_a_broken_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 5}))
    with pytest.raises(ModelError, match="is not a config transformers can read"):
        models.config_of(tmp_path)
