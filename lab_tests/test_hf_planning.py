"""A trainer's plan is what four ranks measure, to the byte; and what fits."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, TrainerCallback

import lab.hf
from cluster.ranks import Cluster
from lab.errors import LabError
from lab.hf.ranks import fresh_process
from lab.memory.meter import Meter
from lab_tests.support.few_recipes import plan_few_recipes
from lab_tests.support.small_trainings import Case, long_trainer
from lab_tests.support.trainers import launch

pytestmark = [
    pytest.mark.long,
    # PEFT asks a model for what transformers is about to call otherwise.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENS = 41
"""A length that four ranks do not divide."""

CASES = {
    "upipe": Case(dtype="float32", steps=2),
    "accumulation": Case(dtype="float32", steps=2, accumulate=2),
    "four micro-batches": Case("ulysses", rows=1, dtype="float32", steps=2, accumulate=4),
    "adapters": Case(dtype="float32", steps=2, lora=True),
    "tiling": Case("tiling", dtype="float32", steps=2),
    "streamed": Case("streamed", dtype="float32", steps=2),
    "groups": Case(knobs={"ulysses": 2, "ring": 1}, rows=1, dtype="float32", steps=2),
}
FLAT = {"flattened": Case(rows=3, dtype="float32", steps=2)}
"""A case whose batch is one row of three documents."""

ON_RANKS = "accumulation"
"""The case that the ranks themselves plan."""


def rows() -> list[dict[str, list[int]]]:
    ids = [[(row * n**2) % 61 + 1 for n in range(TOKENS)] for row in range(1, 25)]
    return [{"input_ids": row, "labels": row} for row in ids]


class MeteredStep(TrainerCallback):
    """Measures the second step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.peaks = (0, 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.meter = Meter()
            self.measurement = self.meter.measure(
                self.trainer.applied.inner, self.trainer.optimizer.optimizer
            )
            self.measurement.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.measurement.__exit__(None, None, None)
            timeline = self.meter.timeline()
            self.peaks = timeline.device_peak, timeline.host_peak


def trainer_of(case: Case, folder: Path, **more: Any) -> Any:
    trainer = long_trainer(case, folder, **more)
    trainer.train_dataset = rows()
    return trainer


def measured_peaks(folder: Path) -> dict[str, tuple[int, int]]:
    """Runs on ranks."""
    found = {}
    for name, case in (CASES | FLAT).items():
        trainer = trainer_of(case, folder / name)
        if name in FLAT:
            trainer.data_collator = DataCollatorWithFlattening()
        if name == ON_RANKS:
            plan = lab.hf.plan(trainer)
            found["planned on ranks"] = plan.device_peak, plan.host_peak
        metered = MeteredStep(trainer)
        trainer.add_callback(metered)
        trainer.train()
        found[name] = metered.peaks
    return found


@pytest.fixture(scope="module")
def on_four(ranks4: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, int]]]:
    return launch(ranks4, 4, measured_peaks, tmp_path_factory.mktemp("on_four"))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_ranks_measure(
    name: str, on_four: list[dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    case = CASES[name]
    with fresh_process():
        # The trainer of one rank, whose recipe is made for four.
        alone = trainer_of(Case(**{**vars(case), "knobs": {}}), tmp_path)
        choice = alone.args.long_context
        choice.knobs.update(case.knobs)
        plan = lab.hf.plan(alone, ranks=4, workspace=False)
    planned = plan.device_peak, plan.host_peak
    # A matrix of three rows has no row for the last of four ranks.
    peaks = {rank[name] for rank in on_four}
    assert peaks == {planned} if name != "adapters" else max(peaks) == planned
    assert (planned[1] > 0) == (plan.recipe.offload != "none")
    if name == ON_RANKS:
        assert {rank["planned on ranks"] for rank in on_four} == {planned}
        assert plan.job.accumulate == 2


def test_a_plan_of_documents_is_what_ranks_measure(
    on_four: list[dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    with fresh_process():
        alone = trainer_of(FLAT["flattened"], tmp_path)
        alone.data_collator = DataCollatorWithFlattening()
        for ask, words in (
            (lab.hf.plan, "whose collator makes one row of a batch: give documents"),
            (lab.hf.fit, r"this collator packs several; use lab\.hf\.plan\(trainer, documents="),
        ):
            with pytest.raises(LabError, match=words):
                ask(alone, ranks=4, device_memory="1GiB")
        plan = lab.hf.plan(alone, ranks=4, documents=[TOKENS] * 3, workspace=False)
    assert (plan.job.rows, plan.job.tokens) == (1, 3 * TOKENS)
    assert {rank["flattened"] for rank in on_four} == {(plan.device_peak, plan.host_peak)}


def test_a_plan_is_of_the_model_as_it_is_trained(tmp_path: Path) -> None:
    with fresh_process():
        trainer = trainer_of(CASES["tiling"], tmp_path)
        whole = lab.hf.plan(trainer)
        trainer.model.model.embed_tokens.requires_grad_(False)
        metered = MeteredStep(trainer)
        trainer.add_callback(metered)
        planned = lab.hf.plan(trainer)
        trainer.train()
        assert metered.peaks == (planned.device_peak, planned.host_peak)
        assert planned.device_peak < whole.device_peak
        assert lab.hf.plan(trainer).device_peak == planned.device_peak


def test_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_few_recipes(monkeypatch, "ulysses", "tiling")
    with fresh_process():
        alone = trainer_of(CASES["accumulation"], tmp_path, bf16=True)
        fits = lab.hf.fit(alone, ranks=4, device_memory="1GiB", workspace=False)
        assert len(fits) == 2
        for plan in fits:
            assert (plan.job.tokens, plan.job.rows, plan.job.accumulate) == (TOKENS, 2, 2)
            assert plan.device_peak <= 2**30
        in_fp32 = trainer_of(CASES["tiling"], tmp_path)
        assert (
            lab.hf.fit(in_fp32, ranks=4, device_memory="1GiB", workspace=False)[0].recipe.compute_dtype
            is None
        )
        with pytest.raises(LabError, match="no recipe fits 41 tokens on 4 ranks: the leanest needs"):
            lab.hf.fit(alone, ranks=4, device_memory="1KiB", workspace=False)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_what_fits_with_adapters(targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_few_recipes(monkeypatch, "tiling")
    with fresh_process():
        alone = trainer_of(CASES["upipe"], tmp_path, bf16=True)
        adapted = get_peft_model(alone.model, LoraConfig(r=3, target_modules=targets))
        alone.model = alone.model_wrapped = adapted
        [plan] = lab.hf.fit(alone, ranks=4, device_memory="1GiB", workspace=False)
        assert "frozen parameters" in plan.state


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    with fresh_process():
        alone = trainer_of(CASES["upipe"], tmp_path)
        replicas = trainer_of(Case("tiling", knobs={"fsdp": False}), tmp_path)
        with pytest.raises(
            LabError, match=r"which DDP keeps equal: .* use fsdp=True in the recipe, or bf16=True"
        ):
            lab.hf.plan(replicas, ranks=4)
        with pytest.raises(LabError, match="0"):
            lab.hf.plan(alone, ranks=0)
        alone.train_dataset = iter(rows())
        with pytest.raises(LabError, match="have no input_ids: give tokens, the number of tokens in the"):
            lab.hf.plan(alone)
