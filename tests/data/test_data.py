"""Tests of corpora: reading, splitting, caching, blocks, and errors."""

import gzip
import json
import lzma
import os
import pickle
import sys
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    ByT5Tokenizer,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
)

from t2r import compat
from t2r.data import Blocks, TokenCorpus, check_block_size, text, tokenize_corpus, tokens
from t2r.data.corpus import CorpusWriter
from t2r.errors import T2RError
from texts import CHAT, EOS, SPLITS, ids, train, words


@pytest.fixture(scope="module")
def tokenizer():
    made = train(eos_token=EOS, pad_token=EOS, unk_token="<unk>")
    made.chat_template = CHAT
    return made


@pytest.fixture
def build(tmp_path, tokenizer):
    """Tokenize files with the cache in the folder of the test."""

    def build(*names, tokenizer=tokenizer, **options) -> TokenCorpus:
        sources = [str(tmp_path / name) for name in names]
        return tokenize_corpus(sources, tokenizer, cache_dir=tmp_path / "cache", progress=False, **options)

    return build


def jsonl(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# Reading


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("name", ["a.txt", "a", "a.md", "a.v1.jsonl"])
def test_formats(tmp_path, build, tokenizer, name, suffix):
    body = words(300)
    data = (jsonl({"text": body, "id": 1}) if name.endswith("jsonl") else body).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    (tmp_path / (name + suffix)).write_bytes(pack(data))
    corpus = build(name + suffix)
    assert corpus.tokens.tolist() == [*ids(tokenizer, body), tokenizer.eos_token_id]
    assert corpus.tokens.dtype == np.uint16
    assert corpus.scored(0, len(corpus)).all()


def test_documents_are_files_in_sorted_order_or_lines(tmp_path, build, tokenizer, monkeypatch):
    listed = text.glob.glob
    monkeypatch.setattr(text.glob, "glob", lambda *args, **options: sorted(listed(*args, **options))[::-1])
    for name, body in {"b.txt": "the cat\n\nsat", "a.txt": "a mat\r\n\r\nit's", "empty.txt": ""}.items():
        (tmp_path / name).write_bytes(body.encode())
    eos = tokenizer.eos_token_id
    texts = ["a mat\r\n\r\nit's", "the cat\n\nsat"]
    corpus = build("*.txt")
    assert corpus.tokens.tolist() == [i for text in texts for i in [*ids(tokenizer, text), eos]]
    assert corpus.starts.tolist() == [0, len(ids(tokenizer, texts[0])) + 1]
    assert build("b.txt", "a.txt").tokens.tolist() != corpus.tokens.tolist()

    assert eos not in build("*.txt", add_eos=False).tokens
    by_line = build("*.txt", lines=True)
    texts = ["a mat", "it's", "the cat", "sat"]
    assert by_line.tokens.tolist() == [i for text in texts for i in [*ids(tokenizer, text), eos]]
    assert by_line.documents == 4


def test_a_byte_order_mark_is_not_text(tmp_path, build):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfthe cat")
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "the cat"}\n')
    (tmp_path / "plain.txt").write_bytes(b"the cat")
    plain = build("plain.txt").tokens.tolist()
    assert build("bom.txt").tokens.tolist() == build("bom.jsonl").tokens.tolist() == plain


def test_characters_survive_any_read_size(tmp_path, build, monkeypatch):
    (tmp_path / "a.txt").write_text("東京🙂" * 50, "utf-8")
    (tmp_path / "b.txt").write_text("東京🙂" * 50, "utf-8")
    whole = build("a.txt").tokens.tolist()
    monkeypatch.setattr(text, "READ", 5)
    assert build("b.txt").tokens.tolist() == whole


def test_large_vocabularies_need_more_bytes(tmp_path, build, tokenizer):
    class Large(PreTrainedTokenizerFast):
        def get_vocab(self):
            return {**super().get_vocab(), "far": 1 << 16}

    (tmp_path / "a.txt").write_text("the cat")
    large = Large(tokenizer_object=tokenizer.backend_tokenizer, eos_token=EOS)
    assert build("a.txt", tokenizer=large).tokens.dtype == np.uint32


@pytest.mark.parametrize("worthwhile", [0, 1 << 20])
def test_slow_tokenizers(tmp_path, build, monkeypatch, worthwhile):
    monkeypatch.setattr(tokens, "PIECE", 100)
    monkeypatch.setattr(compat, "WORTHWHILE", worthwhile)
    slow = ByT5Tokenizer()
    assert not slow.is_fast
    (tmp_path / "a.txt").write_text(words(100), "utf-8")
    assert build("a.txt", tokenizer=slow).tokens.tolist() == [*ids(slow, words(100)), slow.eos_token_id]


