"""Checkpoints are written whole, refused for another model or run, and exported to the same logits."""

import ctypes
import gc
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from transformers import AutoModelForCausalLM, Qwen3Config

import lab
from lab import models
from lab.errors import CheckpointError, ModelError
from lab.models import weight_files
from lab.recipe.jobs import TrainSettings, make_job
from lab.step.on_ranks import make_rank_state
from lab.step.training_step import NoMeter, make_optimizer, train_step
from lab.training import manifest
from lab.training.checkpoints import Checkpointer, export
from lab.training.loss_file import LossFile
from lab.training.manifest import checkpoints_in, config_document
from lab.units import MiB
from lab_tests.support.commands import answer
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config
from lab_tests.support.on_ranks import ranks_kept
from lab_tests.support.training import ROWS, TOKENS, manifest_of


def training(text, folder):
    """``lab.train`` of a small model on this one rank, into a folder."""

    def trained(model=None, recipe="plain", **settings):
        told = {"tokens": TOKENS, "rows": ROWS, "steps": 2, "text": text, "checkpoint": folder}
        return lab.train(model or small_config(), recipe, cluster=None, **(told | settings))

    return trained


@pytest.fixture
def train(alone, digits, tmp_path):
    return training(digits, tmp_path / "run")


@pytest.fixture(scope="module")
def four_steps(alone, digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four steps") / "run"
    training(digits, folder)(steps=4, every=2)
    return folder


@pytest.fixture
def four(four_steps, tmp_path):
    """A copy of the folder of a training with checkpoints of its steps 2 and 4."""
    return shutil.copytree(four_steps, tmp_path / "run")


@pytest.fixture
def step(four):
    """The first of these checkpoints, alone."""
    shutil.rmtree(four / "step-00000004")
    return four / "step-00000002"


def refused(said):
    return pytest.raises(CheckpointError, match=said)


def save_on_rank(job, settings, folder):
    """Runs on every rank: one step, one checkpoint; the whole state as the ranks hold it together."""
    state = make_rank_state(job, settings)
    train_step(state.model, state.optimizer, state.batch(0), meter=NoMeter())
    facts = manifest_of(config_document(job.model), ranks=dist.get_world_size(), step=1)
    checkpoints = Checkpointer(folder, keep=2)
    checkpoints.save(state.model, state.optimizer, facts)
    checkpoints.close()
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in state.model.state_dict().items()}
    return {name: tensor.clone() for name, tensor in whole.items()} if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    "config",
    mostly_long([small_config(tie_word_embeddings=True), small_config(Qwen3Config)], 0),
    ids=["llama, tied head", "qwen3"],
)
def test_what_ranks_saved_transformers_loads_to_the_same_logits(ranks4, digits, tmp_path, config):
    job = make_job(config, "upipe", ranks=4, tokens=TOKENS, rows=ROWS, compute_dtype=None)
    settings = TrainSettings(1, digits, learning_rate=1e-2)
    held = ranks4.apply(save_on_rank, job, settings, tmp_path)[0]
    untrained, trained = models.build(config), models.build(config)
    trained.load_state_dict(held, strict=True)
    assert export(tmp_path, tmp_path / "out").name == "step-00000001"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")
    assert exported.config.tie_word_embeddings == config.tie_word_embeddings
    assert exported.config.use_cache
    ids = torch.arange(2 * 30).view(2, 30)
    expected = trained(input_ids=ids).logits
    torch.testing.assert_close(exported(input_ids=ids).logits, expected, rtol=0, atol=0)
    assert not torch.allclose(untrained(input_ids=ids).logits, expected)
    export(tmp_path, tmp_path / "several", max_file="30KB")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 3
    for whole in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "several"),
        models.build(tmp_path / "several"),
    ):
        torch.testing.assert_close(dict(whole.state_dict()), held, rtol=0, atol=0)
    assert not list(tmp_path.glob("*.part"))


