"""What a model does differently from Llama: the numbers are those of plans and of the closed form.

Each was seen red: with another width, factor, or size in the sentence; with code of the model's executed.
"""

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

import lab
from lab import models
from lab.bench.reference import FAMILIES, config
from lab.commands.cli import main
from lab.decoder import FAMILIES as SUPPORTED
from lab.models.presets import PRESETS
from lab.planning.closed_form import estimate_job
from lab.recipe.jobs import make_job
from lab.recipe.recipe import Recipe
from lab.units import format_bytes

TOKENS = 40


def cost(model, what, **more):
    """The cost of the one difference that begins so."""
    [found] = [one.cost for one in models.differences(model, **more) if one.what.startswith(what)]
    return found


def more_bytes(model, plain, moment, knobs, tokens=TOKENS):
    """What the closed form holds more at a moment, in bf16, than for a shape with some plain fields."""
    shape, recipe = models.shape_of(model), Recipe(fsdp=True, compute_dtype="bfloat16", **knobs)
    held = []
    for one in (shape, replace(shape, **plain)):
        job = make_job(model, recipe, tokens=tokens, ranks=1, shape=one)
        parts = estimate_job(one, job).moments[moment]
        # The state and the gathered weights depend on the number of weights, of which other sentences speak.
        held.append(sum(sum(parts[name].values()) for name in parts.keys() - {"model state", "parameters"}))
    return held[0] - held[1]


LAST = "loss backward"
"""When all layers keep what their backward needs, and none has run backward."""


