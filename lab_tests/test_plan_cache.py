"""Plans on disk: each is found under everything that it depends on."""

import os
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import lab
from lab.planning import answers, plan_cache, whole_step
from lab.planning.fake_step import fake_step
from lab.planning.plan import known_plan, plan_job
from lab.recipe.recipe import Recipe
from lab_tests.support.models import small_config

config = partial(small_config, num_hidden_layers=1, vocab_size=104)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_cache, "folder", lambda kind: tmp_path / "made" / kind)
    return tmp_path / "made" / "plans"


@pytest.fixture
def walks(monkeypatch, folder):
    made = []

    def walked(job, layers, **settings):
        made.append(job)
        return fake_step(job, layers, **settings)

    monkeypatch.setattr(whole_step, "fake_step", walked)
    return made


def plan(**changed):
    asked = {"model": config(), "recipe": Recipe(), "tokens": 24, "ranks": 2, "workspace": False, **changed}
    return lab.plan(asked.pop("model"), asked.pop("recipe"), **asked)


def test_the_second_time_nothing_is_walked_and_the_same_comes_back(walks):
    first, again = plan(), plan()
    assert len(walks) == 1
    assert first.timeline.to_json() == again.timeline.to_json()
    assert first.costs == again.costs
    kept = {k: v for k, v in first.to_json().items() if k != "planning_seconds"}
    assert kept == {k: v for k, v in again.to_json().items() if k != "planning_seconds"}


def test_limits_are_no_part_of_what_is_kept(walks):
    assert plan(device_memory=1).limit == "device"
    assert plan(device_memory="80GiB").limit is None
    assert len(walks) == 1


def test_no_plan_is_known_of_a_length_that_is_refused(folder):
    *_, longest = (plan(tokens=2**power, ranks=1) for power in (26, 27, 28))
    beyond, too_long = (replace(longest.job, tokens=2**power) for power in (29, 30))
    found = known_plan(beyond, longest.machine)
    assert found is not None
    assert found.lengths == (2**26, 2**27, 2**28)
    assert known_plan(too_long, longest.machine) is None
    with pytest.raises(lab.LabError, match=r"needs a matrix of all pairs of .* up to 1073741823 tokens work"):
        plan_job(too_long, longest.machine)


CHANGES = {
    "recipe": {"recipe": Recipe(checkpoint=True)},
    "tokens": {"tokens": 26},
    "ranks": {"ranks": 4},
    "rows": {"rows": 2},
    "workspace": {"workspace": True},
    "compute_dtype": {"recipe": Recipe(compute_dtype="bfloat16")},
    "vocabulary": {"model": config(vocab_size=108)},
    "layers": {"model": config(num_hidden_layers=2)},
    "epsilon": {"model": config(rms_norm_eps=1e-4)},
    "theta": {"model": config(rope_parameters={"rope_type": "default", "rope_theta": 10_001.0})},
}


@pytest.mark.long
def test_whatever_is_changed_makes_a_new_plan(walks, folder):
    plan()
    for number, (name, change) in enumerate(CHANGES.items(), start=2):
        plan(**change)
        assert len(walks) == len(list(folder.iterdir())) == number, name
        plan(**change)
        plan()
        assert len(walks) == number, name


def test_other_sources_or_versions_make_a_new_plan(walks, monkeypatch):
    plan()
    monkeypatch.setattr(plan_cache, "_versions", lambda: {"lab": "other"})
    plan()
    assert len(walks) == 2


def test_sources_and_versions_are_known():
    versions = plan_cache._versions()
    assert set(versions) == {"lab", "torch", "transformers", "peft"}
    assert len(versions["lab"]) == 64


def spoiled(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2
    return {
        "empty": b"",
        "text": b"not compressed",
        "cut off": whole[:middle],
        "flipped": whole[:12] + bytes(255 - b for b in whole[12:middle]) + whole[middle:],
        "no columns": zlib.compress(b"no columns"),
        "cut off inside": zlib.compress(zlib.decompress(whole)[:-200]) if whole else b"",
        "other columns": zlib.compress(zlib.decompress(whole).replace(b"flops0", b"flips0"))
        if whole
        else b"",
    }


def test_a_device_and_its_nodes_are_no_part_of_what_is_kept(walks):
    here = plan().costs
    others = [plan(device="a100").costs, plan(ranks_per_node=1).costs]
    assert len(walks) == 1
    assert all(other.seconds > here.seconds and other.flops == here.flops for other in others)


@pytest.mark.long
@pytest.mark.parametrize("how", spoiled(b""))
def test_a_file_that_cannot_be_read_is_made_anew(walks, folder, how):
    first = plan()
    (file,) = folder.iterdir()
    file.write_bytes(spoiled(file.read_bytes())[how])
    again = plan()
    assert len(walks) == 2
    assert again.timeline.to_json() == first.timeline.to_json()
    plan()
    assert len(walks) == 2


@pytest.mark.parametrize("at", ["plans", "made"])
def test_a_folder_that_cannot_be_written_costs_only_the_time(walks, folder, tmp_path, at):
    """A file stands where a folder should: also the superuser cannot write there."""
    blocked = folder if at == "plans" else folder.parent
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("")
    assert plan().device_peak == plan().device_peak
    assert len(walks) == 2
    assert blocked.read_text() == ""


def test_a_disk_that_is_full_leaves_no_part_behind(walks, folder, monkeypatch):
    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    plan()
    assert list(folder.iterdir()) == []


def test_a_callable_is_never_remembered(walks, folder):
    make = partial(lab.models.build, config())
    assert plan(model=make).device_peak == plan(model=make).device_peak == plan().device_peak
    assert len(walks) == 3
    assert len(list(folder.iterdir())) == 1


@pytest.mark.long
def test_the_plans_used_last_are_kept(walks, folder, monkeypatch):
    monkeypatch.setattr(plan_cache, "KEPT", 3)
    for age, tokens in enumerate((10, 12, 14)):
        plan(tokens=tokens)
        for file in folder.iterdir():
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9 * (age + 1)))
    plan(tokens=10)  # the oldest is used again
    plan(tokens=16)
    assert len(list(folder.iterdir())) == 3
    assert len(walks) == 4
    for tokens in (10, 14, 16):
        plan(tokens=tokens)
    assert len(walks) == 4
    plan(tokens=12)
    assert len(walks) == 5


def test_a_preset_and_a_directory_of_its_name_are_two_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    given = ["tiny", "./tiny", Path("tiny")]
    assert len({str(plan_cache.model_identity(model)) for model in given}) == 3


def test_an_answer_that_is_in_memory_is_not_read_again(monkeypatch):
    first = plan()
    reads = []
    own = answers.decode
    monkeypatch.setattr(answers, "decode", lambda data: reads.append(data) or own(data))
    assert plan().device_peak == plan().device_peak == first.device_peak
    assert len(reads) <= 1