def test_export_keeps_the_dtype_and_refuses_a_folder_in_use(train, tmp_path):
    train(lambda: models.build(small_config()).to(dtype=torch.bfloat16))
    (tmp_path / "out").mkdir()
    export(tmp_path / "run", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    with refused(r"out is there already: give a folder that is new or empty$"):
        export(tmp_path / "run", tmp_path / "out")


@pytest.mark.long
def test_the_newest_stay(train, tmp_path):
    train(steps=5, every=1, keep=3)
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == [f"step-0000000{n}" for n in (3, 4, 5)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "losses.jsonl", "step-00000003", "step-00000004", "step-00000005"
    ]  # fmt: skip


def test_a_folder_is_not_started_in_twice_nor_gone_on_from_without_a_checkpoint(train, tmp_path):
    with refused(r"no checkpoint in .*run: give a folder that has one; a first start goes without"):
        train(resume=True)
    train()
    before = (tmp_path / "run" / "losses.jsonl").read_text()
    with refused("run holds checkpoints up to step-00000002: go on with --resume"):
        train()
    with refused("step-00000002 has 2 of 2 steps already: give more steps"):
        train(resume=True)
    assert (tmp_path / "run" / "losses.jsonl").read_text() == before


def test_another_model_and_another_run_are_refused_by_what_differs(train, tmp_path):
    train()
    going_on = {"resume": True, "steps": 3}
    with refused(r"step-00000002 holds another model: hidden_size 48 there and 36 here; give that model"):
        train(small_config(hidden_size=36), **going_on)
    with refused(r"another model: .*model_type llama there and qwen3 here"):
        train(small_config(Qwen3Config), **going_on)
    other = tmp_path / "other.txt"
    other.write_text("3210" * 500)
    for knob, value, said in [
        ("text", other, "text [0-9a-f]{16} there and [0-9a-f]{16} here"),
        ("tokens", 80, "tokens 40 there and 80 here"),
        ("rows", 1, "rows_per_step 3 there and 1 here"),
        ("accumulate", 2, "rows_per_step 3 there and 6 here"),
        ("warmup", 1, "warmup 0 there and 1 here"),
        ("schedule", "cosine", "schedule constant there and cosine here"),
        ("weight_decay", 0.0, "weight_decay 0.01 there and 0.0 here"),
        ("seed", 1, "seed 0 there and 1 here"),
        ("learning_rate", 1e-2, "learning_rate 0.001 there and 0.01 here"),
        ("clip_norm", 2.0, "clip_norm 1.0 there and 2.0 here"),
    ]:
        with refused(f"step-00000002 is of another run: {said}; losses would not"):
            train(**going_on | {knob: value})
    # The rows of a step may be other micro-batches.
    assert len(train(recipe="tiling", **going_on, rows=1, accumulate=3).losses) == 1


def flip(step):
    """Change one bit in the middle of a file."""
    path = step / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(step):
    """Move a file out of the checkpoint, and leave a link to it."""
    path, outside = step / "__0_0.distcp", step.parent.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def edit(*, hashed=True, **fields):
    """Change fields of the manifest; ``hashed`` changes its hash too, as somebody can who means to."""

    def edited(step):
        path = step / "manifest.json"
        document = json.loads(path.read_text()) | fields
        if hashed:
            del document["sha256"]
            document["sha256"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(document))

    return edited


def edit_config(**fields):
    def edited(step):
        config = json.loads((step / "manifest.json").read_text())["config"]
        assert all(config[name] != value for name, value in fields.items())
        edit(config=config | fields, hashed=False)(step)

    return edited


def swap(step):
    """Swap two tensors of one shape in the index, and change the checksum of the index."""
    index = json.loads((step / "tensors.json").read_text())
    names = [f"model.model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    index[names[0]], index[names[1]] = index[names[1]], index[names[0]]
    rewrite(step, "tensors.json", json.dumps(index).encode(), hashed=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: (step / "__0_0.distcp").write_bytes(b"cut"), r"__0_0\.distcp has 3 of its \d+ bytes"),
        (lambda step: (step / ".metadata").unlink(), r"\.metadata has 0 of its \d+ bytes"),
        (lambda step: (step / "manifest.json").write_text('{"con'), r"its manifest\.json is missing"),
        (flip, r"__0_0\.distcp has other bytes than were written"),
        (link, r"__0_0\.distcp is a link"),
        (lambda step: (step / "a.distcp").touch(), r"'a\.distcp' is not in its manifest\.json"),
        (edit(files=None), r"its manifest\.json has files=None"),
        (edit(files={}), r"'\.metadata' is not in its manifest\.json"),
        (edit(step=3), r"its manifest\.json has step=3"),
        (edit(rows_per_step="3"), r"its manifest\.json has rows_per_step='3'"),
        (edit(config={"model_type": "own"}), r"its manifest\.json has model_type='own'"),
        (edit(learning_rate=0.5, hashed=False), r"its manifest\.json was edited: its sha256 is not"),
        (edit(sha256=None, hashed=False), r"its manifest\.json has no sha256: it was edited, or"),
        (edit_config(rope_parameters={"rope_theta": 9e4, "rope_type": "default"}), r"its manifest\.json was"),
        (swap, r"its manifest\.json was edited"),
    ],
    ids=[
        "cut short", "a file missing", "manifest cut short", "one bit", "a link", "another file", "no files",
        "no file", "step", "rows", "model type", "learning rate", "no hash", "rope", "swapped",
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_and_the_one_before_named(train, four, tmp_path, damage, said):
    damage(four / "step-00000004")
    helps = "step-00000002 beside it is whole: remove step-00000004 to go on from there"
    for use in (lambda: train(steps=6, resume=True), lambda: export(four, tmp_path / "out")):
        with refused(f"step-00000004 is damaged: {said}.*; {helps}$"):
            use()
    (four / "step-00000002" / ".metadata").unlink()
    with refused(r"is damaged: .*; no other in its folder is whole$"):
        train(steps=6, resume=True)


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def rewrite(step, name, data, *, hashed=True):
    """Write a file anew, and its checksum: whoever changes a file can change that, too."""
    (step / name).write_bytes(data)
    described = json.loads((step / "manifest.json").read_text())["files"]
    edit(files=described | {name: [len(data), zlib.crc32(data)]}, hashed=hashed)(step)


def test_a_checkpoint_runs_no_code(train, step, tmp_path):
    rewrite(step, ".metadata", pickle.dumps(Touch(tmp_path / "hacked")))
    assert len(train(steps=3, resume=True).losses) == 1
    rewrite(tmp_path / "run" / "step-00000003", ".metadata", pickle.dumps(Touch(tmp_path / "hacked")))
    export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "hacked").exists()
    rewrite(tmp_path / "run" / "step-00000003", "__0_0.distcp", pickle.dumps(Touch(tmp_path / "hacked")))
    with pytest.raises(CheckpointError):
        export(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "hacked").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("o")) == ["out"]


