"""Tokenizers trained on the corpus, for pretraining.

    bpe     byte-level BPE: encodes any text, and decodes to exactly the same text
    word    words separated by spaces, as in fairseq, for text that is already tokenized, such as WikiText

`word` is a fairseq dictionary: `<s> <pad> </s> <unk>`, then words by frequency; a newline becomes the token `</s>`. The
number of tokens is therefore the number of words and lines, as in published word-level perplexities.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
"""The first entries of every fairseq dictionary, in order."""
SMALLEST = {"bpe": 257, "word": len(SPECIALS) + 1}
LONGEST = 1 << 20
"""Number of characters after which text without a newline is split at a space, or anywhere if it has none."""
LONG_RUN = re.compile(r"\S{256}|\s{256}")
"""Longer words are split, because the time of BPE training is quadratic in the length of a word."""
FORMAT = 2


def train_tokenizer(
    sources: str | Sequence[str],
    kind: str = "bpe",
    vocab_size: int | None = None,
    *,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on a text, or return it from the cache if the text has not changed.

    Args:
        sources: as for `tokenize_corpus`.
        kind: `bpe` or `word`.
        vocab_size: maximum vocabulary size, including special tokens. Required for `bpe`. None: all words.
        cache_dir: folder of the cache. Defaults to `tokenizers` in `T2R_CACHE` or in `~/.cache/t2r`.
        progress: whether to show a progress bar.
    """
    check_tokenizer(kind, vocab_size)
    found = find_sources(sources)

    def make(folder: Path) -> None:
        reader = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()))  # it has no chat template
        texts = whole_lines(read_all(found, reader, False, progress, "reading words"))
        made = train_bpe(texts, vocab_size or 0) if kind == "bpe" else word_tokenizer(frequent_words(texts, vocab_size))
        made.save_pretrained(folder)

    versions = [source.fingerprint() for source in found]
    return cached_tokenizer([kind, vocab_size, versions], make, cache_dir)


def cached_tokenizer(
    inputs: list[Any], make: Callable[[Path], None], cache_dir: str | Path | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that was made from these inputs. If there is none yet, `make` saves it in a folder."""
    name = fingerprint.digest([FORMAT, tokenizers.__version__, *inputs])
    folder = Path(cache_dir or fingerprint.cache_folder("tokenizers")).expanduser() / name
    if not folder.exists():
        try:
            with whole_folder(str(folder)) as partial:
                make(Path(partial))
        except T2RError:
            if not folder.exists():  # otherwise another process has made the same tokenizer meanwhile
                raise
    return AutoTokenizer.from_pretrained(folder)


def check_tokenizer(kind: str, vocab_size: int | None) -> None:
    """Raise T2RError for invalid options, before any text is read."""
    if kind not in KINDS:
        raise T2RError(f"no tokenizer of kind {kind!r}: choose one of {', '.join(KINDS)}")
    if vocab_size is None and kind == "bpe":
        raise T2RError("a bpe tokenizer requires a vocab_size")
    if vocab_size is not None and vocab_size < SMALLEST[kind]:
        raise T2RError(f"vocab_size is {vocab_size}: a {kind} tokenizer requires at least {SMALLEST[kind]}")


def train_bpe(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's. Every byte is a token, so there are no unknown tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # as in GPT-2
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
        clean_up_tokenization_spaces=False,  # decoding must return the exact text
    )


def without_long_runs(texts: Iterator[str]) -> Iterator[str]:
    """Split texts after long runs of non-space or space characters."""
    for text in texts:
        start = 0
        for found in LONG_RUN.finditer(text):
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]


def frequent_words(texts: Iterator[str], vocab_size: int | None) -> list[str]:
    """Return the words of a text by descending frequency, then alphabetically."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    for special in SPECIALS:
        del counts[special]
    words = sorted(counts, key=lambda word: (-counts[word], word))
    if not words:
        raise T2RError("the text has no words")
    return words if vocab_size is None else words[: vocab_size - len(SPECIALS)]


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build a word tokenizer. The words are numbered in this order, after fairseq's special tokens."""
    vocabulary = {word: i for i, word in enumerate((*SPECIALS, *words))}
    if len(vocabulary) != len(SPECIALS) + len(words):
        raise T2RError("the dictionary has a duplicate word, or a special token among its words")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # Newlines become words before splitting, so that offsets still refer to the original text.
    backend.normalizer = normalizers.Replace("\n", " </s> ")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Sequence(
        [
            # Adds a space before each word except the first, and except words with this prefix, which do not occur.
            decoders.WordPiece(prefix="\n", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?</s> ?"), "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="</s>",  # <s> is never trained: in fairseq, too, a text starts after </s>
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def whole_lines(parts: Iterator[Part]) -> Iterator[str]:
    """Join parts and split the text at newlines, independently of the sizes of the parts."""
    text = ""
    for part in parts:
        text += part.text
        end = len(text) if part.ends else text.rfind("\n") + 1
        if not end and len(text) > LONGEST:
            end = max(text.rfind(" "), 0) or len(text)
        if end:
            yield text[:end]
            text = text[end:]
