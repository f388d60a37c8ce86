"""Input that cannot train is refused in one line; training that diverges ends and keeps its checkpoint."""

import json
import math
import time

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from transformers import Qwen3Config

import lab
from cluster.ranks import Cluster
from lab import models
from lab.commands.cli import main
from lab.errors import DivergedError, LabError
from lab.recipe.jobs import TrainSettings, make_job
from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab.recipe.recipe import BY_NAME, parse_knobs
from lab.step import on_ranks
from lab.step.training_step import make_optimizer
from lab.training import manifest
from lab.training.checkpoints import Checkpointer, export
from lab.training.manifest import Manifest, checkpoints_in, config_document
from lab.training.train_loop import CheckpointSettings, train_on_this_rank
from lab_tests.support.models import small_config, tiny_with_infinite_head
from lab_tests.support.on_ranks import ranks_kept
from lab_tests.support.training import ROWS, TOKENS, manifest_of

RATE = "it takes a finite number, 0 or more, for instance 0.001"
NORM = "it takes a number above 0, for instance 1.0, or inf for no clipping"

TOO_FAR = 1e15
"""A learning rate after whose first update parameters are finite, and no loss is."""

BEYOND = 1e300
"""A learning rate after whose first update no parameter is finite."""


# ---- refused before it starts ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [lab.run, lab.profile])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": math.nan}, f"learning_rate=nan: {RATE}"),
        ({"learning_rate": "0.1"}, f"learning_rate='0.1': {RATE}"),
        ({"clip_norm": 0}, f"clip_norm=0: {NORM}"),
        ({"clip_norm": None}, f"clip_norm=None: {NORM}"),
        ({"tokens": 1}, "tokens=1: there is no next token to predict; give 2 or more"),
    ],
)
def test_run_and_profile_refuse_numbers_that_cannot_train(verb, settings, said):
    with pytest.raises(LabError) as error:
        verb("tiny", cluster=Cluster(ranks=2), **{"tokens": 40, **settings})
    assert str(error.value) == said


def test_no_clipping_and_a_learning_rate_of_0_train(alone, digits, tmp_path):
    run = lab.train(
        small_config(), "plain", tokens=TOKENS, rows=ROWS, text=digits, steps=2, checkpoint=tmp_path,
        cluster=None, learning_rate=0, clip_norm=math.inf,
    )  # fmt: skip
    assert len(run.losses) == 2
    assert manifest.newest(tmp_path)[1].clip_norm == math.inf


VALUES = [
    "", "none", "true", "false", "0", "1", "3", "7", "64", "1.5", "-1", "nan", "auto", "0K", "1K", "5m",
    "NONE", "inputs", "liger", "deepspeed", "float32",
]  # fmt: skip


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_no_value_of_a_knob_ends_in_a_traceback(name):
    shape = models.shape_of("tiny")
    refusals = []
    for setting in (f"{field}={value}" for field in BY_NAME for value in VALUES):
        try:
            resolve_recipe(name, "tiny", 4, 64, shape=shape, **parse_knobs([setting]))
        except LabError as error:
            refusals.append(str(error))
    assert len(refusals) > len(BY_NAME)
    assert not [said for said in refusals if "\n" in said]


# ---- ended when it diverges ------------------------------------------------------------------------------


@pytest.fixture
def train_settings(digits, tmp_path):
    return {"tokens": TOKENS, "rows": ROWS, "text": digits, "checkpoint": tmp_path / "run", "every": 1}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_loss_that_is_not_finite_ends_training_on_all_ranks(ranks4, train_settings, tmp_path):
    # Two stages, of six heads.
    train_settings |= {
        "cluster": ranks4, "compute_dtype": None, "head_chunk": 6, "learning_rate": TOO_FAR
    }  # fmt: skip
    with ranks_kept(ranks4), pytest.raises(DivergedError) as error:
        lab.train(small_config(), "upipe", steps=4, **train_settings)
    run = train_settings["checkpoint"]
    assert error.value.step == 2
    assert not math.isfinite(error.value.loss)
    assert str(error.value) == (
        f"the loss of step 2 is {error.value.loss}; the last good checkpoint is {run / 'step-00000001'} "
        "(lab export makes a model of it); "
        "start again in another folder with a lower learning_rate than 1e+15 or a lower clip_norm than 1"
    )
    assert names(run) == ["losses.jsonl", "step-00000001"]
    assert [json.loads(line)["step"] for line in (run / "losses.jsonl").read_text().splitlines()] == [1]
    assert export(run, tmp_path / "out") == run / "step-00000001"


@pytest.mark.long
def test_the_command_says_in_one_line_that_the_loss_is_not_finite(train_settings, digits, tmp_path):
    models.build(small_config()).config.save_pretrained(tmp_path / "model")
    words = [
        "train", tmp_path / "model", "--tokens", TOKENS, "--text", digits, "--steps", 4, "--every", 1,
        "--checkpoint", tmp_path / "run", "--ranks", 1, "--recipe", "fsdp", "--set", "compute_dtype=none",
        "--lr", TOO_FAR,
    ]  # fmt: skip
    run = CliRunner().invoke(main, [str(word) for word in words])
    assert run.exit_code == 2, run.exception
    assert run.stdout.startswith("random weights: the folder has none\nstep 1/4   loss ")
    assert run.stdout.count("\n") == 2
    assert run.stderr.startswith("lab: the loss of step 2 is ")
    assert f"; the last good checkpoint is {tmp_path / 'run' / 'step-00000001'} (" in run.stderr
    assert run.stderr.count("\n") == 1