WEIGHT = "model.lm_head.weight"


def changed(**fields):
    """Change fields of the first chunk of a weight."""

    def change(index):
        index[WEIGHT]["chunks"][0] |= fields

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(file="../outside"), r"is in '\.\./outside', which is no file in its folder"),
        (changed(file="manifest.txt"), r"is in 'manifest\.txt', which is no file in its folder"),
        (changed(file=["x"]), r"which is no file in its folder"),
        (changed(at=10**9), r"lies behind the end of __0_0\.distcp"),
        (changed(at=-1), r"which are no counts"),
        (changed(length=True), r"which are no counts"),
        (changed(sizes=[1, 1]), r"the chunks of model\.lm_head\.weight are not the whole tensor"),
        (changed(offsets=[1, 0]), r"are not the whole tensor"),
        (lambda index: index[WEIGHT].update(chunks=[]), r"are not the whole tensor"),
        (lambda index: index[WEIGHT].update(size=[]), r"are not the whole tensor"),
        (lambda index: index[WEIGHT].update(dtype="float8_e4m3fn"), r"is damaged: 'float8_e4m3fn'"),
        (lambda index: index[WEIGHT].update(dtype="float64"), r"its parameters have 2 dtypes, not one"),
        (lambda index: index.pop(WEIGHT), r"lm_head\.weight is missing, and \(\d+, 48\) in a model of"),
        (lambda index: index.update(x=3), r"is damaged: 'int' object is not subscriptable"),
    ],
    ids=range(14),
)  # fmt: skip
def test_an_index_that_is_not_exactly_the_tensors_is_refused(step, tmp_path, change, said):
    index = json.loads((step / "tensors.json").read_text())
    change(index)
    rewrite(step, "tensors.json", json.dumps(index).encode())
    with refused(said):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"vocab_size": "4096"}, "vocab_size"),
        ({"vocab_size": 2**20}, r"is damaged: model\.\S+ is \(\d+, 48\), and \(1048576, 48\) in a model"),
        ({"layer_types": ["full_attention"]}, "its config"),
        ({"rope_parameters": {"rope_type": "own", "rope_theta": 1e4}}, "is damaged: no llama model"),
        ({"model_type": ["llama"]}, r"has model_type=\['llama'\]"),
    ],
    ids=range(5),
)  # fmt: skip
def test_a_config_that_was_edited_is_refused_before_a_model_is_made(step, tmp_path, config, said):
    edit(config=json.loads((step / "manifest.json").read_text())["config"] | config)(step)
    with refused(said) as error:
        export(tmp_path / "run", tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_config_that_lacks_a_field_is_no_way_around_the_comparison(train, step):
    edit(config={"model_type": "llama"})(step)
    with refused(r"holds another model: .*hidden_size 4096 there and 48 here"):
        train(steps=3, resume=True)


def test_what_is_no_file_is_not_opened(step, tmp_path):
    """A pipe that nobody writes into would be read for ever."""
    (step / "manifest.json").unlink()
    os.mkfifo(step / "manifest.json")
    with refused(r"is damaged: 'manifest\.json' is no file"):
        export(tmp_path / "run", tmp_path / "out")


def test_losses_that_are_a_link_or_of_something_else_are_not_changed(train, tmp_path):
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    secret.write_text("no newline")
    (run / "losses.jsonl").symlink_to(secret)
    with refused(r"losses\.jsonl cannot be written: "):
        train()
    (run / "losses.jsonl").unlink()
    secret.rename(run / "losses.jsonl")
    with refused(r"losses\.jsonl is no file of losses: its last line is none"):
        train()
    assert (run / "losses.jsonl").read_text() == "no newline"


@pytest.mark.parametrize("steps", [[3, 4], [1], [1, 1], [2, 1]])
def test_losses_of_another_training_are_refused_and_kept(train, tmp_path, steps):
    """Seen red: its lines were removed without a word."""
    train()
    file = tmp_path / "run" / "losses.jsonl"
    own, other = file.read_text(), "".join(f'{{"step": {step}, "loss": 5.5}}\n' for step in steps)
    file.write_text(other)
    with refused("its steps do not lead to 2; put back the file of this training, or move it away"):
        train(steps=3, resume=True)
    assert file.read_text() == other
    file.write_text(own)
    train(steps=3, resume=True)
    file.unlink()
    train(steps=4, resume=True)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [4]


def test_a_training_goes_on_beside_the_config_of_its_model(train, tmp_path):
    """A resume reads no weights of the directory. Seen red: the checkpoint was taken for foreign ones."""
    small_config().save_pretrained(tmp_path)
    first = train(tmp_path, checkpoint=tmp_path)
    assert first.weights == "random weights: the folder has none"
    after = train(tmp_path, checkpoint=tmp_path, steps=3, resume=True)
    assert (after.weights, after.title) == ("", first.title)
    assert (*first.losses, *after.losses) == train(steps=3).losses
    export(tmp_path, tmp_path / "out")
    assert len(train(tmp_path, checkpoint=tmp_path, steps=4, resume=True).losses) == 1
    with pytest.raises(ModelError, match=r"out/model\.safetensors, .* give a directory that has both"):
        train(tmp_path)


def test_folders_of_others_stay(train, tmp_path):
    mine = tmp_path / "run" / "mydata.part" / "thesis"
    mine.mkdir(parents=True)
    (tmp_path / "run" / "step-00000007.part").symlink_to(mine)
    train()
    assert mine.is_dir()
    assert not (tmp_path / "run" / "step-00000007.part").exists()


@pytest.mark.parametrize("place", ["step-00000002/model", "step-00000003"])
def test_an_export_into_the_place_of_a_checkpoint_is_refused(step, tmp_path, place):
    with refused("has the place of a checkpoint: give a folder outside of"):
        export(tmp_path / "run", tmp_path / "run" / place)


def test_an_index_that_is_no_json_is_refused(train, step, tmp_path):
    for text, said in (("[" * 10**5, "recursion"), ("{", "property name"), ("[]", "no attribute 'items'")):
        rewrite(step, "tensors.json", text.encode())
        for use in (lambda: train(steps=3, resume=True), lambda: export(tmp_path / "run", tmp_path / "out")):
            with refused(rf"tensors\.json is damaged: .*{said}"):
                use()


def test_what_an_export_that_was_killed_left_is_not_in_the_next(step, tmp_path):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "model.safetensors.index.json").write_text("{}")
    export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip


