"""Parallel text: pairs of lines, their tokens, blocks of pairs for training, and vocabularies of two languages."""
