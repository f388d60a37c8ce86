"""Training that is stopped and goes on: the losses of the unbroken run, bit for bit, also after a SIGKILL."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

import lab
from lab import manifest, models
from lab_tests.training import ROWS, TOKENS, alone, small, text  # noqa: F401  # fixtures among them


def lines(folder):
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def test_the_losses_after_a_resume_are_those_of_the_unbroken_run(ranks4, alone, text, tmp_path):
    told = {"tokens": TOKENS, "rows": ROWS, "text": text, "compute_dtype": None, "every": 2}
    seen = []
    unbroken = lab.train(
        small(), "upipe", steps=5, checkpoint=tmp_path / "a", cluster=ranks4, watch=seen.append, **told
    )
    assert len(set(unbroken.losses)) == 5
    assert tuple(seen) == unbroken.steps
    assert [step.step for step in seen] == [1, 2, 3, 4, 5]
    last = seen[-1]
    assert last.tokens_per_second == pytest.approx(ROWS * TOKENS / last.seconds)
    assert last.tokens_per_second == 4 * last.tokens_per_second_and_rank
    assert seen[0].seconds_left == pytest.approx(4 * seen[0].seconds, rel=0.01)
    assert last.seconds_left == 0
    plan = lab.plan(small(), "upipe", tokens=TOKENS, rows=ROWS, ranks=4, workspace=False, compute_dtype=None)
    assert {step.device_peak for step in seen} == {plan.device_peak}

    broken = {"checkpoint": tmp_path / "b", "cluster": ranks4}
    first = lab.train(small(), "upipe", steps=3, **broken, **told)
    assert first.losses == unbroken.losses[:3]
    after = lab.train(small(), "upipe", steps=5, resume=True, **broken, **told)
    assert after.losses == unbroken.losses[3:]
    assert [line["loss"] for line in lines(tmp_path / "b")] == list(unbroken.losses)

    # On one rank, by another recipe: up to rounding.
    (tmp_path / "c").mkdir()
    (tmp_path / "b" / "step-00000003").rename(tmp_path / "c" / "step-00000003") if (
        tmp_path / "b" / "step-00000003"
    ).exists() else (tmp_path / "a" / "step-00000004").rename(tmp_path / "c" / "step-00000004")
    alone_after = lab.train(
        small(), "plain", steps=5, resume=True, checkpoint=tmp_path / "c", cluster=None, **told
    )
    assert alone_after.losses == pytest.approx(unbroken.losses[5 - len(alone_after.losses) :], rel=1e-5)


def test_what_one_rank_wrote_four_go_on_from(ranks4, alone, text, tmp_path):
    told = {"tokens": TOKENS, "rows": ROWS, "text": text, "checkpoint": tmp_path, "compute_dtype": None}
    first = lab.train(small(tie_word_embeddings=True), "plain", steps=4, every=2, cluster=None, **told)
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.part")
    after = lab.train(small(tie_word_embeddings=True), "upipe", steps=4, resume=True, cluster=ranks4, **told)
    assert after.losses == pytest.approx(first.losses[2:], rel=1e-5)
    assert manifest.newest(tmp_path)[1].ranks == 4


def launched(*words, **more):
    """`lab train` as two processes of torchrun's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.Popen(
        [*torchrun, "-m", "lab", "train", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment, **more,
    )  # fmt: skip


def kill(process):
    """SIGKILL to it and to all that it started, so that nobody can tidy up."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_at_a_random_moment_under_torchrun(text, tmp_path):
    models.build(small()).config.save_pretrained(tmp_path / "model")
    words = [
        tmp_path / "model", "--tokens", TOKENS, "--rows", ROWS, "--text", text, "--recipe", "upipe",
        "--set", "compute_dtype=none", "--every", 3, "--json",
    ]  # fmt: skip
    steps = 300
    killed = launched(*words, "--steps", steps, "--checkpoint", tmp_path / "run")
    while not (tmp_path / "run" / "step-00000003").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    moment = random.SystemRandom().uniform(0, 1)
    time.sleep(moment)
    kill(killed)
    before = [json.loads(s) for s in (tmp_path / "run" / "losses.jsonl").read_text().splitlines()[:-1]]
    steps = len(before) + 5
    resumed = launched(*words, "--steps", steps, "--checkpoint", tmp_path / "run", "--resume")
    unbroken, said = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said
    told = [json.loads(line) for line in unbroken.splitlines()]
    start = told[0]["step"]
    assert (start - 1) % 3 == 0
    assert 3 < start <= len(before) + 2, moment
    assert lines(tmp_path / "run")[start - 1 :] == told
    whole = launched(*words, "--steps", steps, "--checkpoint", tmp_path / "whole")
    _, said = whole.communicate(timeout=300)
    assert whole.returncode == 0, said
    expected, found = lines(tmp_path / "whole"), lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert [line["loss"] for line in found] == [line["loss"] for line in expected], moment
    assert not list((tmp_path / "run").glob("*.part"))
