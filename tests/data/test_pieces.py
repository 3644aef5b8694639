"""The target pieces of a model that has the sentencepiece model of its sources twice."""

import io
import json
import random
import shutil
from collections import Counter

import pytest
from transformers import MarianTokenizer

from t2r.data.pieces import lacks_target_pieces, rebuild_target_pieces, warn_of_target_pieces
from t2r.errors import T2RError

sentencepiece = pytest.importorskip("sentencepiece", reason="needs the translation extra")
SOURCE = ["haus", "baum", "katze", "hund", "wasser", "feuer", "berg", "strasse"]
TARGET = ["house", "tree", "cat", "dog", "water", "fire", "mountain", "street"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sentencepiece models and one vocabulary, by descending frequency, as of OPUS-MT."""
    root = tmp_path_factory.mktemp("opus")
    draw = random.Random(0)
    counts = Counter()
    for words, name in ((SOURCE, "source"), (TARGET, "target")):
        odds = [1 / (i + 1) for i in range(len(words))]
        lines = [" ".join(draw.choices(words, odds, k=6)) for _ in range(300)]
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=made,
            vocab_size=40,
            bos_id=-1,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (root / f"{name}.spm").write_bytes(made.getvalue())
        model = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
        counts.update(model.id_to_piece(i) for i in range(2, model.get_piece_size()))
        counts.update(piece for line in lines for piece in model.encode(line, out_type=str))
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    vocabulary = ["</s>", "<unk>", *ranked, "<pad>"]
    (root / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocabulary)}))
    return root


def load(folder):
    paths = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    return MarianTokenizer(*paths, source_lang="de", target_lang="en")


def test_a_copied_file_is_detected_and_rebuilt(folder, tmp_path, caplog):
    right = load(folder)
    assert not lacks_target_pieces(right)
    shutil.copytree(folder, tmp_path / "copied")
    shutil.copy(folder / "source.spm", tmp_path / "copied" / "target.spm")
    copied = load(tmp_path / "copied")
    text = "water fire house mountain"
    assert lacks_target_pieces(copied)
    assert copied(text_target=text).input_ids != right(text_target=text).input_ids
    warn_of_target_pieces(right)
    assert not caplog.messages
    warn_of_target_pieces(copied)
    assert "train with --tgt teacher" in caplog.text

    assert rebuild_target_pieces(tmp_path / "copied") > 30
    rebuilt = load(tmp_path / "copied")
    assert not lacks_target_pieces(rebuilt)
    assert rebuilt(text_target=text).input_ids == right(text_target=text).input_ids
    assert rebuilt("haus katze").input_ids == right("haus katze").input_ids
    with pytest.raises(T2RError, match="needs no replacement"):
        rebuild_target_pieces(tmp_path / "copied")


def test_what_cannot_be_rebuilt(folder, tmp_path):
    with pytest.raises(T2RError, match=r"has no source\.spm"):
        rebuild_target_pieces(tmp_path)
    shutil.copytree(folder, tmp_path / "mixed")
    shutil.copy(folder / "source.spm", tmp_path / "mixed" / "target.spm")
    vocabulary = list(json.loads((folder / "vocab.json").read_text()))
    (tmp_path / "mixed" / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(sorted(vocabulary))}))
    with pytest.raises(T2RError, match="not sorted by frequency"):
        rebuild_target_pieces(tmp_path / "mixed")
