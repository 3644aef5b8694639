"""Text data: reading corpora, tokenizing them once, and splitting them into blocks for training."""

from t2r.data.blocks import Blocks, check_block_size
from t2r.data.corpus import TokenCorpus
from t2r.data.tokens import tokenize_corpus

__all__ = ["Blocks", "TokenCorpus", "check_block_size", "tokenize_corpus"]
