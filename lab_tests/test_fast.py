"""The recipe ``fast``, which is the top rung with its attention saved, is known wherever rungs are."""

from dataclasses import replace

import pytest

import lab
from lab.errors import RecipeError
from lab.planning.hardware import hardware
from lab.recipe.ladder import RECIPE_NAMES, ladder, recipe_by_name, resolve_recipe
from lab.show.tuner.text import fields_to_set
from lab_tests.support.costs import ATTENTION, FP32, RANKS, D, E, H, L, S, planned_costs


def test_fast_is_upipe_with_its_attention_saved_and_no_rung():
    top = resolve_recipe("upipe", "tiny", 4, 4096)
    assert resolve_recipe("fast", "tiny", 4, 4096) == replace(top, offload="attention")
    assert set(RECIPE_NAMES) - set(ladder("tiny", 4, 4096)) == {"fast", "long"}
    assert resolve_recipe("fast", "tiny", 4, 4096, offload="inputs", ulysses=2).head_chunk == 2
    assert recipe_by_name("fast", "tiny", 4, 4096, offload="inputs") == top
    with pytest.raises(
        RecipeError, match=r"unknown recipe 'slow': give one of plain, .*, upipe, streamed, fast, long, or a"
    ):
        resolve_recipe("slow", "tiny", 4, 4096)
    with pytest.raises(RecipeError, match=r"offload='attention' without checkpointing: .* checkpoint=True"):
        lab.Recipe(offload="attention")


@pytest.mark.long
@pytest.mark.parametrize("knobs", [{}, {"ring": 2, "ulysses": 2}])
def test_a_step_of_fast_has_an_attention_forward_less_and_more_to_copy(knobs):
    settings = {"fsdp": True, "ulysses": RANKS, "checkpoint": True, **knobs}
    inputs, kept = (planned_costs(offload=offload, **settings) for offload in ("inputs", "attention"))
    again = L * ATTENTION // RANKS
    rank = S // RANKS
    assert kept.host_bytes == 2 * ((L - 1) * FP32 * rank * E + L * FP32 * rank * H * (D + 1))
    if not knobs:
        assert inputs.flops - kept.flops == again
        h100 = hardware("h100")
        saved = again / h100.attention_forward.value
        assert inputs.device_seconds - kept.device_seconds == pytest.approx(saved, rel=1e-9)
    assert inputs.link_bytes > kept.link_bytes if knobs else inputs.link_bytes == kept.link_bytes
    assert kept.host_seconds > inputs.host_seconds


@pytest.mark.long
def test_the_tuner_has_fast_in_both_lists():
    tuner = lab.show.tuner("tiny", "fast", tokens=2048, ranks=4)
    assert (tuner.knobs.by_name["rung"].value, tuner.knobs.by_name["offload"].value) == ("fast", "attention")
    assert fields_to_set(tuner.state) == {}
    tuner.knobs.by_name["offload"].value = "inputs"
    assert tuner.recipe == resolve_recipe("upipe", "tiny", 4, 2048)
    told = lab.show.tuner("tiny", resolve_recipe("fast", "tiny", 4, 2048), tokens=2048, ranks=4)
    assert told.state.rung == "fast"
    assert '"fast"' in told.panel.content["texts"][0]
