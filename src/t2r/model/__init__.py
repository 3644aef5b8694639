"""The swapped model: swap, generate, save and load, merge."""
