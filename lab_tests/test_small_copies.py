"""A small copy has the model's heads and proportions, and trains; copies of refused models are refused."""

import json
import math
from functools import partial

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config, StableLmConfig

from lab import models
from lab.decoder import head_dim_of
from lab.errors import LabError, ModelError
from lab.models.presets import PRESETS
from lab.models.small_copies import small_copy
from lab.recipe.recipe import Recipe
from lab.techniques.frequencies import check_rope
from lab.techniques.ulysses_degrees import degrees
from lab_tests.support.models import small_config

odd = partial(
    small_config, hidden_size=720, intermediate_size=780, num_hidden_layers=7, num_attention_heads=24,
    num_key_value_heads=6, head_dim=60, vocab_size=20_011,
)  # fmt: skip
"""D=60, E=720, MLP 780: 60, 30, 20 and 15 divide all three, and 30 and 15 also E/H=30."""


@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_keeps_its_heads_and_its_proportions_and_trains(name):
    full, small = models.config_of(name), small_copy(name)
    assert type(small) is type(full)
    kept = (
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
        "rope_parameters",
    )
    for attribute in kept:
        assert getattr(small, attribute) == getattr(full, attribute)
    by = head_dim_of(full) // head_dim_of(small)
    # No smaller number divides all widths.
    assert head_dim_of(small) == {"gemma3-27b": 16, "phi3-mini": 12}.get(name, 8)
    assert (small.hidden_size * by, small.intermediate_size * by, small.vocab_size * by) == (
        full.hidden_size, full.intermediate_size, full.vocab_size
    )  # fmt: skip
    if name == "qwen3-30b-a3b":
        assert small.moe_intermediate_size * by == full.moe_intermediate_size
    for of_experts in ("num_experts", "num_local_experts", "num_experts_per_tok"):
        assert getattr(small, of_experts, None) == getattr(full, of_experts, None)
    assert small.num_hidden_layers == min(full.num_hidden_layers, 4)
    assert degrees(small.num_attention_heads, small.num_key_value_heads) == degrees(
        full.num_attention_heads, full.num_key_value_heads
    )
    model = models.build(small).train()
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # The scaled embedding of Gemma 3, which is also its head, predicts a token from itself at first.
    near = 0.1 if name == "gemma3-27b" else 0.05
    assert losses[0] == pytest.approx(math.log(small.vocab_size), rel=near)
    assert losses[2] < losses[1] < losses[0]


def test_one_number_divides_every_width():
    small = small_copy(odd(), head_dim=3)
    # 30 would leave D=2, too small for 3 or more; of a D of 30, 10 and 6 would leave 3 and 5, which are odd.
    assert small_copy(odd(head_dim=30), head_dim=3).head_dim == 6
    assert (small.head_dim, small.hidden_size, small.intermediate_size) == (4, 48, 52)
    assert small_copy(odd(), head_dim=2).head_dim == 2
    assert small_copy(odd(), head_dim=4).head_dim == small_copy(odd(), head_dim=3).head_dim
    assert small.vocab_size == 20_011 // 15
    assert small.num_hidden_layers == 4
    assert small_copy(odd(), layers=9, head_dim=3).num_hidden_layers == 7
    assert small_copy(odd(vocab_size=1000), head_dim=3).vocab_size == 256
    assert small_copy(odd(vocab_size=200), head_dim=3).vocab_size == 200


def test_biases_and_norms_of_heads_are_the_models():
    def names(config):
        with torch.device("meta"):
            model = models.build(config)
        return {name for name, _ in model.model.layers[0].named_parameters()}

    for config in (odd(Qwen2Config), odd(Qwen3Config), odd(attention_bias=True, mlp_bias=True)):
        assert names(small_copy(config, head_dim=3)) == names(config)
    assert "self_attn.q_norm.weight" in names(odd(Qwen3Config))
    assert "self_attn.q_proj.bias" in names(odd(Qwen2Config))


def test_a_copy_has_every_nth_number_of_longrope():
    numbers = [1 + i / 9 for i in range(30)]
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    small = small_copy(
        odd(rope_parameters={**longrope, "short_factor": numbers, "long_factor": numbers}), head_dim=3
    )
    assert small.rope_parameters["long_factor"] == small.rope_parameters["short_factor"] == [1, 1 + 15 / 9]
    check_rope(small)


def test_a_model_whose_heads_have_no_size_of_their_own():
    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    small = small_copy(config)
    assert (small.hidden_size, small.intermediate_size, small.vocab_size) == (112, 608, 18992)
    model = models.build(small)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (14 * 8, 112)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_model_itself_is_left_alone_and_a_directory_will_do(tmp_path):
    config = odd(Qwen3Config, pad_token_id=20_000)
    before = config.to_dict()
    small = small_copy(config, head_dim=3)
    assert config.to_dict() == before
    # A padding token beyond the smaller vocabulary would be no row of the embedding.
    assert models.build(small).config.pad_token_id is None
    assert len(small.layer_types) == 4
    (tmp_path / "config.json").write_text(json.dumps(before))
    assert small_copy(tmp_path, head_dim=3).hidden_size == small.hidden_size


REFUSED = {
    "stablelm is not a family": StableLmConfig(),
    "attention_dropout=0.1": odd(attention_dropout=0.1),
    "factor=0.0": odd(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 0.0}, max_position_embeddings=99
    ),
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_a_copy_of_a_refused_model_is_refused(named):
    config = REFUSED[named]
    with pytest.raises(LabError, match=named) as own:
        Recipe().check(config, 1)
    with pytest.raises(LabError) as of_the_copy:
        small_copy(config)
    assert str(of_the_copy.value) == str(own.value)


def test_a_model_that_cannot_be_shrunk_is_refused():
    said = r"head_dim 60, hidden_size 744 and intermediate_size 780 have no divisor that leaves heads of 8 or"
    with pytest.raises(ModelError, match=said):
        small_copy(odd(hidden_size=744))
    with pytest.raises(ModelError, match="layers=0: it takes a whole number, 1 or more"):
        small_copy("tiny", layers=0)
    with pytest.raises(ModelError, match="head_dim=True"):
        small_copy("tiny", head_dim=True)
    with pytest.raises(ModelError, match="unknown model 'tiy'"):
        small_copy("tiy")
