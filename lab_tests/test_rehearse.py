"""A rehearsal is the step of one rank of N: its bytes are the plan's, and the process stays usable."""

import json
import pkgutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import PretrainedConfig

import lab
from cluster.ranks import Cluster
from lab import models
from lab.bench import rehearsals
from lab.bench.rehearsals import _row
from lab.errors import DataError, DivergedError, LabError, RecipeError
from lab.memory.cuda import History
from lab.planning.cuda_workspace import nccl_workspace, outside_workspace
from lab.planning.plan import Plan
from lab.recipe.ladder import RECIPE_NAMES, RUNGS
from lab.rehearsing.rehearsal import RehearsalOutOfMemory, RehearsalTooLarge
from lab.rehearsing.rehearse import _beyond, _capped, _limit
from lab.units import GiB
from lab_tests.support.commands import answer, invoke, refusal
from lab_tests.support.gpus import Card
from lab_tests.support.models import small_config, tiny_with_infinite_head

TOKENS = 512


def odd() -> PretrainedConfig:
    """All axes and quotients differ; four divides each, so that shards are equal."""
    return small_config(num_hidden_layers=3, vocab_size=260)


@pytest.mark.long
def test_the_command_of_the_readme() -> None:
    """2K tokens on 8 ranks: the plan's bytes, and every figure that is promised."""
    found = json.loads(answer("rehearse tiny --tokens 2K --ranks 8 --json"))
    assert found["plan_over_measured"] == 1
    assert found["device_peak"] == found["planned_device_peak"] > 2**20
    # The inputs of all layers but the last: [2K/8, 256] in fp32.
    assert found["host_peak"] == 3 * 256 * 256 * 4
    assert found["reserved_peak"] is None
    assert found["seconds"] == pytest.approx(sum(found["seconds_by_phase"].values()))
    assert found["tokens_per_second"] == pytest.approx(2048 / 8 / found["seconds"])
    assert found["tokens_per_second_with_links"] < found["tokens_per_second"]
    assert 5 < found["loss"] < 12


@pytest.mark.long
def test_a_hybrid_with_a_ring_in_bf16() -> None:
    said: list[str] = []
    found = lab.rehearse(
        odd(), "upipe", tokens=TOKENS, ranks=8, ring=2, head_chunk=6, rows=2, watch=said.append
    )
    assert found.plan_over_measured == 1
    assert found.link_bytes == found.plan.costs.link_bytes
    assert found.job.recipe.ring == 2
    assert said[0] == "planning"
    assert said[-1] == "step 1 of 1 by the clock"


@pytest.mark.long
def test_fewer_layers_are_extrapolated_by_the_plans() -> None:
    part = lab.rehearse("tiny", "tiling", tokens=TOKENS, ranks=4, layers=2)
    assert part.weights == "random weights: a part of the layers is rehearsed"
    whole = lab.rehearse("tiny", "tiling", tokens=TOKENS, ranks=4)
    assert (part.layers, part.of_layers, whole.layers) == (2, 4, 4)
    assert part.plan_over_measured == 1
    assert part.device_peak < part.whole_device_peak == whole.device_peak
    # 2 of 4 layers, the loss and the embedding: between half and all.
    assert 1.2 < part.whole_seconds / part.step_seconds < 2
    assert part.tokens_per_second == pytest.approx(TOKENS / 4 / part.whole_seconds)
    text = answer(f"rehearse tiny --recipe tiling --tokens {TOKENS} --ranks 4 --layers 2")
    assert "2 of 4 layers" in text
    assert "extrapolated  to 4 layers" in text


class WithWorkspace:
    """A plan whose peak has in it what lies outside torch on CUDA."""

    def __init__(self, made: Plan) -> None:
        peak = made.timeline.device_peak + outside_workspace(made.ranks)
        self.timeline, self.job = SimpleNamespace(device_peak=peak), made.job


@pytest.mark.long
def test_what_lies_outside_torch_is_in_neither_of_the_peaks_compared() -> None:
    found = lab.rehearse(odd(), "fsdp", tokens=TOKENS, ranks=4, layers=2)
    plans: Any = {name: WithWorkspace(getattr(found, name)) for name in ("plan", "whole")}
    on_cuda = replace(found, outside_torch=2**30, **plans)
    assert on_cuda.plan_over_measured == found.plan_over_measured == 1
    assert on_cuda.whole_device_peak == found.whole_device_peak > found.device_peak


