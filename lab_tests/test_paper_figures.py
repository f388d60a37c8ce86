"""Published figures: each is stored once, with its unit and source, and has a recipe that works."""

from collections import Counter

import grimp
import pytest

from lab.bench.paper_figures import rows
from lab.recipe.ladder import resolve_recipe
from lab.units import Ki, Mi


def one(**which):
    [row] = rows(**which)
    return row


def throughput(model, method):
    return {row.tokens: row.value for row in rows(what="throughput", model=model, method=method)}


def test_the_figures_are_the_papers():
    upipe = throughput("llama3-8b", "upipe")
    assert list(upipe) == [128 * Ki, 256 * Ki, 512 * Ki, *(n * Mi for n in range(1, 6))]
    assert (upipe[128 * Ki], upipe[5 * Mi]) == (2281.05, 98.25)
    assert throughput("qwen3-32b", "upipe")[5 * Mi] == "OOM"
    assert throughput("llama3-8b", "ring")[5 * Mi] is None
    assert one(what="model state", method="plain").value == 119
    assert one(what="longest context", ranks=16, model="llama3-8b", method="upipe").value == 8 * Mi
    assert one(what="memory", model="llama3.2-3b").value == 37
    trl = {(row.what, row.ranks, row.tokens): (row.value, row.unit) for row in rows(method="trl")}
    assert trl == {
        ("step", 8, Mi): (380, "s"),
        ("memory", 8, Mi): (56.2, "GB per GPU"),
        ("step", 16, 2 * Mi): (696, "s"),
    }


def test_each_number_stands_once_with_unit_and_source():
    found = rows()
    assert len(found) == 2 * 5 * 8 + 7 * 3 + (4 + 2 + 4) + 6 * 3 + 3 + 1 + 3
    places = Counter((r.what, r.model, r.ranks, r.method, r.tokens, r.source) for r in found)
    assert set(places.values()) == {1}
    assert all(row.unit and row.source for row in found)
    assert {type(row.value) for row in found} == {int, float, str, type(None)}
    assert {row.value for row in found if isinstance(row.value, str)} == {"OOM"}


def test_each_figure_has_a_recipe_that_works_or_says_why_not():
    for row in rows():
        if row.rung is None:
            assert row.differs.startswith("not implemented here: ")
        else:
            resolve_recipe(row.rung, row.model, row.ranks, row.tokens or Mi, **row.knobs)
    assert {row.method for row in rows() if row.rung is None} == {"native_pytorch", "fpdt"}


def test_the_names_of_methods_are_read_as_what_they_stand_for():
    ring = one(what="longest context", model="qwen3-32b", method="ring")
    assert (ring.rung, ring.knobs) == ("tiling", {"ulysses": 1, "ring": 16})
    hybrid = rows(what="throughput", model="qwen3-32b", method="ulysses")[0]
    assert (hybrid.rung, hybrid.knobs) == ("tiling", {"ulysses": 8, "ring": 2})
    # The same word in the figure of the memory is the technique alone.
    assert {r.rung for r in rows(what="attention activations", method="ulysses")} == {"ulysses"}
    loss, both = (rows(what="step", method=m)[0] for m in ("tiled loss", "tiled loss + ulysses + offload"))
    assert loss.knobs == {"ulysses": 1, "ring": 1, "loss_tile": 16 * Ki}
    assert both.knobs == {"ulysses": 8, "ring": 1, "loss_tile": 16 * Ki, "offload": "inputs"}
    assert "optimizer offload" in both.differs
    guide = one(what="step", ranks=16, method="trl")
    assert (guide.rung, guide.knobs) == ("offload", {"ulysses": 1, "ring": 16, "loss_tile": 16 * Ki})
    assert "does not state" in guide.differs


def test_alst_counts_in_thousands_and_a_step_is_taken_at_its_methods_longest():
    method = "tiled loss + ulysses + tiled mlp + offload"
    longest = one(what="longest context", method=method)
    assert longest.tokens is None
    assert longest.value == 3_700_000
    assert one(what="longest context", method="tiled loss").value == 160_000
    assert one(what="step", method=method).tokens == longest.value


@pytest.mark.parametrize(("ours", "ratio"), [(49.125, 0.5), (None, None)])
def test_a_ratio_is_ours_as_a_share_of_the_published(ours, ratio):
    upipe = rows(what="throughput", model="llama3-8b", method="upipe")[-1]
    assert upipe.ratio(ours) == ratio
    assert rows(what="throughput", model="llama3-8b", method="ring")[-2].ratio(1.0) is None


def test_the_figures_know_nothing_of_plans():
    imported = grimp.build_graph(
        "lab", exclude_type_checking_imports=True, cache_dir=None
    ).find_upstream_modules("lab.bench.paper_figures")
    assert "lab.recipe.ladder" in imported
    assert not [module for module in imported if "planning" in module]
