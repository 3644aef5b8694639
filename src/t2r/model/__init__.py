"""The swapped model: swapping, generation, saving, loading and merging."""
