"""The language model of the paper: the adaptive LM of Baevski and Auli, fairseq's transformer_lm_wiki103."""
