"""Rotations of positions are exact past five million tokens."""

import math
from fractions import Fraction

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import lab
from lab import models
from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.techniques.frequencies import check_rope, inverse_frequencies
from lab.techniques.rope import apply_rope, rotary_tables, rotate_
from lab_tests.support.reference import build, config, error

FAR = 5 * 2**20
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn with its temperature": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1 + i / 50 for i in range(32)],
        "long_factor": [2 + i / 3 for i in range(32)],
    },
}


def rotary(parameters, **more):
    return build(config(rope_parameters=parameters, head_dim=64, **more), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_rotations_near_the_start_are_transformers_own(kind):
    theirs, ours = rotary(KINDS[kind]), rotary(KINDS[kind])
    apply_rope(ours)
    x, positions = torch.zeros(2, 3), torch.stack((torch.arange(300), torch.arange(7, 307)))
    for found, right in zip(
        ours.model.rotary_emb(x, position_ids=positions),
        theirs.model.rotary_emb(x, position_ids=positions),
        strict=True,
    ):
        assert found.shape == (2, 300, 64)
        torch.testing.assert_close(found, right, rtol=0, atol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_inverse_frequencies_are_transformers_own_before_their_rounding(kind):
    model = rotary(KINDS[kind])
    found, factor, *_ = inverse_frequencies(KINDS[kind], 64, max_positions=4096)
    right = model.model.rotary_emb.inv_freq.double()
    assert factor == pytest.approx(model.model.rotary_emb.attention_scaling, rel=1e-12)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), right, rtol=4e-7, atol=0)


def test_yarn_takes_its_factor_from_the_lengths_where_none_is_given():
    given = KINDS["yarn"]
    without = {**given, "factor": None}
    assert inverse_frequencies(without, 64, max_positions=2048) == inverse_frequencies(given, 64)


@pytest.mark.parametrize("tokens", [512, 513, 700])
@pytest.mark.parametrize("more", [{}, {"factor": 3.0}, {"attention_factor": 1.1}])
def test_longrope_has_other_frequencies_for_sequences_longer_than_its_first_training(tokens, more):
    """Of rows with padding at their end, transformers counts the padding too, and so does the lab."""
    theirs, ours = (rotary({**KINDS["longrope"], **more}, max_position_embeddings=4096) for _ in range(2))
    x, positions = torch.zeros(1), torch.arange(tokens)[None]
    # What transformers computed last is no reason for a refusal.
    ours.model.rotary_emb(x, position_ids=torch.arange(600)[None])
    apply_rope(ours)
    right = theirs.model.rotary_emb(x, position_ids=positions)
    for found, one in zip(ours.model.rotary_emb(x, position_ids=positions), right, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=2e-4)


def test_a_rank_knows_the_length_of_the_whole_sequence():
    theirs = rotary(KINDS["longrope"])
    whole = theirs.model.rotary_emb(torch.zeros(1), position_ids=torch.arange(516)[None])
    for ulysses, ring in ((4, 1), (1, 2)):
        ours = rotary(KINDS["longrope"])
        apply_rope(ours, ulysses=ulysses, ring=ring)
        part = torch.arange(516 // (ulysses * ring))[None]
        for found, one in zip(ours.model.rotary_emb(torch.zeros(1), position_ids=part), whole, strict=True):
            torch.testing.assert_close(found, one[:, : part.shape[1]], rtol=0, atol=2e-4)


def test_padding_never_decides_on_the_frequencies_of_longrope():
    """With three ranks, rows of 511 and of 512 tokens are padded to 513."""
    model, x = rotary(KINDS["longrope"]), torch.zeros(1)
    apply_rope(model, ulysses=3)
    embed = model.model.rotary_emb
    short, long = (embed(x, position_ids=torch.arange(n)[None])[0][:, :100] for n in (170, 172))
    part = torch.arange(171)[None]
    for tokens, right in ((512, short), (513, long)):
        with embed.forward.rows_of(tokens):
            assert torch.equal(embed(x, position_ids=part)[0][:, :100], right)
        # What the block says does not count after it.
        with pytest.raises(RecipeError, match=r"^rows of 511 to 513 tokens, .*='longrope': .* padding; call"):
            embed(x, position_ids=part)
    assert not torch.equal(short, long)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [18, 44])