@pytest.mark.long
def test_layers_of_a_callable() -> None:
    found = lab.rehearse(lambda: models.build(odd()), "fsdp", tokens=TOKENS, ranks=4, layers=2)
    assert (found.layers, found.plan_over_measured) == (2, 1)
    assert found.device_peak == lab.rehearse(odd(), "fsdp", tokens=TOKENS, ranks=4, layers=2).device_peak


def test_out_of_memory_says_how_far_it_got_and_leaves_the_process_usable() -> None:
    whole = lab.rehearse(odd(), "fsdp", tokens=TOKENS, ranks=4)
    limit = whole.device_peak - 1
    with pytest.raises(RehearsalOutOfMemory) as caught:
        lab.rehearse(odd(), "fsdp", tokens=TOKENS, ranks=4, device_memory=limit)
    assert caught.value.moment.phase == whole.timeline.peak.phase
    assert caught.value.moment.op == whole.timeline.peak.op
    assert f"out of memory in {whole.timeline.peak.phase}, {whole.timeline.peak.op}" in str(caught.value)
    assert "the whole step needs" in str(caught.value)
    assert caught.value.plan.device_peak == whole.device_peak
    again = lab.rehearse(odd(), "fsdp", tokens=TOKENS, ranks=4, device_memory=whole.device_peak)
    assert (again.loss, again.device_peak) == (whole.loss, whole.device_peak)


