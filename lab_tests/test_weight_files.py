"""Weights are written one file at a time, and read by transformers and by the lab as they were.

Whatever the files hold has a place in the model, or is refused. Each refusal was seen red: a tensor was
dropped, or read as numbers that it does not hold.
"""

import json
import os
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import lab
from cluster.errors import RankError
from lab import models
from lab.commands.doctor import model_report
from lab.errors import ModelError
from lab.models.headers import LARGE
from lab.models.unread import UNREAD, unread_reason
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


# ---- what the files hold ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    models.build(llama()).save_pretrained(place)
    return place


def llama(**fields):
    return LlamaConfig(
        hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6, head_dim=10,
        num_key_value_heads=2, vocab_size=67, **fields,
    )  # fmt: skip


def add(folder, **tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def refusal(folder, error=ModelError):
    with pytest.raises(error) as caught:
        models.build(folder)
    said = str(caught.value)
    assert said.count("\n") == 0
    return said.replace(str(folder), "DIR")


def of_projections(ends, make):
    return {f"model.layers.{n}.self_attn.{end}": make(end) for n in range(2) for end in ends}


BELONGS = (
    "a llama model with this config has no place: give the config that belongs to them, or files without them"
)


def test_biases_without_a_place_are_refused_and_read_by_the_config_that_has_one(folder):
    with torch.no_grad():
        biased = models.build(llama(attention_bias=True))
        for name, parameter in biased.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.25)
    biased.save_pretrained(folder)
    own = folder / "config.json"
    document = json.loads(own.read_text())
    own.write_text(json.dumps({**document, "attention_bias": False}))
    assert refusal(folder) == (
        "the weights in DIR hold model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.o_proj.bias, "
        f"model.layers.0.self_attn.q_proj.bias and 5 more, for which {BELONGS}"
    )
    own.write_text(json.dumps(document))
    assert models.build(folder).model.layers[1].self_attn.o_proj.bias.unique().tolist() == [0.25]


EXTRA = {
    "norms of heads": of_projections(("q_norm.weight", "k_norm.weight"), lambda _: torch.ones(10)),
    "a layer more": {"model.layers.2.input_layernorm.weight": torch.ones(48)},
    "a head of a classifier": {"score.weight": torch.ones(3, 48)},
    "the sinks of another family": of_projections(("sinks",), lambda _: torch.ones(6)),
    "a second name": {"lm_head.bias": torch.ones(67)},
    "a name without its prefix": {"norm.weight": torch.ones(48)},
    "another part": {"vision_tower.patch.weight": torch.ones(3)},
    "the inverse frequencies of something else": {"mtp.rotary_emb.inv_freq": torch.ones(5)},
}


@pytest.mark.parametrize("name", EXTRA)
def test_a_tensor_without_a_place_is_refused(folder, name):
    add(folder, **EXTRA[name])
    first = min(EXTRA[name])
    assert refusal(folder).startswith(f"the weights in DIR hold {first}")
    assert refusal(folder).endswith(f", for which {BELONGS}")


