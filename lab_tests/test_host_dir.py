"""The host memory of streamed layers in a file: the same gradients, planned bytes, and what is refused."""

import copy
import gc
import mmap
import os
import random
import signal
from pathlib import Path

import pytest
import torch

import lab
from lab.errors import HostFileError
from lab.memory.meter import Meter
from lab.planning.host_folder import file_bytes
from lab.recipe.jobs import make_job
from lab.recipe.recipe import Recipe
from lab.techniques import host_file
from lab.techniques.host_file import HostFile, HostFolder, file_system
from lab.techniques.rope import apply_rope
from lab.techniques.streaming.layer import apply_streaming
from lab_tests.support.models import small_config
from lab_tests.support.reference import build, config, gradients, loss_of

PAGE = 4096


@pytest.fixture
def folder(tmp_path):
    """A folder on a disk; on some machines /tmp lies in memory."""
    if file_system(tmp_path) in host_file.IN_MEMORY:
        pytest.skip("the folder of temporary files lies in memory")
    return tmp_path


def streamed(model, **knobs):
    apply_rope(model)
    apply_streaming(model, tile=8, head_chunk=6, **knobs)
    return model


def backward(model):
    ids = torch.randint(0, 101, (3, 44), generator=torch.Generator().manual_seed(0))
    loss = loss_of(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])
    loss.backward()
    return gradients(model)


@pytest.mark.long
@pytest.mark.parametrize("knobs", [{}, {"segment": 2}, {"attention": True}], ids=str)
def test_gradients_are_bit_for_bit_those_without_the_file(folder, knobs):
    model = build(config("qwen3", 24, 6, layers=3))
    plain = streamed(copy.deepcopy(model), **knobs)
    meter = Meter()
    with meter.measure(plain), meter.phase("step"):
        expected = backward(plain)
    host = meter.timeline()
    nbytes = host.with_tiles_on_disk().disk_peak
    file = HostFolder(folder, nbytes).open()
    trained = streamed(model, file=file, **knobs)
    meter = Meter()
    with meter.measure(trained), meter.phase("step"):
        found = backward(trained)
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Every byte that was on the host is on the disk, but for the LSEs; and the file was as large as needed.
    disk = meter.timeline()
    assert disk.disk_peak == nbytes > 0
    assert disk.disk.tolist() == host.with_tiles_on_disk().disk.tolist()
    assert disk.host.tolist() == host.with_tiles_on_disk().host.tolist()
    assert (disk.host + disk.disk).tolist() == host.host.tolist()
    assert disk.device_peak == host.device_peak
    assert os.listdir(folder) == []
    held = disk.holders(memory="disk")
    assert sum(item.bytes for item in held) == held.total == nbytes
    assert {item.category for item in held} == {"disk"}
    assert disk.holders("step").total > 0
    # All tensors have died: a second step has the whole file again, and the disk gets its bytes back.
    backward(trained)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        len(file._mapping)


# ---- the allocator -----------------------------------------------------------------------------------------


def filled(nbytes):
    return HostFile(mmap.mmap(-1, nbytes))


def test_pages_are_handed_out_to_the_last_one_however_they_are_scattered():
    file, order = filled(12 * PAGE), random.Random(0)
    held, number = {}, 0
    for _ in range(300):
        free = 12 - sum(pages for _, pages in held.values())
        if held and (free == 0 or order.random() < 0.5):
            key = order.choice(sorted(held))
            pieces, _ = held.pop(key)
            assert all((piece == key % 251).all() for piece in pieces), "another tensor wrote there"
        else:
            pages = order.randint(1, free)
            pieces = file.allocate(pages * PAGE - 5)
            assert sum(piece.numel() for piece in pieces) == pages * PAGE
            for piece in pieces:
                piece.fill_(number % 251)
            held[number] = pieces, pages
            number += 1
        pieces = piece = None
    with pytest.raises(HostFileError, match=r"the file of streamed layers is full: 52\.0 KiB wanted"):
        file.allocate(13 * PAGE)


def test_of_free_stretches_the_smallest_that_is_enough_is_taken():
    file = filled(10 * PAGE)
    tensors = [file.allocate(pages * PAGE) for pages in (4, 1, 2, 1, 2)]
    del tensors[2], tensors[0]
    [piece] = file.allocate(PAGE + 1)
    assert piece.data_ptr() == file._address + 5 * PAGE
    assert piece.numel() == 2 * PAGE


def test_a_file_with_tensors_stays_until_they_are_gone():
    file = filled(2 * PAGE)
    pieces = file.allocate(PAGE)
    view = pieces[0][7:9]
    file.close()
    pieces.clear()
    file.close()
    view.fill_(3)
    assert view.tolist() == [3, 3]
    del view
    file.close()
    with pytest.raises(ValueError, match="closed"):
        len(file._mapping)


# ---- the folder --------------------------------------------------------------------------------------------


def used(folder: Path) -> int:
    numbers = os.statvfs(folder)
    return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize


