"""The tuner: sliders for a recipe, and the memory of the step that it makes."""