# PEFT asks a model for what transformers is about to call otherwise.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_beside_the_weights_are_refused_and_read_where_they_are_merged(folder, tmp_path):
    """transformers adds such adapters to the model."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(models.build(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        adapted.get_parameter("base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight").fill_(
            0.5
        )
    adapted.save_pretrained(folder)
    assert "DIR has adapters of PEFT (adapter_config.json), which the lab does not read: merge" in refusal(
        folder
    )
    (folder / "model.safetensors").unlink()
    assert "which the lab does not read: merge" in refusal(folder)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    built = models.build(tmp_path / "merged")
    for name, parameter in built.named_parameters():
        assert torch.equal(parameter, merged.get_parameter(name)), name


def test_harmless_tensors_are_left_out(folder):
    """Checkpoints of 2023 have them: transformers reads the frequencies from the config, too."""
    add(folder, **{f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(5) for n in range(2)})
    models.build(folder)


def test_the_tensors_that_are_left_out_are_listed_by_whole_names_or_anchored_prefixes():
    for one in UNREAD:
        name = one.name.replace("N", "11") + "some.weight" * one.name.endswith(".")
        assert unread_reason(name, one.wrapper) == one.reason
        assert unread_reason(f"x.{name}", one.wrapper) is None
        assert (unread_reason(name, None) is None) == (one.wrapper is not None)
        if not one.name.endswith("."):
            assert unread_reason(f"{name}.x", one.wrapper) is None


@pytest.mark.parametrize(
    ("dtype", "called"),
    [(torch.bool, "BOOL"), (torch.complex64, "C64"), (torch.int64, "I64"), (torch.int16, "I16")],
)
def test_numbers_that_are_no_weights_are_refused(folder, dtype, called):
    add(folder, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(72, 48, dtype=dtype)})
    assert refusal(folder) == (
        f"the weights in DIR hold model.layers.1.mlp.up_proj.weight as {called}: the lab trains weights of "
        "F64, F32, F16, BF16; save them in one of these"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_floating_numbers_are_read(folder, dtype):
    whole = models.build(folder).to(dtype)
    add(
        folder, **{name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    for name, parameter in models.build(folder).named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name).to(parameter.dtype)), name


# ---- an index --------------------------------------------------------------------------------------------


@pytest.fixture
def several(folder):
    model = models.build(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    return folder


def change_index(folder, change):
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    change(document)
    index.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "place", ["../other/model-00002.safetensors", "{}/other.safetensors", "", ".", 3, None]
)
def test_an_entry_that_leads_out_of_the_folder_is_refused(several, place):
    other = several.parent / "other"
    other.mkdir()
    file = next(several.glob("model-00002*"))
    (other / "model-00002.safetensors").write_bytes(file.read_bytes())
    place = place.format(other) if isinstance(place, str) else place
    change_index(several, lambda document: document["weight_map"].update({"model.norm.weight": place}))
    for call in (models.config_of, models.build):
        with pytest.raises(ModelError, match=r"give the name of a file in the folder of the index$"):
            call(several)


def test_the_links_of_the_hubs_cache_are_followed(several):
    """It has blobs by their hashes, and snapshots of links to them."""
    expected = models.build(several)
    blobs, snapshot = several.parent / "blobs", several.parent / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(several.iterdir())):
        file.rename(blobs / f"{number:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    for name, parameter in models.build(snapshot).named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_a_tensor_that_the_index_leaves_out_is_read_as_all_others(several):
    """transformers reads it too."""
    change_index(several, lambda document: document["weight_map"].pop("model.norm.weight"))
    models.build(several)
    file = next(several.glob("model-00002*"))
    save_file({**load_file(file), "model.layers.0.self_attn.q_norm.weight": torch.ones(10)}, file)
    assert "hold model.layers.0.self_attn.q_norm.weight, for which" in refusal(several)


def test_a_tensor_in_two_files_or_in_none_is_refused(several):
    first, second = sorted(several.glob("model-0000[12]*"))
    weights = load_file(second)
    name = next(iter(load_file(first)))
    save_file({**weights, name: torch.ones(3)}, second)
    assert f"{name} is in {second}".replace(str(several), "DIR") in refusal(several)
    save_file(dict(list(weights.items())[1:]), second)
    assert f"{second} lacks {next(iter(weights))}".replace(str(several), "DIR") in refusal(several)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_refused(several, text):
    (several / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is no index of weights" in refusal(several)


# ---- which files there are -------------------------------------------------------------------------------

FOREIGN = (
    "consolidated.00.pth", "model.gguf", "flax_model.msgpack", "tf_model.h5", "pytorch_model-1-of-2.bin",
    "pytorch_model.bin.index.json", "WEIGHTS.PT", "model.ckpt.1", "model.ckpt-1000.index",
    "original/consolidated.00.pth", "checkpoint-7/__0_0.distcp",
)  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_weights_that_are_not_read_are_refused(folder, name):
    """Seen red: the model had random weights, without a word."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"no safetensors")
    models.build(folder)
    assert models.weights_note(folder) == ""
    (folder / "model.safetensors").unlink()
    # A plan needs none.
    assert models.shape_of(models.config_of(folder)).L > 0
    assert refusal(folder) == (
        f"DIR has {name}, which may hold weights, and the lab reads safetensors alone: save the weights in "
        "that format, or give a directory with config.json alone for random weights"
    )


