"""What tests share: one cluster of four ranks for the whole session."""

from collections.abc import Iterator

import pytest

from cluster.ranks import Cluster


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Cluster]:
    with Cluster(ranks=4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _recovered(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ranks4" in request.fixturenames:
        cluster = request.getfixturevalue("ranks4")
        if cluster.broken:
            cluster.recover()
