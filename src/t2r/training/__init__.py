"""Training: recipes, stages, objectives, optimizers, and runs that can be resumed."""
