"""The step on real ranks: a short run, a profiled run, and training with checkpoints."""
