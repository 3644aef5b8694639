"""Blocks of tokens: what a step of training reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from t2r.data.corpus import JoinedCorpus, TokenCorpus
from t2r.errors import T2RError

BLOCK_SIZE = 512
"""The paper's."""
IGNORED = -100
"""The label that transformers' losses leave out."""


def check_block_size(block_size: int, max_positions: int | None) -> None:
    """Refuse blocks that the teacher cannot read. `max_positions` is None for one without a limit."""
    if block_size < 2:
        raise T2RError(f"block_size is {block_size}: predicting the next token needs at least 2")
    if max_positions is not None and block_size > max_positions:
        raise T2RError(
            f"block_size is {block_size} but the teacher has only {max_positions} positions: "
            f"use {max_positions} or less"
        )


class Blocks(Dataset[dict[str, Tensor]]):
    """A corpus as blocks of contiguous tokens, each token in one block. A rest that fills no block is left.

    Items have `input_ids` and `labels`: the same, but -100 where there is nothing to learn (the prompts of a
    conversation). The model shifts the labels, as transformers' models do.

    Documents run on within a block and over its edges, as in the paper. With `documents`, items also have
    `position_ids` that start again with each document, as from transformers' DataCollatorWithFlattening: they
    tell the model to forget, and a document's first token is not predicted from the one before.
    """

    def __init__(self, corpus: TokenCorpus | JoinedCorpus, block_size: int = BLOCK_SIZE, *, documents: bool = False):
        check_block_size(block_size, None)
        if len(corpus) < block_size:
            raise T2RError(
                f"the corpus has {len(corpus)} tokens, less than one block of {block_size}: "
                f"give more text or a smaller block_size"
            )
        self.corpus = corpus
        self.block_size = block_size
        self.documents = documents

    def __len__(self) -> int:
        return len(self.corpus) // self.block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.block_size
        stop = start + self.block_size
        input_ids = torch.from_numpy(self.corpus.read(start, stop))
        scored = torch.from_numpy(self.corpus.scored(start, stop))
        item = {"input_ids": input_ids}
        if self.documents:
            item["position_ids"] = torch.from_numpy(self.corpus.positions(start, stop))
            scored &= item["position_ids"] > 0
        item["labels"] = input_ids.masked_fill(~scored, IGNORED)
        return item
