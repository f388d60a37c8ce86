"""Objects in, pictures out: the live timeline, static figures, and the library's own code."""

from lab.show.comparisons import curves, stack
from lab.show.figures import timeline
from lab.show.live_timeline import live
from lab.show.picture import Picture
from lab.show.sources import source

__all__ = ["Picture", "curves", "live", "source", "stack", "timeline"]
