"""Odd configs: each is refused in one line, or planned; none ends in an exception of Python or of torch."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab import models
from lab.commands.cli import main
from lab.models.unread import wrapper_of
from lab_tests.support.long_run import mostly_long

GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 67,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "head_dim",
)  # fmt: skip
VALUES = [0, -1, 1.5, True, "8", [], {}, 2**31, 2**63, 10**30]
"""Values of a size. The number 1 and null are legal for some of them."""

THREE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
WRONG = [0, -1, float("nan"), float("inf"), "8", None, [], 1e400, 10**400]


def ropes() -> list[dict[str, Any]]:
    """Each number of each rope type, with each wrong value, and missing."""
    found: list[dict[str, Any]] = []
    for rope in (PLAIN, LINEAR, THREE, YARN):
        for name in rope:
            if name == "rope_type":
                continue
            found += [{**rope, name: value} for value in WRONG]
    found += [{**THREE, "low_freq_factor": 4.0}, {**THREE, "low_freq_factor": 8.0}, {"rope_type": "own"}, {}]
    found += [{**YARN, "beta_fast": value} for value in (0, -1, 1, "a")]
    return found


CASES: list[dict[str, Any]] = [
    *({**GOOD, name: value} for name in SIZES for value in VALUES),
    *({**GOOD, "head_dim": value} for value in (1, 7)),
    *({**GOOD, "rope_parameters": rope} for rope in ropes()),
    *({**GOOD, "rope_parameters": rope} for rope in (None, 3, "yarn", [])),
    *({**GOOD, "rms_norm_eps": value} for value in ("a", None, [], -1, float("nan"))),
    *({**GOOD, "hidden_act": value} for value in ("", "none", None, 3, [], "prelu")),
    *({**GOOD, "quantization_config": value} for value in ("fp8", 3, [1], {"quant_method": 3})),
    *({**GOOD, "text_config": value} for value in ("llama", 3, [], {}, GOOD)),
    *({**GOOD, "tie_word_embeddings": value} for value in ("yes", None, 2)),
    *({**GOOD, "max_position_embeddings": value} for value in (0, -1, "a", None, 10**30)),
    *({**GOOD, "model_type": value} for value in ("", None, 3, [], "own", "gpt2", "../llama")),
    *({**GOOD, "layer_types": value} for value in ([], "full_attention", ["own", "own"], 3)),
    *({**GOOD, "dtype": value} for value in ("own", 3, [], "int8")),
    *({**GOOD, "attention_bias": value} for value in ("yes", 3, None)),
    *({name: value for name, value in GOOD.items() if name != missing} for missing in SIZES),
]


WINDOWS = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 16}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
OUT = object()
"""A field that is taken out."""

REMEDIES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"auto_map": {"AutoConfig": "own.C"}}, "take auto_map out", {"auto_map": OUT}),
    ({"text_config": {"hidden_size": 9}}, "take it out", {"text_config": OUT}),
    ({"num_labels": 10**9}, "take it out", {"num_labels": OUT}),
    ({"gradient_checkpointing": True}, "take the field out", {"gradient_checkpointing": OUT}),
    ({"hidden_size": OUT}, "add the model's own", {"hidden_size": 48}),
    ({"model_type": None}, "such as llama", {"model_type": "llama"}),
    ({"pad_token_id": 67}, "give a token of the vocabulary, or None", {"pad_token_id": None}),
    ({"num_hidden_layers": 10**9}, "the lab takes sizes up to 16777216", {"num_hidden_layers": 2}),
    ({**WINDOWS, "num_hidden_layers": 10**7}, "the lab takes up to 4096 layers", {"num_hidden_layers": 2}),
    ({**EXPERTS, "num_experts": 10**9}, "the lab takes sizes up to 16777216", {"num_experts": 4}),
    ({"head_dim": 7}, "RoPE requires an even rotary dimension", {"head_dim": 8}),
    ({"hidden_act": "SILU"}, "(did you mean 'silu'?): give the model's own", {"hidden_act": "silu"}),
    ({"attention_dropout": 0.1}, "only with attention_dropout=0.0; set it", {"attention_dropout": 0.0}),
    ({"is_causal": False}, "only with is_causal=True; set it", {"is_causal": True}),
    (
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.6}},
        "take it out",
        {"rope_parameters": PLAIN},
    ),
    (
        {**WINDOWS, "layer_types": ["full_attention", "chunked_attention"]},
        "only with 'full_attention' and 'sliding_attention'; set each value to one of them",
        {"layer_types": ["full_attention", "full_attention"]},
    ),
    (
        {**WINDOWS, "layer_types": ["full_attention"]},
        "",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    (
        {**WINDOWS, "layer_types": ["sliding_attention"] * 2, "sliding_window": None},
        "",
        {"sliding_window": 16},
    ),
]
"""Changes of a config that is right, what is said of them, and that done."""


def test_a_mark_at_the_beginning_of_files_is_read_over(tmp_path: Path) -> None:
    """As editors on Windows write it."""
    models.build("tiny").save_pretrained(tmp_path, max_shard_size="100KB")
    before = models.config_of(tmp_path).to_dict()
    for name in ("config.json", "model.safetensors.index.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert models.config_of(tmp_path).to_dict() == before
    assert [*models.build(tmp_path).state_dict()] == [*models.build("tiny").state_dict()]
    wrapper = {"model_type": "gemma3", "text_config": GOOD}
    (tmp_path / "config.json").write_text(json.dumps(wrapper), encoding="utf-8-sig")
    assert wrapper_of(tmp_path) == "gemma3"


def test_a_number_that_transformers_writes_as_a_table_is_a_number(tmp_path: Path) -> None:
    config = models.config_of("tiny")
    config.clip_qkv = float("inf")
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert models.config_of(tmp_path).clip_qkv == float("inf")


def changed(*changes: dict[str, Any]) -> dict[str, Any]:
    document = GOOD
    for change in changes:
        document = {name: value for name, value in {**document, **change}.items() if value is not OUT}
    return document


def answer(folder: Path) -> str:
    """The line with which the command refuses a model in a folder; empty if it is planned."""
    words = ["plan", str(folder), "--tokens", "64", "--ranks", "2", "--recipe", "ulysses"]
    run = CliRunner().invoke(main, words)
    assert run.exit_code in (0, 2), run.exception
    if run.exit_code == 2:
        assert run.stderr.startswith("lab: ")
        assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr


@pytest.mark.parametrize("number", mostly_long(range(len(CASES)), *range(0, len(CASES), 4)))
def test_an_odd_config_is_refused_in_one_line_or_planned(number: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES[number]))
    answer(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "cannot be read as JSON"),
        (json.dumps(GOOD)[:-1], "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("null", "has model_type=None"),
        ("[]", "has model_type=None"),
        ("\udcff", "cannot be read as JSON"),
        (json.dumps({**GOOD, "rope_parameters": {**PLAIN, "rope_theta": 0}}), "no angle can be computed"),
        (json.dumps({**GOOD, "rope_parameters": {**PLAIN, "rope_theta": -1}}), "no angle can be computed"),
        (json.dumps({**GOOD, "rope_parameters": {**LINEAR, "factor": 0}}), "no angle can be computed"),
        (json.dumps({**GOOD, "rope_parameters": {**THREE, "low_freq_factor": 4.0}}), "no angle can"),
        (json.dumps({**GOOD, "head_dim": 1}), "head_dim=1: rotary positions turn pairs"),
        (json.dumps({**GOOD, "head_dim": 2**31}), "head_dim=2147483648: the lab takes sizes up to 16777216"),
        (json.dumps({**GOOD, "num_hidden_layers": 5000}), "num_hidden_layers=5000: the lab takes up to 4096"),
        (json.dumps({**GOOD, "hidden_act": "prelu"}), "hidden_act='prelu': this activation has parameters"),
        (json.dumps({**GOOD, "quantization_config": "fp8"}), "with quantized weights ('fp8')"),
        (
            json.dumps({**GOOD, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.6}}),
            "partial_rotary_factor=0.6 in the config of a Llama model",
        ),
        (json.dumps({**GOOD, "hidden_act": "SILU"}), "no activation of transformers (did you mean 'silu'?)"),
        (json.dumps({**GOOD, "pad_token_id": GOOD["vocab_size"]}), "give a token of the vocabulary, or None"),
        (json.dumps({**GOOD, "gradient_checkpointing": True}), "checkpoint=True; take the field out"),
        (json.dumps({**GOOD, "text_config": {"hidden_size": 32}}), "which a llama model does not read"),
    ],
    ids=range(20),
)  # fmt: skip
def test_a_broken_config_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert said in answer(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(REMEDIES)))
def test_what_a_refusal_says_works(number: int, tmp_path: Path) -> None:
    wrong, said, mend = REMEDIES[number]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(wrong)))
    line = answer(tmp_path)
    assert line.endswith("\n")
    assert said in line
    path.write_text(json.dumps(changed(wrong, mend)))
    assert answer(tmp_path) == ""


def test_the_reason_that_nothing_mends_comes_first(tmp_path: Path) -> None:
    """The family, then quantized weights, then code, then fields."""
    document = {**GOOD, "model_type": "glm_moe_dsa", "quantization_config": {"quant_method": "fp8"},
                "auto_map": {"AutoConfig": "own.C"}, "attention_dropout": 0.1}  # fmt: skip
    steps = (
        ("glm_moe_dsa is not a family that the lab computes right", {"model_type": "llama"}),
        ("a checkpoint with quantized weights (fp8)", {"quantization_config": None}),
        ("has auto_map (AutoConfig)", {"auto_map": None}),
        ("attention_dropout=0.1", {"attention_dropout": 0.0}),
    )
    for said, mend in steps:
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert said in answer(tmp_path)
        document |= mend
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert answer(tmp_path) == ""


def test_the_config_that_the_cases_change_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    assert answer(tmp_path) == ""
