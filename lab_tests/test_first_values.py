"""The first values of parameters: their distribution, their independence, and slices made alone."""

import math
from collections import Counter
from itertools import combinations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Starcoder2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from lab.errors import ModelError
from lab.models import first_values
from lab.models.first_values import fill, normal_
from lab_tests.support.models import small_config

N = 2**18


def normal(n, *, seed=0, name="model.layers.0.mlp.up_proj.weight", start=0, std=1.0, dtype=torch.float32):
    out = torch.empty(n, dtype=dtype)
    normal_(out, seed=seed, name=name, start=start, std=std)
    return out


def test_the_values_are_splitmix64s():
    """Against plain Python integers, one element at a time."""
    mask = 2**64 - 1

    def word(key, index):
        z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = int.from_bytes(first_values.blake2b(b"7 a.weight", digest_size=8).digest(), "little")
    for start in (0, 5, 2**40):
        expected = []
        for i in range(start, start + 9):
            words = [word(key, 3 * i + w) for w in range(3)]
            total = sum((one >> shift) & 0xFFFF for one in words for shift in (0, 16, 32, 48))
            expected.append((total - 6 * 0xFFFF) / 2**16)
        assert normal(9, seed=7, name="a.weight", start=start).tolist() == expected


def test_mean_deviation_and_tails_are_those_of_a_normal_number():
    """Each bound is five standard errors of what it holds, at N samples."""
    x = normal(N).double()
    assert abs(x.mean()) < 5 / math.sqrt(N)
    assert abs(x.std() - 1) < 5 * math.sqrt(0.5 / N)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / N)
    # A sum of twelve has a kurtosis of 3 - 1.2 / 12.
    assert abs((x**4).mean() - 2.9) < 5 * math.sqrt(96 / N)
    for sigmas in (1, 2, 3, 4):
        share = 2 * below(6 - sigmas)
        assert abs((x.abs() > sigmas).double().mean() - share) < 5 * math.sqrt(share / N), sigmas
        # A normal number is as often so far out, within 3%, but for the last two: 0.77 and 0.27 times.
        assert share == pytest.approx(
            math.erfc(sigmas / math.sqrt(2)), rel=(0.03, 0.03, 0.3, 0.8)[sigmas - 1]
        )
    assert 3.8 < x.abs().max() < 6.0


def below(x):
    """The probability that a sum of twelve uniform numbers is less than x (Irwin-Hall)."""
    return sum((-1) ** k * math.comb(12, k) * (x - k) ** 12 for k in range(x + 1)) / math.factorial(12)


def test_a_deviation_is_the_one_asked_for():
    assert torch.equal(normal(1000, std=0.02), normal(1000) * torch.tensor(0.02))
    assert normal(N, std=0.02).std() == pytest.approx(0.02, rel=0.01)


def test_names_seeds_and_neighbours_are_independent():
    draws = {
        (seed, name): normal(N, seed=seed, name=name).double()
        for seed in (0, 1)
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
    }
    for one, other in combinations(draws.values(), 2):
        assert abs((one * other).mean()) < 5 / math.sqrt(N)
    x = draws[0, "model.layers.0.mlp.up_proj.weight"]
    for lag in (1, 2, 3, 48, 256, 4096, 2**15):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5.5 / math.sqrt(N - lag), lag
        assert abs(((x[lag:] ** 2 - 1) * (x[:-lag] ** 2 - 1)).mean()) < 5.5 * 2 / math.sqrt(N - lag), lag


@pytest.mark.parametrize("start", [0, 1, 2**15 - 3, 99_999])
@pytest.mark.parametrize("length", [1, 37, 2**15 + 5])
def test_any_slice_can_be_made_alone(start, length):
    whole = normal(140_000)
    assert torch.equal(normal(length, start=start), whole[start : start + length])


def test_the_length_of_the_pieces_changes_nothing(monkeypatch):
    whole = normal(10_000)
    monkeypatch.setattr(first_values, "piece_elements", lambda _: 77)
    assert torch.equal(normal(10_000), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_has_the_same_values_rounded(dtype):
    assert torch.equal(normal(1000, dtype=dtype), normal(1000).to(dtype))


def llama(**fields):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return small_config(**heads, vocab_size=261, initializer_range=0.03, **fields)


@pytest.mark.parametrize(
    "config",
    [
        llama(pad_token_id=7, attention_bias=True, mlp_bias=True),
        llama(tie_word_embeddings=True),
        small_config(
            Starcoder2Config, num_attention_heads=6, num_key_value_heads=2, head_dim=None, vocab_size=261,
            use_bias=True,
        ),
    ],
)  # fmt: skip
def test_each_parameter_is_distributed_as_transformers_has_it(config):
    theirs, ours = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(math.nan)
    fill(ours, 0)
    for name, other in theirs.named_parameters():
        one, other = ours.get_parameter(name).detach(), other.detach()
        error = 5 * config.initializer_range / math.sqrt(one.numel())
        # Ones, zeros and the row of the padding are the same numbers; normal ones are alike.
        constant = Counter(other.flatten().tolist()).most_common(1)[0]
        if constant[1] > 1 and constant[0] in (0.0, 1.0):
            assert torch.equal(one == constant[0], other == constant[0]), name
        if other.std() > 0:
            assert float(one.std()) == pytest.approx(config.initializer_range, rel=0.1), name
            assert abs(one.mean()) < error, name
    values = [p.detach().flatten()[:40] for p in ours.parameters() if p.std() > 0]
    assert not any(torch.equal(one, other) for one, other in combinations(values, 2))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight or not config.tie_word_embeddings


def test_a_module_of_another_kind_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8))
    with pytest.raises(ModelError, match=r"c_attn.weight is a parameter of a Conv1D: only linear maps"):
        fill(model, 0)
