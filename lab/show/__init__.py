"""Objects in, pictures out: the live timeline, static figures, and the library's own code."""

from lab.show.comparisons import curves, stack
from lab.show.exploring import explore
from lab.show.figures import timeline
from lab.show.live_timeline import live
from lab.show.picture import Picture
from lab.show.predictions import predict
from lab.show.profiles import profile
from lab.show.sources import source

__all__ = ["Picture", "curves", "explore", "live", "predict", "profile", "source", "stack", "timeline"]