def test_parameters_that_are_not_finite_are_in_no_checkpoint(alone, train_settings):
    with pytest.raises(DivergedError) as error:
        lab.train(small_config(), "plain", steps=1, cluster=None, learning_rate=BEYOND, **train_settings)
    assert error.value.step == 1
    assert str(error.value) == (
        f"after step 1 (loss {error.value.loss:.4g}) a parameter or the optimizer's state is not finite; "
        "there is no earlier checkpoint; start again in another folder with a lower "
        "learning_rate than 1e+300 or a lower clip_norm than 1"
    )
    assert names(train_settings["checkpoint"]) == ["losses.jsonl"]


@pytest.mark.long
def test_weights_that_are_too_large_are_reported_in_step_1(alone, train_settings):
    with pytest.raises(DivergedError) as error:
        lab.train(tiny_with_infinite_head, "plain", steps=3, cluster=None, **train_settings)
    assert str(error.value) == (
        "the loss of step 1 is nan; there is no earlier checkpoint; "
        "no update had been made yet: check the model's initial weights"
    )


@pytest.mark.long
def test_a_profile_refuses_a_loss_that_is_not_finite(ranks4):
    with pytest.raises(DivergedError, match=r"^the loss of step 1 is nan; no update had been made yet"):
        lab.profile(tiny_with_infinite_head, "fsdp", tokens=TOKENS, cluster=ranks4)


def test_a_loss_that_is_not_finite_waits_for_a_save_under_way(alone, train_settings, monkeypatch):
    complete = Manifest.complete
    monkeypatch.setattr(Manifest, "complete", lambda *args: time.sleep(1) or complete(*args))
    with pytest.raises(DivergedError, match=r"; the last good checkpoint is .*step-00000001 "):
        lab.train(small_config(), "plain", steps=3, cluster=None, learning_rate=TOO_FAR, **train_settings)
    assert names(train_settings["checkpoint"]) == ["losses.jsonl", "step-00000001"]


def test_the_error_of_a_loss_that_is_not_finite_says_that_a_save_failed(alone, train_settings, monkeypatch):
    def full(*_):
        time.sleep(1)
        raise OSError("no room")

    monkeypatch.setattr(Manifest, "complete", full)
    with pytest.raises(DivergedError) as error:
        lab.train(small_config(), "plain", steps=3, cluster=None, learning_rate=TOO_FAR, **train_settings)
    assert str(error.value).startswith("the loss of step 2 is ")
    assert "; step-00000001 could not be written in " in str(error.value)
    assert "no room (rank 0); there is no earlier checkpoint; start again" in str(error.value)
    assert not checkpoints_in(train_settings["checkpoint"])


def with_one_bad_shard(*arguments):
    """Runs on every rank: train; after each step one rank's shard of the norms of heads has a NaN."""
    step = on_ranks.train_step

    def stepped(model, *args, **settings):
        loss = step(model, *args, **settings)
        if dist.get_rank() == 2:
            with torch.no_grad():
                model.model.layers[0].self_attn.q_norm.weight.to_local().fill_(math.nan)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ranks, "train_step", stepped)
        try:
            train_on_this_rank(*arguments)
        except DivergedError as error:
            return str(error)
    return None


def test_one_ranks_shard_that_is_not_finite_ends_all_alike(ranks4, digits, tmp_path):
    # Of six numbers on four ranks the last holds none.
    config = small_config(Qwen3Config, head_dim=6)
    job = make_job(config, "fsdp", ranks=4, tokens=TOKENS, rows=ROWS)
    facts = manifest_of(config_document(config), ranks=4)
    saving = CheckpointSettings(tmp_path, 1, 2, facts)
    [said, *others] = ranks4.apply(with_one_bad_shard, job, TrainSettings(1, digits), saving)
    assert said.startswith("after step 1 (loss ")
    assert ") a parameter or the optimizer's state is not finite; there is no earlier checkpoint" in said
    assert others == [said] * 3
    assert names(tmp_path) == ["losses.jsonl"]


@pytest.mark.parametrize(
    ("where", "value", "finite"),
    [
        ("parameter", 1e30, True),
        ("parameter", math.nan, False),
        ("parameter", -math.inf, False),
        ("exp_avg_sq", math.inf, False),
    ],
)
def test_a_checkpointer_sees_any_value_that_is_not_finite(alone, tmp_path, where, value, finite):
    model = models.build(small_config())
    optimizer = make_optimizer(model, learning_rate=1e-3)
    parameter = model.lm_head.weight
    with torch.no_grad():
        (parameter if where == "parameter" else optimizer.state[parameter][where])[-1] = value
    checkpoints = Checkpointer(tmp_path, keep=1)
    assert checkpoints.is_finite(model, optimizer) is finite
    checkpoints.close()


def test_a_run_that_diverges_keeps_what_it_measured(ranks4, digits):
    seen = []
    with ranks_kept(ranks4), pytest.raises(DivergedError) as error:
        lab.run(
            small_config(), "fsdp", tokens=TOKENS, rows=ROWS, text=digits, steps=4, cluster=ranks4,
            learning_rate=TOO_FAR, watch=seen.append,
        )  # fmt: skip
    assert str(error.value) == (
        f"the loss of step 2 is {error.value.loss}; "
        "start again with a lower learning_rate than 1e+15 or a lower clip_norm than 1"
    )
    kept = error.value.partial
    assert kept is seen[-1]
    assert kept.title.endswith(" · failed in step 2 of 4")
    assert len(kept.losses) == 1
    assert math.isfinite(kept.losses[0])
