"""The samples of an analysis: windows of a text, or pairs of sentences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.analysis.subject import Subject
from t2r.data.parallel.lines import find_file, read_pairs
from t2r.errors import T2RError
from t2r.evaluation import encode, read_text
from t2r.evaluation.inputs import positions_of
from t2r.evaluation.logits import check_positions
from t2r.evaluation.perplexity import begun
from t2r.generation.state import check_vocabulary
from t2r.tasks.translation import shift_of

WINDOW = 512
BATCH = 4
"""Windows per forward pass."""


class Samples(NamedTuple):
    batches: list[Any]
    """The inputs of each forward pass."""
    window: int
    """Tokens of the longest sample."""
    words: int
    """Tokens at the end of a sample whose attention is measured."""
    facts: dict[str, Any]
    """What was read, for the result."""
    text: str | None = None
    """The whole text, of language models."""


def of_text(
    own: Subject,
    other: Subject | None,
    tokenizer: Tokenizer,
    text: str | Path,
    window: int | None,
    words: int | None,
    limit: int,
) -> Samples:
    """Return windows of a text."""
    read = encode(tokenizer, read_text(text, tokenizer))
    check_vocabulary(own.model, read.read)
    window = _window(own, other, window, len(read.token_ids))
    words = min(window, words or max(1, window // 2))
    samples = begun(_windows(read.token_ids, window, limit), read.bos)
    facts = {"text": str(text), "window": window, "words": words, "samples": len(samples), "tokens": samples.numel()}
    return Samples([{"input_ids": batch} for batch in samples.split(BATCH)], window, words, facts, read.string)


def of_pairs(
    own: Subject, other: Subject | None, tokenizer: Tokenizer, source: str | Path, target: str | Path, limit: int
) -> Samples:
    """Return pairs of sentences, one in each forward pass."""
    batches = list(_pairs(tokenizer, source, target, limit, _fewest_positions(own, other)))
    shift = shift_of(own.model)
    for batch in batches:
        check_vocabulary(own.model, batch["input_ids"].flatten().tolist())
        check_vocabulary(own.model, batch["labels"].flatten().tolist(), targets=True)
        batch["decoder_input_ids"] = shift(batch["labels"])  # FSMT does not read the labels
    longest = max(max(x.shape[1] for x in batch.values()) for batch in batches)
    tokens = sum(batch["labels"].numel() for batch in batches)
    facts = {"source": str(source), "target": str(target), "samples": len(batches), "tokens": tokens}
    return Samples(batches, longest, longest, facts)


def _fewest_positions(own: Subject, other: Subject | None) -> int | None:
    limits = [positions_of(subject.model.config) for subject in (own, other) if subject is not None]
    return min((limit for limit in limits if limit is not None), default=None)


def _window(own: Subject, other: Subject | None, window: int | None, tokens: int) -> int:
    chosen = min(WINDOW, _fewest_positions(own, other) or WINDOW) if window is None else window
    if chosen < 2:
        raise T2RError(f"window must be at least 2; got {chosen}")
    if tokens < chosen:
        raise T2RError(
            f"the text has {tokens} tokens, less than one window of {chosen}: give a longer text or a smaller --window"
        )
    for subject in filter(None, (own, other)):
        check_positions(subject.model, chosen)
    return chosen


def _windows(ids: Tensor, window: int, limit: int) -> Tensor:
    """Return windows `[samples, window]` that do not overlap, spread evenly over the text."""
    fitting = len(ids) // window
    count = min(limit, fitting)
    return torch.stack([ids[(i * fitting // count) * window :][:window] for i in range(count)])


def _pairs(
    tokenizer: Tokenizer, source: str | Path, target: str | Path, limit: int, positions: int | None
) -> Iterator[Any]:
    """Yield the inputs of one pair of sentences at a time, which need no padding. Longer ones are cut at `positions`,
    or at the tokenizer's own limit."""
    pairs = [pair for pair in read_pairs(find_file(str(source)), find_file(str(target))) if all(map(str.strip, pair))]
    if not pairs:
        raise T2RError(f"{source} and {target} have no pair of lines without an empty side")
    count = min(limit, len(pairs))
    for i in range(count):
        one, two = pairs[i * len(pairs) // count]
        coded = tokenizer(one, text_target=two, return_tensors="pt", truncation=True, max_length=positions)
        yield {name: coded[name] for name in ("input_ids", "labels")}