@pytest.mark.parametrize(
    ("error", "said", "asked"),
    [
        (LabError, "torch sees no GPU here", {"machine": "cuda"}),
        (LabError, "machine='tpu': it takes 'cuda', 'cpu', or None", {"machine": "tpu"}),
        (RecipeError, "ulysses=5: it does not divide the 32 query heads", {"ulysses": 5, "ranks": 5}),
        (RecipeError, "unknown recipe 'fastest'", {"recipe": "fastest"}),
        (LabError, "layers=5: the model has 4", {"layers": 5}),
        (LabError, "layers=0: the model has 4", {"layers": 0}),
        (LabError, "steps=-1: it takes a whole number, 0 or more", {"steps": -1}),
        (LabError, "steps=0.5: it takes a whole number, 0 or more", {"steps": 0.5}),
        (LabError, "no device named 'h300'", {"device": "h300"}),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    error: type[Exception], said: str, asked: dict[str, object]
) -> None:
    with pytest.raises(error, match=said) as caught:
        lab.rehearse(**{"model": "tiny", "tokens": TOKENS, "ranks": 4, **asked})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_what_this_machine_cannot_hold_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lab.plan("tiny", "plain", tokens=256, ranks=1, workspace=False)
    needed = made.device_peak + made.host_peak
    for more in (-1, 0):
        has = type("Memory", (), {"total": 2**40, "available": needed + more})
        monkeypatch.setattr(psutil, "virtual_memory", has)
        if more == 0:
            assert lab.rehearse("tiny", "plain", tokens=256, ranks=1).plan_over_measured == 1
            continue
        with pytest.raises(
            RehearsalTooLarge, match=r"tiny · plain · 1 ranks · 256 tokens on CPU takes .* are available"
        ):
            lab.rehearse("tiny", "plain", tokens=256, ranks=1)


def test_a_cap_up_to_2_gib_above_the_gpu_is_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)  # of 79 GiB
    with pytest.raises(LabError, match=r"device_memory=81.1 GiB: the GPU has 79.0 GiB") as caught:
        _limit("cuda", 81 * GiB + GiB // 10)
    assert "\n" not in str(caught.value)
    asked = [None, 60 * GiB, 79 * GiB, 80 * GiB, 81 * GiB]
    assert [_limit("cuda", each) for each in asked] == [None, 60 * GiB, 79 * GiB, 79 * GiB, 79 * GiB]
    assert _limit("cpu", 90 * GiB) == 90 * GiB
    with _capped("cuda", 79 * GiB, 8):
        # 0.75 GiB are outside torch, and a rank of eight has NCCL's buffers there too.
        assert card.fractions == [pytest.approx((78.25 * GiB - nccl_workspace(8)) / (79 * GiB))]
    # Kernels that the step loads are found when it has ended.
    loaded = History(device_peak=60 * GiB, reserved_peak=70 * GiB, outside_torch=GiB)
    assert _beyond(loaded, 61 * GiB, ranks=1) == _beyond(loaded, None, ranks=8) == ""
    assert _beyond(loaded, 61 * GiB - 1, ranks=1) == "1.00 GiB outside torch, the limit is 61.0 GiB"
    assert "outside torch" in _beyond(loaded, 61 * GiB, ranks=8)
    assert 2 * GiB < nccl_workspace(8) == outside_workspace(8) - outside_workspace(1)


def test_the_report_says_what_the_allocator_did_and_which_limit_it_had() -> None:
    found = lab.rehearse(odd(), "fsdp", tokens=TOKENS, ranks=4, layers=1, device_memory="1GiB")
    assert "device memory 1.00 GiB\n" in repr(found)
    on_cuda = replace(
        found, reserved_peak=3 * GiB, alloc_retries=5, outside_torch=GiB, device_memory=79 * GiB,
        device_memory_asked=80 * GiB, reserved_by_pool={"stream 0 large": 3 * GiB},
    )  # fmt: skip
    text = repr(on_cuda)
    assert "device memory 79.0 GiB, all that the GPU has: 80.0 GiB were asked for\n" in text
    assert "reserved      3.00 GiB (retries: 5), 1.00 GiB outside torch\n" in text
    said = on_cuda.to_json()
    assert (said["reserved_peak"], said["alloc_retries"], said["device_memory"]) == (3 * GiB, 5, 79 * GiB)
    assert said["reserved_by_pool"] == {"stream 0 large": 3 * GiB}
    assert "planned_seconds" not in said, "they are an H100's, whatever was rehearsed on"
    row = _row("fsdp", TOKENS, {"fsdp": on_cuda})
    assert (row["reserved, GiB"], row["retries"]) == (3, 5)


@pytest.mark.long
def test_the_bench_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of the recipes, with those that others are compared with; the bench has all of them."""
    assert rehearsals.RECIPE_NAMES is RECIPE_NAMES
    sample = ("plain", "tiling", "upipe", "fast")
    monkeypatch.setattr(rehearsals, "RECIPE_NAMES", sample)
    small_config(vocab_size=260).save_pretrained(tmp_path)
    tried = "--ranks 4 --tokens 256 --layers 1 --steps 1 --json --device-memory 1900KiB"
    rows = {row["recipe"]: row for row in json.loads(answer(f"bench rehearsals {tmp_path} {tried}"))}
    assert tuple(rows) == sample
    assert rows["plain"]["failed"].startswith("out of memory in forward, aten.")
    assert rows["plain"]["seconds"] is None
    assert all(row["planned / peak"] == 1 for name, row in rows.items() if name != "plain")
    assert rows["upipe"]["over upipe"] == rows["tiling"]["over tiling"] == 1
    assert rows["fast"]["over upipe"] == pytest.approx(rows["fast"]["seconds"] / rows["upipe"]["seconds"])


@pytest.mark.long
def test_a_loss_that_is_not_finite_ends_a_rehearsal() -> None:
    with pytest.raises(DivergedError, match=r"^the loss of step 1 is nan; no update had been made yet"):
        lab.rehearse(tiny_with_infinite_head, "fsdp", tokens=64, ranks=4)


@pytest.mark.long
@pytest.mark.parametrize("verb", ["rehearse", "bench rehearsals"])
def test_a_text_and_a_tokenizer_are_taken(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of five letters is repeated; a missing one is refused, and a folder without a tokenizer.

    The bench has two recipes here; another test has more of them.
    """
    monkeypatch.setattr("lab.bench.rehearsals.RECIPE_NAMES", ("plain", "fsdp"))
    (tmp_path / "text").write_text("abcde")
    recipe = "--recipe plain" if verb == "rehearse" else ""
    asked = f"{verb} tiny {recipe} --tokens 64 --ranks 1 --layers 1 --steps 1 --json"
    answer(f"{asked} --text {tmp_path / 'text'}")
    assert "no text at" in refusal(f"{asked} --text {tmp_path / 'none'}")
    assert "no tokenizer in" in refusal(f"{asked} --tokenizer {tmp_path}")


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_recipe_is_as_planned_with_a_loss_near_that_of_the_ranks(recipe: str, ranks4: Cluster) -> None:
    """Peers repeat the labels of this rank, and their sum. Seen red: the sum alone, so 4/3 of the loss."""
    asked = {"tokens": 64, "rows": 3, "compute_dtype": None}
    rehearsed = lab.rehearse(odd(), recipe, ranks=4, machine="cpu", **asked)
    assert rehearsed.device_peak == rehearsed.plan.device_peak
    assert rehearsed.host_peak == rehearsed.plan.host_peak
    assert rehearsed.link_bytes == rehearsed.plan.costs.link_bytes > 0
    assert rehearsed.timeline.peak.op == rehearsed.plan.peak.op
    assert rehearsed.whole is rehearsed.plan
    run = lab.run(odd(), recipe, steps=1, cluster=ranks4, **asked)
    assert rehearsed.loss == pytest.approx(run.losses[0], rel=0.05)


def test_a_rank_without_labels_is_refused() -> None:
    """Seen red: its loss was 0."""
    with pytest.raises(DataError, match="no token with a label: give more tokens"):
        lab.rehearse("tiny", "upipe", ranks=16, tokens=5, machine="cpu")


@pytest.mark.long
def test_the_loss_is_that_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcde")
    plain = lab.rehearse(odd(), "fsdp", tokens=64, ranks=2)
    assert lab.rehearse(odd(), "fsdp", tokens=64, ranks=2, text=tmp_path / "text").loss != plain.loss


@pytest.mark.long
def test_no_timed_step_times_the_metered_one() -> None:
    said: list[str] = []
    found = lab.rehearse("tiny", "plain", tokens=64, ranks=1, layers=1, steps=0, watch=said.append)
    assert said[-1] == "a step under the meter"
    assert found.timed_steps == found.to_json()["timed_steps"] == 0
    assert list(found.seconds) == ["forward", "backward", "optimizer"]
    assert found.plan_over_measured == 1
    text = answer("rehearse tiny --recipe plain --tokens 64 --ranks 1 --layers 1 --steps 0")
    assert "the first one, with pinning and the meter: forward" in text


class Refusing:
    """Stands in for a device that is full: some calls of a function raise torch's own error."""

    def __init__(self, function: Any, calls: int, error: Exception) -> None:
        self.function, self.left, self.error = function, calls, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*args, **kwargs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "call", "phase"),
    [
        ("lab.step.training_step.loss", 2, "forward"),
        ("lab.step.training_step.update", 2, "optimizer"),
        ("lab.rehearsing.rehearse.make_rank_state", 1, "setup"),
    ],
)
def test_out_of_memory_where_no_meter_stands(
    name: str, call: int, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a timed step and before the first: the same error as in the metered step."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    monkeypatch.setattr(name, Refusing(pkgutil.resolve_name(name), call, full))
    with pytest.raises(RehearsalOutOfMemory) as caught:
        lab.rehearse(odd(), "fsdp", tokens=64, ranks=2)
    assert caught.value.moment.phase == phase
    assert str(caught.value).startswith(
        f"out of memory in {phase}, outside the meter: 0 B held, CUDA out of memory. Tried to allocate"
    )
    assert caught.value.plan.device_peak > 0


@pytest.mark.long
def test_rows_are_written_as_they_are_measured_and_a_failing_row_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    seen: list[int] = []
    out = tmp_path / "rows.jsonl"

    def stand_in(model: str, name: str, **settings: Any) -> Any:
        seen.append(len(out.read_text().splitlines()))
        if name == "fsdp":
            raise full
        if name == "ulysses":
            raise RecipeError("ulysses=5: no")
        if name == "fast":
            raise ZeroDivisionError
        return plain

    plain = lab.rehearse("tiny", "plain", tokens=64, ranks=1, layers=1)
    monkeypatch.setattr("lab.bench.rehearsals.rehearse", stand_in)
    asked = f"bench rehearsals tiny --ranks 1 --tokens 64 --out {out}"
    assert isinstance(invoke(asked).exception, ZeroDivisionError)
    assert seen == list(range(9))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["recipe"] for row in rows] == list(RUNGS)
    assert rows[1]["failed"] == str(full)
    assert rows[2]["failed"] == "ulysses=5: no"
    assert rows[3]["failed"] is None
    assert rows[3]["seconds"] == plain.step_seconds
    assert all(f"torch {torch.__version__}" in row["machine"] for row in rows)
