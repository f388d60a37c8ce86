"""The memory of a training step: the meter counts bytes, and the timeline stores them over time."""