def test_the_file_has_no_name_and_goes_with_a_process_that_is_killed(folder):
    """Nobody can delete it under a running step, because nobody finds it."""
    nbytes = 64 * 2**20
    ready, tell = os.pipe()
    before = used(folder)
    child = os.fork()
    if not child:
        file = HostFolder(folder, nbytes).open()
        file.allocate(PAGE)[0].fill_(1)
        os.write(tell, b"1")
        signal.pause()
    assert os.read(ready, 1) == b"1"
    assert os.listdir(folder) == []
    assert used(folder) - before > nbytes // 2, "the bytes are not reserved"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(folder) == []
    assert used(folder) - before < nbytes // 2
    os.close(ready)
    os.close(tell)


def refusal(path, nbytes=PAGE):
    with pytest.raises(HostFileError) as refused:
        HostFolder(Path(path), nbytes).check()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_folders_that_are_refused(folder, monkeypatch):
    assert "there is no such folder" in refusal(folder / "none")
    (folder / "file").touch()
    assert "there is no such folder" in refusal(folder / "file")
    (folder / "file").unlink()
    if Path("/dev/shm").is_dir():
        assert "lies in memory (tmpfs)" in refusal("/dev/shm")
    monkeypatch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert "no file can be made there (no)" in refusal(folder)


def test_a_disk_that_is_too_small_for_all_ranks_of_the_host_is_refused(folder, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(host_file, "free_bytes", lambda _: 3 * 2**20)
    HostFolder(folder, 2**20).check()
    text = refusal(folder, 2**20 + PAGE)
    assert "need 3.01 MiB there, 1.00 MiB for each of 3 ranks, and 3.00 MiB are free" in text

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostFileError, match=r"and 3\.00 MiB are free"):
        HostFolder(folder, 2**20).open()
    assert os.listdir(folder) == []


def test_a_file_system_is_found_by_its_device(folder, monkeypatch, tmp_path):
    device = os.stat(folder).st_dev
    mounts = tmp_path / "mountinfo"
    line = (
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime shared:1 master:2 - ramfs none rw\n"
    )
    mounts.write_text("22 1 0:99999 / / rw - ext4 /dev/vda rw\n" + line)
    monkeypatch.setattr(host_file, "MOUNTS", mounts)
    assert "lies in memory (ramfs)" in refusal(folder)
    monkeypatch.setattr(host_file, "MOUNTS", tmp_path / "none")
    assert file_system(folder) == ""


# ---- the verbs ---------------------------------------------------------------------------------------------


MODEL = small_config(num_attention_heads=24, vocab_size=104)
RECIPE = Recipe(fsdp=True, ulysses=2, head_chunk=8, checkpoint=True, offload="inputs", stream=24, segment=2)


@pytest.mark.long
def test_planned_bytes_are_measured_on_every_rank_and_losses_are_the_same(ranks4, digits, folder):
    model, recipe = MODEL, RECIPE
    settings = {"tokens": 64, "text": digits, "steps": 2, "cluster": ranks4}
    plan = lab.plan(model, recipe, tokens=64, ranks=4, workspace=False, disk="1TB")
    run = lab.run(model, recipe, host_dir=folder, **settings)
    assert {timeline.disk_peak for timeline in run.timelines} == {plan.disk_peak}
    assert {timeline.host_peak for timeline in run.timelines} == {plan.host_peak}
    assert run.disk_peak == plan.disk_peak > plan.host_peak > 0
    assert os.listdir(folder) == []
    assert run.losses == lab.run(model, recipe, **settings).losses
    with pytest.raises(HostFileError, match="lies in memory"):
        lab.run(model, recipe, host_dir="/dev/shm", **settings)
    trained = lab.train(
        model, recipe, tokens=64, text=digits, steps=2, cluster=ranks4, checkpoint=folder / "a",
        host_dir=folder,
    )  # fmt: skip
    assert trained.losses == run.losses
    assert os.listdir(folder) == ["a"]


@pytest.mark.long
def test_a_rehearsal_measures_what_the_plan_has_on_disk(digits, folder):
    model, recipe = MODEL, RECIPE
    settings = {"tokens": 64, "ranks": 2, "text": digits, "machine": "cpu"}
    rehearsal = lab.rehearse(model, recipe, host_dir=folder, **settings)
    assert rehearsal.disk_peak == rehearsal.plan.disk_peak == rehearsal.to_json()["disk_peak"] > 0
    assert rehearsal.host_peak == rehearsal.plan.host_peak
    assert file_bytes(make_job(model, recipe, tokens=64, ranks=2)) == rehearsal.disk_peak
    gc.collect()
    with pytest.raises(HostFileError, match="without stream: nothing would lie there"):
        lab.rehearse(model, "upipe", host_dir=folder, **settings)
    with pytest.raises(HostFileError, match="there is no such folder"):
        lab.rehearse(model, recipe, host_dir=folder / "none", **settings)
