"""Translation as a task: what a model reads, what is scored against what, and what is measured."""

import copy
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sacrebleu import corpus_bleu, corpus_chrf
from torch.nn.functional import cross_entropy, kl_div
from transformers import MBartTokenizer

import t2r
from families import EOS, PAD, tiny
from t2r.attention.recurrence import exact_attention
from t2r.data.languages import set_languages
from t2r.data.parallel.corpus import tokenize_pairs
from t2r.data.parallel.lines import SomeLines, find_file
from t2r.errors import T2RError
from t2r.generation import translation as translating_module
from t2r.generation.engine.step import DecodeStep
from t2r.generation.text import until_stop
from t2r.generation.translation import bucket_of, translate, translate_to_tokens, write_translations
from t2r.tasks import Translation
from t2r.tasks.base import exchanged
from t2r.training.recipes.recipe import Stage
from t2r.training.steps.job import Job
from t2r.training.steps.learner import Learner
from t2r.training.steps.objectives import transferring
from t2r.training.steps.order import collate
from translating import make_model, make_tokenizer, sentences, translated, write_pairs


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def teacher():
    return make_model().eval()


def make_task(tmp_path, tokenizer, model, **options):
    task = Translation(tokenizer, *write_pairs(tmp_path, "train", 30), progress=False, **options)
    task.check(model, [64])
    task.prepare(None, 64)
    return task


@pytest.mark.parametrize("name", ["marian", "bart", "t5", "fsmt"])
def test_a_batch_is_what_the_model_makes_of_labels(tmp_path, tokenizer, name):
    model = tiny(name, torch.float32)
    task = make_task(tmp_path, tokenizer, model)
    blocks = task.dataset(64)
    batch = task.collate([blocks[0], blocks[1]])
    pairs = [*blocks[0], *blocks[1]]
    for i, pair in enumerate(pairs):
        size = len(pair.source)
        assert batch["input_ids"][i, :size].tolist() == pair.source.tolist()
        assert batch["attention_mask"][i].sum() == size
        assert batch["labels"][i, : len(pair.target)].tolist() == pair.target.tolist()
        assert (batch["labels"][i, len(pair.target) :] == -100).all()
    start = EOS if name == "fsmt" else model.config.decoder_start_token_id
    assert (batch["decoder_input_ids"][:, 0] == start).all()
    assert (batch["decoder_input_ids"] >= 0).all()
    # The model's own loss, from labels alone, is that of our inputs against our labels.
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    with torch.no_grad():
        logits = model(**task.inputs(batch), use_cache=False).logits
        if name != "fsmt":  # whose own loss does not shift
            own = model(**given, labels=batch["labels"].clone()).loss
            ours = cross_entropy(logits.flatten(0, 1), task.labels(batch).flatten())
            torch.testing.assert_close(ours, own)


