"""The best model for a number of bytes: how much each head needs the tokens it reads, and who gets which window."""
