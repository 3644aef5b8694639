"""Training: recipes of stages, their objectives, and a run that survives being stopped."""
