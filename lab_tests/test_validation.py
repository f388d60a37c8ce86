"""The loss of a validation's text is transformers' own mean, and leaves the training as it was."""

import numpy as np
import pytest
import torch

from lab import models
from lab.memory.meter import Meter
from lab.memory.moment import Op
from lab.memory.timeline import Timeline
from lab.recipe.jobs import TrainSettings, make_job
from lab.recipe.recipe import Recipe
from lab.step.on_ranks import make_rank_state
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config

ROWS, TOKENS, START, LENGTH = 2, 40, 500, 3 * 40 + 17
"""The text has three rows of 40 tokens and one of 17: two batches, the second with a short row."""

UPIPE = Recipe(
    fsdp=True, ulysses=2, head_chunk=6, checkpoint=True, offload="inputs",
    mlp_tile=7, norm_tile=7, loss_tile=7,
)  # fmt: skip
RECIPES = {
    "plain": Recipe(),
    "upipe": UPIPE,
    "a ring, kept attention": Recipe(fsdp=True, ring=2, ulysses=2, checkpoint=True, offload="attention"),
    "streamed, segments, optimizer on the host": Recipe(
        fsdp=True, ulysses=2, checkpoint=True, offload="inputs", stream=7, segment=2, loss_tile=7,
        optimizer="host",
    ),
}  # fmt: skip


def model() -> torch.nn.Module:
    return models.build(small_config(num_hidden_layers=3)).double()


def transformers_mean(text: bytes) -> float:
    """The mean over all tokens but the first of each row, from transformers' logits, in fp64."""
    plain, total, labels = model(), 0.0, 0
    for start in range(0, len(text), TOKENS):
        ids = torch.tensor([list(text[start : start + TOKENS])])
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        labels += ids.shape[1] - 1
    return total / labels


def validated_on_rank(job, settings):
    """Runs on every rank: two steps, a validation and a step, each under a meter."""
    state = make_rank_state(job, settings)
    before, during, after = Meter(), Meter(), Meter()
    # The first step makes what DTensor keeps.
    state.train_step(0, Meter())
    losses = [float(state.train_step(0, before))]
    with during.measure(state.model, state.optimizer), during.phase("forward"):
        value = state.validation_loss()
    assert all(module.training for module in state.model.modules())
    held = sum(p.numel() for p in state.model.parameters() if not hasattr(p, "to_local"))
    losses.append(float(state.train_step(0, after)))
    return value, losses, [meter.timeline() for meter in (before, during, after)], held


def operators(timeline: Timeline) -> list[tuple[str, str, Op]]:
    """The phase, the module and the operator of each row."""
    return [
        (timeline.phases[phase], timeline.modules[module], timeline.ops[op])
        for phase, module, op in zip(timeline.phase, timeline.module, timeline.op, strict=True)
    ]


def attention_shapes(timeline: Timeline) -> set[str]:
    """The shapes that the attention's kernel gets in a forward: rows, heads and tokens."""
    return {op.shapes for phase, _, op in operators(timeline) if phase == "forward" and "flash" in op.name}


@pytest.mark.parametrize("name", mostly_long(RECIPES, 1))
def test_it_is_transformers_mean_and_leaves_the_training_as_it_was(ranks4, digits, tmp_path, name):
    # Another text than that of the training, which begins with other tokens.
    text = digits.read_bytes()[START : START + LENGTH]
    (tmp_path / "validation.txt").write_bytes(text)
    recipe = RECIPES[name]
    job = make_job(model, recipe, ranks=4, tokens=TOKENS, rows=ROWS)
    settings = TrainSettings(2, digits, learning_rate=0.0, validate=tmp_path / "validation.txt")
    expected = transformers_mean(text)
    for value, losses, (before, during, after), held in ranks4.apply(validated_on_rank, job, settings):
        assert value == pytest.approx(expected, rel=1e-9)
        assert losses[0] == losses[1]
        assert during.device_peak <= before.device_peak
        assert during.host_peak <= before.host_peak
        # Nothing is kept for a backward, on the device or on the host, and no more rows are computed at once.
        forward = before.rows([before.phases[phase] == "forward" for phase in before.phase])
        assert during.device_peak + during.host_peak < forward.device_peak + forward.host_peak
        assert attention_shapes(during) == attention_shapes(before) != set()
        # The validation leaves nothing behind: FSDP holds no parameters more, at any row, than without it.
        assert during.total[-1] == during.total[0]
        assert operators(before) == operators(after)
        assert np.array_equal(before.device, after.device)
        assert np.array_equal(before.host, after.host)
        assert (held == 0) == recipe.fsdp


def test_a_text_of_one_row_and_a_token(alone, digits, tmp_path):
    """The last token of the text stands alone in its row, and none is predicted there."""
    text = digits.read_bytes()[: TOKENS + 1]
    (tmp_path / "t.txt").write_bytes(text)
    job = make_job(model, Recipe(), ranks=1, tokens=TOKENS, rows=ROWS)
    state = make_rank_state(job, TrainSettings(1, digits, validate=tmp_path / "t.txt"))
    assert state.validation_loss() == pytest.approx(transformers_mean(text[:TOKENS]), rel=1e-9)
