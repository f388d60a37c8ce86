"""What tests share: one cluster of four ranks for the whole session, and plans kept away from the user's."""

from collections.abc import Iterator

import platformdirs
import pytest

from cluster.ranks import Cluster


@pytest.fixture(scope="session", autouse=True)
def _own_plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not by XDG_CACHE_HOME, where the browser of the browser's tests is installed."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platformdirs, "user_cache_path", lambda name: folder / name)
        yield


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
