"""The places ranks can run, by name."""

from cluster.errors import ClusterError
from cluster.profiles.base import Profile
from cluster.profiles.local import LOCAL

PROFILES = {profile.name: profile for profile in (LOCAL,)}


def find_profile(name: str) -> Profile:
    """Return the profile called `name`. Raises ClusterError that lists the known ones."""
    if name not in PROFILES:
        raise ClusterError(f"profile {name!r} is not known; known are: {', '.join(sorted(PROFILES))}")
    return PROFILES[name]
