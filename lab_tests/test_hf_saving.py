"""What Trainer saves with a recipe: plain files; a training that goes on has the unbroken one's losses."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from cluster.ranks import Cluster
from lab.errors import CheckpointError
from lab.hf.ranks import fresh_process
from lab.hf.saving import FOLDER, GROUPS, load_optimizer, load_whole_state, whole_state
from lab_tests.support import killed_training
from lab_tests.support.small_trainings import Case, long_trainer, model
from lab_tests.support.trainers import launch, whole

pytestmark = [
    pytest.mark.long,
    # PEFT asks a model for what transformers is about to call otherwise.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

STEPS, SAVED = 5, 3
SETTINGS = {"save_strategy": "steps", "save_steps": SAVED, "warmup_steps": 2}
BEST = {
    "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
    # The best of them is the first.
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
}  # fmt: skip

CASES = {
    "full": Case(dtype="float32", steps=STEPS, settings=SETTINGS, accumulate=2),
    "adapters": Case(dtype="float32", steps=STEPS, settings=SETTINGS, lora=True),
    "streamed": Case("streamed", dtype="float32", steps=STEPS, settings=SETTINGS),
    "replicas": Case(
        "ulysses",
        knobs={"ulysses": 2, "ring": 1, "replicas": 2},
        dtype="float32",
        steps=STEPS,
        settings=SETTINGS,
    ),
    "ddp": Case("tiling", knobs={"fsdp": False}, dtype="float32", steps=STEPS, settings=SETTINGS),
}
ON_OTHER_RANKS = Case(steps=STEPS, settings=SETTINGS)
BEST_FIRST = {
    "full": Case(dtype="float32", steps=3, settings=BEST),
    "adapters": Case(dtype="float32", steps=3, settings=BEST, lora=True),
}


@dataclass
class Training:
    """What a trainer logged by step, and its weights afterwards."""

    logs: dict[int, tuple[float, float, float]]
    weights: dict[str, Tensor]


def trained(trainer: Any, resume: str | None = None) -> Training:
    trainer.train(resume_from_checkpoint=resume)
    logs = {
        log["step"]: (log["loss"], float(log["grad_norm"]), log["learning_rate"])
        for log in trainer.state.log_history
        if "grad_norm" in log
    }
    return Training(logs, whole(trainer.model))


OnRanks = list[dict[str, dict[str, Any]]]


def on_ranks(folder: Path) -> dict[str, dict[str, Any]]:
    unbroken, resumed, best = {}, {}, {}
    for name, case in CASES.items():
        trainer = long_trainer(case, folder / name)
        unbroken[name] = trained(trainer)
        trainer.save_model(str(folder / name / "saved"))
        trainer.model.save_pretrained(str(folder / name / "by the model"))
        resumed[name] = trained(long_trainer(case, folder / name), str(folder / name / f"checkpoint-{SAVED}"))
    for name, case in BEST_FIRST.items():
        trainer = long_trainer(case, folder / "best" / name)
        weights = trained(trainer).weights
        losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        best[name] = losses, trainer.evaluate()["eval_loss"], weights
    # The trainer of the adapters, which are merged into the shards.
    trainer.model.merge_and_unload().save_pretrained(str(folder / "merged"))
    trained(long_trainer(ON_OTHER_RANKS, folder / "of four"))
    of_one = trained(long_trainer(ON_OTHER_RANKS, folder / "of one"), str(folder / "of one" / "checkpoint-3"))
    return {"unbroken": unbroken, "resumed": resumed, "best": best, "other": {"one": of_one}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on_four")


@pytest.fixture(scope="module")
def of_one(folder: Path) -> Training:
    """A training on one rank, of which four resume."""
    with fresh_process():
        return trained(long_trainer(ON_OTHER_RANKS, folder / "of one"))


@pytest.fixture(scope="module")
def on_four(ranks4: Cluster, of_one: Training, folder: Path) -> OnRanks:
    return launch(ranks4, 4, on_ranks, folder)


def adapters_with_a_module(case: Case) -> Any:
    """LoRA whose A is frozen, under a name of its own, and a head that is saved with it."""
    made = get_peft_model(
        model(replace(case, lora=False)),
        LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
        adapter_name="own",
    )
    for name, parameter in made.named_parameters():
        if ".lora_A." in name:
            parameter.requires_grad_(False)
    return made


def test_frozen_adapters_and_modules_are_saved_and_loaded(tmp_path: Path) -> None:
    case = Case(dtype="float32", steps=2, settings=BEST)
    with fresh_process():
        trainer = long_trainer(case, tmp_path)
        trainer.model = trainer.model_wrapped = adapters_with_a_module(case)
        trainer.train()
        # The best is the first step's, which was loaded at the end.
        trainer.save_model(str(tmp_path / "saved"))
        weights = whole(trainer.model)
    for folder in ("saved", "checkpoint-1"):
        loaded = PeftModel.from_pretrained(model(case), tmp_path / folder / "own", adapter_name="own")
        check_equal(loaded.state_dict(), weights)


def test_every_rank_that_writes_has_the_weights(tmp_path: Path) -> None:
    with fresh_process():
        trainer = long_trainer(Case(dtype="float32", steps=1), tmp_path)
        trainer.train()
        assert whole_state(trainer.model, keep=True).keys() == trainer.model.state_dict().keys()
        assert whole_state(trainer.model, keep=False) == {}


def test_a_checkpoint_without_a_parameter_is_refused(tmp_path: Path) -> None:
    with fresh_process():
        trainer = long_trainer(Case(dtype="float32", steps=1), tmp_path)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        file = tmp_path / "saved" / "model.safetensors"
        weights = load_file(file)
        del weights["model.norm.weight"]
        save_file(weights, file)
        with pytest.raises(CheckpointError, match=r"has no model.norm.weight: .* give a whole checkpoint"):
            load_whole_state(trainer.model, tmp_path / "saved")


def check_equal(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", CASES)
def test_the_steps_after_a_resume_are_those_of_the_unbroken_training(name: str, on_four: OnRanks) -> None:
    unbroken = on_four[0]["unbroken"][name]
    assert list(unbroken.logs) == [1, 2, 3, 4, 5]
    assert len(set(unbroken.logs.values())) == STEPS
    for rank in on_four:
        assert rank["resumed"][name].logs == unbroken.logs
        check_equal(rank["resumed"][name].weights, unbroken.weights)


@pytest.mark.parametrize("name", ["full", "ddp"])
def test_a_model_is_saved_as_a_plain_checkpoint(name: str, folder: Path, on_four: OnRanks) -> None:
    for saved in "saved", "by the model":
        loaded = LlamaForCausalLM.from_pretrained(folder / name / saved)
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        check_equal(loaded.state_dict(), on_four[0]["unbroken"][name].weights)


def test_adapters_are_saved_as_peft_saves_them(folder: Path, on_four: OnRanks) -> None:
    for saved in "saved", "by the model":
        files = {path.name for path in (folder / "adapters" / saved).glob("*.safetensors")}
        assert files == {"adapter_model.safetensors"}
        base = model(CASES["full"])
        loaded = PeftModel.from_pretrained(base, folder / "adapters" / saved)
        check_equal(loaded.state_dict(), on_four[0]["unbroken"]["adapters"].weights)


@pytest.mark.parametrize("name", BEST_FIRST)
def test_the_best_model_is_loaded_at_the_end(name: str, folder: Path, on_four: OnRanks) -> None:
    losses, after, weights = on_four[0]["best"][name]
    assert losses[0] > losses[1] > losses[2]
    assert after == losses[0]
    file = "adapter_model" if name == "adapters" else "model"
    for stored, value in load_file(folder / "best" / name / "checkpoint-1" / f"{file}.safetensors").items():
        own = weights.get(stored, weights.get(stored.replace(".weight", ".default.weight")))
        assert own is not None
        assert torch.equal(own, value), stored


def test_merged_adapters_are_saved_as_a_plain_checkpoint(folder: Path, on_four: OnRanks) -> None:
    """Seen red: torch's error about the data pointer of a tensor without storage."""
    loaded = LlamaForCausalLM.from_pretrained(folder / "merged").state_dict()
    adapted = PeftModel.from_pretrained(
        model(replace(BEST_FIRST["adapters"], lora=False)), folder / "best" / "adapters" / "checkpoint-1"
    )
    merged = adapted.merge_and_unload().state_dict()
    assert loaded.keys() == merged.keys()
    for name, value in merged.items():
        assert torch.allclose(loaded[name], value, rtol=1e-5, atol=1e-6), name


