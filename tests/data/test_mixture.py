"""Tests of weighted sources: parsing, and the composition of an epoch."""

import json
import logging
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from t2r.data import Blocks
from t2r.data.corpus import CorpusWriter, JoinedCorpus, TokenCorpus
from t2r.data.mixture import MixedBlocks, WeightedSource, parse_sources, readings_of_shares, warn_of_shares
from t2r.errors import T2RError
from t2r.tasks import LanguageModeling
from t2r.training.steps.order import Order, epoch_items


@pytest.fixture
def make(tmp_path):
    """Build corpora of documents with these lengths. The tokens of the n-th corpus are in the n-th thousand."""

    def corpus(number, *documents):
        with CorpusWriter(tmp_path / f"{number:032x}", np.dtype(np.uint16)) as writer:
            count = 0
            for length in documents:
                writer.add([1000 * number + (count + i) % 1000 for i in range(length)], scored=True)
                writer.end_document(None, True)
                count += length
            writer.commit({})
        return TokenCorpus(tmp_path / f"{number:032x}")

    return corpus


# --- Parsing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "source", "readings", "share"),
    [
        ("wiki.txt", "wiki.txt", None, None),
        ("wiki.txt:2", "wiki.txt", 2, None),
        ("novels.txt:0.5", "novels.txt", 0.5, None),
        ("novels.txt:.5", "novels.txt", 0.5, None),
        ("wiki.txt:60%", "wiki.txt", None, 60),
        ("wiki.txt:0.5%", "wiki.txt", None, 0.5),
        ("books/*.txt:3", "books/*.txt", 3, None),
        ("chats.jsonl.gz:1.5", "chats.jsonl.gz", 1.5, None),
        ("datasets:a/b:config:train:2", "datasets:a/b:config:train", 2, None),
        ("datasets:a/b:config:train[:1%]", "datasets:a/b:config:train[:1%]", None, None),
        ("datasets:a/b:20%", "datasets:a/b", None, 20),
        ("teacher:2", "teacher", 2, None),
        ("C:\\texts\\wiki.txt", "C:\\texts\\wiki.txt", None, None),
        ("wiki:two", "wiki:two", None, None),
    ],
)
def test_a_source_is_written_with_its_weight(text, source, readings, share):
    assert parse_sources(text) == [WeightedSource(source, readings, share)]


def test_weights_are_given_in_many_forms():
    expected = [WeightedSource("a.txt", 2.0), WeightedSource("b.txt", 0.5)]
    assert parse_sources(["a.txt:2", "b.txt:0.5"]) == expected
    assert parse_sources({"a.txt": 2, "b.txt": 0.5}) == expected
    assert parse_sources([("a.txt", 2), ["b.txt", "0.5"]]) == expected
    assert parse_sources([{"source": "a.txt", "readings": 2}, {"source": "b.txt", "readings": "5e-1"}]) == expected
    shares = [WeightedSource("a.txt", share=60.0), WeightedSource("b.txt", share=40.0)]
    assert parse_sources({"a.txt": "60%", Path("b.txt"): "40 %"}) == shares
    assert parse_sources([{"source": "a.txt", "share": "60%"}, {"source": "b.txt", "share": 40}]) == shares
    assert parse_sources(shares) == shares
    assert [str(source) for source in shares + expected] == ["a.txt:60%", "b.txt:40%", "a.txt:2", "b.txt:0.5"]


def test_a_source_named_again_is_read_again():
    assert parse_sources(["a.txt"] * 8) == [WeightedSource("a.txt", 8.0)]
    assert parse_sources(["a.txt:0.5", "b.txt", "a.txt:2"])[0] == WeightedSource("a.txt", 2.5)
    assert parse_sources(["a.txt:10%", "b.txt:60%", "a.txt:30%"])[0] == WeightedSource("a.txt", share=40.0)


def test_a_file_whose_name_ends_like_a_weight_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd.txt:2").write_text("x")
    assert parse_sources(["odd.txt:2"]) == [WeightedSource("odd.txt:2")]
    assert parse_sources(["odd.txt:2:3"]) == [WeightedSource("odd.txt:2", 3.0)]
    assert parse_sources(["*.txt:2"]) == [WeightedSource("*.txt:2")]
    assert parse_sources(["*.md:2"]) == [WeightedSource("*.md", 2.0)]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("a.txt:0", r"a.txt: readings must be a number, at least 0.001"),
        ("a.txt:-2", r"a.txt: readings must be"),
        ("a.txt:1e9", r"readings must be .* at most 10,000"),
        ("a.txt:0%", r"share must be a number, at least 1e-06"),
        (["a.txt:60%", "b.txt"], r"a.txt:60% has a share and b.txt does not"),
        (["b.txt:2", "a.txt:60%"], r"a.txt:60% has a share and b.txt:2 does not"),
        ({"a.txt": "many"}, r"readings must be"),
        ({"a.txt": float("nan")}, r"readings must be"),
        ({"a.txt": True}, r"readings must be"),
        ({"a.txt": "x%"}, r"share must be"),
        ([("a.txt", 1, 2)], r"a pair of source and weight"),
        ([{"readings": 2}], r"has no source"),
        ([{"source": "a.txt", "weight": 2}], r"unknown option weight; the options are source, readings, share"),
        ([{"source": "a.txt", "readings": 2, "share": 3}], r"readings or a share, not both"),
        ([{"source": 3.5j}], r"source must be text"),
        ([7], r"got 7"),
    ],
)
def test_wrong_weights_are_one_line(train, words):
    with pytest.raises(T2RError, match=words) as caught:
        parse_sources(train)
    assert "\n" not in str(caught.value)


