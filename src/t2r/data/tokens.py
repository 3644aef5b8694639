"""Tokenise a corpus once, into a memory-mapped cache.

The text streams through in pieces, a batch of them at a time. The tokenizer's own threads share a batch out:
they scale as processes would, need no pickling, and cannot deadlock after a fork as processes with fast
tokenizers can (`RAYON_NUM_THREADS` sets how many).

A long document must be cut to be tokenised in bounded memory, and should give the tokens that it gives
whole. So it is cut after a line end, at one where the tokenizer is seen to separate (whether two line ends may
be cut apart differs from one to the next), and each piece is tokenised behind the last few characters of the
one before, so that it does not look like the start of a text. What remains are texts without such places, such
as a megabyte without a line end or a space: these are cut anyway, and a word there may become other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from t2r.data import fingerprint
from t2r.data.chat import Part
from t2r.data.corpus import FORMAT, CorpusWriter, TokenCorpus, read_header
from t2r.data.progress import is_watched
from t2r.data.text import Source, find_sources
from t2r.errors import T2RError

PIECE = 1 << 16
"""Most characters that are tokenised as one."""
BATCH = 1 << 22
"""About how many characters are in memory at a time."""
CONTEXT = 64
"""Characters before and after a cut that may have a say in how the text is tokenised there."""
TRIES = 32
"""How many line ends, and then how many spaces, are tried for a cut."""


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
    """The tokens of a corpus, from the cache if it was tokenised before and nothing has changed since.

    Args:
        sources: text files (.txt or any name), .jsonl with `text` or `messages`, either as .gz or .xz, globs
            of these, and `datasets:NAME[:CONFIG][:SPLIT]`.
        lines: each line of plain text is a document; otherwise each file is one.
        add_eos: end each document with the tokenizer's EOS token, if it has one. Conversations end as their
            chat template ends them.
        cache_dir: where the cache goes; by default `tokens` in `T2R_CACHE` or in `~/.cache/t2r`.
        progress: show a bar.
        tokenizer_key: the tokenizer's fingerprint, where it is known already.
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
            raise T2RError(f"{', '.join(names)} changed while it was read: try again when it is complete")
        writer.commit({"sources": names, "tokens": writer.count})
    return TokenCorpus(folder)


def read_all(
    sources: list[Source], tokenizer: PreTrainedTokenizerBase, lines: bool, progress: bool, title: str = "tokenizing"
) -> Iterator[Part]:
    """Every source, one after the other, behind a bar that counts the bytes read."""
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
    """Text to be tokenised as one, and what comes before it in its document."""

    text: str
    context: str
    loss: bool
    ends: bool
    closed: bool


def cut(parts: Iterator[Part], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Cut what is too long, and join what a reader had to break at any place."""
    text, context, loss = "", "", True
    for part in parts:
        if part.loss != loss:
            if text:
                yield Piece(text, context, loss, ends=False, closed=False)
            text, context, loss = "", (context + text)[-CONTEXT:], part.loss
        text += part.text
        # Only what lies in this window decides on a cut, so it does not depend on how the text was read.
        while len(text) > PIECE + CONTEXT:
            end = find_cut(text[: PIECE + CONTEXT], tokenizer)
            yield Piece(text[:end], context, loss, ends=False, closed=False)
            text, context = text[end:], text[max(0, end - CONTEXT) : end]
        if part.ends:
            yield Piece(text, context, loss, ends=True, closed=part.closed)
            text, context = "", ""


def find_cut(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The last good place to cut: after a line end, else before a space, else after `PIECE` characters."""
    for mark, offset in (("\n", 1), (" ", 0)):
        found = PIECE
        for _ in range(TRIES):
            found = text.rfind(mark, 1, found)
            if found < 0:
                break
            at = found + offset
            before = text[max(0, at - CONTEXT) : at]
            left, both = encode([before, before + text[at : at + CONTEXT]], tokenizer)
            if both[: len(left)] == left:  # what follows changes nothing of what was
                return at
    return PIECE


def batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """As many pieces as make up `BATCH` characters."""
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
    """The tokens of each piece, as they are behind its context."""
    texts = [text for piece in pieces for text in (piece.context, piece.context + piece.text)]
    encoded = encode(texts, tokenizer)
    for piece, before, both in zip(pieces, encoded[::2], encoded[1::2], strict=True):
        if both[: len(before)] == before:
            yield both[len(before) :]
        else:  # the cut is inside a token, so that the context has no tokens of its own
            yield encode([piece.text], tokenizer)[0]


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens alone: no special ones but those written in the text."""
    if not tokenizer.is_fast:
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    # Past the wrapper, which spends as long on lists of offsets and masks as all threads on the tokens.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
