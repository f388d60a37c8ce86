"""Weights are written one file at a time, and read by transformers and by the lab as they were."""

import json
import weakref
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from lab import models
from lab_tests.support.models import small_config

EMBEDDING = 211 * 48 * 2
"""The bytes of the largest tensor in bf16; the next one, of the queries, has 120 * 48 * 2."""

LIMIT = 15_000
"""Of a file: less than the embedding, and more than any other tensor."""


@pytest.fixture
def model():
    model = models.build(small_config(tie_word_embeddings=True, vocab_size=211)).to(dtype=torch.bfloat16)
    assert max(parameter.nbytes for parameter in model.parameters()) == EMBEDDING > LIMIT
    return model


def skeleton():
    return models.build_on_meta(small_config(tie_word_embeddings=True, vocab_size=211)).model.to(
        dtype=torch.bfloat16
    )


def test_no_more_than_one_file_is_held_and_a_larger_tensor_has_one_of_its_own(model, tmp_path):
    live, sizes, names = weakref.WeakSet(), [], []

    def read(asked):
        assert not live
        values = {name: model.get_parameter(name).detach().clone() for name in asked}
        live.update(values.values())
        sizes.append(sum(value.nbytes for value in values.values()))
        names.append(asked)
        return values

    models.save(skeleton(), tmp_path, read, max_file=LIMIT)
    assert not live
    assert (names[0], sizes[0]) == (["model.embed_tokens.weight"], EMBEDDING)
    assert max(sizes[1:]) <= LIMIT
    # Two neighbours would not fit in one file.
    assert all(size + model.get_parameter(after[0]).nbytes > LIMIT for size, (_, after) in zip(
        sizes, pairwise(names), strict=False))  # fmt: skip
    assert [name for group in names for name in group] == list(models.weights_of(model))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "total_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "total_size": sum(sizes),
    }
    for number, group in enumerate(names, 1):
        file = f"model-{number:05}-of-{len(names):05}.safetensors"
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert sorted(opened.keys()) == sorted(group)
            assert opened.metadata() == {"format": "pt"}
        assert {index["weight_map"][name] for name in group} == {file}


@pytest.mark.parametrize("max_file", [LIMIT, models.MAX_FILE])
def test_transformers_and_the_lab_load_what_was_written(model, tmp_path, max_file):
    models.save(model, tmp_path, max_file=max_file)
    assert (tmp_path / "model.safetensors").exists() == (max_file == models.MAX_FILE)
    for loaded in AutoModelForCausalLM.from_pretrained(tmp_path), models.build(tmp_path):
        assert loaded.dtype == torch.bfloat16
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_one_file_is_what_transformers_writes(model, tmp_path):
    model.save_pretrained(tmp_path / "theirs")
    models.save(model, tmp_path / "ours")
    ours, theirs = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in (
        "ours", "theirs"))  # fmt: skip
    assert ours == theirs
