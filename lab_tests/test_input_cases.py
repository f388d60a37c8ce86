"""Models and batches as users have them are computed right or refused by name, on every rank."""

import re

import pytest

from cluster.ranks import Cluster
from lab.bench.input_cases import CASES, FOREIGN, RECIPES, outcomes
from lab.bench.reference import FAMILIES

RIGHT = "right$"
FAMILY = "refused: {} is not a family that the lab computes right: Arcee, Cohere, Cohere 2, Gemma, Gemma 3, "

EXPECTED = {
    **{f"model: {family}": RIGHT for family in FAMILIES},
    **{f"model: {kind}": FAMILY.format(kind) for kind in FOREIGN},
    "config: is_causal=False": "refused: is_causal=False in the config of a Llama model: .*is_causal=True",
    "config: attention_dropout": "refused: attention_dropout=0.1 .*only with attention_dropout=0.0",
    "config: residual_dropout": "refused: residual_dropout=0.1 .*only with residual_dropout=0.0",
    "config: sliding_window": RIGHT,
    "config: a window in the last layer": RIGHT,
    "config: a window that no layer has": RIGHT,
    "config: quantization_config": r"refused: a checkpoint with quantized weights \({'bits': 4}\): ",
    "config: rope_type=dynamic": RIGHT,
    "config: rope_type=dynamic with short rows": RIGHT,
    "config: a key that no class declares": RIGHT,
    "batch: padding at the right": RIGHT,
    "batch: padding at the left": "refused: attention_mask of row 0 has padding before a token",
    "batch: holes": "refused: attention_mask of row 1 has padding before a token",
    "batch: padding alone": "refused: attention_mask leaves no token to predict",
    "batch: other tokens on a rank": "refused: the tokens, the mask or the documents differ on rank 1",
    "batch: labels of transformers": r"refused: labels=\.\.\.: .*use lab\.loss",
    "batch: several documents by mask": "refused: attention_mask has values other than 0 and 1",
    "batch: several documents by lengths": RIGHT,
    "batch: several documents by positions": RIGHT,
    "batch: documents that do not add up": "refused: documents of row 0 have 23 tokens together, and the row",
    "batch: a token outside the vocabulary": "refused: input_ids with token 101: the model's vocabulary",
    "batch: made for another recipe": "refused: a batch that was not made for ulysses=[12], ring=1",
    "forward: attention_mask of ones": RIGHT,
    "forward: attention_mask of another shape": r"refused: attention_mask has shape \[1, 5\]: ",
    "forward: a 4D attention_mask": r"refused: attention_mask has shape \[1, 1, 4, 4\]: ",
    "forward: position_ids that restart": "refused: position_ids are not the positions that this rank holds",
    "forward: position_ids left out": {
        "plain": RIGHT,
        "everything": "refused: position_ids left out with ulysses=2, ring=1",
    },
    "forward: inputs_embeds": "refused: inputs_embeds=a tensor: ",
    "forward: use_cache=True": "refused: use_cache=True: ",
    "forward: use_cache=False": RIGHT,
    "forward: output_hidden_states": "refused: output_hidden_states=True: ",
    "forward: output_attentions": "refused: output_attentions=True: ",
    "forward: return_dict=False": "refused: return_dict=False: ",
    "forward: logits_to_keep=1": "refused: logits_to_keep=1: ",
    "forward: num_items_in_batch": "refused: num_items_in_batch=3: ",
    "forward: is_causal=False": "refused: is_causal=False: ",
    "adapter: LoRA on q, k, v, o": RIGHT,
    "adapter: LoRA on every linear": RIGHT,
    "adapter: LoRA on the head": RIGHT,
    "adapter: LoRA on the embedding": RIGHT,
    "adapter: LoRA with norms of heads": RIGHT,
    "adapter: LoRA with a bias": RIGHT,
    "adapter: LoRA beside a trained head": RIGHT,
    "adapter: LoRA with dropout": r"refused: .*q_proj\.lora_dropout\.default has p=0\.1: .*lora_dropout=0",
    "adapter: DoRA": r"refused: .*q_proj has a variant of LoRA \(DoraLinearVariant\)",
    "adapter: a model of PEFT": r"refused: a PeftModel of PEFT .*model\.get_base_model\(\)",
    "adapter: added after the recipe": "refused: .* after the recipe was applied",
    "module: a parametrized weight": RIGHT,
    "module: a Linear with its own forward": r"refused: .*k_proj is a lab\.bench\.input_cases\.Doubling: ",
    "module: a hook on a projection": {
        "plain": RIGHT,
        "everything": "refused: a hook on a Linear: UPipe does not call",
    },
    "module: a hook inside an MLP": {
        "plain": RIGHT,
        "everything": "refused: a hook on a Linear: mlp_tile does not",
    },
    "module: a hook on an MLP": RIGHT,
    "module: a spectral norm": r"refused: model\.layers\.0\.mlp\.up_proj.* has a buffer _u",
    "module: one MLP in two layers": r"refused: model\.layers\.1\.mlp is the same as model\.layers\.0\.mlp",
    "module: a gradient hook": r"refused: model\.layers\.0\.mlp\.up_proj has a gradient hook",
    "module: other rotary frequencies": "refused: the rotary embedding has other frequencies than config",
    "module: dropout by an attribute": r"refused: model\.layers\.0\.self_attn has attention_dropout=0\.5",
    "module: another scale on one rank": "refused: the modules or their attributes differ on rank 1: ",
    "module: is_causal=False after the recipe": r"refused: .*0\.self_attn changed after the recipe",
    "module: another head after the recipe": "refused: lm_head",
    "module: transformers' checkpointing": "refused: transformers' gradient checkpointing is on in model: ",
    "state: frozen but for norms of heads": RIGHT,
    "state: frozen on one rank": "refused: the weights, or which of them are trained, differ on rank 1: ",
    "state: other weights on a rank": "refused: the weights, or which of them are trained, differ on rank 1",
    "state: dropout on one rank": r"refused: .*has p=0\.1: dropout is not supported",
    "state: unfrozen after the recipe": r"refused: lm_head\.weight was frozen or unfrozen after the recipe",
    "state: gradients from before": "refused: .* has gradients already",
    "state: a graph of gradients": {
        "plain": RIGHT,
        "everything": "refused: backward with create_graph=True under FSDP",
    },
    "state: an update before backward": r"refused: .* changed between forward and backward",
    "state: a second recipe": "refused: .* already: build|refused: .* already, and a second would add to it",
    "state: copy.deepcopy": "refused: a model with techniques applied cannot be copied",
    "state: pickle": "refused: a model with techniques applied cannot be pickled",
    "state: autocast": "refused: autocast around a model with a recipe: .*compute_dtype='bfloat16'",
    "state: torch.compile of the model": RIGHT,
    "state: torch.compile before the recipe": "refused: a OptimizedModule is not a transformers model",
    "state: eval and no_grad": RIGHT,
    "state: inference_mode": r"refused: torch\.inference_mode .*torch\.no_grad",
    "state: accumulation": RIGHT,
    "state: two models": RIGHT,
    "state: backward twice": {
        "plain": RIGHT,
        "everything": "refused: a second backward through a tiled loss",
    },
    "state: a forward that fails": RIGHT,
    "state: a backward that fails": {
        "plain": RIGHT,
        "everything": "refused: the backward before this forward failed",
    },
}


@pytest.fixture(scope="module")
def answers():
    """What each rank of two says."""
    with Cluster(ranks=2) as cluster:
        yield cluster.apply(outcomes)


def test_each_case_has_an_expected_outcome():
    assert list(EXPECTED) == [case.name for case in CASES]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", EXPECTED)
def test_an_arrival_is_right_or_refused_in_one_line(answers, name, recipe):
    wanted = EXPECTED[name]
    for rank in answers:
        said = rank[name, recipe]
        assert re.match(wanted if isinstance(wanted, str) else wanted[recipe], said), said
        assert "\n" not in said
