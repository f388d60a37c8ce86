"""The tests: one file a module, and the whole held together in parity, notebooks, browser and house."""