@pytest.mark.parametrize(
    ("family", "what", "plain", "said", "moment", "times", "knobs"),
    [
        ("gemma", "norms that multiply", {"wide_scales": False}, "keeps {}", LAST, 5, {}),
        ("starcoder2", "LayerNorm", {"layer_norms": False}, "keeps {}", LAST, 5, {}),
        ("olmo", "LayerNorm in fp32", {"bare_norms": False}, "keeps {}", LAST, 5, {}),
        ("olmo", "q, k and v are clipped", {"clipped": False}, "clipped, {} per", LAST, 2, {}),
        ("cohere2", "norms that subtract", {"centered_norms": False, "wide_scales": False}, "keeps {} per",
         LAST, 3, {}),
        ("cohere", "the attention and the MLP", {"parallel": False}, "residual's, {} per",
         "attention backward, layer 1", 1, {"checkpoint": True, "norm_tile": 8, "head_chunk": 24}),
        ("gemma3_text", "norms before and", {"norms": 2}, "keep {} per token each", LAST, 4, {}),
        ("qwen3", "a norm of each", {"head_norms": "none"}, "keeps {} more", LAST, 2, {}),
        ("cohere", "a norm of each head of q and of k, with scales of its own", {"head_norms": "none"},
         "keeps {} more", LAST, 2, {}),
        ("olmo2", "one norm over", {"head_norms": "none"}, "keeps {} more", LAST, 2, {}),
        ("phi3", "one projection for q,", {"fused_attention": False}, "as projected, {}", LAST, 2, {}),
        ("glm4", "each head of q", {"joined_heads": False}, "keeps {} more", LAST, 2, {}),
        ("glm4", "the first 4 of", {"rotated": 0}, "have {}, where", LAST, 1, {}),
        ("olmo3", "rotary frequencies", {"rotated": 0}, "have {}, where", LAST, 1, {}),
        ("gpt_oss", "the cosines and sines", {"rotated": 0}, "have {}, where", LAST, 1, {}),
        ("granite", "what the attention", {"scaled_residual": False}, "residual's, {} per",
         "MLP backward, layer 0", 1, {"checkpoint": True, "mlp_tile": 5}),
        ("gemma3_text", "norms before and", {"norms": 2, "norms_after": False}, "residual's, {} per",
         "attention backward, layer 1", 1, {"checkpoint": True, "norm_tile": 8, "head_chunk": 24}),
    ],
)  # fmt: skip
def test_bytes_of_a_token_are_those_of_the_closed_form(family, what, plain, said, moment, times, knobs):
    model = config(family)
    held = more_bytes(model, plain, moment, knobs)
    if what in ("norms that multiply", "LayerNorm", "LayerNorm in fp32", "norms that subtract"):
        # RMSNorm of Llama keeps six bytes of each number, and one number in fp32.
        held += times * TOKENS * (6 * model.hidden_size + 4)
    assert held % (times * TOKENS) == 0
    assert said.format(format_bytes(held // (times * TOKENS))) in cost(model, what)


def test_bytes_of_experts_are_those_of_the_closed_form():
    """One of two layers has experts. Without them, its MLP would keep four tensors."""
    model = config("qwen3_moe")
    shape = models.shape_of(model)
    held = more_bytes(model, {"sparse": (False, False), "experts": 0}, LAST, {}) // TOKENS
    kept = format_bytes(held + 4 * 2 * shape.I)
    said = cost(model, "7 experts in 1 of 2 layers, of which 3")
    assert f"experts keep {kept} per token" in said
    weights = sum(p.numel() for p in models.build(model).parameters())
    idle = (7 - 3) * 3 * 48 * 23
    assert f"computed with {weights - idle:,} of {weights:,} weights" in said
    layer = models.build(model).model.layers[0]
    of_layer = sum(p.numel() for p in layer.parameters())
    assert f"{format_bytes(2 * of_layer)} with its attention" in said
    assert f"needs {format_bytes(2 * (of_layer - idle))};" in said


def test_bytes_of_clamped_experts_and_of_sinks_are_those_of_the_closed_form():
    model = config("gpt_oss")
    shape = models.shape_of(model)
    experts = cost(model, "5 experts in each layer, of which 3")
    said = cost(model, "experts and routers with biases")
    # Both layers keep three tensors more of each of the three experts of a token.
    held = more_bytes(model, {"clamped_experts": False}, LAST, {}) // TOKENS
    assert held == 2 * 3 * 3 * 2 * shape.expert_width
    assert f"8 tensors of {format_bytes(2 * shape.expert_width)} per token, where others keep 5" in said
    without = more_bytes(model, {"sparse": (False, False), "experts": 0, "clamped_experts": False}, LAST, {})
    kept = format_bytes(without // TOKENS // 2 + 4 * 2 * shape.I)
    assert f"experts keep {kept} per token" in experts
    built = models.build(model)
    layer, own = built.model.layers[0], built.model.layers[0].mlp.experts
    biases = own.gate_up_proj_bias.numel() + own.down_proj_bias.numel() + layer.mlp.router.bias.numel()
    assert said.startswith(f"{2 * biases:,} weights more;")
    idle = (5 - 3) * (own.gate_up_proj[0].numel() + own.gate_up_proj_bias[0].numel())
    idle += (5 - 3) * (own.down_proj[0].numel() + own.down_proj_bias[0].numel())
    of_layer = sum(p.numel() for p in layer.parameters())
    assert f"{format_bytes(2 * of_layer)} with its attention" in experts
    assert f"needs {format_bytes(2 * (of_layer - idle))};" in experts
    sinks = cost(model, "a sink for each query head")
    assert sinks.startswith(f"{2 * layer.self_attn.sinks.numel()} weights more;")
    # A long sequence has whole pieces: the bytes of a head are in lab_tests/test_sinks.py.
    assert f"with {format_bytes(4 * 8192 * shape.D)} for each head of a row and 8 bytes for each" in sinks


def test_bytes_of_the_head_are_those_of_the_closed_form():
    tied = config("gemma")
    held = more_bytes(tied, {"tied": False}, "embedding backward", {})
    # An untied head's gradient is there too, but it is a gradient of its own.
    assert f"backward {format_bytes(held)} more" in cost(tied, "the head has")
    plain = config("gemma", tie_word_embeddings=False)
    fewer = [sum(p.numel() for p in models.build(one).parameters()) for one in (plain, tied)]
    assert f"{fewer[0] - fewer[1]:,} weights fewer" in cost(tied, "the head has")
    divided = config("granite")
    tokens = 2**16
    held = more_bytes(divided, {"scaled_logits": False}, "loss", {"loss_tile": 2**14}, tokens)
    assert f"{format_bytes(held)} more" in cost(divided, "logits divided by 1.7")
    multiplied = config("cohere")
    held = more_bytes(multiplied, {"scaled_logits": False}, "loss", {"loss_tile": 2**14}, tokens)
    assert f"{format_bytes(held)} more" in cost(multiplied, "logits multiplied by 0.7")


def test_bytes_of_a_cap_are_those_of_the_closed_form():
    capped, tokens = config("gemma3_text", hidden_size=24, head_dim=2), 2**16
    held = more_bytes(capped, {"capped_logits": False}, LAST, {}, tokens)
    assert f"keeps their tanh, {format_bytes(held // tokens)} per token;" in cost(capped, "logits capped")
    # With so narrow a hidden state, a block holds more than the backward of the head.
    tiny = config("gemma3_text", 1, 1, hidden_size=2, head_dim=2)
    held = more_bytes(tiny, {"capped_logits": False}, "loss", {"loss_tile": 2**14}, tokens)
    assert f"that of 1K of them, {format_bytes(held)} more" in cost(tiny, "logits capped at 1.5 by a tanh")


def test_bytes_of_a_wide_rotation_are_those_of_the_closed_form():
    for kv_heads in (6, 24):
        model = config("cohere2", kv_heads=kv_heads)
        recipe = Recipe(fsdp=True, checkpoint=True, compute_dtype="bfloat16")
        job = make_job(model, recipe, tokens=TOKENS, ranks=1)
        moments = estimate_job(models.shape_of(model), job).moments
        held = moments["rotation recomputed, layer 0"]["attention"]["temporary buffers"]
        assert f"UPipe, {format_bytes(held // TOKENS)} per token" in cost(model, "q and k are rotated in")
        assert "rotation recomputed, layer 1" not in moments


def test_weights_are_those_of_the_model():
    """The cost of biases and norms beside Llama's model with the same sizes."""
    cohere = models.build(config("cohere2")).model
    norms = cohere.layers[0].input_layernorm.weight.numel() * len(cohere.layers)
    assert f"{norms:,} weights fewer" in cost(config("cohere2"), "the attention and the MLP")
    olmo = models.build(config("olmo")).model
    fewer = len([m for m in olmo.modules() if isinstance(m, type(olmo.norm))]) * olmo.config.hidden_size
    assert cost(config("olmo"), "LayerNorm in fp32").startswith(f"{fewer:,} weights fewer;")
    for family, whats, more in (
        ("qwen2", ["360 biases in the attention"], {}),
        ("granite", ["408 biases in the attention", "192 biases in the MLP"], {}),
        ("qwen3", ["a norm of each head"], {}),
        ("olmo2", ["408 biases in the attention", "one norm over all heads"], {}),
    ):
        own = sum(p.numel() for p in models.build(config(family, **more)).parameters())
        llamas = sum(p.numel() for p in models.build(config("llama")).parameters())
        said = [re.search(r"([\d,]+) weights more", cost(config(family), what))[1] for what in whats]
        assert sum(int(text.replace(",", "")) for text in said) == own - llamas
    arcee = [models.build(config(family)).model.layers[0].mlp for family in ("llama", "arcee")]
    matrices = [sum(p.numel() for p in mlp.parameters() if p.ndim == 2) for mlp in arcee]
    assert f"{2 * (matrices[0] - matrices[1]):,} weights fewer" in cost(
        config("arcee"), "MLPs without a gate"
    )
    gate_up = models.build(config("phi3")).model.layers[0].mlp.gate_up_proj.weight.numel()
    said = cost(config("phi3"), "one projection for the gate")
    assert f"weight has {format_bytes(2 * gate_up)}, where Llama's has {format_bytes(gate_up)}" in said


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


def test_every_family_but_llama_differs_and_every_sentence_is_found():
    assert set(FAMILIES) == set(SUPPORTED)
    of_family = {family: models.differences(config(family, 2, 1, hidden_size=20)) for family in FAMILIES}
    assert [family for family, found in of_family.items() if not found] == ["llama"]
    for found in of_family.values():
        assert len({one.what for one in found}) == len(found)
    whats = " / ".join(one.what for found in of_family.values() for one in found)
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
