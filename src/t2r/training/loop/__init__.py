"""The loop over the steps of a stage, on transformers' Trainer: its callbacks, checkpoints, threads and processes."""
