"""Attention's kernels, the function that transformers calls for them, and their saved results."""
