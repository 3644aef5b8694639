"""Tokenize a corpus once, into a memory-mapped cache.

The text is streamed in batches of pieces. The tokenizer's own threads process a batch in parallel
(`RAYON_NUM_THREADS` sets their number). They scale like processes, need no pickling, and cannot deadlock after a fork
as processes with fast tokenizers can.

A long document is split into pieces, so that it is tokenized in bounded memory. The tokens should be those of the
unsplit document. The document is therefore split after a newline, or else before a space, where the tokenizer is
observed to have a token boundary, and each piece is tokenized with the last few characters of the previous piece as
context. Text without such a position, for example a megabyte without newlines or spaces, is split anyway, and a word at
the split may be tokenized differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from t2r import compat
from t2r.data import fingerprint
from t2r.data.chat import Part
from t2r.data.corpus import FORMAT, CorpusWriter, TokenCorpus, read_header
from t2r.data.progress import is_watched
from t2r.data.text import Source, find_sources
from t2r.errors import T2RError

PIECE = 1 << 16
"""Maximum number of characters of a piece."""
BATCH = 1 << 22
"""Approximate number of characters in memory at a time."""
CONTEXT = 64
"""Number of characters before and after a split that may affect the tokens at the split."""
TRIES = 32
"""Number of newlines, and then of spaces, that are tried as a split."""


def tokenize_corpus(
    sources: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    lines: bool = False,
    add_eos: bool = True,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    tokenizer_key: str | None = None,
) -> TokenCorpus:
    """Tokenize a corpus, or return it from the cache if neither the text nor the tokenizer has changed.

    Args:
        sources: text files (any extension), .jsonl files with `text` or `messages`, both optionally .gz or .xz, globs
            of these, or `datasets:NAME[:CONFIG[:SPLIT]]`.
        tokenizer: the tokenizer.
        lines: whether each line of plain text is a document; otherwise each file is one document.
        add_eos: whether to end each document with the EOS token, if the tokenizer has one. Conversations end as in
            their chat template.
        cache_dir: folder of the cache. Defaults to `tokens` in `T2R_CACHE` or in `~/.cache/t2r`.
        progress: whether to show a progress bar.
        tokenizer_key: the fingerprint of the tokenizer, if already known.

    Raises T2RError if a source cannot be read, has no text, or changes while it is read.
    """
    found = find_sources(sources)
    tokenizer_key = tokenizer_key or fingerprint.of_tokenizer(tokenizer)

    def key() -> str:
        versions = [source.fingerprint() for source in found]
        return fingerprint.digest([FORMAT, tokenizer_key, versions, lines, add_eos])

    folder = Path(cache_dir or fingerprint.cache_folder("tokens")).expanduser() / key()
    if read_header(folder) is not None:
        return TokenCorpus(folder)

    names = [sources] if isinstance(sources, str) else list(sources)
    highest = max(tokenizer.get_vocab().values())
    dtype = np.dtype(np.uint16 if highest <= np.iinfo(np.uint16).max else np.uint32)
    eos = tokenizer.eos_token_id if add_eos else None
    with CorpusWriter(folder, dtype) as writer:
        parts = read_all(found, tokenizer, lines, progress)
        for batch in batches(cut(parts, tokenizer)):
            for piece, ids in zip(batch, encode_pieces(batch, tokenizer), strict=True):
                writer.add(ids, piece.loss)
                if piece.ends:
                    writer.end_document(None if piece.closed else eos, piece.loss)
        if not writer.count:
            raise T2RError(f"there is no text in {', '.join(names)}")
        if key() != folder.name:
            raise T2RError(f"{', '.join(names)} changed while being read: try again when it is complete")
        writer.commit({"sources": names, "tokens": writer.count})
    return TokenCorpus(folder)


def read_all(
    sources: list[Source], tokenizer: PreTrainedTokenizerBase, lines: bool, progress: bool, title: str = "tokenizing"
) -> Iterator[Part]:
    """Read the sources in order, with a progress bar that counts bytes."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (progress and is_watched(console))) as bar:
        task = bar.add_task("", total=sum(source.size for source in sources))
        done = 0
        for source in sources:
            before = done

            def report(read: int, before: int = before) -> None:
                bar.update(task, completed=before + read)

            yield from source.read(tokenizer, lines, report)
            done += source.size
            report(done - before)


class Piece(NamedTuple):
    """Text to tokenize in one call, and the text before it in the same document."""

    text: str
    context: str
    loss: bool
    ends: bool
    closed: bool


def cut(parts: Iterator[Part], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Split long documents into pieces. Parts that the reader split at arbitrary positions are joined first."""
    text, context, loss = "", "", True
    for part in parts:
        if part.loss != loss:
            if text:
                yield Piece(text, context, loss, ends=False, closed=False)
            text, context, loss = "", (context + text)[-CONTEXT:], part.loss
        text += part.text
        # Only the text in this window determines the split, so it does not depend on the sizes of the parts.
        while len(text) > PIECE + CONTEXT:
            end = find_cut(text[: PIECE + CONTEXT], tokenizer)
            yield Piece(text[:end], context, loss, ends=False, closed=False)
            text, context = text[end:], text[max(0, end - CONTEXT) : end]
        if part.ends:
            yield Piece(text, context, loss, ends=True, closed=part.closed)
            text, context = "", ""


def find_cut(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the last good split: after a newline, else before a space, else after `PIECE` characters."""
    for mark, offset in (("\n", 1), (" ", 0)):
        found = PIECE
        for _ in range(TRIES):
            found = text.rfind(mark, 1, found)
            if found < 0:
                break
            at = found + offset
            before = text[max(0, at - CONTEXT) : at]
            left, both = encode([before, before + text[at : at + CONTEXT]], tokenizer)
            if both[: len(left)] == left:  # the text after the split does not change the tokens before it
                return at
    return PIECE


def batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches of about `BATCH` characters."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_pieces(pieces: list[Piece], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the tokens of each piece, tokenized after its context."""
    texts = [text for piece in pieces for text in (piece.context, piece.context + piece.text)]
    encoded = encode(texts, tokenizer)
    for piece, before, both in zip(pieces, encoded[::2], encoded[1::2], strict=True):
        if both[: len(before)] == before:
            yield both[len(before) :]
        else:  # the split is inside a token
            yield encode([piece.text], tokenizer)[0]


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize texts without adding special tokens."""
    if not tokenizer.is_fast:
        return compat.encode(tokenizer, text=texts, add_special_tokens=False)
    # The wrapper is bypassed because its lists of offsets and masks take as long as the tokenization itself.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
