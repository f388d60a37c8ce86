"""The attention kernels, the attention function that transformers calls, and saved attention results."""
