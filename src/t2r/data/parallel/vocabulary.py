"""Tokenizers trained on parallel text, for encoder-decoders from random weights.

    joint       one byte-level BPE for both languages, for models that share all embeddings
    separate    two sentencepiece BPEs, in a MarianTokenizer: one for sources, one for targets (`text_target`)

Both end a sentence with `</s>`, pad with `<pad>`, and encode any text. AutoTokenizer loads them from their folder. The
ids of special tokens are the same on both sides.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import MarianTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from t2r.data.parallel.lines import LineSource, find_file
from t2r.data.progress import progress_bar
from t2r.data.vocabulary import cached_tokenizer, check_tokenizer, without_long_runs
from t2r.errors import T2RError
from t2r.words import extra

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
SEPARATE_SPECIALS = (EOS, UNK, PAD)
"""The first entries of separate vocabularies. sentencepiece has the first two."""


def train_pair_tokenizer(
    sources: Sequence[str],
    targets: Sequence[str],
    vocab_size: int,
    *,
    separate: bool = False,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on parallel text, or return it from the cache if the text has not changed.

    Args:
        sources: files of source sentences, one per line.
        targets: files of target sentences.
        vocab_size: maximum size of the vocabulary, special tokens included; if `separate`, of each of the two.
        separate: train one vocabulary for sources and another for targets.
        cache_dir: folder of the cache. Defaults to `tokenizers` in `T2R_CACHE` or in `~/.cache/t2r`.
        progress: whether to show a progress bar.
    """
    check_tokenizer("bpe", vocab_size)
    sides = [[find_file(name) for name in dict.fromkeys(side)] for side in (sources, targets)]
    if not all(sides):
        raise T2RError("a tokenizer is trained on sources and targets: name files of both")

    def make(folder: Path) -> None:
        texts = [read_side(side, words, progress) for side, words in zip(sides, ("sources", "targets"), strict=True)]
        if separate:
            save_separate(texts, vocab_size, folder)
        else:
            train_joint(chain(*texts), vocab_size).save_pretrained(folder)

    versions = [[file.fingerprint() for file in side] for side in sides]
    return cached_tokenizer(["pairs", separate, vocab_size, versions], make, cache_dir)


def read_side(files: Sequence[LineSource], words: str, progress: bool) -> Iterator[str]:
    """Yield the lines of files."""
    for file in files:
        with progress_bar(f"reading words of {words}", file.size, "bytes", shown=progress) as report:
            yield from file.read_lines(report)


def train_joint(lines: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE. A sentence starts with a space, so that its first word is the same token as elsewhere."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(without_long_runs(iter(lines)), trainer)
    end = (EOS, backend.token_to_id(EOS))
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A $B {EOS}", special_tokens=[end]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def save_separate(sides: Sequence[Iterable[str]], vocab_size: int, folder: Path) -> None:
    """Train a sentencepiece BPE for each side, and save both as a MarianTokenizer."""
    names = (("source.spm", "vocab.json"), ("target.spm", "target_vocab.json"))
    for lines, (model, vocabulary) in zip(sides, names, strict=True):
        proto, pieces = train_sentencepiece(lines, vocab_size)
        (folder / model).write_bytes(proto)
        ids = {piece: i for i, piece in enumerate((*SEPARATE_SPECIALS, *pieces))}
        (folder / vocabulary).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    tokenizer = MarianTokenizer(
        source_spm=str(folder / "source.spm"),
        target_spm=str(folder / "target.spm"),
        vocab=str(folder / "vocab.json"),
        target_vocab_file=str(folder / "target_vocab.json"),
        separate_vocabs=True,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
    )
    tokenizer.save_pretrained(folder)


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> tuple[bytes, list[str]]:
    """Train a BPE. Returns the model, and its pieces without special tokens. Rare characters are encoded as bytes."""
    try:
        import sentencepiece
    except ImportError as error:
        raise T2RError(f"separate vocabularies require sentencepiece: {extra('translation')}") from error
    made = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.9995,
        "eos_id": SEPARATE_SPECIALS.index(EOS),
        "unk_id": SEPARATE_SPECIALS.index(UNK),
        "bos_id": -1,
        "pad_id": -1,
        "hard_vocab_limit": False,  # a small text gives a smaller vocabulary
        "eos_piece": EOS,
        "unk_piece": UNK,
        "minloglevel": 2,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=made, vocab_size=vocab_size - 1, **options
        )
    except RuntimeError as error:  # there are more characters than this
        reason = str(error).rpartition("] ")[-1].strip()
        raise T2RError(f"no vocabulary of {vocab_size} can be trained on this text: {reason}") from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    return made.getvalue(), [piece for piece in pieces if piece not in SEPARATE_SPECIALS]


def target_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the size of the target vocabulary, which is the tokenizer's own unless it has two."""
    own = getattr(tokenizer, "target_encoder", None)
    return len(tokenizer) if own is None else len(own)


def has_two_vocabularies(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "separate_vocabs", False))
