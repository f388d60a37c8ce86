"""One training step: the recipe applied to a model, batches, the step itself, one rank in place of many."""
