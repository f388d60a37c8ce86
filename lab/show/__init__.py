"""Pictures of plans and runs: the live timeline, static figures, the tuner, and the library's own code."""

from lab.show.buffer_reuse import buffer_reuse
from lab.show.comparisons import curves, stack
from lab.show.context_table import context_table
from lab.show.exchange_grid import exchange
from lab.show.exploring import explore
from lab.show.figures import timeline
from lab.show.guesses import guess, match
from lab.show.head_schedule import schedule
from lab.show.lanes import lanes
from lab.show.live.timeline import live
from lab.show.memory_vs_speed import memory_vs_speed
from lab.show.one_layer.player import layer
from lab.show.picture import Picture
from lab.show.profiles import profile
from lab.show.questions import missed, questions
from lab.show.sources import source
from lab.show.tuner.widget import tuner

__all__ = [
    "Picture",
    "buffer_reuse",
    "context_table",
    "curves",
    "exchange",
    "explore",
    "guess",
    "lanes",
    "layer",
    "live",
    "match",
    "memory_vs_speed",
    "missed",
    "profile",
    "questions",
    "schedule",
    "source",
    "stack",
    "timeline",
    "tuner",
]