def test_longrope_under_upipe_and_in_streamed_layers(tokens, ranks4):
    """18 tokens, which have the frequencies of short rows, are padded to 20."""
    for knobs in ({"head_chunk": 8}, {"head_chunk": 8, "checkpoint": True, "offload": "inputs", "stream": 5}):
        for found in ranks4.apply(longrope_error, Recipe(fsdp=True, ulysses=4, **knobs), tokens):
            assert found < 1e-5


def longrope_error(recipe, tokens):
    """The largest relative error of a gradient, against transformers' own tables of fp32."""
    parameters = {**KINDS["longrope"], "original_max_position_embeddings": 18}
    for name in ("short_factor", "long_factor"):
        parameters[name] = parameters[name][:5]
    made = [
        build(config("llama", 24, 4, rope_parameters=parameters, max_position_embeddings=64))
        for _ in range(2)
    ]
    ids = torch.arange(2 * tokens).reshape(2, tokens) * 7 % 64
    made[0](input_ids=ids, labels=ids).loss.backward()
    right = {name: p.grad for name, p in made[0].named_parameters()}
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lab.apply_recipe(made[1], recipe, mesh)
    lab.loss(made[1], lab.shard_batch(ids, recipe, mesh)).backward()
    return error({name: p.grad.full_tensor() for name, p in made[1].named_parameters()}, right)


def test_five_million_tokens_on_the_tables_are_as_exact_as_their_dtype():
    parameters = KINDS["default"]
    model = rotary(parameters)
    apply_rope(model)
    positions = torch.arange(FAR - 50, FAR + 50)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1), position_ids=positions)
    # The truth in rational arithmetic: the exact product of two fp64 numbers, reduced by pi to 60 digits.
    two_pi = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
    frequencies = inverse_frequencies(parameters, 64).inverse
    worst = 0.0
    for row, position in enumerate(positions[0].tolist()):
        for i, frequency in enumerate(frequencies):
            angle = float(position * Fraction(frequency) % two_pi)
            worst = max(worst, abs(cos[0, row, i].item() - math.cos(angle)))
            worst = max(worst, abs(sin[0, row, 32 + i].item() - math.sin(angle)))
    assert worst < 1e-6
    # and transformers' own tables are not: the reason this file exists
    theirs = rotary(parameters).model.rotary_emb(torch.zeros(1), position_ids=positions)[0]
    assert (theirs - cos).abs().max() > 0.1


def test_only_the_given_positions_are_computed():
    far = torch.tensor([[FAR - 1]])
    cos, sin = rotary_tables(torch.zeros(1, dtype=torch.bfloat16), far, frequencies=[1.0, 0.5])
    assert cos.shape == sin.shape == (1, 1, 4)
    assert cos.dtype == torch.bfloat16


def test_other_models_keep_their_own_rotations():
    first, second = rotary(KINDS["default"]), rotary(KINDS["default"])
    apply_rope(first)
    assert "forward" in vars(first.model.rotary_emb)
    assert "forward" not in vars(second.model.rotary_emb)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "ntk", "rope_theta": 1e4}, "'ntk' is not one of default, linear, .*, dynamic$"),
        ({**KINDS["longrope"], "long_factor": [1.0] * 31}, "no angle can be computed .ValueError: zip"),
        ({**KINDS["longrope"], "long_factor": [-1.0] * 32}, "a frequency is not above 0, or not finite"),
        (
            {**KINDS["llama3"], "low_freq_factor": 4.0},
            "high_freq_factor=4.0 is not above low_freq",
        ),
        ({**KINDS["yarn"], "factor": 0.0}, "no angle can be computed .ZeroDivisionError"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
            r"partial_rotary_factor=0.4 of a head_dim of 64: an even number of dimensions",
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5},
            r"partial_rotary_factor=1.5 of a head_dim of 64",
        ),
        ({**KINDS["yarn"], "partial_rotary_factor": 0.5}, "yarn' with partial_rotary_factor=0.5"),
    ],
)
def test_other_types_of_rotation_are_refused_by_name(parameters, named):
    with pytest.raises(RecipeError, match=named):
        inverse_frequencies(parameters, 64)


def test_a_type_of_layers_without_rotary_parameters_is_refused():
    own = {"sliding_attention": KINDS["default"]}
    made = config("gemma3_text")
    made.rope_parameters = own
    with pytest.raises(RecipeError, match=r"none for layers of the type full_attention: give those"):
        check_rope(made)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [4, 10])