# Conversations


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_the_loss_is_on_answers_only(tmp_path, build, tokenizer):
    messages = [user("the cat"), assistant("sat on"), user("a mat"), assistant("it's")]
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "plain"}, {"messages": messages}, {"text": "dogs"}))
    corpus = build("a.jsonl")
    stretches = [
        ("plain" + EOS, True),
        ("<|user|>\nthe cat<end>\n<|assistant|>\n", False),
        ("sat on<end>\n", True),
        ("<|user|>\na mat<end>\n<|assistant|>\n", False),
        ("it's<end>\n", True),  # no EOS, because the template ends the conversation
        ("dogs" + EOS, True),
    ]
    expected = [(i, scored) for stretch, scored in stretches for i in ids(tokenizer, stretch)]
    assert corpus.tokens.tolist() == [i for i, _ in expected]
    assert corpus.scored(0, len(corpus)).tolist() == [scored for _, scored in expected]
    assert corpus.documents == 3

    labels = torch.cat([block["labels"] for block in Blocks(corpus, 2)]).tolist()
    assert labels == [i if scored else -100 for i, scored in expected][: len(labels)]
    assert len(labels) >= len(expected) - 1


def test_a_final_prompt_without_an_answer_has_no_loss(tmp_path, build, tokenizer):
    (tmp_path / "a.jsonl").write_text(jsonl({"messages": [user("a"), assistant("cat"), user("sat")]}))
    corpus = build("a.jsonl")
    learned = corpus.tokens[corpus.scored(0, len(corpus))]
    assert tokenizer.decode(learned) == "cat<end>\n"


def test_a_template_that_rewrites_the_past_gives_a_document_per_answer(tmp_path, build, tokenizer):
    thinking = train(eos_token=EOS)
    thinking.chat_template = CHAT.replace(
        "{{ m.content }}", "{{ '(thinks)' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}"
    )
    messages = [user("the"), assistant("cat"), user("sat"), assistant("on")]
    (tmp_path / "a.jsonl").write_text(jsonl({"messages": messages}))
    corpus = build("a.jsonl", tokenizer=thinking)
    assert corpus.documents == 2
    assert thinking.decode(corpus.tokens[corpus.scored(0, len(corpus))]) == "(thinks)cat<end>\n(thinks)on<end>\n"


# Splitting documents


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("ends", [(" ", " ", "\n"), (" ", " ", "\n\n"), (" ", " \n "), (" ", "\n\n\n", "\r\n"), (" ",)])
def test_pieces_give_the_tokens_of_the_whole(tmp_path, build, monkeypatch, split, ends):
    made = train(split)
    body = words(4000, ends=ends).strip()
    whole = ids(made, body)
    (tmp_path / "a.txt").write_bytes(body.encode())
    monkeypatch.setattr(tokens, "PIECE", 500)
    monkeypatch.setattr(tokens, "BATCH", 3000)
    seen = []
    cut = tokens.cut
    monkeypatch.setattr(tokens, "cut", lambda *args: (seen.append(piece) or piece for piece in cut(*args)))
    assert build("a.txt", tokenizer=made).tokens.tolist() == whole
    assert len(seen) > 30
    assert "".join(piece.text for piece in seen) == body


def test_splits_do_not_depend_on_the_read_size(monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 50)
    tokenizer = train("metaspace")  # its tokens cross newlines, so a split must look ahead
    body = words(2000, ends=(" ", "\n", "\n\n"))

    def pieces(size):
        parts = [tokens.Part(body[i : i + size], ends=False) for i in range(0, len(body), size)]
        return list(tokens.cut(iter([*parts, tokens.Part("")]), tokenizer))

    assert pieces(1) == pieces(37) == pieces(len(body))
    assert all(len(piece.text) <= 50 + tokens.CONTEXT for piece in pieces(37))


def test_text_without_a_good_split_is_split_anyway(tmp_path, build, tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 200)
    (tmp_path / "a.txt").write_text("catmat" * 500)
    corpus = build("a.txt", add_eos=False)
    assert tokenizer.decode(corpus.tokens) == "catmat" * 500


# The cache


