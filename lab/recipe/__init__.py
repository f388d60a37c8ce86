"""Which techniques, with which knobs: the recipe, and the ladder of named recipes."""
