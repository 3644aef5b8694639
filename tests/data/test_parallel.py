"""Parallel text: what is read, skipped and refused, and blocks of pairs of about the same length."""

import gzip
import lzma
import sys
import types
from collections import Counter

import numpy as np
import pytest
from tokenizers import processors
from transformers import ByT5Tokenizer

from t2r import compat
from t2r.data.mixture import WeightedSource
from t2r.data.parallel.blocks import PairBlocks, width_of
from t2r.data.parallel.corpus import tokenize_pairs
from t2r.data.parallel.lines import find_file, parse_pairs
from t2r.errors import T2RError
from t2r.training.steps.order import Order
from translating import make_tokenizer, write_pairs


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_tokens_are_those_of_the_tokenizer(tmp_path, tokenizer):
    source, target = write(tmp_path / "a", "w3 w4", "w5"), write(tmp_path / "b", "w6", "w7 w8 w9")
    corpus = tokenize_pairs(source, target, tokenizer, progress=False)
    pairs = [(pair.source.tolist(), pair.target.tolist()) for pair in (corpus[0], corpus[1])]
    assert pairs == [([3, 4, 2], [6, 2]), ([5, 2], [7, 8, 9, 2])]
    assert corpus.lengths.tolist() == [3, 4]


def test_targets_are_written_in_target_mode(tmp_path):
    words = make_tokenizer()
    backend = words.backend_tokenizer
    plain = backend.post_processor
    words._switch_to_target_mode = lambda: setattr(
        backend, "post_processor", processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", 2)])
    )
    words._switch_to_input_mode = lambda: setattr(backend, "post_processor", plain)
    corpus = tokenize_pairs(write(tmp_path / "a", "w3"), write(tmp_path / "b", "w6"), words, progress=False)
    assert [side.tolist() for side in corpus[0]] == [[3, 2], [2, 6, 2]]


def test_the_cache_of_a_slow_tokenizer_does_not_depend_on_the_amount_of_text(tmp_path, monkeypatch, caplog):
    lines = ["the cat", "", "<extra_id_3> sat", "on  a mat</s>", "東京"] * 5
    paths = write(tmp_path / "a", *lines), write(tmp_path / "b", *lines[::-1])
    caches = []
    for name, worthwhile in (("stock", 1 << 20), ("lean", 0)):
        monkeypatch.setattr(compat, "WORTHWHILE", worthwhile)
        caplog.clear()
        tokenize_pairs(*paths, ByT5Tokenizer(), cache_dir=tmp_path / name, progress=False)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents = {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}
        caches.append((contents, caplog.messages.copy()))
    assert caches[0] == caches[1]
    assert len(caches[0][0]) == 8
    assert "10 pairs with an empty side are skipped (line 2, 4, 7, ...)" in caches[0][1][0]