def test_shares_that_do_not_add_up_are_scaled_with_a_notice(caplog, make):
    sources = parse_sources({"a": "3%", "b": "1%"})
    assert MixedBlocks(sources, [make(1, 100), make(2, 100)], 10).readings == [3, 1]
    with caplog.at_level(logging.WARNING):
        warn_of_shares(parse_sources({"a": "60%", "b": "40%"}))
        assert not caplog.text
        warn_of_shares(sources)
    assert "add up to 4 %: they are scaled to 100 %" in caplog.text


# --- Joined corpora -------------------------------------------------------------------------------------------


def test_joined_corpora_read_as_one(make):
    parts = [make(1, 5, 8), make(2, 3), make(3, 20, 2)]
    joined = JoinedCorpus(parts)
    tokens = np.concatenate([part.tokens for part in parts])
    starts = [0, 5, 13, 16, 36]
    assert len(joined) == len(tokens) == 38
    for start in range(0, 38, 3):
        for stop in range(start + 1, 39, 4):
            assert joined.read(start, stop).tolist() == tokens[start:stop].tolist()
            expected = [i - max(start, max(s for s in starts if s <= i)) for i in range(start, stop)]
            assert joined.positions(start, stop).tolist() == expected
            assert joined.scored(start, stop).all()
    assert JoinedCorpus(parts[:1]).key == parts[0].folder.name
    assert JoinedCorpus(parts).key != JoinedCorpus(parts[::-1]).key


def test_sources_with_equal_weights_are_concatenated(make):
    """A block may start in one file and end in the next."""
    corpora = [make(1, 15), make(2, 7), make(3, 30), make(4, 9)]
    mixed = MixedBlocks(parse_sources(["a", "b", "c:2", "d:1"]), corpora, 10, documents=True)
    assert [len(part) for part in mixed.parts] == [3, 3]  # 15 + 7 + 9, and 30
    assert mixed[1]["input_ids"].tolist() == [*range(1010, 1015), *range(2000, 2005)]
    assert mixed[1]["position_ids"].tolist() == [*range(5), *range(5)]
    assert mixed[3]["input_ids"].tolist() == list(range(3000, 3010)) == mixed[-3]["input_ids"].tolist()
    assert mixed.portions == [(3, 1), (3, 2)]
    with pytest.raises(IndexError):
        mixed[6]
    # The last token of d is in no block.
    read = mixed.tokens_of_sources(np.array([2, 4, 2, 1, 1, 1]))
    assert read == [2 * 10 + 4 * 5, 4 * 5 + 2 * 2, 30, 2 * 8]


def test_a_source_too_short_for_a_block_is_named(make):
    corpora = [make(1, 100), make(2, 9)]
    assert len(MixedBlocks(parse_sources(["a", "b"]), corpora, 10)) == 10
    with pytest.raises(T2RError, match=r"^b has 9 tokens, less than one block of 10.*, to concatenate both$"):
        MixedBlocks(parse_sources(["a", "b:2"]), corpora, 10)
    for sources in (["a:90%", "b:10%"], ["teacher", "b"]):  # which are never concatenated
        with pytest.raises(T2RError, match=r"^b has 9 tokens, .* or use a smaller block_size$"):
            MixedBlocks(parse_sources(sources), corpora, 10, apart=("teacher",))


# --- Epochs ---------------------------------------------------------------------------------------------------

WEIGHTS = st.one_of(
    st.integers(1, 9).map(float), st.integers(1, 40).map(lambda n: n / 8), st.floats(0.02, 5).map(lambda x: round(x, 3))
)


class Parts:
    """A dataset with the interface that `Order` requires."""

    def __init__(self, counts, readings):
        self.portions = [(count, Fraction(str(times))) for count, times in zip(counts, readings, strict=True)]
        self.edges = np.cumsum([0, *counts])

    def __len__(self):
        return int(self.edges[-1])

    def __getitem__(self, index):
        return index


