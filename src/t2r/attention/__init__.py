"""Attention that is an RNN: the sites, exact softmax beside them, masks, and the state as a cache."""
