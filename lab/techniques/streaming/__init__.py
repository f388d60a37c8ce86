"""Streamed layers: a decoder layer whose long tensors are in host memory and pass the device in tiles."""
