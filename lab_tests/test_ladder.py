"""What each rung of the ladder saves, measured on four ranks at a size where every technique saves memory."""

from itertools import pairwise

import pytest

import lab
from lab.recipe.ladder import RUNGS, ladder
from lab.training.records import Started
from lab_tests.support.models import small_config

pytestmark = pytest.mark.long

TOKENS, LAYERS, HIDDEN = 1024, 3, 64
LOCAL = TOKENS // 4


def small():
    return small_config(
        hidden_size=HIDDEN, intermediate_size=224, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=4, head_dim=4, vocab_size=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip


def test_the_device_peak_falls_on_every_rung_and_the_loss_stays(ranks4):
    runs = {
        name: lab.run(small(), recipe, tokens=TOKENS, steps=1, cluster=ranks4)
        for name, recipe in ladder(small(), 4, TOKENS, compute_dtype=None).items()
    }
    peaks = [run.device_peak for run in runs.values()]
    assert all(above < below for below, above in pairwise(peaks)), dict(zip(RUNGS, peaks, strict=True))
    for run in runs.values():
        assert abs(run.losses[0] / runs["plain"].losses[0] - 1) < 1e-6
        assert {t.device_peak for t in run.timelines} == {run.device_peak}

    block_input = LOCAL * HIDDEN * 4
    *others, streamed = (run.host_peak for run in runs.values())
    assert others == [0] * 4 + [(LAYERS - 1) * block_input] * 3
    assert streamed > LAYERS * block_input
    # The peak of both is at the loss, where all but two of the block inputs make the difference.
    assert runs["checkpoint"].device_peak - runs["offload"].device_peak == (LAYERS - 1) * block_input

    state = 16 * sum(p.numel() for p in lab.models.build(small()).parameters())
    at_rest = {name: run.timelines[0].moment(0).by_category for name, run in runs.items()}
    counters = 4 * (9 * LAYERS + 3)
    for name, held in at_rest.items():
        ranks = 1 if name == "plain" else 4
        assert (
            held["parameters"] + held["optimizer"] - counters - held_by_buffers() == state * 3 // 4 // ranks
        )


def held_by_buffers() -> int:
    return sum(b.numel() * b.element_size() for b in lab.models.build(small()).buffers())


def test_a_run_brings_back_what_happened_and_watch_sees_it_happen(ranks4):
    seen = []
    run = lab.run("tiny", "offload", tokens=512, steps=2, cluster=ranks4, watch=seen.append, norm_tile=48)
    assert run.job.recipe.norm_tile == 48
    assert len(run.losses) == len(run.seconds) == 2
    assert run.losses[1] < run.losses[0]
    assert run.title == "tiny · offload · 4 ranks · 512 tokens"
    assert isinstance(seen[0], Started)
    assert seen[-1] is run
    for rank, timeline in enumerate(run.timelines):
        mine = [message.timeline for message in seen[1:-1] if message.rank == rank]
        assert sum(len(rows) for rows in mine) == len(timeline)
        assert [s for rows in mine for s in rows.seconds] == timeline.seconds.tolist()
        assert timeline.phases == ("forward", "backward", "optimizer")
