"""Training that stops and resumes has the losses of an unbroken run, bit for bit, also after a SIGKILL."""

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

import lab
from lab import models
from lab.errors import CheckpointError, DivergedError
from lab.recipe.jobs import TrainSettings
from lab.step.on_ranks import RankState
from lab.training import manifest
from lab.training.loss_file import LossFile
from lab_tests.support.commands import answer, refusal
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config
from lab_tests.support.training import ROWS, TOKENS


def lines(folder):
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.fixture
def train_settings(digits, tmp_path):
    return {"tokens": TOKENS, "rows": ROWS, "text": digits, "checkpoint": tmp_path / "run", "every": 2}


@pytest.fixture(scope="module")
def unbroken_run(ranks4, digits, tmp_path_factory):
    """Five steps on four ranks, and what was told of each as it came."""
    seen = []
    folder = tmp_path_factory.mktemp("unbroken")
    run = lab.train(
        small_config(), "upipe", tokens=TOKENS, rows=ROWS, text=digits, steps=5, checkpoint=folder, every=2,
        keep=3, cluster=ranks4, watch=seen.append, compute_dtype=None,
    )  # fmt: skip
    assert tuple(seen) == run.steps
    assert [step.to_json() for step in seen] == lines(folder)
    return run


def test_what_is_told_of_a_step(unbroken_run):
    first, *_, last = unbroken_run.steps
    assert [step.step for step in unbroken_run.steps] == [1, 2, 3, 4, 5]
    assert last.tokens_per_second == pytest.approx(ROWS * TOKENS / last.seconds)
    assert last.tokens_per_second == 4 * last.tokens_per_second_and_rank
    assert first.seconds_left == pytest.approx(4 * first.seconds, rel=0.01)
    assert last.seconds_left == 0
    plan = lab.plan(
        small_config(), "upipe", tokens=TOKENS, rows=ROWS, ranks=4, workspace=False, compute_dtype=None
    )
    assert {step.device_peak for step in unbroken_run.steps} == {plan.device_peak}


def test_the_losses_after_a_resume_are_those_of_the_unbroken_run(ranks4, unbroken_run, train_settings):
    train_settings |= {"cluster": ranks4, "compute_dtype": None}
    assert len(set(unbroken_run.losses)) == 5
    first = lab.train(small_config(), "upipe", steps=3, **train_settings)
    with (train_settings["checkpoint"] / "losses.jsonl").open("a") as file:
        # Killed after the checkpoint, in the middle of a line.
        file.write('{"step": 4, "loss": 9}\n{"st')
    after = lab.train(small_config(), "upipe", steps=5, resume=True, **train_settings)
    assert first.losses + after.losses == unbroken_run.losses
    assert [line["loss"] for line in lines(train_settings["checkpoint"])] == list(unbroken_run.losses)


@pytest.mark.parametrize("recipe", mostly_long(["plain", "upipe"], 1))
def test_what_four_ranks_wrote_one_goes_on_from(alone, unbroken_run, train_settings, recipe):
    train_settings["checkpoint"].mkdir()
    shutil.copytree(unbroken_run.checkpoint / "step-00000002", train_settings["checkpoint"] / "step-00000002")
    after = lab.train(
        small_config(), recipe, steps=5, resume=True, cluster=None, compute_dtype=None, **train_settings
    )
    assert after.losses == pytest.approx(unbroken_run.losses[2:], rel=1e-5)


@pytest.mark.long
def test_what_one_rank_wrote_four_go_on_from(ranks4, alone, train_settings):
    config = small_config(tie_word_embeddings=True)
    first = lab.train(config, "plain", steps=4, cluster=None, compute_dtype=None, **train_settings)
    shutil.rmtree(train_settings["checkpoint"] / "step-00000004")
    after = lab.train(
        config, "upipe", steps=4, resume=True, cluster=ranks4, compute_dtype=None, **train_settings
    )
    assert after.losses == pytest.approx(first.losses[2:], rel=1e-5)
    assert manifest.newest(train_settings["checkpoint"])[1].ranks == 4


def test_the_file_of_losses_is_cut_to_the_checkpoint(tmp_path):
    path = tmp_path / "losses.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    file = LossFile(tmp_path)
    file.cut(2)
    file.add({"step": 3, "loss": 0.5})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 0.5}\n'
    file.cut(0)
    assert path.read_text() == ""
    path.write_text("nothing\n")
    with pytest.raises(CheckpointError, match=r"losses\.jsonl is no file of losses: Expecting value"):
        file.cut(1)


