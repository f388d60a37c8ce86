"""The rows of ``python -m lab_tests.proofs growth``: each is compared with the one before it."""

from lab.units import MiB
from lab_tests.proofs.growth import Point, Setting, compare_points


def test_bytes_a_token_where_the_context_alone_grew() -> None:
    first, second, third = compare_points(
        "context",
        [
            Point(Setting("fsdp", 2, 128), 2.0, 10 * MiB, 11 * MiB),
            Point(Setting("fsdp", 2, 256), 3.0, 15 * MiB, 13 * MiB),
            Point(Setting("fsdp", 2, 512), 9.0, 30 * MiB, 29 * MiB),
        ],
    )
    assert list(first) == list(second)
    assert (first["seconds, x"], first["peak, x"], first["bytes per token"], first["planned"]) == (None,) * 4
    assert (second["over"], second["rung"], second["ranks"], second["tokens"]) == ("context", "fsdp", 2, 256)
    assert (second["seconds, x"], second["peak, x"]) == (1.5, 1.5)
    assert (second["bytes per token"], second["planned"]) == (5 * MiB / 128, 2 * MiB / 128)
    assert (third["seconds, x"], third["peak, MiB"]) == (3.0, 30)
    assert (third["bytes per token"], third["planned"]) == (15 * MiB / 256, 16 * MiB / 256)


def test_more_ranks_are_no_longer_context() -> None:
    _, grown, fixed = compare_points(
        "ranks",
        [
            Point(Setting("upipe", 1, 128), 2.0, 10 * MiB, 11 * MiB),
            Point(Setting("upipe", 2, 256), 3.0, 8 * MiB, 9 * MiB),
            Point(Setting("upipe", 4, 256), 6.0, 4 * MiB, 5 * MiB),
        ],
    )
    assert (grown["seconds, x"], grown["peak, x"], grown["bytes per token"]) == (1.5, 0.8, None)
    assert (fixed["seconds, x"], fixed["peak, x"], fixed["planned"]) == (2.0, 0.5, None)