@pytest.fixture
def built(monkeypatch):
    """Count how often a corpus was tokenized."""
    count = []
    real = tokens.read_all
    monkeypatch.setattr(tokens, "read_all", lambda *args: count.append(1) or real(*args))
    return count


def test_tokenized_once(tmp_path, build, built, tokenizer):
    (tmp_path / "a.txt").write_text(words(100))
    first = build("a.txt")
    tokenizer(["a", "a cat"], padding="max_length", max_length=4, truncation=True)  # changes the state of the tokenizer
    assert build("a.txt").tokens.tolist() == first.tokens.tolist()
    assert len(built) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.folder.name]


def test_changed_inputs_are_tokenized_again(tmp_path, build, built, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("the cat sat")
    build("a.txt")
    stat = path.stat()
    path.write_text("the mat sat")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and modification time
    assert tokenizer.decode(build("a.txt").tokens) == "the mat sat" + EOS
    build("a.txt", lines=True)
    build("a.txt", add_eos=False)
    build("a.txt", tokenizer=train(unk_token="<unk>"))
    assert len(built) == 5


def test_large_files_are_identified_by_modification_time(tmp_path, build, built, monkeypatch):
    monkeypatch.setattr("t2r.data.fingerprint.SMALL", 0)
    path = tmp_path / "a.txt"
    path.write_text("the cat sat")
    first = build("a.txt")
    stat = path.stat()
    path.write_text("the mat sat")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert build("a.txt").tokens.tolist() != first.tokens.tolist()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_text(path.read_text().replace("<u2", "<i2"))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("tokens.bin", truncate),
        ("starts.bin", truncate),
        ("unscored.bin", Path.unlink),
        ("header.json", truncate),
        ("header.json", flip),
        ("header.json", Path.unlink),
        ("header.json", lambda path: path.write_text("[]")),
    ],
)
def test_a_damaged_cache_is_built_again(tmp_path, build, built, file, damage):
    (tmp_path / "a.txt").write_text(words(100))
    first = build("a.txt")
    expected = first.tokens.tolist()
    damage(first.folder / file)
    with pytest.raises(T2RError, match="not a complete token cache"):
        TokenCorpus(first.folder)
    assert build("a.txt").tokens.tolist() == expected
    assert len(built) == 2


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, build, monkeypatch):
    (tmp_path / "a.txt").write_text(words(100))

    def interrupted(*args):
        yield from [[1, 2, 3]]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "encode_pieces", interrupted)
        patch.setattr(tokens, "PIECE", 50)
        with pytest.raises(KeyboardInterrupt):
            build("a.txt")
    assert not list((tmp_path / "cache").iterdir())


def test_abandoned_folders_are_removed_after_a_day(tmp_path, build):
    (tmp_path / "a.txt").write_text("the cat")
    old, new = f"{'a' * 32}.old.tmp", f"{'a' * 32}.new.tmp"
    for name, age in {old: 1e6, new: 10, "mine.tmp": 1e6}.items():
        left = tmp_path / "cache" / name
        left.mkdir(parents=True)
        (left / "tokens.bin").write_bytes(b"x")
        now = left.stat().st_mtime
        for path in (left / "tokens.bin", left):
            os.utime(path, (now - age, now - age))
    corpus = build("a.txt")
    assert {path.name for path in corpus.folder.parent.iterdir()} == {new, "mine.tmp", corpus.folder.name}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="requires /dev/full")
def test_a_full_disk_is_not_kept_full(tmp_path):
    """Closing a file on a full disk fails too. What was written is removed nevertheless."""

    def write():
        with CorpusWriter(tmp_path / "cache", np.dtype(np.int64)) as writer:
            writer._files["tokens"].close()
            writer._files["tokens"] = open("/dev/full", "wb")  # noqa: SIM115
            writer.add([1])  # stays in the buffer
            writer.add(range(10**5))

    with pytest.raises(OSError, match="No space left"):
        write()
    assert os.listdir(tmp_path) == []


def test_two_processes_may_build_the_same(tmp_path, build, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("the cat")
    real = tokens.encode_pieces

    def overtaken(*args):
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "encode_pieces", real)
            build("a.txt")
        yield from real(*args)

    monkeypatch.setattr(tokens, "encode_pieces", overtaken)
    corpus = build("a.txt")
    assert tokenizer.decode(corpus.tokens) == "the cat" + EOS
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [corpus.folder.name]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, build, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("the cat")
    real = tokens.encode_pieces
    monkeypatch.setattr(tokens, "encode_pieces", lambda *args: path.write_text("the cats") and real(*args))
    with pytest.raises(T2RError, match="changed while being read"):
        build("a.txt")


