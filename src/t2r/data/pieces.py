"""Target pieces of OPUS-MT models whose target.spm is missing.

An OPUS-MT model has one vocabulary and two sentencepiece models, which divide sources and targets into pieces. Some
copies of `opus-mt-zh-en` have the file of the sources twice. Such a model translates as well as ever, because decoding
needs only the vocabulary, but given targets are divided into pieces of the source language, on which its loss is high.

`vocab.json` still has the target pieces, sorted by frequency. By Zipf's law the probability of a piece is about
proportional to 1 / rank, which is enough for a unigram model:

    python -m t2r.data.pieces opus-mt-zh-en     # replaces target.spm, which was a copy of source.spm
"""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from t2r.errors import T2RError
from t2r.storage import kind_of, whole_file
from t2r.words import extra

logger = logging.getLogger(__name__)

UNREACHABLE = 0.1
"""Share of the vocabulary that no sentencepiece model can produce, from which on a file is missing."""
SORTED = 0.5
"""Least correlation of log rank and log probability in a vocabulary that is sorted by frequency."""
NORMAL = 1
"""sentencepiece's type of ordinary pieces."""


def lacks_target_pieces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a MarianTokenizer has one sentencepiece model twice, and a vocabulary for two."""
    files = getattr(tokenizer, "spm_files", None)
    if not files or getattr(tokenizer, "separate_vocabs", False):
        return False
    one, other = (Path(file).read_bytes() if Path(file).is_file() else None for file in files)
    if one is None or one != other:
        return False
    model: Any = tokenizer
    pieces = {model.spm_source.id_to_piece(i) for i in range(model.spm_source.get_piece_size())}
    vocabulary = tokenizer.get_vocab()
    return len(vocabulary.keys() - pieces) > UNREACHABLE * len(vocabulary)


def warn_of_target_pieces(tokenizer: PreTrainedTokenizerBase) -> None:
    if lacks_target_pieces(tokenizer):
        logger.warning(
            "target.spm of this tokenizer is a copy of source.spm, so given targets and references are divided into "
            "wrong pieces, on which the model's loss is high: train with --tgt teacher, or rebuild target.spm with "
            "`python -m t2r.data.pieces FOLDER`"
        )


def rebuild_target_pieces(folder: str | Path) -> int:
    """Replace the target.spm of a model folder, a copy of its source.spm, by a unigram model of all pieces in
    vocab.json. Returns the number of pieces.

    Raises T2RError if target.spm is not a copy, or if the vocabulary is not sorted by frequency."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise T2RError(f"target pieces require sentencepiece and protobuf: {extra('translation')}") from error
    proto: Any = sentencepiece_model_pb2
    folder = Path(folder)
    source, target, vocabulary = (folder / name for name in ("source.spm", "target.spm", "vocab.json"))
    for path in (source, target, vocabulary):
        if kind_of(path) != "file":
            raise T2RError(f"{folder} has no {path.name}: give the folder of an OPUS-MT model")
    if source.read_bytes() != target.read_bytes():
        raise T2RError(f"target.spm in {folder} is not a copy of source.spm: it needs no replacement")
    ranks = json.loads(vocabulary.read_text(encoding="utf-8"))
    model = proto.ModelProto()
    model.ParseFromString(source.read_bytes())
    known = [(-math.log(ranks[p.piece] + 1), p.score) for p in model.pieces if p.type == NORMAL and p.piece in ranks]
    if len(known) < 2 or not np.corrcoef(np.array(known).T)[0, 1] > SORTED:
        raise T2RError(f"vocab.json in {folder} is not sorted by frequency, so probabilities are not known")
    special = [piece for piece in model.pieces if piece.type != NORMAL]
    names = {piece.piece for piece in special}
    made = proto.ModelProto()
    made.CopyFrom(model)
    del made.pieces[:]
    made.pieces.extend(special)
    harmonic = math.log(len(ranks)) + 0.5772  # the sum of 1 / rank
    for piece, rank in ranks.items():
        if piece not in names:
            made.pieces.add(piece=piece, score=-math.log((rank + 1) * harmonic))
    with whole_file(target) as temporary:
        temporary.write_bytes(made.SerializeToString())
    return len(made.pieces)


if __name__ == "__main__":
    try:
        count = rebuild_target_pieces(*sys.argv[1:2] or ["."])
    except T2RError as error:
        sys.exit(f"t2r: {error}")
    print(f"target.spm has {count:,} pieces of vocab.json now")
