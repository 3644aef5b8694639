"""Pairs of neighboring lines: nothing is lost, and a group is tokenized as one line would be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import NllbTokenizer

from families import tiny
from t2r.data.parallel.corpus import tokenize_pairs
from t2r.data.parallel.joined import JoinedCorpus, frame, group_starts, join
from t2r.tasks import Translation
from translating import make_tokenizer, sentences, write_pairs


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def corpus_of(tmp_path, lines):
    for side, name in enumerate(("a", "b")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in lines))
    return tokenize_pairs(str(tmp_path / "a"), str(tmp_path / "b"), make_tokenizer(), progress=False)


def test_groups_have_one_end_and_grow_in_turn(tmp_path):
    lines = [(f"w{3 + i}", f"w{3 + i} w{14 - i}") for i in range(8)]
    joined = JoinedCorpus(corpus_of(tmp_path, lines), 3, {2}, None)
    found = [(pair.source.tolist(), pair.target.tolist()) for pair in map(joined.__getitem__, range(len(joined)))]
    assert found == [
        ([3, 2], [3, 14, 2]),
        ([4, 5, 2], [4, 13, 5, 12, 2]),
        ([6, 7, 8, 2], [6, 11, 7, 10, 8, 9, 2]),
        ([9, 2], [9, 8, 2]),
        ([10, 2], [10, 7, 2]),  # of two, the second is missing
    ]
    assert joined.lengths.tolist() == [len(target) for _, target in found]
    assert [joined.line(i) for i in range(5)] == [1, 2, 4, 7, 8]
    assert joined.key != joined.corpus.key


def test_lines_with_the_code_of_a_language_are_tokenized_as_one_line(tmp_path):
    tokenizer = NllbTokenizer(
        vocab={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "\u2581": 4} | {c: 5 + i for i, c in enumerate("abcdef")},
        src_lang="eng_Latn",
        tgt_lang="deu_Latn",
    )
    for name, lines in (("a", ("f", "abc", "de")), ("b", ("a", "b", "cd"))):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    task = Translation(tokenizer, str(tmp_path / "a"), str(tmp_path / "b"), join=2, progress=False)
    task.read()
    _, pair = (task.corpora[0][i] for i in range(2))
    assert pair.source.tolist() == tokenizer("abc de").input_ids
    assert pair.target.tolist() == tokenizer(text_target="b cd").input_ids


def test_a_group_ends_before_it_is_too_long(tmp_path):
    long = " ".join(["w9"] * 9)
    lines = [("w3", "w4"), ("w5", "w6"), ("w7", long), (long, "w8"), ("w3", "w4")]
    joined = JoinedCorpus(corpus_of(tmp_path, lines), 4, {2}, 6)
    assert joined.starts.tolist() == [0, 1, 2, 3, 4]
    assert [len(joined[i].source) for i in range(5)] == [2, 2, 2, 10, 2]
    assert [joined.line(i) for i in range(5)] == [1, 2, 3, 4, 5]


def test_no_line_is_lost_in_blocks_smaller_than_the_positions(tmp_path):
    tokenizer, files = make_tokenizer(), write_pairs(tmp_path, "train", 40, longest=8)
    task = Translation(tokenizer, *files, join=4, progress=False)
    task.check(tiny("marian"), [64, 12])  # 64 positions
    task.prepare(None, 64)
    for size in (64, 12):
        kept = sum(len(pair.source) - 1 for block in task.dataset(size) for pair in block)
        assert kept == sum(len(line.split()) for line in sentences(40, longest=8))
    assert len(task.corpora[0]) < 40


def test_skipped_lines_do_not_shift_the_numbers(tmp_path):
    joined = JoinedCorpus(corpus_of(tmp_path, [("w3", "w4"), ("", "w5"), ("w6", "w7"), ("w8", "w9")]), 2, {2}, None)
    assert [joined.line(i) for i in range(2)] == [1, 3]
    assert joined[1].source.tolist() == [6, 8, 2]


def test_the_tokens_that_every_line_begins_and_ends_with():
    lines = [np.array([7, 7, 3, 1]), np.array([7, 7, 1]), np.array([7, 5, 2, 1])]
    assert frame(lines, {1, 7}) == (1, 1)
    assert frame(lines, {9}) == (0, 0)
    assert frame([np.array([1])], {1}) == (0, 0)
    assert join(lines, 1, 1).tolist() == [7, 7, 3, 7, 5, 2, 1]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30),
    most=st.integers(1, 5),
    longest=st.none() | st.integers(1, 20),
)
def test_every_line_is_in_one_group(lengths, most, longest):
    starts = group_starts(np.array(lengths), most, longest).tolist()
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
        assert 1 <= end - start <= most
        if end - start > 1 and longest is not None:
            assert all(sum(line[side] for line in lengths[start:end]) <= longest for side in (0, 1))


def test_any_choice_of_pairs_has_the_tokens_of_each(tmp_path):
    random = np.random.default_rng(0)
    words = [" ".join(f"w{i}" for i in random.integers(3, 15, count)) for count in random.integers(1, 6, 40)]
    joined = JoinedCorpus(corpus_of(tmp_path, list(zip(words, words[::-1], strict=True))), 4, {2}, 12)
    chosen = random.permutation(len(joined))
    for place, pair in zip(chosen.tolist(), joined.take(chosen), strict=True):
        assert [side.tolist() for side in pair] == [side.tolist() for side in joined[place]]
        assert (len(pair.source), len(pair.target)) == (joined.source_lengths[place], joined.target_lengths[place])
    everything = [token for i in range(len(joined)) for token in joined[i].source.tolist() if token != 2]
    assert everything == [token for i in range(40) for token in joined.corpus[i].source.tolist() if token != 2]
