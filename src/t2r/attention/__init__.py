"""Recurrent attention: sites, exact softmax attention, masks, and the recurrent state as a cache."""
