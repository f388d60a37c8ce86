"""Objects in, pictures out: the live timeline, static figures, and the library's own code."""

from lab.show.buffer_reuse import buffers
from lab.show.comparisons import curves, stack
from lab.show.exchange_grid import exchange
from lab.show.exploring import explore
from lab.show.figures import timeline
from lab.show.guesses import predict
from lab.show.head_schedule import schedule
from lab.show.lanes import lanes
from lab.show.live.timeline import live
from lab.show.memory_vs_speed import trade
from lab.show.picture import Picture
from lab.show.profiles import profile
from lab.show.sources import source
from lab.show.tuner.widget import tuner

__all__ = [
    "Picture",
    "buffers",
    "curves",
    "exchange",
    "explore",
    "lanes",
    "live",
    "predict",
    "profile",
    "schedule",
    "source",
    "stack",
    "timeline",
    "trade",
    "tuner",
]