def test_lines_that_the_disk_does_not_take_wait_for_the_next_try(tmp_path, monkeypatch):
    path = tmp_path / "losses.jsonl"
    file = LossFile(tmp_path)
    file.add({"step": 1})

    def no_room():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "open", lambda *_: no_room())
        file.add({"step": 2})
        with pytest.raises(
            CheckpointError, match=r"jsonl could not be written: No space left on device; the check"
        ):
            file.sync()
    file.add({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_number_of_ranks_that_torchrun_did_not_start(monkeypatch, tmp_path):
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "-", "MASTER_PORT": "0"}
    for name, value in one.items():
        monkeypatch.setenv(name, value)
    said = refusal(f"train tiny --tokens 40 --steps 2 --checkpoint {tmp_path} --ranks 3")
    assert said == "--ranks 3: torchrun started 1; --ranks 1 would work, or no --ranks"


def launch(*words):
    """`lab train` as two processes of torchrun's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "-m", "lab", "train", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def kill(process):
    """SIGKILL to it and to all that it started, so that none can tidy up."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.long
def test_killed_at_a_random_moment_under_torchrun_and_resumed(digits, tmp_path):
    models.build(small_config()).config.save_pretrained(tmp_path / "model")
    words = [
        tmp_path / "model", "--tokens", TOKENS, "--rows", ROWS, "--text", digits, "--recipe", "upipe",
        "--set", "compute_dtype=none", "--every", 10, "--checkpoint", tmp_path / "run", "--json",
    ]  # fmt: skip
    killed = launch(*words, "--steps", 100_000)
    while not (tmp_path / "run" / "step-00000010").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    moment = random.SystemRandom().uniform(0, 1.5)
    time.sleep(moment)
    kill(killed)
    # The run that nothing broke, as far as it came; its last line may be cut short.
    whole = [json.loads(s) for s in (tmp_path / "run" / "losses.jsonl").read_text().split("\n")[:-1]]
    steps = len(whole) + 3
    resumed = launch(*words, "--steps", steps, "--resume")
    printed, said = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said
    after = [json.loads(line) for line in printed.splitlines()]
    start = after[0]["step"]
    assert start % 10 == 1
    assert 10 < start <= len(whole) + 1, moment
    found = lines(tmp_path / "run")
    assert found[start - 1 :] == after
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert [line["loss"] for line in found[: len(whole)]] == [line["loss"] for line in whole], moment
    assert not list((tmp_path / "run").glob("*.part"))


def test_the_learning_rate_is_a_function_of_the_step():
    settings = TrainSettings(10, learning_rate=0.4, warmup=4, schedule="cosine")
    rates = [settings.learning_rate_of(step) for step in range(1, 11)]
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[4:] == pytest.approx([0.4 * (1 + math.cos(math.pi * n / 6)) / 2 for n in range(1, 7)])
    assert rates[-1] == 0
    constant = replace(settings, schedule="constant")
    assert [constant.learning_rate_of(step) for step in (1, 4, 10)] == [0.1, 0.4, 0.4]
    assert TrainSettings(3, warmup=3, schedule="cosine").learning_rate_of(3) == 1e-3


@pytest.fixture
def scheduled(train_settings, digits):
    return train_settings | {
        "cluster": None, "compute_dtype": None, "steps": 5, "every": 1, "keep": 9, "rows": 1, "accumulate": 3,
        "learning_rate": 1e-2, "warmup": 2, "schedule": "cosine", "weight_decay": 0.1, "validate": digits,
    }  # fmt: skip


@pytest.mark.long
def test_a_scheduled_training_resumes_bit_for_bit_and_reports_its_validation(alone, scheduled, tmp_path):
    scheduled |= {"recipe": "plain"}
    whole = lab.train(small_config(), **scheduled)
    of_text = [step.validation_loss for step in whole.steps]
    assert [line["validation_loss"] for line in lines(scheduled["checkpoint"])] == of_text
    # The last step has learning rate 0, and no other: the last two checkpoints have the same parameters.
    assert of_text[-1] == of_text[-2]
    assert len(set(of_text)) == 4
    shutil.rmtree(scheduled["checkpoint"] / "step-00000005")
    shutil.rmtree(scheduled["checkpoint"] / "step-00000004")
    after = lab.train(small_config(), **scheduled | {"resume": True})
    assert after.losses == whole.losses[3:]
    assert [step.validation_loss for step in after.steps] == of_text[3:]
    assert [line["loss"] for line in lines(scheduled["checkpoint"])] == list(whole.losses)
    with pytest.raises(CheckpointError, match="is of another run: steps 5 there and 7 here; losses"):
        lab.train(small_config(), **scheduled | {"resume": True, "steps": 7})
    # Warm-up, schedule and weight decay change the losses, each for itself.
    for other in ({"warmup": 0}, {"schedule": "constant"}, {"weight_decay": 5.0}):
        changed = scheduled | other | {"checkpoint": tmp_path / str(other), "every": 5, "validate": None}
        found = lab.train(small_config(), **changed)
        assert found.losses[0] == whole.losses[0]
        assert found.losses[-1] != whole.losses[-1]
        assert {step.validation_loss for step in found.steps} == {None}


def test_a_validation_that_is_not_finite_ends_training(alone, train_settings, digits, monkeypatch):
    monkeypatch.setattr(RankState, "validation_loss", lambda _: math.nan)
    settings = train_settings | {"validate": digits, "compute_dtype": None}
    with pytest.raises(DivergedError, match=r"^the validation loss after step 2 \(loss 4\.\d+\) is nan; "):
        lab.train(small_config(), "plain", steps=3, cluster=None, **settings)


def test_the_command_line_passes_every_setting_on(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr("lab.training.train.train", lambda **settings: asked.update(settings))
    words = "train tiny --tokens 40 --steps 9 --checkpoint new --accumulate 3 --warmup 2 --schedule cosine"
    answer(f"{words} --weight-decay 0.1 --validate {tmp_path}")
    names = ("accumulate", "warmup", "schedule", "weight_decay", "validate")
    assert {name: asked[name] for name in names} == {
        "accumulate": 3, "warmup": 2, "schedule": "cosine", "weight_decay": 0.1, "validate": tmp_path,
    }  # fmt: skip
