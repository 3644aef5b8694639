"""Tokenizers made from the corpus itself, for models that start from nothing.

    bpe     byte-level BPE: any text, and back to exactly that text
    word    for text that is tokens already, such as WikiText's: words between spaces, as fairseq reads them

The second is fairseq's dictionary: `<s> <pad> </s> <unk>`, then words by frequency, and a line end is the token `</s>`.
So a text has as many tokens as it has words and lines, which is what published word-level perplexities are over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from t2r.data import fingerprint
from t2r.data.chat import Part
from t2r.data.text import find_sources
from t2r.data.tokens import read_all
from t2r.errors import T2RError
from t2r.storage import whole_folder

KINDS = ("bpe", "word")
END_OF_TEXT = "<|endoftext|>"
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
"""The first words of every fairseq dictionary, in its order."""
SMALLEST = {"bpe": 257, "word": len(SPECIALS) + 1}
LONGEST = 1 << 20
"""Characters after which a text without a line end is cut at a space, or anywhere if it has none."""
LONG_RUN = re.compile(r"\S{256}|\s{256}")
"""Training a BPE takes time quadratic in the length of a word: longer ones are cut."""
FORMAT = 2


def train_tokenizer(
    sources: str | Sequence[str],
    kind: str = "bpe",
    vocab_size: int | None = None,
    *,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> PreTrainedTokenizerBase:
    """A tokenizer for this text, from the cache if it was made before and nothing has changed since.

    Args:
        sources: as for `tokenize_corpus`.
        kind: `bpe` or `word`.
        vocab_size: entries in all, special ones included; a text may give fewer. None: all words there are.
        cache_dir: where the cache goes; by default `tokenizers` in `T2R_CACHE` or in `~/.cache/t2r`.
        progress: show a bar.
    """
    check_tokenizer(kind, vocab_size)
    found = find_sources(sources)
    versions = [source.fingerprint() for source in found]
    name = fingerprint.digest([FORMAT, tokenizers.__version__, kind, vocab_size, versions])
    folder = Path(cache_dir or fingerprint.cache_folder("tokenizers")).expanduser() / name
    if not folder.exists():
        reader = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()))  # it has no chat template
        texts = whole_lines(read_all(found, reader, False, progress, "reading words"))
        made = train_bpe(texts, vocab_size or 0) if kind == "bpe" else word_tokenizer(frequent_words(texts, vocab_size))
        with whole_folder(str(folder)) as partial:
            made.save_pretrained(partial)
    return AutoTokenizer.from_pretrained(folder)


def check_tokenizer(kind: str, vocab_size: int | None) -> None:
    """Refuse what cannot be made, before any text is read."""
    if kind not in KINDS:
        raise T2RError(f"no tokenizer of kind {kind!r}: choose one of {', '.join(KINDS)}")
    if vocab_size is None and kind == "bpe":
        raise T2RError("a bpe tokenizer needs a vocab_size")
    if vocab_size is not None and vocab_size < SMALLEST[kind]:
        raise T2RError(f"vocab_size is {vocab_size}: a {kind} tokenizer needs at least {SMALLEST[kind]}")


def train_bpe(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2 has it: every byte is a token, so that nothing is unknown."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # a word at a line's start is another
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(without_long_runs(texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,  # or what is decoded would not be the text
    )


def without_long_runs(texts: Iterator[str]) -> Iterator[str]:
    """The same text, cut wherever it goes on for too long without a change between words and spaces."""
    for text in texts:
        start = 0
        for found in LONG_RUN.finditer(text):
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]


def frequent_words(texts: Iterator[str], vocab_size: int | None) -> list[str]:
    """The words of a text, most frequent first; of equally frequent ones the order is that of their letters."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    for special in SPECIALS:
        del counts[special]
    words = sorted(counts, key=lambda word: (-counts[word], word))
    if not words:
        raise T2RError("there are no words in this text")
    return words if vocab_size is None else words[: vocab_size - len(SPECIALS)]


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of words, numbered in this order behind fairseq's special ones."""
    vocabulary = {word: i for i, word in enumerate((*SPECIALS, *words))}
    if len(vocabulary) != len(SPECIALS) + len(words):
        raise T2RError("a dictionary has a word twice, or a special one among its words")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # A line end becomes a word before words are split: offsets still point to it in the text.
    backend.normalizer = normalizers.Replace("\n", " </s> ")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Sequence(
        [
            # Puts a space before each word but the first, except those with this prefix, which none has.
            decoders.WordPiece(prefix="\n", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?</s> ?"), "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="</s>",  # nothing is ever learned of <s>: to fairseq too a text begins as after a line's end
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def whole_lines(parts: Iterator[Part]) -> Iterator[str]:
    """The text in stretches that end with a line, however it was read."""
    text = ""
    for part in parts:
        text += part.text
        end = len(text) if part.ends else text.rfind("\n") + 1
        if not end and len(text) > LONGEST:
            end = max(text.rfind(" "), 0) or len(text)
        if end:
            yield text[:end]
            text = text[end:]
