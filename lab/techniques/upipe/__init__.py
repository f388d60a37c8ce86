"""Untied Ulysses (UPipe): attention in stages, each for a few heads, which share their buffers."""
