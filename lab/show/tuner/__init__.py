"""The tuner: sliders for a recipe, and an estimate of the memory of a step."""
