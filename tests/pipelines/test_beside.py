"""What a conversion measures of its result beside the teacher, and the learning rates that it logs."""

import copy
import json
import random

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import t2r
import translating
from t2r.attention.cache import cache_bytes
from t2r.evaluation.generation import NAMES, WORDS, recall
from t2r.pipelines import beside
from t2r.training.sessions import session as sessions

POSITIONS = 128
SHORT = ["block_size=16", "batch_tokens=64", "transfer.steps=4", "distill.steps=4", "warmup_steps=0"]
RATES = {"transfer": {"learning_rate": 1e-2}, "distill": {"learning_rate": 1e-3, "map_learning_rate": 2e-2}}


def text(lines, seed):
    pick = random.Random(seed)
    return "\n".join(" ".join(pick.choice(WORDS) for _ in range(40)) for _ in range(lines))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return the folder of a model and texts. Every word is a token."""
    folder = tmp_path_factory.mktemp("beside")
    words = ["<eos>", ".", "The", "password", "of", "the", "is", *NAMES, *WORDS]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder / "llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=POSITIONS, eos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    (folder / "train.txt").write_text(text(30, 0))
    (folder / "valid.txt").write_text(text(9, 1))
    return folder


def convert(world, out, **options):
    rates = [f"{stage}.{name}={rate}" for stage, own in RATES.items() for name, rate in own.items()]
    given = {"train": str(world / "train.txt"), "valid": str(world / "valid.txt"), "overrides": [*SHORT, *rates]}
    how = {"limit": 2, "device": "cpu", "progress": False, "feature_size": 8}
    return t2r.convert(str(world / "llama"), str(out), **(given | how | options))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def timed(monkeypatch):
    """Let short runs count as long ones."""
    monkeypatch.setattr(sessions, "WORTH_TIMING", 1)


def test_the_result_beside_its_teacher(world, tmp_path, timed):
    results = convert(world, tmp_path / "rnn")
    assert json.loads((tmp_path / "rnn" / "results.json").read_text()) == results
    teacher = AutoModelForCausalLM.from_pretrained(world / "llama").eval()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "rnn").eval()
    tokenizer = t2r.load_tokenizer(str(world / "llama"))

    wanted = recall(teacher, tokenizer, (world / "valid.txt").read_text(), distances=(16, 64), trials=2)
    assert [row["accuracy"] for row in results["teacher_recall"]] == [row.accuracy for row in wanted]
    assert [row["distance"] for row in results["teacher_recall"]] == [row["distance"] for row in results["recall"]]
    assert "recall of the teacher: " in (tmp_path / "rnn" / "README.md").read_text()

    first, second = results["samples"]
    lines = (world / "valid.txt").read_text().splitlines()
    assert [lines[3].startswith(first["prompt"]), lines[6].startswith(second["prompt"])] == [True, True]
    how = beside.SAMPLED | {"max_new_tokens": beside.NEW_TOKENS, "seed": 0, "tokenizer": tokenizer}
    for name, model in (("teacher", teacher), ("model", student)):
        texts = [done.text for done in t2r.generate(model, [first["prompt"], second["prompt"]], **how)]
        assert texts == [first[name], second[name]]
        assert first[name].split()

    (point,) = results["speed"]["points"]
    assert point["tokens"] == POSITIONS
    assert min(point["teacher"], point["model"]) > 0
    (row,) = results["memory"]
    assert row["tokens"] == POSITIONS
    half = [copy.deepcopy(model).to(torch.bfloat16) for model in (teacher, student)]
    caches = [model(torch.zeros(1, POSITIONS, dtype=torch.long), use_cache=True).past_key_values for model in half]
    assert [row["teacher"], row["model"]] == list(map(cache_bytes, caches))

    text = (t2r.report(tmp_path / "rnn")).read_text()
    assert all(words in text for words in ("recall of a word after 64 tokens", "tokens per second", first["prompt"]))


def test_a_short_run(world, tmp_path):
    """It has neither samples nor speed. Its learning rates are those of the stages, not those of the first parameter
    group of the optimizer, which is one of the maps."""
    results = convert(world, tmp_path / "rnn")
    assert results["teacher_recall"]
    assert results["memory"]
    assert not {"samples", "speed"} & results.keys()
    for stage, rates in RATES.items():
        first, *_, last = results["log"][stage]
        for name, rate in rates.items():
            assert first[name] == pytest.approx(rate)
            assert last[name] < rate
    assert "map_learning_rate" not in results["log"]["transfer"][0]


def test_a_failure_does_not_lose_the_model(world, tmp_path, timed, monkeypatch, caplog):
    """Nor does a teacher in bfloat16, with which a copy of the student is compared."""

    def fails(models, *args, **options):
        assert {model.dtype for model in models.values()} == {torch.bfloat16}
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(beside.decoding, "run", fails)
    results = convert(world, tmp_path / "rnn", bf16=True)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "rnn")
    assert saved.dtype == torch.float32
    assert [sorted(sample) for sample in results["samples"]] == [["model", "prompt", "teacher"]] * 2
    assert "speed" not in results
    assert "speed cannot be measured: out of memory" in caplog.text


def test_the_time_is_reserved(world, tmp_path, timed, monkeypatch):
    """A stage with a time budget ends early enough for what is measured after the last."""
    seen = []
    seconds_for = sessions.Session.seconds_for

    def watched(session, stage):
        seen.append((session.aside, seconds_for(session, stage)))
        session.aside += 1000.0
        assert not seconds_for(session, stage)
        session.aside -= 1000.0
        return 0.1  # ten minutes are enough on any machine, and are not trained

    monkeypatch.setattr(sessions.Session, "seconds_for", watched)
    convert(world, tmp_path / "rnn", overrides=SHORT[:2], minutes=10)
    assert len(seen) == 2
    assert all(aside > 0 and seconds > 0 for aside, seconds in seen)


def test_translations(tmp_path, timed):
    folder = tmp_path / "marian"
    copy.deepcopy(translating.trained(steps=0)).save_pretrained(folder)
    translating.make_tokenizer().save_pretrained(folder)
    lines = translating.sentences(60)
    (tmp_path / "a.src").write_text("\n".join(lines))
    (tmp_path / "a.tgt").write_text("\n".join(map(translating.translated, lines)))
    texts = {"source": "a.src", "target": "a.tgt", "valid_source": "a.src", "valid_target": "a.tgt"}
    results = t2r.convert(
        str(folder),
        str(tmp_path / "rnn"),
        **{name: str(tmp_path / file) for name, file in texts.items()},
        overrides=["block_size=64", "batch_tokens=64", "transfer.steps=2", "distill.steps=2", "warmup_steps=0"],
        limit=4,
        device="cpu",
        progress=False,
    )
    assert [sample["prompt"] for sample in results["samples"]] == lines[:3]
    teacher = t2r.generate(folder, lines[:3], do_sample=False, num_beams=1, max_new_tokens=32)
    assert [sample["teacher"] for sample in results["samples"]] == [done.text for done in teacher]
    assert [point["tokens"] for point in results["speed"]["points"]] == [16]
    page = t2r.report(tmp_path / "rnn").read_text()
    assert "tokens per second, in lines of 16 tokens" in page
    assert f"Source: \u201c{lines[0]}\u201d" in page