def test_the_cache_goes_where_the_environment_says(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("the cat")
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "here"))
    assert tokenize_corpus(str(tmp_path / "a.txt"), tokenizer).folder.parent == tmp_path / "here" / "tokens"
    monkeypatch.delenv("T2R_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = tokenize_corpus(str(tmp_path / "a.txt"), tokenizer).folder
    assert folder.parent == tmp_path / "xdg" / "t2r" / "tokens"


# Errors


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "there is no text in .*a.txt"),
        ("a.txt", b"ab\nc\xff", r"a.txt is not UTF-8: 0xff at byte 4 \(invalid start byte\)"),
        ("a.txt", b"abc\xe6\x9d", "a.txt is not UTF-8: 0xe6 at byte 3"),
        ("a.txt.gz", gzip.compress(b"ab\xff", mtime=0), "0xff at byte 2"),
        ("a.txt.gz", b"plain", "a.txt.gz is damaged or not a .gz file"),
        ("a.txt.gz", gzip.compress(words(500).encode(), mtime=0)[:-20], "a.txt.gz is damaged"),
        ("a.txt.xz", lzma.compress(words(500).encode())[:-20], "a.txt.xz is damaged"),
        ("a.txt.xz", b"plain", "a.txt.xz is damaged or not a .xz file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2: not JSON: "),
        ("a.jsonl", b'{"text": "a"}\n\n{"txt": "a"}\n', "a.jsonl:3: requires `text` .* or `messages`"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1: requires `text`"),
        ("a.jsonl", b'["a"]\n', "a.jsonl:1: requires `text`"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl is not UTF-8: 0xff at byte 24, line 2"),
        ("a.jsonl", b'{"messages": "hi"}\n', "a.jsonl:1: `messages` must be a list of objects"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', "a.jsonl:1: .* no assistant message"),
    ],
)
def test_bad_files_are_named(tmp_path, build, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(T2RError, match=message) as caught:
        build(name)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def test_a_bad_byte_is_counted_over_reads(tmp_path, build, monkeypatch):
    monkeypatch.setattr(text, "READ", 4)
    (tmp_path / "a.txt").write_bytes("東京東京".encode() + b"\xff.")
    with pytest.raises(T2RError, match="0xff at byte 12 "):
        build("a.txt")


def test_missing_files(tmp_path, build):
    with pytest.raises(T2RError, match=r"there is no file .*a\.txt"):
        build("a.txt")
    with pytest.raises(T2RError, match=r"no file matches .*\*\.txt"):
        build("*.txt")
    with pytest.raises(T2RError, match="is a folder: give its files as a glob"):
        build("")
    with pytest.raises(T2RError, match="no text was given"):
        build()


def test_chat_template_errors(tmp_path, build, tokenizer):
    (tmp_path / "a.jsonl").write_text(jsonl({"messages": [user("a"), assistant("b")]}))
    made = train(eos_token=EOS)
    with pytest.raises(T2RError, match=r"a.jsonl:1: the tokenizer has no chat template"):
        build("a.jsonl", tokenizer=made)
    made.chat_template = "{{ raise_exception('no cats') }}"
    with pytest.raises(T2RError, match=r"a.jsonl:1: the chat template rejects this conversation: no cats"):
        build("a.jsonl", tokenizer=made)
    made.chat_template = "{{ messages | length }}"
    with pytest.raises(T2RError, match=r"a.jsonl:1: cannot separate answers from prompts"):
        build("a.jsonl", tokenizer=made)


# datasets


def test_datasets_need_the_extra(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(T2RError, match=r"datasets:a requires the datasets extra: pip install '\.\[datasets\]'"):
        tokenize_corpus("datasets:a", tokenizer)


def test_datasets(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "rows.arrow"
    asked = []

    class Rows(list):
        cache_files = ({"filename": str(file)},)

    def load_dataset(name, config, split):
        if name == "nowhere":
            raise FileNotFoundError("no such\ndataset")
        asked.append((name, config, split))
        return Rows([{"text": "the cat"}, {"messages": [user("a"), assistant("b")]}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    folders = set()
    for name in ("a/b", "a/b:c", "a/b:c:test[:1%]", "a/b::valid"):
        file.write_bytes(b"1")
        corpus = tokenize_corpus(f"datasets:{name}", tokenizer, cache_dir=tmp_path / "cache", progress=False)
        assert tokenizer.decode(corpus.tokens).startswith("the cat" + EOS)
        folders.add(corpus.folder)
    file.write_bytes(b"2")
    folders.add(tokenize_corpus("datasets:a/b", tokenizer, cache_dir=tmp_path / "cache", progress=False).folder)
    assert len(folders) == 5
    assert asked[:4] == [
        ("a/b", None, "train"),
        ("a/b", "c", "train"),
        ("a/b", "c", "test[:1%]"),
        ("a/b", None, "valid"),
    ]
    with pytest.raises(T2RError, match="cannot load datasets:nowhere: no such dataset"):
        tokenize_corpus("datasets:nowhere", tokenizer)


def test_datasets_with_the_library(tmp_path, tokenizer, monkeypatch):
    """Read Parquet files in a folder, as on the Hub: rows of text and messages, a split, and a slice of it."""
    datasets = pytest.importorskip("datasets", reason="needs the datasets extra")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    for split, texts in (("train", ["the cat", "sat"]), ("validation", ["on a mat"])):
        rows = datasets.Dataset.from_dict({"text": texts})
        rows.to_parquet(tmp_path / "plain" / f"{split}.parquet")
    chats = [[user("the"), assistant("cat")]]
    datasets.Dataset.from_dict({"messages": chats}).to_parquet(tmp_path / "chats" / "train.parquet")

    def read(name):
        source = f"datasets:{tmp_path}/{name}"
        return tokenizer.decode(tokenize_corpus(source, tokenizer, cache_dir=tmp_path / "cache", progress=False).tokens)

    assert read("plain") == f"the cat{EOS}sat{EOS}"
    assert read("plain::train[1:]") == f"sat{EOS}"
    assert read("plain::validation") == f"on a mat{EOS}"
    assert "cat" in read("chats")
    with pytest.raises(T2RError, match=r"cannot load datasets:.*/plain::test: Unknown split"):
        read("plain::test")


# Blocks


@pytest.fixture
def corpus(tmp_path, build):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(words(1 + 7 * i % 40, seed=i), "utf-8")
    return build("*.txt")


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("size", [2, 7, 64])
def test_blocks_tile_the_corpus(corpus, size, documents):
    blocks = Blocks(corpus, size, documents=documents)
    items = list(blocks)
    assert len(items) == len(blocks) == len(corpus) // size
    assert torch.cat([item["input_ids"] for item in items]).tolist() == corpus.tokens[: len(items) * size].tolist()
    assert all(item[key].dtype == torch.int64 and len(item[key]) == size for item in items for key in item)
    assert blocks[-1]["input_ids"].equal(items[-1]["input_ids"])
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    if not documents:
        assert all(item["labels"].equal(item["input_ids"]) and "position_ids" not in item for item in items)


def test_documents_start_over_as_transformers_packs_them(corpus):
    size = 64
    flatten = DataCollatorWithFlattening()
    starts = set(corpus.starts.tolist())
    for index, item in enumerate(Blocks(corpus, size, documents=True)):
        first = index * size
        edges = [first, *(i for i in range(first + 1, first + size) if i in starts), first + size]
        packed = flatten([{"input_ids": corpus.tokens[a:b].tolist()} for a, b in pairwise(edges)])
        for key in ("input_ids", "position_ids", "labels"):
            assert item[key].equal(packed[key][0]), key
    assert index > 5
    assert len(starts) == 30


def test_blocks_travel_to_workers(corpus):
    blocks = Blocks(corpus, 16, documents=True)
    state = pickle.dumps(blocks)
    assert len(state) < 1000  # the path, not the tokens
    assert pickle.loads(state)[3]["input_ids"].equal(blocks[3]["input_ids"])
    loader = DataLoader(blocks, batch_size=4, num_workers=1)
    seen = torch.cat([batch["input_ids"].flatten() for batch in loader])
    assert seen.tolist() == corpus.tokens[: len(blocks) * 16].tolist()


def test_invalid_block_sizes(corpus):
    check_block_size(512, 512)
    check_block_size(512, None)
    with pytest.raises(T2RError, match="block_size is 513 but the teacher has only 512 positions: use 512 or less"):
        check_block_size(513, 512)
    with pytest.raises(T2RError, match="block_size is 1: "):
        Blocks(corpus, 1)
    with pytest.raises(T2RError, match=rf"the corpus has {len(corpus)} tokens, less than one block of 99999"):
        Blocks(corpus, 99999)
