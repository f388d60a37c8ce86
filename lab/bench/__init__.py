"""Ratios within one run: the only kind of speed that holds from one machine to the next."""