def test_padding_changes_nothing(tmp_path, tokenizer, teacher):
    task = make_task(tmp_path, tokenizer, teacher)
    student = t2r.swap(copy.deepcopy(teacher), feature_size=4, recurrent="both", cross_feature_size=8)
    blocks = task.dataset(64)
    batch = task.collate([blocks[0], blocks[len(blocks) - 1]])
    for model in (teacher, student):
        with torch.no_grad():
            together = model(**task.inputs(batch), use_cache=False).logits
            pairs = [*blocks[0], *blocks[len(blocks) - 1]]
            for i in (0, len(pairs) - 1):
                alone = model(**task.inputs(task.collate([[pairs[i]]])), use_cache=False).logits
                torch.testing.assert_close(together[i, : alone.shape[1]], alone[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", ["transfer", "distill", "task"])
def test_batches_in_few_shapes_have_the_same_loss(tmp_path, tokenizer, teacher, objective):
    """Padding to the width of a block, and copies of rows, change neither the loss nor its gradients."""
    base = copy.deepcopy(teacher).double()
    model = t2r.swap(copy.deepcopy(base), feature_size=4, recurrent="both", cross_feature_size=8)
    task = make_task(tmp_path, tokenizer, base)
    trained = "maps" if objective == "transfer" else "all"
    learner = Learner(Job(task, base), model, Stage("only", objective, trained, steps=1))
    blocks, shapes = task.dataset(64), set()
    for block in blocks:
        batch = collate([(block, 1)], task.collate, task.rows_of)
        shaped = task.in_few_shapes(batch, 64)
        assert {x.shape[:1] for x in shaped.values()} == {(blocks.shape_of(max(map(max_length, block)))[0],)}
        shapes.add(shaped["labels"].shape)
        assert shaped["labels"].shape == shaped["input_ids"].shape == shaped["attention_mask"].shape
        found = []
        for each in (batch, shaped):
            model.zero_grad()
            loss, _ = learner(each)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(found[1], found[0])
    assert 1 < len(shapes) <= 3


def max_length(pair):
    return max(map(len, pair))


def test_noise_spares_padding_and_the_first_token(tmp_path, tokenizer, teacher):
    task = make_task(tmp_path, tokenizer, teacher)
    batch = task.collate([task.dataset(64)[0], task.dataset(64)[len(task.dataset(64)) - 1]])
    torch.manual_seed(0)
    rows = len(batch["input_ids"])
    share = torch.zeros(rows, 1)
    share[0] = 1.0
    noisy = task.disturbed(batch, share)
    for name in ("input_ids", "decoder_input_ids"):
        assert torch.equal(noisy[name][1:], batch[name][1:])
        assert not torch.equal(noisy[name][0], batch[name][0])
    noisy = task.disturbed(batch, 1.0)
    padding, labeled = batch["attention_mask"] == 0, batch["labels"] >= 0
    assert (noisy["input_ids"][padding] == PAD).all()
    assert (noisy["input_ids"][~padding] != PAD).all()
    ids, before = noisy["decoder_input_ids"], batch["decoder_input_ids"]
    assert torch.equal(ids[:, 0], before[:, 0])
    assert torch.equal(ids[~labeled], before[~labeled])
    words = ids[:, 1:][labeled[:, 1:]]
    assert (words > EOS).all()  # neither padding nor the end of another target
    assert len(words.unique()) > 5


def test_noise_without_real_tokens_changes_nothing():
    ids = torch.arange(6).view(2, 3)
    assert torch.equal(exchanged(ids, 1.0, torch.zeros(2, 3, dtype=torch.bool)), ids)


def test_a_transfer_sees_causal_and_cross_attention(tmp_path, tokenizer, teacher):
    task = make_task(tmp_path, tokenizer, teacher)
    student = t2r.swap(copy.deepcopy(teacher), feature_size=4, recurrent="both", cross_feature_size=8)
    batch = task.collate([task.dataset(64)[0]])
    with transferring(student) as errors:
        student(**task.inputs(batch), use_cache=False)
    layers = student.config.decoder_layers
    assert len(errors) == 2 * layers
    torch.stack(errors).mean().backward()
    maps = {name: p.grad for name, p in student.named_parameters() if "feature_map" in name}
    assert len({name.split(".feature_map")[0] for name in maps}) == 2 * layers
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in maps.values())


def test_a_step_is_timed_with_pairs_that_are_not_too_long(tmp_path, tokenizer, teacher):
    """Also if most pairs are beyond the positions, and all of the first file."""
    files = [write_pairs(tmp_path, "long", 5, shortest=70, longest=80), write_pairs(tmp_path, "train", 30, longest=8)]
    for path in files[1]:
        with open(path, "a") as file:
            file.write("w3 " * 70 + "\n" + ("w4 " * 70 + "\n") * 40)
    task = Translation(tokenizer, *map(list, zip(*files, strict=True)), progress=False)
    task.check(teacher, [64])
    task.prepare(None, 64)
    batch = task.example(2, 64)
    lengths = batch["attention_mask"].sum(1)
    assert len(lengths) == 2 * 64 // 5
    assert lengths.max() <= 9


def test_what_is_measured(tmp_path, tokenizer, teacher):
    source, target = write_pairs(tmp_path, "valid", 12, seed=5)
    task = make_task(tmp_path, tokenizer, teacher, valid_source=source, valid_target=target, beams=2, limit=10)
    student = t2r.swap(copy.deepcopy(teacher), feature_size=4, recurrent="both", cross_feature_size=8).eval()
    measured = task.measure(student, teacher)
    lines = sentences(12, 5)[:10]
    references = list(map(translated, lines))
    texts = translate(student, tokenizer, lines, beams=2)
    assert measured["bleu"] == pytest.approx(corpus_bleu(texts, [references]).score)
    assert measured["chrf"] == pytest.approx(corpus_chrf(texts, [references]).score)
    assert "tok:13a" in measured["bleu_signature"]
    assert measured["lines"] == 10
    # Token by token, a pair at a time.
    loss = kl = tokens = 0.0
    for line, reference in zip(lines, references, strict=True):
        given = tokenizer([line], return_tensors="pt")
        labels = tokenizer(text_target=[reference], return_tensors="pt").input_ids
        with torch.no_grad():
            ours, theirs = (
                model(input_ids=given.input_ids, labels=labels, use_cache=False).logits[0].log_softmax(-1)
                for model in (student, teacher)
            )
        loss += cross_entropy(ours, labels[0], reduction="sum").item()
        kl += kl_div(ours, theirs, log_target=True, reduction="sum").item()
        tokens += labels.numel()
    assert measured["tokens"] == tokens
    assert measured["loss"] == pytest.approx(loss / tokens, rel=1e-4)
    assert measured["kl"] == pytest.approx(kl / tokens, rel=1e-3)


def test_what_scores_say():
    def score(bleu, loss=1.0):
        return {"bleu": bleu, "loss": loss}

    assert Translation.gap(score(42.4), score(39.0)) is None
    assert Translation.gap(score(42.4), score(5.1)) == "its BLEU is 5.1 instead of 42.4 (-37.3)"
    assert Translation.gap(score(5.0), score(4.1)) is None  # 18 %, but less than one
    assert Translation.doubt(score(20.0)) is None
    assert Translation.doubt(score(0.3, 7.0)) == "its loss is 7.0 per token, and its BLEU 0.3"


def test_the_time_of_a_search_is_measured(tokenizer, teacher, monkeypatch):
    """On lines of the median length, more of them until they take long enough; the first is a warm-up."""
    seen, now = [], [0.0]

    def translate(model, tokenizer, lines, *args, **options):
        seen.append(len(lines))
        now[0] += 6.0 * len(lines)

    monkeypatch.setattr(translating_module, "translate_to_tokens", translate)
    monkeypatch.setattr(translating_module.time, "perf_counter", lambda: now[0])
    lines = ["w3", "", *["w3 w4 w5"] * 20, "w5 " * 40]
    token = translating_module.time_translation(teacher, tokenizer, lines, 5, 0.6)
    assert seen == [1, 7]
    assert token == pytest.approx(7 * 6.0 / (7 * 4), rel=0.1)
    assert translating_module.time_translation(teacher, tokenizer, ["", " "], 5, 0.6) == 0.0


def test_some_lines_are_spread_evenly(tmp_path):
    (tmp_path / "lines").write_text("".join(f"{i}\n" for i in range(10)))
    file = find_file(str(tmp_path / "lines"))
    assert list(SomeLines(file, 4, 10).read_lines()) == ["2", "4", "7", "9"]
    assert list(SomeLines(file, 10, 10).read_lines()) == [str(i) for i in range(10)]
    assert SomeLines(file, 4, 10).fingerprint() != SomeLines(file, 5, 10).fingerprint() != file.fingerprint()


def test_the_table():
    measured = [
        ("teacher", {"bleu": 20.0, "chrf": 50.0, "loss": 1.5, "kl": None}),
        ("after distill", {"bleu": 19.5, "chrf": 49.0, "loss": 1.6, "kl": 0.05}),
    ]
    header, rows = Translation.table(measured, compared=True)
    assert header == ("model", "BLEU", "against the teacher", "chrF", "loss per token", "KL to the teacher")
    assert rows[1] == ("after distill", "19.50", "-0.50", "49.00", "1.600", "0.0500")
    assert Translation.table([("untrained", None)], compared=False)[1] == []


# --- Translating --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True])
def test_lines_are_translated_as_one_at_a_time(tokenizer, teacher, swapped):
    model = (
        t2r.swap(copy.deepcopy(teacher), feature_size=4, recurrent="both", cross_feature_size=8).eval()
        if swapped
        else teacher
    )
    lines = ["", *sentences(4, longest=30), "  ", sentences(1, 9, shortest=20, longest=30)[0]]
    done = []
    together = translate(model, tokenizer, lines, beams=2, report=done.append)
    assert together == [translate(model, tokenizer, [line], beams=2)[0] for line in lines]
    assert not together[0]
    assert not together[5]
    assert len(set(together)) > 4
    assert done == sorted(done)
    assert done[-1] == len(lines)


def ways(kind, teacher):
    """A teacher, or a model that a conversion measures, in float64."""
    model = copy.deepcopy(teacher).double()
    model.generation_config.forced_eos_token_id = EOS
    model.generation_config.bad_words_ids = [[PAD], [9]]
    if kind == "bart":
        torch.manual_seed(0)
        model = tiny("bart", torch.float64)
        model.generation_config.forced_bos_token_id = 5
    return (
        model
        if kind in ("teacher", "bart")
        else t2r.swap(model, feature_size=4, recurrent="both", cross_feature_size=8).eval()
    )


@pytest.mark.parametrize("kind", ["teacher", "swapped", "exact", "bart"])
def test_the_engine_translates_as_generate(kind, tokenizer, teacher, monkeypatch, caplog):
    """Lines join and leave a running batch of 4, and each has the translation of `generate` for it alone."""
    model, all_beams = ways(kind, teacher), (1, 3) if kind == "teacher" else (1,)
    few = 1 if kind == "teacher" else 2  # the others write until their limits
    lines = [*sentences(12 // few, 1, longest=14), *sentences(3 // few, 2, shortest=20, longest=30)]
    with exact_attention(model) if kind == "exact" else nullcontext():
        expected = {}
        for beams in all_beams:
            how = {"num_beams": beams, "do_sample": False} | ({"length_penalty": 0.6} if beams > 1 else {})
            expected[beams] = []
            for line in lines:
                ids = torch.tensor([tokenizer(line).input_ids])
                limit = 2 * bucket_of(ids.shape[1]) + 16
                out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(limit, 63), **how)
                expected[beams].append(until_stop(out[0, 1:].tolist(), [EOS]))
        steps, before = Counter(), []
        build = DecodeStep.__init__

        def counted(self, model, rows, length, source, **how):
            assert not any(step() for step in before)  # one cache at a time
            before.append(weakref.ref(self))
            steps[how["reorders"], rows, length, source] += 1
            build(self, model, rows, length, source, **how)

        monkeypatch.setattr(DecodeStep, "__init__", counted)
        monkeypatch.setitem(translating_module.TOKENS, "cpu", 4 * 16)
        monkeypatch.setattr(type(model), "generate", refuse_own_loop(type(model).generate))
        for beams in all_beams:
            assert translate_to_tokens(model, tokenizer, lines, beams, 0.6, name="") == expected[beams]
    assert len({len(row) for row in expected[1]}) > 1
    assert max(steps.values()) == 1
    buffers = {(length, source) for reorders, _, length, source in steps if not reorders}
    assert buffers == ({(None, None)} if kind == "swapped" else {(49, 16), (64, 32)})
    assert not caplog.records


def refuse_own_loop(real):
    """`generate` may prepare a call of the engine, but not decode."""

    def generate(self, *args, **kwargs):
        assert "custom_generate" in kwargs
        return real(self, *args, **kwargs)

    return generate


@pytest.mark.parametrize("beams", [1, 2])
def test_a_translation_that_does_not_end_is_empty(tokenizer, teacher, beams):
    """Also if the model's configuration forces an EOS token at the limit."""
    model = copy.deepcopy(teacher)
    model.final_logits_bias[0, EOS] = -1e4
    model.generation_config.forced_eos_token_id = EOS
    model.generation_config.eos_token_id = [EOS, 3]
    lines = sentences(12, 3, longest=5)
    given, whole = (
        translate_to_tokens(model, tokenizer, lines, beams, 0.6, name="", whole=whole) for whole in (False, True)
    )
    endless = [row[-1] == EOS for row in given]
    assert 0 < sum(endless) < 12
    assert whole == [[] if never else row for row, never in zip(given, endless, strict=True)]


def test_a_model_that_the_engine_does_not_support_translates_with_generate(tokenizer, caplog):
    torch.manual_seed(0)
    model = tiny("t5", torch.float64)
    ids = torch.tensor([tokenizer("w3 w4").input_ids])
    expected = until_stop(model.generate(ids, max_new_tokens=48)[0, 1:].tolist(), [EOS])
    assert translate_to_tokens(model, tokenizer, ["w3 w4"], 1, 0.6, name="") == [expected]
    assert "translating with model.generate()" in caplog.text
    assert "relative bias" in caplog.text


def test_a_line_beyond_the_positions_is_told_by_its_number(tokenizer, teacher):
    lines = ["w3", "w4 " * 80]
    with pytest.raises(T2RError, match=r"test.zh:2: 81 tokens are beyond the 64 positions"):
        translate(teacher, tokenizer, lines, name="test.zh")


def test_translations_of_a_file_go_on_where_they_were(tmp_path, tokenizer, teacher, monkeypatch):
    source, _ = write_pairs(tmp_path, "train", 10)
    with open(source, "a") as file:
        file.write("\n" + "w4 " * 80 + "\n")
    monkeypatch.setattr(translating_module, "CHUNK", 4)
    whole = write_translations(teacher, tokenizer, source, tmp_path / "one", beams=2, progress=False)
    lines = whole.read_text().splitlines()
    assert len(lines) == 12
    assert all(line.endswith(f" {EOS}") or line == str(EOS) for line in lines[:10])
    assert lines[10:] == ["", ""]  # empty, and too long

    class Stopped(Exception):
        pass

    calls = []
    real = translating_module.translate_to_tokens

    def stops(*args, **kwargs):
        calls.append(kwargs["first"])
        if len(calls) == 2:
            raise Stopped
        return real(*args, **kwargs)

    monkeypatch.setattr(translating_module, "translate_to_tokens", stops)
    with pytest.raises(Stopped):
        write_translations(teacher, tokenizer, source, tmp_path / "two", beams=2, progress=False)
    (partial,) = (tmp_path / "two").glob("*.partial")
    partial.write_text(partial.read_text() + "12 5")  # and in the middle of a line
    again = write_translations(teacher, tokenizer, source, tmp_path / "two", beams=2, progress=False)
    assert calls == [1, 5, 5, 9]
    assert again.read_text() == whole.read_text()


def test_an_interruption_loses_a_few_minutes_of_translations(tmp_path, tokenizer, teacher, monkeypatch):
    """Whatever the speed of the machine. The first write must come soon, because the speed is not known before."""
    source = tmp_path / "many.src"
    source.write_text("w3\n" * 3000)
    now, calls = 0.0, []

    def slowly(model, tokenizer, lines, *args, first, **options):
        nonlocal now
        now += len(lines) * 0.5
        calls.append((first, len(lines)))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [[first + i] for i in range(len(lines))]

    monkeypatch.setattr(translating_module, "translate_to_tokens", slowly)
    monkeypatch.setattr(translating_module.time, "perf_counter", lambda: now)
    with pytest.raises(KeyboardInterrupt):
        write_translations(teacher, tokenizer, str(source), tmp_path / "cache", progress=False)
    (partial,) = (tmp_path / "cache").glob("*.partial")
    assert partial.read_text().splitlines() == [str(i + 1) for i in range(256 + 360)]
    assert calls == [(1, 256), (257, 360), (617, 360)]


def test_translations_of_a_file_are_written_once(tmp_path, tokenizer, teacher, monkeypatch):
    """Commands of a grid share the cache. Threads take the lock like processes."""
    source, _ = write_pairs(tmp_path, "train", 6)
    calls = []

    def slowly(model, tokenizer, lines, *args, first, **options):
        calls.append(first)
        time.sleep(0.05)
        return [[first + i] for i in range(len(lines))]

    monkeypatch.setattr(translating_module, "CHUNK", 2)
    monkeypatch.setattr(translating_module, "translate_to_tokens", slowly)
    with ThreadPoolExecutor(2) as pool:
        writing = [
            pool.submit(write_translations, teacher, tokenizer, source, tmp_path / "cache", progress=False)
            for _ in range(2)
        ]
        first, second = (done.result() for done in writing)
    assert first == second
    assert first.read_text() == "1\n2\n3\n4\n5\n6\n"
    assert calls == [1, 3, 5]
    assert list(first.parent.iterdir()) == [first]


def test_what_the_teacher_wrote_is_learned_token_by_token(tmp_path, tokenizer, teacher):
    source, _ = write_pairs(tmp_path, "train", 6)
    written = write_translations(teacher, tokenizer, source, beams=2, progress=False)
    corpus = tokenize_pairs(source, str(written), tokenizer, as_tokens=True, progress=False)
    for i in range(len(corpus)):
        line = written.read_text().splitlines()[corpus.line(i) - 1]
        assert corpus[i].target.tolist() == list(map(int, line.split()))


def test_mbart_learns_what_the_teacher_wrote_from_the_language_on(tmp_path, monkeypatch):
    """Its decoder starts with the language, which the shift of labels takes from the end of a target."""
    tokenizer = MBartTokenizer()
    model = tiny("mbart", torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    set_languages(model, tokenizer, "en_XX", "de_DE")
    (tmp_path / "train.en").write_text("a\nb\n")
    (tmp_path / "train.de").write_text("b\na\n")
    wrote = [tokenizer(text_target=text)["input_ids"][:-1] for text in ("b", "a")]  # a model ends with the EOS token
    monkeypatch.setattr(translating_module, "translate_to_tokens", lambda *args, **options: wrote)
    batches = []
    for target in ("train.de", "teacher"):
        path = target if target == "teacher" else str(tmp_path / target)
        task = Translation(tokenizer, str(tmp_path / "train.en"), path, progress=False)
        task.check(model, [64])
        task.prepare(model, 64)
        batches.append(task.collate([task.dataset(64)[0]]))
    german = tokenizer.convert_tokens_to_ids("de_DE")
    assert batches[0]["decoder_input_ids"][:, 0].tolist() == [german, german]
    for name, values in batches[0].items():
        assert torch.equal(values, batches[1][name]), name


# --- What is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_a_warning_if_longer_lines_are_measured_than_learned(tmp_path, tokenizer, teacher, caplog, times):
    source, target = write_pairs(tmp_path, "train", 30)
    long = [tmp_path / "long.src", tmp_path / "long.tgt"]
    for file, short in zip(long, (source, target), strict=True):
        lines = Path(short).read_text().splitlines()
        file.write_text("".join(" ".join([line] * times) + "\n" for line in lines))
    task = Translation(tokenizer, source, target, *map(str, long), progress=False)
    task.check(teacher, [64])
    task.prepare(None, 64)
    assert ("join neighboring lines (--join 4)" in caplog.text) == (times == 3)


def test_mistakes_of_the_caller(tmp_path, tokenizer, teacher):
    source, target = write_pairs(tmp_path, "train", 3)
    with pytest.raises(T2RError, match="--valid-src and --valid-tgt"):
        Translation(tokenizer, source, target, valid_source=source)
    with pytest.raises(T2RError, match="no parallel text was given"):
        Translation(tokenizer, None, None).check(teacher, [])
    with pytest.raises(T2RError, match="gpt2 is a language model"):
        Translation(tokenizer, source, target).check(tiny("gpt2"), [])
    alone = Translation(tokenizer, source, "teacher", progress=False)
    with pytest.raises(T2RError, match="there is no teacher"):
        alone.prepare(None, 64)
    for line, words in (("", r"bad:2 is empty"), ("w3 " * 70, r"bad:2: 71 tokens are beyond the 64 positions")):
        (tmp_path / "bad").write_text(f"w3\n{line}\nw4\n")
        with pytest.raises(T2RError, match=words):
            Translation(tokenizer, source, target, str(tmp_path / "bad"), target).check(teacher, [])


def test_bleu_without_sacrebleu_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", SimpleNamespace())
    from t2r.evaluation.translation import metrics

    with pytest.raises(T2RError, match=r"\.\[translation\]"):
        metrics()
