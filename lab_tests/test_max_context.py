"""The longest context that fits, and the plans of its search."""

import pytest

from lab.errors import LabError
from lab.models import config_of
from lab.planning.fit import fit
from lab.planning.max_context import max_context
from lab.recipe.ladder import TILE

pytestmark = pytest.mark.long

MODEL = config_of("tiny")
MODEL.num_hidden_layers = 2
SMALL = {"ranks": 4, "workspace": False, "host_memory": "21GiB"}


def test_a_ladders_name_gives_each_length_its_own_tiles():
    tried = []
    max_context(MODEL, "tiling", device_memory="64MiB", watch=tried.append, **SMALL)
    assert {p.recipe.loss_tile for p in tried} == {min(TILE, p.tokens // 4 // 4) for p in tried}


def test_no_host_memory_is_refused():
    for verb in (max_context, fit):
        with pytest.raises(LabError, match=r"^host_memory=None: give the memory of a node, such as 2TiB$"):
            verb(MODEL, ranks=4, host_memory=None, **{"tokens": 64} if verb is fit else {})


def test_what_never_fits_and_what_always_does():
    with pytest.raises(
        LabError,
        match=r"^not even 1K tokens fit: .* of device memory needed, 8\.00 MiB given; \w+ .* MiB; more ranks "
        r"or the recipe 'long' need less$",
    ):
        max_context(MODEL, "plain", device_memory="8MiB", **SMALL)
    with pytest.raises(LabError, match=r"tokens still fit: give less memory, or another recipe$"):
        max_context(MODEL, "checkpoint", device_memory="1000TiB", **SMALL)