def check_close(found: Training, right: Training) -> None:
    assert list(found.logs) == list(right.logs)
    for step, (loss, norm, rate) in right.logs.items():
        assert found.logs[step][0] == pytest.approx(loss, rel=1e-6), step
        assert found.logs[step][1] == pytest.approx(norm, rel=1e-6), step
        assert found.logs[step][2] == rate


def test_four_ranks_go_on_from_what_one_wrote_and_one_from_what_four_wrote(
    folder: Path, of_one: Training, on_four: OnRanks
) -> None:
    for rank in on_four:
        check_close(rank["other"]["one"], of_one)
    with fresh_process():
        trainer = long_trainer(ON_OTHER_RANKS, folder / "of four")
        check_close(trained(trainer, str(folder / "of four" / "checkpoint-3")), of_one)


def test_a_checkpoint_without_the_optimizer_is_refused(
    folder: Path, tmp_path: Path, of_one: Training
) -> None:
    shutil.copytree(folder / "of one" / "checkpoint-3", tmp_path / "checkpoint-3")
    shutil.rmtree(tmp_path / "checkpoint-3" / FOLDER)
    with (
        fresh_process(),
        pytest.raises(CheckpointError, match=f"has no {FOLDER} and scheduler.pt: .*; resume"),
    ):
        long_trainer(ON_OTHER_RANKS, tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{")
    with fresh_process(), pytest.raises(CheckpointError, match=r"no complete checkpoint in .*: train"):
        long_trainer(ON_OTHER_RANKS, tmp_path).train(resume_from_checkpoint=True)


def test_settings_of_the_optimizer_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Its settings and its learning rate too, whatever the new arguments say."""
    case = Case(dtype="float32", steps=STEPS, settings={**SETTINGS, "weight_decay": 0.1})
    others = {
        "learning_rate": 0.02, "adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 0.01, "weight_decay": 0.4
    }  # fmt: skip
    with fresh_process():
        unbroken = trained(long_trainer(case, tmp_path))
        changed = replace(case, settings={**SETTINGS, **others})
        resumed = trained(long_trainer(changed, tmp_path), str(tmp_path / f"checkpoint-{SAVED}"))
    assert resumed.logs == unbroken.logs
    check_equal(resumed.weights, unbroken.weights)


def one_group(trained: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=1e-3)


def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    case = Case("tiling", dtype="float32", steps=1, settings={"save_strategy": "steps", "save_steps": 1})
    checkpoint = tmp_path / "checkpoint-1"
    with fresh_process():
        long_trainer(case, tmp_path).train()
        other = long_trainer(replace(case, steps=2), tmp_path)
        other.create_optimizer()
        with pytest.raises(CheckpointError, match=r"has other groups of parameters .*: give the trainer the"):
            load_optimizer(checkpoint / FOLDER, other.applied.inner, one_group(other.model))
        (checkpoint / FOLDER / GROUPS).write_bytes(b"PK")
        with pytest.raises(CheckpointError, match=r"param_groups.pt is missing or damaged: resume from"):
            other.train(resume_from_checkpoint=str(checkpoint))


# ---- killed ----------------------------------------------------------------------------------------------


def torchrun(folder: Path, what: str) -> "subprocess.Popen[str]":
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, *words, "-m", killed_training.__name__, str(folder), what],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_killed_while_it_saves_and_resumed(tmp_path: Path) -> None:
    killed = torchrun(tmp_path, "begin")
    while len(list(tmp_path.glob("killed_*"))) < 2:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    for one in [*psutil.Process(killed.pid).children(recursive=True), killed]:
        one.send_signal(signal.SIGKILL)
    killed.communicate()
    assert {path.name for path in (tmp_path / "broken").iterdir()} == {"checkpoint-2", "checkpoint-4"}
    resumed = torchrun(tmp_path, "resume")
    said, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said
    whole, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("begin", "resume"))
    assert len(whole) == killed_training.STEPS
    # Its first steps are those of the checkpoint.
    assert after == whole
