"""What is trained: stages with their options and schedules, recipes, and presets."""