def test_two_trainings_in_one_folder(train, tmp_path):
    """The second is refused at its beginning, and what the first is writing stays."""
    run = tmp_path / "run"
    run.mkdir()
    first = LossFile(run)
    first.lock()
    (run / "step-00000001.part").mkdir()
    with refused(r"another training writes into .*run: give another folder, or wait"):
        train()
    assert (run / "step-00000001.part").is_dir()
    first.close()
    assert len(train().losses) == 2


def test_what_was_never_whole_is_removed_and_never_gone_on_from(train, tmp_path):
    first = train(steps=4, every=2)
    run = tmp_path / "run"
    (run / "step-00000004").rename(run / "step-00000004.part")
    (run / "step-00000009.part").mkdir()
    assert train(steps=3, resume=True).losses == first.losses[2:3]
    assert not list(run.glob("*.part"))


def test_an_export_that_is_interrupted_leaves_nothing(step, tmp_path, monkeypatch):
    save_file, written = weight_files.save_file, []

    def interrupted(tensors, path, metadata):
        assert not (tmp_path / "out").exists()
        if written:
            raise KeyboardInterrupt
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(weight_files, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "run", tmp_path / "out", max_file="20KB")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == []
    assert written[0].parent.name.endswith(".part")


def test_the_command_takes_the_largest_file(step, tmp_path):
    said = answer(["export", tmp_path / "run", tmp_path / "out", "--max-file", "20KB"])
    assert said == f"{step} is now in {tmp_path / 'out'}\n"
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def memory(name):
    """A line of this process's status, in bytes."""
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def test_an_export_never_holds_the_whole_model(alone, tmp_path):
    """Beside a file and a tensor, it holds the two blocks of 16 MiB of a checksum.

    12 MiB are for what else happens in this process.
    """
    config = small_config(hidden_size=516, intermediate_size=2048, num_hidden_layers=9, vocab_size=1500)
    model = models.build(config)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    checkpoints = Checkpointer(tmp_path / "run", keep=1)
    facts = manifest_of(config_document(config), ranks=1, step=1)
    checkpoints.save(model, torch.optim.SGD(model.parameters()), facts)
    checkpoints.close()
    # Memory that was freed and not given back would hide as much of the export's.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    except OSError as error:
        pytest.skip(f"the peak of a process cannot be reset here: {error}")
    before = memory("VmRSS")
    export(tmp_path / "run", tmp_path / "out", max_file=8 * MiB)
    held = memory("VmHWM") - before
    assert held <= 8 * MiB + largest + 32 * MiB + 12 * MiB < whole / 1.9
    exported = models.build(tmp_path / "out")
    torch.testing.assert_close(dict(exported.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.fixture
def full(tmp_path):
    """Mounts a file system of so many bytes at a folder."""
    folder = tmp_path / "small disk"
    folder.mkdir()

    def mounted(size):
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        said = subprocess.run(words, capture_output=True, text=True)
        if said.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {said.stderr.strip()}")
        return folder

    yield mounted
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.long
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_one_line(ranks4, digits, tmp_path, full):
    told = {"tokens": TOKENS, "rows": ROWS, "text": digits, "cluster": ranks4, "every": 1}
    told |= {"compute_dtype": None}
    lab.train(small_config(), "upipe", steps=1, checkpoint=tmp_path / "run", **told)
    one = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*"))
    disk = full(int(1.5 * one))
    steps = []
    # All ranks stop for it at one step: none waits for another, and the cluster serves on.
    with ranks_kept(ranks4), refused("No space left on device") as error:
        lab.train(small_config(), "upipe", steps=6, checkpoint=disk / "run", watch=steps.append, **told)
    said = str(error.value)
    assert said.startswith(f"step-00000002 could not be written in {disk / 'run'} (")
    assert said.endswith(f"the last good checkpoint is {disk / 'run' / 'step-00000001'}")
    assert "\n" not in said
    assert sorted(path.name for path in (disk / "run").iterdir()) == ["losses.jsonl", "step-00000001"]
    assert manifest.read(disk / "run" / "step-00000001").step == 1
    subprocess.run(["mount", "-o", f"remount,size={6 * one}", str(disk)], check=True)
    after = lab.train(small_config(), "upipe", steps=3, checkpoint=disk / "run", resume=True, **told)
    assert after.losses[0] == steps[1].loss


@pytest.mark.parametrize("room", [60_000, 100_000, 130_000])
def test_wherever_the_disk_is_full_it_is_said(alone, tmp_path, full, room):
    """Torch's archive raises that it is at a byte it did not expect: the disk's own word is behind that."""
    disk = full(room)
    model = torch.nn.Linear(200, 200)
    checkpoints = Checkpointer(disk, keep=1)
    checkpoints.save(model, torch.optim.AdamW(model.parameters()), manifest_of({}, ranks=1, step=1))
    with refused("No space left on device"):
        checkpoints.wait()


@pytest.mark.parametrize("max_file", ["5GB", "20KB"])
def test_an_export_that_a_full_disk_does_not_take(step, tmp_path, full, max_file):
    disk = full(64 * 1024)
    with refused(r"out could not be written: .*; .*step-00000002 stays$") as error:
        export(tmp_path / "run", disk / "out", max_file=max_file)
    assert "No space left on device" in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(disk.iterdir())


def test_training_goes_on_while_the_disk_is_written(alone, tmp_path, monkeypatch):
    """What is written is the state at the call, whatever training has made of it since."""
    model = models.build(small_config())
    optimizer = make_optimizer(model, learning_rate=1e-3)
    at_the_call = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    go = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: go.wait(60) and fsync(handle))
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(model, optimizer, manifest_of(config_document(model.config), ranks=1, step=7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    while not any(tmp_path.glob("*/*.distcp")):
        time.sleep(0.01)
    assert checkpoints.writing
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007.part"]
    assert not checkpoints_in(tmp_path)
    go.set()
    checkpoints.wait()
    assert not checkpoints.writing
    checkpoints.restore(tmp_path / "step-00000007", model, optimizer)
    checkpoints.close()
    torch.testing.assert_close(dict(model.state_dict()), at_the_call, rtol=0, atol=0)


def test_files_that_rank_0_does_not_see_are_no_checkpoint(alone, tmp_path):
    """As where each node has a disk of its own."""
    from lab.training.checkpoints import _Writer

    facts = manifest_of({}, ranks=2, step=1)
    writer = _Writer(tmp_path / "a.part", tmp_path / "a", facts, keep=2)
    (tmp_path / "a.part").mkdir()
    elsewhere = WriteResult(MetadataIndex("x"), 4, _StorageInfo("__1_0.distcp", 0, 4))
    with pytest.raises(
        OSError, match=r"__1_0\.distcp, written by another rank, is not seen by rank 0: the folder"
    ):
        writer.finish(Metadata({}), [[elsewhere]])
    assert not (tmp_path / "a").exists()
