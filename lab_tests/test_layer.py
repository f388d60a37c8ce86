"""One layer, moving: its frames as data, the exact sums of its boxes, what travels, and what is drawn."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lab
from lab.errors import LabError, ResultError
from lab.memory.categories import OTHER
from lab.memory.storages import NO_STORAGES, Storages
from lab.planning.plan import Plan
from lab.show.one_layer.content import player_content
from lab.show.one_layer.frames import LayerFrames, layer_frames
from lab.show.one_layer.gif import check_animation, write_gif
from lab.show.one_layer.names import Moving
from lab.show.one_layer.packing import Interval, pack
from lab.show.one_layer.tracks import Frame, Lane
from lab.show.one_layer.travels import arrivals, flights
from lab.techniques.upipe.schedule import schedule

RECIPES = ("plain", "fsdp", "ulysses", "checkpoint", "offload", "upipe")


@cache
def plan_of(recipe: str) -> Plan:
    return lab.plan("tiny", recipe, tokens=1024, ranks=4, workspace=False)


@cache
def frames_of(recipe: str) -> LayerFrames:
    return layer_frames(plan_of(recipe), None, 3)


def travels(layer: LayerFrames, *, backward: bool | None = None) -> list[Moving]:
    """How bytes move, in the order of the frames: in all of them, in forward, or in backward."""
    return [
        frame.travel.kind
        for number, frame in enumerate(layer.lanes[0].frames)
        if frame.travel and backward in (None, number >= layer.backward)
    ]


def frames_with(layer: LayerFrames, kind: Moving) -> list[int]:
    """The numbers of the frames in which bytes move so."""
    return [n for n, f in enumerate(layer.lanes[0].frames) if f.travel and f.travel.kind is kind]


def sums(lane: Lane) -> Iterator[tuple[Frame, int, int]]:
    """Of each frame the bytes on the device and on the host, added up of its boxes and of all else."""
    for frame in lane.frames:
        boxes = [lane.boxes[n] for n in frame.boxes]
        host = sum(box.bytes for box in boxes if box.category == "host")
        device = sum(box.bytes for box in boxes) - host
        yield frame, device + frame.small + frame.outside, host + frame.host_outside


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_boxes_and_all_else_add_up_to_the_timeline_at_every_frame(recipe):
    layer, timeline = frames_of(recipe), plan_of(recipe).timeline
    assert len(layer.lanes[0].frames) == len(layer.captions) > 40
    for frame, device, host in sums(layer.lanes[0]):
        assert device == timeline.device[frame.row, :OTHER].sum()
        assert host == timeline.host[frame.row]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_box_keeps_a_place_that_no_other_box_has(recipe):
    layer = frames_of(recipe)
    lane = layer.lanes[0]
    for frame in lane.frames:
        places = sorted(
            (box.category == "host", box.slot.shelf, box.slot.left, box.bytes / layer.unit)
            for box in map(lane.boxes.__getitem__, frame.boxes)
        )
        for (*one, left, size), (*other, next_left, _) in pairwise(places):
            assert one != other or left + size <= next_left + 1e-6
        for host, _, left, size in places:
            assert left + size <= (layer.host_width if host else layer.width) + 1e-6


def test_plain_sums_gradients_over_the_ranks_and_exchanges_nothing():
    assert set(travels(frames_of("plain"))) == {Moving.ALL_REDUCE}
    assert set(travels(frames_of("plain"), backward=False)) == set()


def test_fsdp_gathers_parameters_twice_and_scatters_gradients_once():
    layer = frames_of("fsdp")
    assert travels(layer, backward=False) == [Moving.ALL_GATHER]
    assert travels(layer, backward=True) == [Moving.ALL_GATHER, Moving.REDUCE_SCATTER]


def test_ulysses_exchanges_q_k_v_and_the_result_between_boxes_of_different_ranks():
    layer = frames_of("ulysses")
    assert travels(layer, backward=False).count(Moving.ALL_TO_ALL) == 4
    assert travels(layer, backward=True).count(Moving.ALL_TO_ALL) == 4
    first = frames_with(layer, Moving.ALL_TO_ALL)[0]
    moving = list(flights(layer, first))
    # 3 of the 4 ranks are drawn: each sends a quarter of its box to each of the two others.
    lanes = [(f.source.lane, f.target.lane) for f in moving]
    assert lanes == [(1, 0), (2, 0), (0, 1), (2, 1), (0, 2), (1, 2)]
    assert {(f.source.length, f.target.length) for f in moving} == {(0.25, 0.25)}
    assert [(f.source.start, f.target.start) for f in moving[:2]] == [(0.0, 0.25), (0.0, 0.5)]
    boxes = layer.lanes[0].boxes
    assert boxes[moving[0].source.box].bytes == boxes[moving[0].target.box].bytes == layer.unit
    assert layer.captions[first].text == "all-to-all: every rank gets all tokens of its own heads"


def test_a_gather_fills_a_box_and_an_all_reduce_does_not():
    for recipe, kind, filled in (("fsdp", Moving.ALL_GATHER, 3), ("plain", Moving.ALL_REDUCE, 0)):
        layer = frames_of(recipe)
        assert len(arrivals(layer, frames_with(layer, kind)[0])) == filled


def test_keys_are_gathered_and_their_gradients_scattered_among_the_ranks_of_a_ring():
    knobs = {"ulysses": 2, "ring": 2, "ring_exchange": "gather"}
    layer = layer_frames(lab.plan("tiny", "fsdp", tokens=1024, ranks=4, workspace=False, **knobs), None, 3)
    parameters = (Moving.ALL_GATHER, Moving.REDUCE_SCATTER, Moving.ALL_TO_ALL)
    of_keys = [[m for m in travels(layer, backward=b) if m not in parameters] for b in (False, True)]
    assert of_keys == [[Moving.GATHER], [Moving.GATHER, Moving.SCATTER, Moving.SCATTER]]
    (gather, again), (scatter, _) = (frames_with(layer, kind) for kind in (Moving.GATHER, Moving.SCATTER))
    # 3 of the 4 ranks are drawn, of which the first and the third are the two ranks of a ring.
    sent, reduced = ([*flights(layer, n)] for n in (gather, scatter))
    assert [(f.source.lane, f.target.lane) for f in sent] == [(2, 0), (0, 2)]
    assert [f.source[2:] + f.target[2:] for f in sent] == [(0.0, 1.0, 0.5, 0.5), (0.0, 1.0, 0.0, 0.5)]
    assert [f.source[2:] + f.target[2:] for f in reduced] == [(0.0, 0.5, 0.0, 1.0), (0.5, 0.5, 0.0, 1.0)]
    text = "all-gather: every rank gets the keys and values of all tokens"
    assert layer.captions[gather].text == layer.captions[again].text == text
    assert "gradients of keys and values" in layer.captions[scatter].text


def test_checkpointing_computes_the_forward_again_in_backward_alone():
    layer = frames_of("checkpoint")
    lane = layer.lanes[0]
    again = [box for box in lane.boxes if box.category == "recomputed activations"]
    assert again
    assert all(box.first >= layer.backward for box in again)
    assert "recomputed activations" not in {box.category for box in frames_of("ulysses").lanes[0].boxes}
    assert travels(layer, backward=True).count(Moving.ALL_TO_ALL) == 8


@pytest.mark.long
def test_what_lies_on_a_disk_has_the_place_of_what_lies_on_the_host():
    plan = lab.plan("tiny", "streamed", tokens=1024, ranks=4, workspace=False, disk="1TB")
    on_disk, on_host = layer_frames(plan, None, 3), frames_of("streamed")
    assert on_disk.host_width == on_host.host_width > 0
    boxes = [
        replace(box, category="host") if box.category == "disk" else box for box in on_disk.lanes[0].boxes
    ]
    assert (
        [replace(box, about="") for box in boxes]
        == [replace(box, about="") for box in on_host.lanes[0].boxes]
        != [replace(box, about="") for box in on_disk.lanes[0].boxes]
    )
    assert player_content(on_disk)["categories"][-1][0] == "disk"


def test_offload_copies_the_layers_input_to_the_host_where_it_waits_for_backward():
    layer = frames_of("offload")
    assert travels(layer, backward=False).count(Moving.TO_HOST) == 1
    assert travels(layer, backward=True).count(Moving.FROM_HOST) == 1
    lane = layer.lanes[0]
    (number,) = frames_with(layer, Moving.TO_HOST)
    (flight, *_) = flights(layer, number)
    source, target = lane.boxes[flight.source.box], lane.boxes[flight.target.box]
    assert (source.name, source.category, target.category) == ("layer input", "activations", "host")
    assert source.bytes == target.bytes == layer.unit
    assert target.end > layer.backward >= source.end
    assert frames_of("checkpoint").host_width == 0 < layer.host_width


def test_upipes_stages_are_those_of_the_schedule_and_use_one_buffer():
    layer, recipe = frames_of("upipe"), plan_of("upipe").recipe
    assert recipe.head_chunk is not None
    assert len(schedule(32, 8, recipe.ulysses, recipe.head_chunk).stages) == 8
    assert {caption.stage[1] for caption in layer.captions if caption.stage} == {8}
    seen = [caption.stage[0] for caption in layer.captions[: layer.backward] if caption.stage]
    assert seen == sorted(seen)
    assert set(seen) == set(range(1, 9))
    lane = layer.lanes[0]
    used: dict[int, set[int]] = {}
    for frame, caption in zip(lane.frames[: layer.backward], layer.captions, strict=False):
        if frame.travel and frame.travel.kind is Moving.ALL_TO_ALL and caption.stage:
            for box in {*frame.travel.sources, *frame.travel.targets}:
                used.setdefault(box, set()).add(caption.stage[0])
    assert set(range(1, 9)) in used.values(), "one buffer takes part in every stage"


@pytest.mark.parametrize("recipe", ["offload", "upipe"])
def test_storages_know_the_tensors_that_collectives_read_and_write(recipe):
    timeline = plan_of(recipe).timeline
    storages = timeline.storages
    for entry, row, written in storages.moves.tolist():
        op = timeline.ops[timeline.op[row]]
        assert storages.first[entry] <= row < storages.end[entry]
        if op.name == "c10d.alltoall_base_":
            shape = op.shapes.split()[0 if written else 1]
            elements = int(np.prod([int(size) for size in shape.split("x")]))
            assert elements <= int(np.prod(storages.kinds[storages.kind[entry]].shape))
    exchanges = [row for row in range(len(timeline)) if "alltoall" in timeline.ops[timeline.op[row]].name]
    both = {(row, written) for _, row, written in storages.moves.tolist()}
    assert {(row, w) for row in exchanges for w in (0, 1)} <= both
    loaded = Storages.from_json(storages.to_json())
    assert loaded.moves.tolist() == storages.moves.tolist()


def test_moves_stay_with_their_storages_where_rows_are_chosen():
    storages = plan_of("ulysses").timeline.storages
    last, row = storages.moves[-1, :2].tolist()
    chosen = storages.at_rows(np.array([row - 1, row]))
    assert len(chosen) < len(storages)
    moves = storages.moves[np.isin(storages.moves[:, 1], (row - 1, row))]
    assert last in moves[:, 0]
    assert (chosen.moves[:, 1] + row - 1).tolist() == moves[:, 1].tolist()
    assert chosen.moves[:, 1].tolist().count(1) >= 2
    for column in ("size", "kind"):
        found, expected = getattr(chosen, column)[chosen.moves[:, 0]], getattr(storages, column)[moves[:, 0]]
        assert found.tolist() == expected.tolist()


@pytest.mark.long
def test_a_plan_of_more_layers_has_the_moves_of_every_layer():
    timeline = lab.plan("llama3.2-1b", "ulysses", tokens=4096, ranks=4, workspace=False).timeline
    layers = [timeline.modules[timeline.module[row]].partition("layers.")[2].partition(".")[0]
              for row in timeline.storages.moves[:, 1]]  # fmt: skip
    counts = {layers.count(str(layer)) for layer in range(1, 15)}
    assert counts == {layers.count("1")}
    assert counts != {0}


def test_the_player_gets_each_rank_once_and_small_numbers():
    content = player_content(frames_of("ulysses"))
    assert content["lanes"] == [0, 0, 0]
    assert len(content["ranks"]) == 1
    assert len(content["captions"]) == len(content["ranks"][0]["frames"])


def test_without_a_browser_the_main_frames_are_a_picture():
    shown = lab.show.layer(plan_of("offload"), layer=1)
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"image/png", "text/plain"}
    assert "layer 1" in bundle["text/plain"]
    assert "layer input is copied to host memory" in bundle["text/plain"]


def test_packing_takes_the_first_place_that_is_free_for_a_whole_life():
    boxes = [Interval(0, 2, 2.0), Interval(0, 9, 1.0), Interval(2, 5, 2.0), Interval(3, 4, 1.5)]
    places = pack(boxes, 1, 4.5)
    assert places is not None
    # The one that is held longest is at the left; the third takes the place that the first leaves.
    assert [slot.left for slot in places] == [1.0, 0.0, 1.0, 3.0]
    assert pack(boxes, 1, 4.4) is None


@pytest.mark.long
def test_a_gif_is_written_whole(tmp_path: Path) -> None:
    whole = frames_of("offload")
    few = slice(0, 4)
    lanes = tuple(replace(lane, frames=lane.frames[few]) for lane in whole.lanes)
    short = replace(whole, captions=whole.captions[few], lanes=lanes, backward=3)
    seen: list[tuple[int, int]] = []
    write_gif(short, tmp_path / "layer.gif", lambda n, of: seen.append((n, of)))
    assert [path.name for path in tmp_path.iterdir()] == ["layer.gif"]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with Image.open(tmp_path / "layer.gif") as image:
        assert image.n_frames >= 4  # type: ignore[attr-defined]


def test_errors_are_one_line(tmp_path: Path) -> None:
    plan = plan_of("plain")
    with pytest.raises(ResultError, match=r"^layer=9: this timeline has the layers 0 to 3$"):
        lab.show.layer(plan, layer=9)
    stopped = replace(plan, timeline=replace(plan.timeline, storages=NO_STORAGES))
    with pytest.raises(ResultError, match=r"^there is no layer to show: a run that was stopped"):
        lab.show.layer(stopped)
    forward = plan.timeline.rows(plan.timeline.phase == plan.timeline.phases.index("forward"))
    with pytest.raises(
        ResultError, match=r"^layer 2 has no backward: the last step of this timeline did not"
    ):
        lab.show.layer(replace(plan, timeline=forward), layer=2)
    with pytest.raises(LabError, match=r"^ranks=0: it takes a whole number, 1 or more$"):
        lab.show.layer(plan, ranks=0)
    with pytest.raises(LabError, match=r"layer.png cannot be written: the animation is a GIF file"):
        check_animation(tmp_path / "layer.png")
    with pytest.raises(LabError, match=r"there is no folder .*/none$"):
        check_animation(tmp_path / "none" / "layer.gif")
