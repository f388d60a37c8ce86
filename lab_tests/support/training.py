"""The size of a batch with which many steps of training take a moment."""

TOKENS, ROWS = 40, 3
