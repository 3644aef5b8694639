"""A translation model, converted end to end: trained, measured, saved, stopped and resumed, translating afterwards."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

import t2r
from t2r.errors import T2RError
from t2r.generation.translation import translate, write_translations
from t2r.pipelines.common import Texts
from t2r.pipelines.convert import convert, summary
from t2r.tasks import translation
from t2r.training.loop.trainer import StageTrainer
from t2r.training.planning.timing import Cost, Speeds
from t2r.training.recipes.recipe import load_recipe
from t2r.training.sessions import session as sessions
from t2r.training.steps.order import Order
from translating import make_model, make_tokenizer, sentences, write_pairs

SHORT = ("block_size=64", "batch_tokens=128", "transfer.steps=4", "distill.steps=4", "warmup_steps=0")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_model().save_pretrained(folder / "marian")
    make_tokenizer().save_pretrained(folder / "marian")
    write_pairs(folder, "train", 60)
    write_pairs(folder, "more", 40, seed=7)
    write_pairs(folder, "valid", 6, seed=1)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def run(world, out, overrides=(), **options):
    given = {
        "source": str(world / "train.src"),
        "target": str(world / "train.tgt"),
        "valid_source": str(world / "valid.src"),
        "valid_target": str(world / "valid.tgt"),
        "device": "cpu",
        "progress": False,
    } | options
    return convert(str(world / "marian"), str(out), overrides=[*SHORT, *overrides], **given)


def weights(folder):
    return {name: x for path in Path(folder).glob("*.safetensors") for name, x in load_file(path).items()}


def test_a_forward_pass_reads_one_block(caplog):
    """Several blocks would be padded to the width of the widest."""
    plan = load_recipe("distill-mt", ["device_tokens=100000"])
    fitted = Texts(source=("a",), target=("b",)).fitted(plan, make_model())
    assert all(stage.device_tokens == stage.block_size for stage in fitted.stages)
    assert "device_tokens 100000 has no effect" in caplog.text


def test_the_whole_way(world, tmp_path):
    out = tmp_path / "out"
    results = run(world, out)
    assert results["task"] == "translation"
    assert list(results["stages"]) == ["transfer", "distill"]
    for measured in (results["teacher"], results["swapped"], *results["stages"].values()):
        assert {"bleu", "chrf", "loss", "kl", "bleu_signature", "chrf_signature"} <= set(measured)
    assert results["swapped"]["kl"] > results["stages"]["distill"]["kl"] > 0
    assert results["teacher"]["kl"] is None
    assert json.loads((out / "results.json").read_text())["teacher"] == results["teacher"]
    assert [column.header for column in summary(results).columns][:2] == ["model", "BLEU"]
    card = (out / "README.md").read_text()
    assert "pipeline_tag: translation" in card
    assert "| after distill |" in card
    assert "`train.src` with `train.tgt`: 60 pairs" in card
    (mixture,) = results["mixture"]
    assert mixture["pairs"] == 60
    assert mixture["read"]["distill"] > 0
    # What was saved translates, by t2r and by transformers.
    model, words = AutoModelForSeq2SeqLM.from_pretrained(out), make_tokenizer()
    assert model.t2r_config.recurrent == "causal"  # cross attention stays exact
    assert model.t2r_config.cross_feature_size is None
    assert model.t2r_config.feature_size == 4
    assert model.t2r_config.merged == results["merged"]
    lines = sentences(3, 11)
    texts = [done.text for done in t2r.generate(str(out), lines, num_beams=2, max_new_tokens=20)]
    ids = words(lines, return_tensors="pt", padding=True)
    expected = model.generate(
        ids.input_ids, attention_mask=ids.attention_mask, num_beams=2, max_new_tokens=20, do_sample=False
    )
    assert texts == words.batch_decode(expected, skip_special_tokens=True)


def test_distillation_learns_from_every_token_once_an_epoch(world, tmp_path, monkeypatch):
    read = []
    real = StageTrainer.compute_loss

    def watched(self, model, inputs, *args, **kwargs):
        if self.stage.name == "distill":
            read.extend(tuple(row[row != 0].tolist()) for row in inputs["input_ids"])
        return real(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(StageTrainer, "compute_loss", watched)
    run(world, tmp_path / "out", ["distill.epochs=1", "batch_tokens=64"], valid_source=None, valid_target=None)
    words = make_tokenizer()
    assert sorted(read) == sorted(tuple(words(line).input_ids) for line in sentences(60))


def test_resumed_is_as_if_it_had_not_been_stopped(world, tmp_path, monkeypatch):
    no_valid = {"valid_source": None, "valid_target": None, "save_steps": 2}
    noise = ["distill.noise=0.2", "distill.noise_from=2", "distill.steps=6"]
    run(world, tmp_path / "whole", noise, **no_valid)

    class Stopped(Exception):
        pass

    real = Order.__getitem__

    def stops(self, place):
        if self.items.block_size == 64 and place >= 9 and not stopped:
            stopped.append(place)
            raise Stopped
        return real(self, place)

    stopped = []
    monkeypatch.setattr(Order, "__getitem__", stops)
    with pytest.raises(Stopped):
        run(world, tmp_path / "parts", noise, **no_valid)
    assert (tmp_path / "parts.run" / "distill.checkpoints").exists()
    run(world, tmp_path / "parts", noise, **no_valid)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_neighboring_lines_are_joined(world, tmp_path, monkeypatch):
    """Both those with given targets and those that the teacher translates; a longer side counts as its tokens."""
    made = []
    real = translation.JoinedCorpus

    def watched(*args):
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(translation, "JoinedCorpus", watched)
    both = [str(world / "train.src"), str(world / "more.src")]
    results = run(world, tmp_path / "out", source=both, target=[str(world / "train.tgt"), "teacher"], join=3)
    assert [entry["join"] for entry in results["mixture"]] == [3, 3]
    assert "of up to 3 neighboring lines each" in (tmp_path / "out" / "README.md").read_text()
    given, taught = made[0], made[-1]
    assert (len(given.corpus), len(taught.corpus)) == (60, 40)
    assert len(given) < 60 / 1.5
    assert len(taught) < 40 / 1.5
    ends = [taught[i].target.tolist().count(2) for i in range(len(taught))]
    assert set(ends) == {1}
    with pytest.raises(t2r.T2RError, match="join must be a whole number, at least 1"):
        run(world, tmp_path / "other", join=0)


def test_the_teacher_translates_the_sources(world, tmp_path, monkeypatch):
    out = tmp_path / "out"
    both = [str(world / "train.src"), f"{world / 'more.src'}:2"]
    given = {}

    def watched(*args, **options):
        given.update(options)
        return write_translations(*args, **options)

    monkeypatch.setattr(translation, "write_translations", watched)
    results = run(world, out, source=both, target=[str(world / "train.tgt"), "teacher"], teacher_beams=1)
    assert given["beams"] == 1  # evaluation has five
    assert [entry["target"] for entry in results["mixture"]] == [str(world / "train.tgt"), "teacher"]
    assert "`more.src` with translations by the base model (2 readings)" in (out / "README.md").read_text()
    (written,) = (tmp_path / "cache" / "translations").glob("*.txt")
    assert len(written.read_text().splitlines()) == 40


@contextmanager
def clock(monkeypatch, seconds):
    """A search takes this many seconds for a source token. Training takes little."""

    def timed(teacher, tokenizer, lines, beams, length_penalty):
        assert len(lines) == 60
        return seconds

    def time_all(job, model, plan, write):
        return Speeds({stage.name: Cost(1e-4, 0.0) for stage in plan.stages}, 1e-4, write())

    with monkeypatch.context() as patch:
        patch.setattr(translation, "time_translation", timed)
        patch.setattr(sessions, "time_all", time_all)
        yield


@pytest.mark.slow
def test_translations_have_a_share_of_the_time(world, tmp_path, monkeypatch, caplog):
    """Fewer lines are translated, spread over the file. Once all are translated, all are used."""
    teacher = {"target": "teacher", "valid_source": None, "valid_target": None, "teacher_beams": 1}
    caplog.set_level("INFO", "t2r")
    with clock(monkeypatch, 0.02):  # 150 tokens in a quarter of 12 seconds: two blocks of 64
        results = run(world, tmp_path / "some", minutes=0.2, **teacher)
    said = re.search(r"the teacher translates (\d+) of 60 lines, to fit into 0.2 minutes", caplog.text)
    count = int(said[1])
    assert 10 < count < 20
    assert f"plan: the teacher translates {count} of 60 lines: about 3 seconds" in caplog.text
    (mixture,) = results["mixture"]
    assert mixture["pairs"] == count
    (written,) = (tmp_path / "cache" / "translations").glob("*.txt")
    assert len(written.read_text().splitlines()) == count
    with clock(monkeypatch, 1.0), pytest.raises(T2RError, match=r"the teacher translates \d+ of 60 lines, which takes"):
        run(world, tmp_path / "none", minutes=0.2, **teacher)
    assert not list(tmp_path.glob("none*"))
    run(world, tmp_path / "all", **teacher)
    with clock(monkeypatch, 1.0):
        assert run(world, tmp_path / "again", minutes=0.2, **teacher)["mixture"][0]["pairs"] >= 55


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": "text.txt"}, "parallel text (source, target: --src, --tgt), not both"),
        ({"target": None}, "1 file of sources and 0 of targets"),
        ({"target": "{w}/valid.tgt"}, "ends after line 6, and"),
        ({"source": "{w}/none.src"}, "there is no file"),
        ({"valid_target": None}, "give both a source and a target"),
        ({"valid_source": "{w}/train.src"}, "ends after line 6, and"),
        ({"recipe": "distill-xx"}, "no recipe 'distill-xx'"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(world, tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(sessions, "run_stage", None)
    given = {name: x.replace("{w}", str(world)) if x is not None else None for name, x in options.items()}
    with pytest.raises(T2RError) as error:
        run(world, tmp_path / "out", **given)
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.run").exists()


def test_an_encoder_decoder_wants_parallel_text(world, tmp_path):
    (tmp_path / "text.txt").write_text("w3 w4 " * 100)
    with pytest.raises(T2RError, match="marian is an encoder-decoder: give it parallel text"):
        convert(str(world / "marian"), str(tmp_path / "out"), train=str(tmp_path / "text.txt"), device="cpu")


def test_models_are_evaluated_side_by_side(world, tmp_path):
    t2r.swap(make_model(), feature_size=4, recurrent="both").save_pretrained(tmp_path / "rnn")
    make_tokenizer().save_pretrained(tmp_path / "rnn")
    models = [str(world / "marian"), str(tmp_path / "rnn")]
    pair = {"source": world / "valid.src", "reference": world / "valid.tgt", "beams": 2, "device": "cpu"}
    first, second = t2r.evaluate(models, **pair, outputs=tmp_path / "texts")
    assert second["bleu_difference"] == second["bleu"] - first["bleu"]
    assert "bleu_difference" not in first
    lines = (world / "valid.src").read_text().splitlines()
    assert Path(first["output"]).read_text().splitlines() == translate(make_model(), make_tokenizer(), lines, beams=2)
    assert Path(second["output"]).name == "2-rnn.txt"
    with pytest.raises(T2RError, match="--src and --ref"):
        t2r.evaluate(models, source=world / "valid.src")
    with pytest.raises(T2RError, match="no tokenizer 'klingon'"):
        t2r.evaluate(models, **pair, bleu_tokenize="klingon")
