"""What a model does differently from Llama: the numbers are those of the built model and of plans.

Each was seen red: with another width, factor, or size in the sentence; with code of the model's executed.
"""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import lab
from lab import models
from lab.commands.cli import main
from lab.decoder import FAMILIES, decoder_of
from lab.memory import Meter
from lab.models.presets import PRESETS
from lab.recipe.recipe import Recipe
from lab.units import format_bytes
from lab_tests.support.reference import build, config

TOKENS = 40


def cost(model, what, **more):
    """The cost of the one difference that begins so."""
    [found] = [one.cost for one in models.differences(model, **more) if one.what.startswith(what)]
    return found


def kept(family, find):
    """The bytes of a token that each of these modules keeps: what a model without them holds less."""

    def held(tokens, *, without):
        model = build(config(family), torch.bfloat16)
        found = set(find(decoder_of(model)))
        for module in list(model.modules()) if without else ():
            for name, child in list(module.named_children()):
                if child in found:
                    setattr(module, name, nn.Identity())
        meter = Meter()
        with meter.measure(model), meter.phase("forward"):
            logits = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits
        del logits
        return meter.timeline().end_of("forward").device, len(found)

    (long, count), (short, _), (bare_long, _), (bare_short, _) = (
        held(tokens, without=without) for without in (False, True) for tokens in (TOKENS, TOKENS // 2)
    )
    each, rest = divmod(long - short - bare_long + bare_short, TOKENS // 2 * count)
    assert rest == 0
    return each


@pytest.mark.parametrize(
    ("family", "what", "on_cuda"),
    [
        ("gemma", "norms that multiply", 0),
        ("gpt_oss", "norms that multiply", 0),
        ("olmo2", "norms that multiply", 0),
        # LayerNorm keeps a mean and a deviation, on CUDA in fp32 and on CPUs in bf16.
        ("starcoder2", "LayerNorm, with", 4),
        ("olmo", "LayerNorm in fp32", 0),
        ("cohere2", "norms that subtract", 0),
    ],
)
def test_bytes_that_a_norm_keeps(family, what, on_cuda):
    own, llamas = (kept(name, lambda decoder: decoder.norms) for name in (family, "llama"))
    said = f"a norm keeps {format_bytes(own + on_cuda)} per token, and Llama's {format_bytes(llamas)}"
    assert cost(config(family), what).endswith(said)


@pytest.mark.parametrize("family", ["qwen3", "cohere", "gemma3_text", "olmo2"])
def test_bytes_that_norms_of_heads_keep(family):
    of_layer = sum(
        kept(family, lambda decoder, which=which: [layer.head_norms[which] for layer in decoder.layers])
        for which in (0, 1)
    )
    what = "one norm over all" if family == "olmo2" else "a norm of each head of q"
    assert f"keep {format_bytes(of_layer)} per token" in cost(config(family), what)


@pytest.mark.parametrize("family", ["arcee", "starcoder2"])
def test_bytes_that_an_mlp_without_a_gate_keeps(family):
    own, llamas = (
        format_bytes(kept(name, lambda decoder: [layer.mlp for layer in decoder.layers]))
        for name in (family, "llama")
    )
    said = cost(config(family), "MLPs without a gate")
    assert said.endswith(f"an MLP keeps {own} per token, and Llama's {llamas}")


def parameters(model, *, but=lambda name: False):
    return sum(p.numel() for name, p in model.named_parameters() if not but(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_model(family):
    """All weights more, less all weights fewer, are those beside Llama's model with the same sizes."""
    model, llama = (
        models.build(config(one, tie_word_embeddings=one == "gemma")) for one in (family, "llama")
    )
    shape = models.shape_of(model.config)
    assert shape.weights == parameters(model)

    def of_experts(name):
        # Another sentence counts the experts. Their biases are more than the experts of others have.
        mlp = re.match(r"model\.layers\.(\d+)\.mlp\..*(?<!bias)$", name)
        return mlp and shape.sparse[int(mlp[1])]

    more = 0
    for one in models.differences(model.config):
        for number, sign in re.findall(r"([\d,]+) weights (more|fewer)", one.cost):
            more += int(number.replace(",", "")) * (1 if sign == "more" else -1)
    assert more == parameters(model, but=of_experts) - parameters(llama, but=of_experts)


def test_weights_of_experts_are_those_of_the_model():
    for family, what, experts in (("qwen3_moe", "7 experts in 1 of 2 layers, of which 3", 7),
                                  ("gpt_oss", "5 experts in each layer, of which 3", 5)):  # fmt: skip
        model, said = models.build(config(family)), cost(config(family), what)
        layer = model.model.layers[0]
        idle = (experts - 3) * sum(p[0].numel() for p in layer.mlp.experts.parameters())
        of_layer, layers = parameters(layer), sum(models.shape_of(model.config).sparse)
        weights = parameters(model)
        assert f"computed with {weights - layers * idle:,} of {weights:,} weights" in said
        assert f"{format_bytes(2 * of_layer)} with its attention" in said
        assert f"needs {format_bytes(2 * (of_layer - idle))};" in said


def test_sizes_of_projections_are_those_of_the_model():
    q = models.build(config("llama")).model.layers[0].self_attn.q_proj
    said = cost(config("llama"), "24 heads of 10, which are 240 numbers where the hidden state has 48")
    assert f"have {format_bytes(2 * q.out_features)} per token" in said
    assert said.endswith(f"hidden state has {format_bytes(2 * q.in_features)}")
    gate_up = models.build(config("phi3")).model.layers[0].mlp.gate_up_proj.weight.numel()
    said = cost(config("phi3"), "one projection for the gate")
    assert f"weight has {format_bytes(2 * gate_up)}, where Llama's has {format_bytes(gate_up)}" in said


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "olmo3", "olmo", "cohere"])
def test_operations_are_those_of_a_plan(family):
    """UPipe on two ranks, in six stages; without windows, which have a sentence of their own."""
    recipe = Recipe(ulysses=2, head_chunk=4)
    own, llama = config(family), config("llama")
    if family == "olmo3":
        own.layer_types = ["full_attention"] * 2
    flops = [lab.plan(model, recipe, tokens=TOKENS, ranks=2).costs.flops for model in (own, llama)]
    what = {"olmo3": "one norm over", "olmo": "q, k and v are clipped"}.get(family, "a norm of each")
    assert f"backward: {(flops[0] - flops[1]) / (TOKENS // 2):.3g} operations" in cost(own, what)


def test_the_pairs_of_a_window_are_those_that_a_mask_lets_pass():
    model = config("ministral", layers=3)
    masks = [
        sum(0 <= i - j < (window or TOKENS) for i in range(TOKENS) for j in range(TOKENS))
        for window in (None, 9, None)
    ]
    share = sum(masks) / (3 * masks[0])
    said = cost(model, "a window of 9 keys in 1 of 3 layers", tokens=TOKENS)
    assert f"computes {share:.2%} of the pairs" in said
    assert f"sees {masks[1] / TOKENS:,.0f} keys on average, where it would see 20:" in said
    assert "at most 24 ranks" in said
    whole = cost(config("ministral", sliding_window=TOKENS), "a window of 40", tokens=TOKENS)
    assert "computes 100.00% of the pairs" in whole


def test_a_plan_counts_the_work_of_a_window():
    tokens, both = 4096, []
    for window in (None, 64):
        model = config("mistral", sliding_window=window)
        both.append(lab.plan(model, "plain", tokens=tokens, ranks=1).costs.flops)
    # Attention to all keys: two products forward and five backward, of half the pairs.
    whole = 2 * 24 * 10 * tokens**2 * 7
    said = re.search(
        r"computes ([\d.]+)% of", cost(config("mistral", sliding_window=64), "a window", tokens=tokens)
    )
    assert 1 - (both[0] - both[1]) / whole == pytest.approx(float(said[1]) / 100, rel=0.1)


DERIVED = {
    "norms that multiply by their scales in fp32": {"gemma", "gemma3_text", "gpt_oss", "olmo2", "olmo3"},
    "norms that subtract the mean, with a scale alone, in operators of fp32": {"cohere", "cohere2"},
    "q and k are rotated in fp32": {"cohere", "cohere2"},
    "each head of q and k is joined of what is rotated and what is not, which is a copy": {
        "glm4", "gpt_oss", "phi3",
    },
}  # fmt: skip
"""Sentences that no field of a family says, and the families whose code was read for them."""


def test_every_family_but_llama_differs_and_every_sentence_is_found():
    of_family = {family: models.differences(config(family, 2, 1, hidden_size=20)) for family in FAMILIES}
    assert [family for family, found in of_family.items() if not found] == ["llama"]
    for found in of_family.values():
        assert len({one.what for one in found}) == len(found)
    whats = " / ".join(one.what for found in of_family.values() for one in found)
    for what, families in DERIVED.items():
        assert {name for name, found in of_family.items() if what in {one.what for one in found}} == families
    for word in (
        "1 of 2 layers without rotary positions", "dimensions 2i and 2i+1",
        "gelu_pytorch_tanh in place of SiLU", "multiplied by 3", "multiplied by 4.47214",
        "scores of attention multiplied by 0.21,",
        "q, k and v are clipped at 0.9", "logits capped at 1.5",
        "scores of attention multiplied by 0.2425,", "multiplied by 0.6", "relu2 between",
    ):  # fmt: skip
        assert word in whats, word


def test_presets():
    whats = {name: [one.what for one in models.differences(name)] for name in PRESETS}
    assert [name for name, found in whats.items() if not found] == [
        "tiny", "llama3-8b", "llama3-70b", "mistral-7b",
    ]  # fmt: skip
    assert whats["llama3.2-1b"] == [
        "rotary frequencies of the type llama3", "the head has the embedding's matrix",
    ]  # fmt: skip
    assert "a window of 1,024 keys in 52 of 62 layers" in whats["gemma3-27b"]
    assert "rotary frequencies of the type linear" in whats["gemma3-27b"]
    assert "8 of 32 layers without rotary positions" in whats["command-r7b"]
    assert "logits multiplied by 0.25" in whats["command-r7b"]
    assert "64 heads of 128, which are 8192 numbers where the hidden state has 5120" in whats["qwen3-32b"]


# ---- lab doctor --model ------------------------------------------------------------------------------------


def doctor(model):
    return CliRunner().invoke(main, ["doctor", "--model", str(model)])


def test_the_doctor_prints_the_family_and_a_table():
    said = doctor("qwen3-8b")
    assert said.exit_code == 0, said.output
    first, heading, _, *rows = said.stdout.splitlines()
    assert first == "Qwen3, 36 layers, 8,190,735,360 weights, 1 difference from Llama"
    assert heading.split("  ")[1].strip() == "what this model does differently"
    assert rows[0].startswith("  a norm of each head of q and of k ")
    assert "UPipe, streamed layers" in rows[0]
    assert all(len(line) <= 140 for line in rows)
    assert "memory" not in said.stdout
    assert doctor("tiny").stdout == (
        "Llama, 4 layers, 5,507,328 weights, no difference from Llama: each technique computes it as it "
        "computes Llama\n"
        "A weight has 16 bytes of state in training in float32 (presets are fp32), which FSDP2 divides over "
        "the ranks.\n"
    )


def test_the_doctor_reads_a_directory(tmp_path):
    models.config_of("phi3-mini").save_pretrained(tmp_path)
    found = models.differences("phi3-mini")
    said = " ".join(doctor(tmp_path).stdout.split())
    assert said.startswith(f"Phi-3, 32 layers, 3,821,079,552 weights, {len(found)} differences from Llama")
    assert "one projection for q, k and v" in said


def test_dynamic_frequencies_need_rows_of_one_length():
    said = {"dynamic": "; rows of 4,096 tokens or more must have one length", "linear": ""}
    for kind, more in said.items():
        parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        found = cost(config("llama", rope_parameters=parameters), f"rotary frequencies of the type {kind}")
        assert found == f"no bytes: they are computed once, in fp64{more}"


def written(folder, **fields):
    config("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "gpt2"}, r"gpt2 is not a family that the lab computes right: Arcee, .* are$"),
        ({"model_type": "own"}, r"own is not a family that the lab computes right: Arcee, .* are$"),
        ({"model_type": "own\nlab: \x1b"}, r"'own\\nlab: \\x1b' is not a family that the lab computes right"),
        ({"hidden_size": 0}, r".*hidden_size=0: it takes a whole number, 1 or more"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0.1 in the config of a Llama model"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 0.0}},
         r"rope_parameters with which no angle can be computed .*factor=0.0"),
    ],
)  # fmt: skip
def test_the_doctor_refuses_in_one_line(tmp_path, fields, said):
    run = doctor(written(tmp_path, **fields))
    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1
    assert re.match(f"lab: {said}", run.stderr), run.stderr


def test_the_doctor_refuses_what_is_no_directory_of_a_model_in_one_line(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for model, said in (
        (tmp_path, f"{tmp_path} holds no config.json"),
        (tmp_path / "nothing", f"unknown model '{tmp_path}/nothing'"),
        (tmp_path / "broken", f"{tmp_path}/broken/config.json cannot be read as JSON"),
        ("lama3-8b", "unknown model 'lama3-8b' (did you mean 'llama3-8b'?)"),
    ):
        run = doctor(model)
        assert (run.exit_code, run.stdout, run.stderr.count("\n")) == (2, "", 1)
        assert run.stderr.startswith(f"lab: {said}"), run.stderr


@pytest.mark.parametrize("kind", ["llama", "own", None, "gpt2"])
def test_code_in_a_directory_is_never_executed(tmp_path, kind):
    mark = tmp_path / "executed"
    code = f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig as OwnConfig\n"
    (tmp_path / "own.py").write_text(code)
    folder = written(
        tmp_path, model_type=kind, auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.M"}
    )
    run = doctor(folder)
    assert run.stderr.count("\n") == 1
    assert (run.exit_code, mark.exists()) == (2, False)
    if kind == "llama":
        assert run.stderr.startswith(
            f"lab: {folder}/config.json has auto_map (AutoConfig, AutoModel), which names code in the "
            "model's own files: the lab never executes it; take auto_map out, if transformers' own class of "
            "llama"
        )


@pytest.mark.parametrize("own", ["own.OwnConfig", ["own.OwnConfig"], 3])
def test_an_odd_auto_map_is_refused(tmp_path, own):
    run = doctor(written(tmp_path, auto_map=own))
    assert run.stderr.startswith(f"lab: {tmp_path}/config.json has auto_map ({own!r}), which")
    assert run.stderr.count("\n") == 1
