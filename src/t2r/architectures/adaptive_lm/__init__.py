"""The paper's language model: Baevski and Auli's adaptive LM, which fairseq calls transformer_lm_wiki103."""