UNSEEN = {
    "MODEL.SAFETENSORS": "and the lab reads the weights in model.safetensors alone: name them so",
    "model-00001-of-00002.safetensors": "and no model.safetensors.index.json: write or download that, too",
    "last/model.safetensors": (
        "and the lab reads those beside the config.json alone: give a directory that has both"
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_safetensors_in_another_place_are_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(folder / name)
    assert refusal(folder) == (
        f"DIR has {name}, which may hold weights, {UNSEEN[name]}, or give a directory with config.json alone "
        "for random weights"
    )


def test_a_large_file_of_an_unknown_kind_may_hold_weights(folder):
    (folder / "model.safetensors").unlink()
    with (folder / "blob").open("wb") as file:
        file.truncate(LARGE - 1)
        models.build(folder)
        file.truncate(LARGE)
    assert "DIR has blob, which may hold weights" in refusal(folder)
    (folder / "blob").rename(folder / "text.uint16.bin")
    (folder / "training_args.bin").write_bytes(b"settings")
    models.build(folder)


def test_a_folder_without_weights_says_so(folder):
    (folder / "model.safetensors").unlink()
    assert models.weights_note(folder) == "random weights: the folder has none"
    assert models.weights_note("tiny") == models.weights_note(llama()) == ""


def test_weights_that_are_not_used_are_not_looked_at(several, digits):
    """Seen red: refused, where the config alone is enough."""
    (several / "model-00002-of-00007.safetensors").unlink()
    part = lab.rehearse(several, "plain", tokens=32, ranks=1, layers=1, text=digits, machine="cpu")
    assert part.weights == "random weights: a part of the layers is rehearsed"
    report = model_report(several)
    assert "42,768 weights" in report
    assert "model-00002-of-00007.safetensors is missing: download or copy the weights again" in report


def test_a_folder_that_cannot_be_read_is_refused(folder, monkeypatch):
    part = (folder / "model.safetensors").rename(folder / "part")
    monkeypatch.setattr(Path, "is_file", lambda path: refuse(path) if path == part else os.path.isfile(path))
    assert "DIR/part cannot be read (Permission denied), and may hold weights" in refusal(folder)
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert "DIR cannot be read (Permission denied), and may hold weights" in refusal(folder)


def refuse(path):
    raise PermissionError(13, "Permission denied", str(path))


def make_dangling(path):
    path.symlink_to("blobs/gone")


def make_loop(path):
    path.symlink_to(path.name)


WHAT = {
    make_dangling: "a link to a file that is not there", make_loop: "a link to a file that is not there",
    os.mkfifo: "no regular file", os.mkdir: "a folder",
}  # fmt: skip


@pytest.mark.parametrize("make", WHAT)
def test_weights_that_are_no_files_are_called_what_they_are(several, make):
    shard = several / "model-00002-of-00007.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    make(shard)
    told = f"{WHAT[make]}: download or copy the weights again"
    assert refusal(several).endswith(f"DIR/{shard.name} is {told}")
    shard.rmdir() if shard.is_dir() else shard.unlink()
    shard.write_bytes(whole)
    models.build(several)
    index = several / "model.safetensors.index.json"
    index.unlink()
    make(index)
    assert refusal(several) == f"DIR/{index.name} is {told}"


def test_a_shard_that_is_missing_and_a_null_byte_in_the_index_are_refused(several):
    (several / "model-00002-of-00007.safetensors").unlink()
    told = "DIR/model-00002-of-00007.safetensors is missing: download or copy the weights again"
    assert refusal(several).endswith(told)
    change_index(several, lambda document: document["weight_map"].update({"model.norm.weight": "a\0b"}))
    assert "give the name of a file in the folder of the index" in refusal(several)


def test_generation_config_that_cannot_be_read_is_named(folder):
    (folder / "generation_config.json").write_text("{")
    assert refusal(folder).startswith("DIR/generation_config.json cannot be read; mend it or take it out")


def test_what_a_cast_loses_is_said_or_refused(folder, capsys):
    """Seen red: 70,000 was loaded as infinity, and 1e-9 as 0, without a word."""
    norm = models.build(folder).model.norm.weight.detach().clone()
    norm[2] = 1e-9
    norm[:2] = 0.0
    add(folder, **{"model.norm.weight": norm})
    assert models.weights_note(folder) == ""
    assert models.weights_note(folder, "float16") == "weights of F32 in the files, rounded to torch.float16"
    models.build(folder)
    assert capsys.readouterr().err == ""
    loaded = models.build(folder, dtype="float16").model.norm.weight
    assert torch.equal(loaded, norm.half())
    assert capsys.readouterr().err == f"values of the weights in {folder} that became 0 in torch.float16: 1\n"
    norm[1] = -70000.0
    add(folder, **{"model.norm.weight": norm})
    models.build(folder, dtype="bfloat16")
    said = r"^model\.norm\.weight has -7e\+04, which is not finite in torch\.float16: give dtype='float32'"
    with pytest.raises(ModelError, match=said):
        models.build(folder, dtype="float16")
    norm[1] = float("inf")
    add(folder, **{"model.norm.weight": norm})
    # Of the file, not of the cast.
    assert models.build(folder, dtype="float16").model.norm.weight[1] == float("inf")


@pytest.mark.long
def test_what_a_cast_loses_on_one_rank_is_refused_on_all(folder, ranks4, digits):
    head = models.build(folder).lm_head.weight.detach().clone()
    head[-1] = 70000.0
    add(folder, **{"lm_head.weight": head})
    with pytest.raises(RankError) as caught:
        lab.run(folder, "fsdp", tokens=64, text=digits, cluster=ranks4, dtype="float16", compute_dtype=None)
    assert "lm_head.weight has 7e+04, which is not finite in torch.float16" in str(caught.value)
    assert not caught.value.waiting
    assert "peer left" not in str(caught.value)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_that_loses_nothing_is_not_named(folder, stored):
    path = folder / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path)
    wide = stored in (torch.float32, torch.float64)
    assert bool(models.weights_note(folder, "float32")) == (stored == torch.float64)
    assert bool(models.weights_note(folder, "bfloat16")) == (wide or stored == torch.float16)
