"""Blocks of tokens for training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from t2r.data.corpus import JoinedCorpus, TokenCorpus
from t2r.errors import T2RError

BLOCK_SIZE = 512
"""The default block size, as in the paper."""
IGNORED = -100
"""The label that the losses of transformers ignore."""


def check_block_size(block_size: int, max_positions: int | None) -> None:
    """Raise T2RError if blocks are too short, or longer than `max_positions`. None: no limit."""
    if block_size < 2:
        raise T2RError(f"block_size is {block_size}: predicting the next token requires at least 2")
    if max_positions is not None and block_size > max_positions:
        raise T2RError(
            f"block_size is {block_size} but the teacher has only {max_positions} positions: "
            f"use {max_positions} or less"
        )


class Blocks(Dataset[dict[str, Tensor]]):
    """A corpus as consecutive blocks of tokens. A final incomplete block is dropped.

    Items have `input_ids` and `labels`. The labels are the input ids, with -100 for tokens without loss (the prompts of
    a conversation). The model shifts the labels, as in transformers.

    Documents are concatenated and continue across blocks, as in the paper. With `documents`, items also have
    `position_ids` that restart with each document, as from transformers' DataCollatorWithFlattening. The model then
    resets its state at each document, and the first token of a document is not predicted.

    With `bos`, this token takes the place of the first of a block, or of each document in it: see `t2r.data.beginning`.
    """

    def __init__(
        self,
        corpus: TokenCorpus | JoinedCorpus,
        block_size: int = BLOCK_SIZE,
        *,
        documents: bool = False,
        bos: int | None = None,
    ):
        check_block_size(block_size, None)
        if len(corpus) < block_size:
            raise T2RError(
                f"the corpus has {len(corpus)} tokens, less than one block of {block_size}: "
                f"give more text or a smaller block_size"
            )
        self.corpus = corpus
        self.block_size = block_size
        self.documents = documents
        self.bos = bos

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
        if self.bos is not None:
            input_ids[item["position_ids"] == 0 if self.documents else 0] = self.bos
        item["labels"] = input_ids.masked_fill(~scored, IGNORED)
        return item