@pytest.mark.parametrize(("suffix", "opened"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files(tmp_path, tokenizer, suffix, opened):
    paths = [str(tmp_path / f"{name}{suffix}") for name in "ab"]
    for path, text in zip(paths, ("w3\nw4\n", "w5\nw6"), strict=True):  # the last line end may be missing
        with opened(path, "wt") as file:
            file.write(text)
    corpus = tokenize_pairs(*paths, tokenizer, progress=False)
    assert [pair.target.tolist() for pair in (corpus[0], corpus[1])] == [[5, 2], [6, 2]]


def test_a_changed_file_is_read_again(tmp_path, tokenizer):
    source, target = write(tmp_path / "a", "w3"), write(tmp_path / "b", "w6")
    first = tokenize_pairs(source, target, tokenizer, progress=False)
    assert tokenize_pairs(source, target, tokenizer, progress=False).key == first.key
    write(tmp_path / "b", "w7")
    again = tokenize_pairs(source, target, tokenizer, progress=False)
    assert again.key != first.key
    assert again[0].target.tolist() == [7, 2]


def test_unequal_numbers_of_lines_are_refused(tmp_path, tokenizer):
    source, target = write(tmp_path / "a", "w3", "w4", "w5", "w6"), write(tmp_path / "b", "w6", "w7")
    with pytest.raises(T2RError, match=r"b ends after line 2, and .*a has 4 lines"):
        tokenize_pairs(source, target, tokenizer, progress=False)
    with pytest.raises(T2RError, match=r"b ends after line 2, and .*a has 4 lines"):
        tokenize_pairs(target, source, tokenizer, progress=False)


def test_empty_sides_are_skipped_with_their_lines(tmp_path, tokenizer, caplog):
    source = write(tmp_path / "a", "w3", "", "w5", "w6", "")
    target = write(tmp_path / "b", "w6", "w7", "  ", "w9", "")
    for _ in range(2):  # from the files, and from the cache
        caplog.clear()
        corpus = tokenize_pairs(source, target, tokenizer, progress=False)
        assert caplog.messages == [f"{source}, {target}: 3 pairs with an empty side are skipped (line 2, 3, 5)"]
    assert [corpus.line(i) for i in range(len(corpus))] == [1, 4]
    assert corpus[1].target.tolist() == [9, 2]


def test_lines_that_a_teacher_did_not_translate_are_told_as_such(tmp_path, caplog):
    """Their sources are not empty: they are too long, or the translation does not end."""
    source, written = tmp_path / "train.src", tmp_path / "0123.txt"
    source.write_text("w3\nw4\n")
    written.write_text("5 2\n\n")
    options = {"name": "train.src, translated by the teacher", "as_tokens": True, "cache_dir": tmp_path / "cache"}
    tokenize_pairs(str(source), str(written), make_tokenizer(), progress=False, **options)
    what = "1 pair with an empty source or no translation that fits and ends is skipped (line 2)"
    assert caplog.messages == [f"train.src, translated by the teacher: {what}"]
    written.write_text("\n\n")
    with pytest.raises(T2RError, match=r"train\.src, translated by the teacher: there are no pairs"):
        tokenize_pairs(str(source), str(written), make_tokenizer(), progress=False, **options)


def test_nothing_but_empty_lines_is_refused(tmp_path, tokenizer):
    with pytest.raises(T2RError, match="there are no pairs"):
        tokenize_pairs(write(tmp_path / "a", "", "w3"), write(tmp_path / "b", "w3", ""), tokenizer, progress=False)


def test_what_is_not_a_pair_of_files_is_refused(tmp_path, tokenizer):
    source = write(tmp_path / "a", "w3")
    with pytest.raises(T2RError, match="2 files of sources and 1 of targets"):
        parse_pairs([source, source], [source])
    with pytest.raises(T2RError, match="there is no file"):
        tokenize_pairs(source, str(tmp_path / "none"), tokenizer, progress=False)
    write(tmp_path / "b", "w3")
    with pytest.raises(T2RError, match="name one file for each side"):
        tokenize_pairs(source, str(tmp_path / "*"), tokenizer, progress=False)
    with pytest.raises(T2RError, match="give all sources a share"):
        parse_pairs([f"{source}:60%", source], [source, source])


def test_one_teacher_is_that_of_every_source():
    pairs = parse_pairs(["a", "b:2"], "teacher", for_all=("teacher",))
    assert [str(pair) for pair in pairs] == ["a -> teacher", "b:2 -> teacher"]


def blocks_of(tmp_path, tokenizer, count=200, block_size=48, **options):
    corpus = tokenize_pairs(*write_pairs(tmp_path, "train", count), tokenizer, progress=False)
    return corpus, PairBlocks([WeightedSource("a")], [corpus], block_size, **options)


def test_blocks_hold_every_pair_once_and_fit(tmp_path, tokenizer):
    corpus, blocks = blocks_of(tmp_path, tokenizer)
    members = Counter(pair for block in blocks.blocks for _, pair in block.tolist())
    assert members == Counter(range(len(corpus)))
    sizes = []
    for i in range(len(blocks)):
        sizes.append((len(blocks[i]), max(len(side) for pair in blocks[i] for side in pair)))
    shapes = [blocks.shape_of(longest) for _, longest in sizes]
    assert all(rows <= most and most * width <= 48 for (rows, _), (most, width) in zip(sizes, shapes, strict=True))
    # There are few shapes, and little is padded.
    assert set(shapes) == {(6, 8), (4, 12), (3, 16)}
    assert corpus.lengths.sum() > 0.7 * sum(rows * width for rows, width in shapes)
    # Blocks are full, but for the last one and those with what was left of a smaller width.
    assert sum(rows < most for (rows, _), (most, _) in zip(sizes, shapes, strict=True)) <= 3


def test_widths_of_blocks():
    lengths = np.arange(1, 600)
    widths = width_of(lengths)
    assert np.unique(widths).tolist() == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768]
    assert (widths >= lengths).all()
    assert (widths[8:] <= 1.5 * lengths[8:]).all()


def test_blocks_depend_on_the_seed_alone(tmp_path, tokenizer):
    corpus, blocks = blocks_of(tmp_path, tokenizer, seed=3)
    made = [PairBlocks([WeightedSource("a")], [corpus], 48, seed=seed) for seed in (3, 4)]
    same = [all(np.array_equal(x, y) for x, y in zip(blocks.blocks, other.blocks, strict=False)) for other in made]
    assert same == [True, False]


def test_long_pairs_are_skipped_with_their_lines(tmp_path, tokenizer, caplog):
    source = write(tmp_path / "a", "", "w3", " ".join(["w4"] * 9), "w5", "w6")
    target = write(tmp_path / "b", "w3", "w6", "w7", "w8 " * 10, "w9")
    corpus = tokenize_pairs(source, target, tokenizer, progress=False)
    caplog.clear()
    blocks = PairBlocks([WeightedSource("a")], [corpus], 100, positions=9)
    blocks.notices()
    assert caplog.messages == [f"{source}: 2 pairs with more than 9 tokens are skipped (line 3, 4)"]
    assert sorted(pair.source.tolist() for i in range(len(blocks)) for pair in blocks[i]) == [[3, 2], [6, 2]]
    with pytest.raises(T2RError, match="every pair has more than 1 tokens"):
        PairBlocks([WeightedSource("a")], [corpus], 100, positions=1)


def test_weights_are_numbers_of_readings(tmp_path, tokenizer):
    corpora = [
        tokenize_pairs(*write_pairs(tmp_path, name, 60, seed), tokenizer, progress=False)
        for seed, name in enumerate("ab")
    ]
    blocks = PairBlocks([WeightedSource("a", readings=2), WeightedSource("b")], corpora, 40)
    order = Order(blocks, length=3 * sum(int(count * times) for count, times in blocks.portions), seed=1)
    counts = order.totals()
    read = Counter()
    for place in range(len(order)):
        index, _ = order.at(place)
        for corpus, pair in blocks.blocks[index].tolist():
            read[corpus, pair] += 1
    assert {read[0, pair] for pair in range(60)} == {6}
    assert {read[1, pair] for pair in range(60)} == {3}
    assert blocks.tokens_of_sources(counts) == [6 * corpora[0].lengths.sum(), 3 * corpora[1].lengths.sum()]


def test_shares_are_shares_of_what_is_read(tmp_path, tokenizer):
    corpora = [
        tokenize_pairs(*write_pairs(tmp_path, name, count), tokenizer, progress=False)
        for name, count in (("a", 200), ("b", 100))
    ]
    blocks = PairBlocks([WeightedSource("a", share=25), WeightedSource("b", share=75)], corpora, 40)
    order = Order(blocks, length=4000)
    read = blocks.tokens_of_sources(order.totals())
    assert read[0] / sum(read) == pytest.approx(0.25, abs=0.02)


def test_columns_of_a_dataset(tmp_path, monkeypatch):
    """One dataset has both sides: the same pairs as in files."""
    source, target = write_pairs(tmp_path, "a", 6)
    lines = [(tmp_path / f"a.{side}").read_text().splitlines() for side in ("src", "tgt")]
    (file := tmp_path / "rows.arrow").write_bytes(b"1")

    class Rows(list):
        cache_files = ({"filename": str(file)},)

    def load_dataset(name, config, split):
        assert (name, config, split) == ("a/b", "de-en", "train[:1%]")
        return Rows({"translation": {"en": one, "de": f"{other}\n"}} for one, other in zip(*lines, strict=True))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    name = "datasets:a/b:de-en:train[:1%]"
    read = tokenize_pairs(f"{name}@en", f"{name}@de", make_tokenizer(), progress=False)
    same = tokenize_pairs(source, target, make_tokenizer(), progress=False)
    assert [[side.tolist() for side in read[i]] for i in range(6)] == [[s.tolist() for s in same[i]] for i in range(6)]
    (pair,) = parse_pairs(f"{name}@en:2", f"{name}@de")
    assert (pair.source, pair.weighted.readings) == (f"{name}@en", 2)
    with pytest.raises(T2RError, match="name the language of this side"):
        find_file(name)
    with pytest.raises(T2RError, match="row 0: there is no text in 'fr'"):
        tokenize_pairs(f"{name}@en", f"{name}@fr", make_tokenizer(), progress=False)
