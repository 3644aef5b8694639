"""One optimizer step: the order of the data, the objectives, the optimizers, numerical settings, CUDA graphs."""
