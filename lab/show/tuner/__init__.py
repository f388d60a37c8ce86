"""The tuner: sliders for a recipe, and what a step would hold."""