def test_pairs_of_a_part_of_each_head_rotate_and_the_rest_stays(interleaved, rotated):
    """The rotation is a product of complex numbers."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 3, 10, dtype=torch.float64)
    frequencies = [0.9, 0.4, 0.2, 0.1, 0.05][: rotated // 2]
    tables = rotary_tables(x, torch.arange(7)[None], frequencies=frequencies)
    pairs = x[..., :rotated].unflatten(-1, (rotated // 2, 2) if interleaved else (2, rotated // 2))
    first, second = pairs.unbind(-1 if interleaved else -2)
    angles = torch.arange(7)[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    right = torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)
    found = rotate_(x.clone(), *tables, rotation="interleaved" if interleaved else "halves")
    torch.testing.assert_close(found, torch.cat((right, x[..., rotated:]), -1))
    assert torch.equal(rotate_(x.clone(), *tables, rotation="none"), x)


@pytest.mark.parametrize("scratch", [False, True])
def test_rotation_is_transformers_own_and_its_transpose_is_its_gradient(scratch):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 20, 4, 10, dtype=torch.float64)
    cos, sin = rotary_tables(x, torch.arange(20)[None], frequencies=[1.0, 0.5, 0.2, 0.1, 0.05], factor=1.3)
    flat = x.flatten(0, 1).requires_grad_()
    right, _ = apply_rotary_pos_emb(flat, flat, cos, sin, unsqueeze_dim=2)
    grad = torch.randn_like(right)
    right.backward(grad)
    room = {"scratch": torch.full((x.numel(),), torch.nan, dtype=x.dtype)} if scratch else {}
    torch.testing.assert_close(rotate_(x.clone(), cos, sin, **room).flatten(0, 1), right.detach())
    back = rotate_(grad.clone().view_as(x), cos, sin, transposed=True, **room)
    torch.testing.assert_close(back.flatten(0, 1), flat.grad)


def test_tables_of_half_a_head_are_transformers_own():
    """Of gpt-oss, whose tables have one number for each pair of dimensions."""
    sizes = {"head_dim": 64, "rope_parameters": models.config_of("gpt-oss-20b").rope_parameters}
    theirs, ours = (build(config("gpt_oss", **sizes), torch.float32) for _ in range(2))
    apply_rope(ours)
    positions = torch.arange(7, 307)[None]
    pairs = [model.model.rotary_emb(torch.zeros(2, 3), position_ids=positions) for model in (ours, theirs)]
    for found, right in zip(*pairs, strict=True):
        assert found.shape == (1, 300, 32)
        torch.testing.assert_close(found, right, rtol=0, atol=3e-5)
    # The same pairs as with whole tables.
    heads = torch.randn(1, 300, 2, 64, generator=torch.Generator().manual_seed(0))
    whole = [torch.cat((t, t), -1) for t in pairs[0]]
    half = rotate_(heads.clone(), *pairs[0], rotation="half_tables")
    assert torch.equal(half, rotate_(heads.clone(), *whole))


@pytest.mark.parametrize("kinds", ["ws", "sw"], ids=["window first", "full first"])
def test_interleaved_tables_are_transformers_own(kinds):
    """Of Cohere 2, whose tables have the two numbers of each pair beside each other."""
    types = {"w": "sliding_attention", "s": "full_attention"}
    sizes = {"head_dim": 64, "layer_types": [types[kind] for kind in kinds]}
    theirs, ours = (build(config("cohere2", **sizes), torch.float32) for _ in range(2))
    apply_rope(ours)
    positions = torch.arange(7, 307)[None]
    pairs = [model.model.rotary_emb(torch.zeros(2, 3), position_ids=positions) for model in (ours, theirs)]
    for found, right in zip(*pairs, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=3e-5)
    # The same pairs as with tables whose halves are equal.
    heads = torch.randn(1, 300, 2, 64, generator=torch.Generator().manual_seed(0))
    whole = [torch.cat((t[..., ::2], t[..., ::2]), -1) for t in pairs[0]]
    found = rotate_(heads.clone(), *pairs[0], rotation="interleaved_tables")
    assert torch.equal(found, rotate_(heads.clone(), *whole, rotation="interleaved"))