@given(st.lists(st.tuples(st.integers(1, 60), WEIGHTS), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 9))
def test_an_epoch_reads_each_source_as_often_as_it_says(parts, epochs, seed):
    items = Parts(*zip(*parts, strict=True))
    order = Order(items, 10**6, seed)
    total = np.zeros(len(items), np.int64)
    for epoch in range(epochs):
        indices, readings = order.epoch(epoch)
        counts = np.bincount(indices, minlength=len(items))
        for (count, times), start in zip(items.portions, items.edges, strict=False):
            own = counts[start : start + count]
            assert abs(own.sum() - count * times) < 1  # within one block
            assert set(own) <= {int(times), -(-times.numerator // times.denominator)}
            if times < 1 and own.sum() > 1:  # evenly spread: the distances differ by at most one
                gaps = np.diff(np.flatnonzero(own))
                assert gaps.max() - gaps.min() <= 1
        for index, reading in zip(indices, readings, strict=True):  # readings are numbered in order of time
            total[index] += 1
            assert reading == total[index]
    for (count, times), start in zip(items.portions, items.edges, strict=False):
        assert all(abs(n - epochs * times) < 1 for n in total[start : start + count])


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 99)), min_size=1, max_size=4))
def test_shares_are_met_within_a_block(parts):
    counts, shares = zip(*parts, strict=True)
    readings = readings_of_shares([Fraction(share) for share in shares], counts)
    assert min(readings) == 1  # the source that lasts longest
    assume(sum(count * times for count, times in zip(counts, readings, strict=True)) < 10**5)
    items = Parts(counts, [1] * len(counts))
    items.portions = list(zip(counts, readings, strict=True))
    indices, _ = Order(items, 10**6).epoch(0)
    epoch = float(sum(count * times for count, times in zip(counts, readings, strict=True)))
    for start, stop, share in zip(items.edges, items.edges[1:], shares, strict=False):
        read = ((indices >= start) & (indices < stop)).sum()
        assert abs(read - epoch * share / sum(shares)) <= 1


def test_the_other_half_is_read_in_the_next_epoch():
    order = Order(Parts([10], [0.5]), 20)
    first, second = set(order.epoch(0)[0]), set(order.epoch(1)[0])
    assert first == {1, 3, 5, 7, 9}
    assert first | second == set(range(10))
    assert [order[i][1] for i in range(20)] == [1] * 10 + [2] * 10


def test_the_order_depends_on_the_seed_alone():
    items = Parts([50, 30], [1, 2.5])
    one, same, other = (Order(items, 400, seed) for seed in (1, 1, 2))
    listed = [one[i] for i in range(400)]
    assert listed == [same[i] for i in reversed(range(400))][::-1]
    assert listed != [other[i] for i in range(400)]
    # Epochs have different orders.
    assert [index for index, _ in listed[:125]] != [index for index, _ in listed[125:250]]
    assert listed[7:300] == [Order(items, 400, 1)[i] for i in range(7, 300)]  # independent of the start
    with pytest.raises(IndexError):
        one[400]


@pytest.mark.parametrize("length", [0, 1, 9, 125, 130, 400])
def test_what_was_read_is_counted(length):
    items = Parts([50, 30], [1, 2.5])
    order = Order(items, 400, 1)
    expected = np.bincount([order.at(i)[0] for i in range(length)], minlength=80)
    assert order.totals(length).tolist() == expected.tolist()


def test_a_long_epoch_is_divided(monkeypatch):
    from t2r.training.steps import order as module

    monkeypatch.setattr(module, "LARGEST", 100)
    items = Parts([40, 120], [2, 1])
    order = Order(items, 200, 3)
    assert len(order.epoch(0)[0]) == 100
    counts = order.totals()
    assert counts.tolist() == [2] * 40 + [1] * 120
    assert epoch_items(items) == 200


def test_the_first_item_of_very_unequal_shares_is_found_at_once():
    """An epoch has sixty million items: they are not permuted together."""
    order = Order(Parts([1000, 2], [60_000, 1]), 10**9)
    order.at(0)
    assert len(order.epoch(0)[0]) <= 2**20
    before, after = order.read_before(58), order.read_before(59)
    assert (after - before)[:1000].min() > 1000
    assert order.read_before(2 * 58)[1000:].tolist() == [2, 2]


def test_items_without_weights_are_read_once():
    order = Order(list("abcdef"), 12)
    assert sorted(order[i] for i in range(6)) == [(letter, 1) for letter in "abcdef"]
    assert sorted(order[i] for i in range(6, 12)) == [(letter, 2) for letter in "abcdef"]


# --- The task -------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("one two three four " * 100)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "five six seven " * 50}) + "\n")
    return tmp_path


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "one", "two", "three", "four", "five", "six", "seven"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_changed_weights_do_not_tokenize_again(texts, tokenizer):
    def read(*weights):
        task = LanguageModeling(tokenizer, {str(texts / n): w for n, w in zip(NAMES, weights, strict=True)})
        task.read()
        return task

    NAMES = ("a.txt", "b.jsonl")
    task = read(1, 1)
    assert task.tokens == task.epoch_tokens == 552
    made = {path.name: path.stat().st_mtime_ns for path in (texts / "cache" / "tokens").iterdir()}
    assert len(made) == 2
    assert read(2, 0.5).epoch_tokens == 2 * 401 + 75.5 + 0.5  # rounded to even
    shared = read("30%", "30%")
    assert shared.epoch_tokens == 2 * 401
    assert {path.name: path.stat().st_mtime_ns for path in (texts / "cache" / "tokens").iterdir()} == made
    assert isinstance(shared.dataset(16).parts[0], Blocks)
    assert shared.describe()["train"] == [f"{texts / 'a.txt'}:30%", f"{texts / 'b.jsonl'}:30%"]
