"""The blocks in which the tiled loss computes a softmax, without torch."""

BLOCKS = 16
"""The number of blocks into which the rows of a tile's logits are divided.

The logits of a tile are in the model's dtype. Their softmax is computed in fp32 or wider, one block at a
time.
"""
