"""A finished conversion is trained further: with its own swap and weights, and with the model it came from."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import t2r
from converting import SHORT, make_model, make_tokenizer, make_world, run, weights
from t2r.data.fingerprint import of_weights
from t2r.errors import T2RError
from t2r.pipelines.convert import convert, summary
from t2r.pipelines.swap import swap_folder
from t2r.training.sessions import session as sessions
from translating import make_model as make_translator
from translating import make_tokenizer as make_words
from translating import write_pairs


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T2R_CACHE", str(folder / "cache"))
        run(folder, folder / "rnn", feature_size=8, softmax_layers=[1])
        run(folder, folder / "merged", feature_size=8, merged=True)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def test_a_conversion_is_continued(world, tmp_path, caplog):
    valid = str(world / "valid.txt")
    caplog.set_level("INFO", "t2r")
    results = run(world, tmp_path / "more", "rnn", valid=valid, softmax_layers=[1])
    assert "stage transfer is left out" in caplog.text
    assert list(results["stages"]) == ["distill"]
    assert "swapped" not in results
    # It starts where the first conversion ended, and is compared with the same teacher.
    first = run(world, tmp_path / "again", valid=valid, feature_size=8, softmax_layers=[1])
    assert results["teacher"] == pytest.approx(first["teacher"])
    assert results["before"] == pytest.approx(first["stages"]["distill"])
    assert results["stages"]["distill"]["perplexity"] != results["before"]["perplexity"]
    assert [row[0] for row in sessions.table_of(results, compared=True)[1]] == ["teacher", "before", "after distill"]
    assert len(summary(results).rows) == 3
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "more").t2r_config
    assert (config.feature_size, config.softmax_layers) == (8, [1])
    assert config.base_model == str((world / "gpt2").resolve())
    assert config.base_weights == of_weights(make_model("gpt2"))
    card = (tmp_path / "more" / "README.md").read_text()
    assert "base_model: gpt2\n" in card
    assert "| before |" in card
    # And can be continued again.
    run(world, tmp_path / "most", tmp_path / "more")


def test_its_weights_are_trained_with_its_teacher(world, tmp_path):
    """Distilling at a learning rate of 0 changes nothing; the teacher is the base model, not the student."""
    overrides = (*SHORT, "distill.learning_rate=1e-12", "distill.map_learning_rate=1e-12")
    results = run(world, tmp_path / "more", "rnn", valid=str(world / "valid.txt"), overrides=overrides)
    before, after = weights(world / "rnn"), weights(tmp_path / "more")
    assert all(torch.allclose(x, after[name], atol=1e-7) for name, x in before.items())
    assert results["log"]["distill"][0]["kl"] > 1e-6


def test_a_swapped_model_still_has_the_transfer_before_it(world, tmp_path):
    """Its own softmax attention is the teacher's."""
    swap_folder(str(world / "gpt2"), str(tmp_path / "swapped"), feature_size=4)
    assert list(run(world, tmp_path / "out", tmp_path / "swapped")["stages"]) == ["transfer", "distill"]
    only = tmp_path / "transfer.yaml"
    only.write_text("name: only\nstages: [{name: a, objective: transfer, train: maps, steps: 2}]")
    asked = {"recipe": str(only), "overrides": SHORT[:2]}
    run(world, tmp_path / "maps", tmp_path / "swapped", **asked)
    assert list(run(world, tmp_path / "twice", tmp_path / "maps")["stages"]) == ["transfer", "distill"]
    with pytest.raises(T2RError, match="recipe only has only transfers, which require the weights of the teacher"):
        run(world, tmp_path / "none", "rnn", **asked)


def test_a_teacher_that_has_moved(world, tmp_path):
    shutil.copytree(world / "gpt2", tmp_path / "old")
    run(world, tmp_path / "rnn", tmp_path / "old", feature_size=4)
    shutil.move(tmp_path / "old", tmp_path / "new")
    with pytest.raises(T2RError, match=r"was converted from .*old, which cannot be loaded .*: if it has moved, say"):
        run(world, tmp_path / "more", tmp_path / "rnn")
    run(world, tmp_path / "more", tmp_path / "rnn", teacher=str(tmp_path / "new"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "more").t2r_config.base_model == str(tmp_path / "new")
    (tmp_path / "rnn" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "rnn" / "config.json").read_text()) | {"base_model": None})
    )
    with pytest.raises(T2RError, match="does not say which model it was converted from"):
        run(world, tmp_path / "most", tmp_path / "rnn")
    run(world, tmp_path / "most", tmp_path / "rnn", teacher=make_model("gpt2"))


def other_weights():
    model = make_model("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(1.001)
    return model


def other_activation():
    model = make_model("gpt2")
    model.config.activation_function = "relu"
    return model


def quantized():
    model = make_model("gpt2")
    model.is_quantized = True  # as transformers marks it
    return model


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("merged", {}, "is merged and cannot be trained: continue from the model it was merged from"),
        ("rnn", {"feature_size": 16}, r"feature_size is 8 in .*rnn, not 16: a conversion is continued with its own"),
        ("rnn", {"softmax_layers": [0]}, r"softmax_layers is \[1\] in .*rnn, not \[0\]"),
        ("rnn", {"softmax_layers": "auto:1"}, r"auto:1 chooses layers when a model is converted: .*rnn.* in \[1\]"),
        ("rnn", {"teacher": other_weights}, "has other weights than the model that .*rnn was converted from"),
        ("rnn", {"teacher": other_activation}, "has another activation_function than that of .*rnn: give the model"),
        ("rnn", {"teacher": quantized}, "the model has quantized weights"),
        ("rnn", {"teacher": "rnn"}, "the teacher .*rnn is a t2r model"),
        ("rnn", {"teacher": "nowhere/at/all"}, "there is no folder"),
        ("gpt2", {"teacher": "gpt2"}, "a model is its own teacher"),
    ],
)
def test_refused_in_one_line(world, tmp_path, model, options, says):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    if options.get("teacher") in ("rnn", "gpt2"):
        options["teacher"] = str(world / options["teacher"])
    with pytest.raises(T2RError, match=says):
        run(world, tmp_path / "new" / "out", model, **options)
    assert not (tmp_path / "new").exists()


def test_a_model_swapped_in_memory_does_not_know_its_teacher(world, tmp_path):
    swapped = t2r.swap(make_model("gpt2"), feature_size=4)
    with pytest.raises(T2RError, match="the model does not say which model it was converted from"):
        run(world, tmp_path / "out", swapped, tokenizer=make_tokenizer())
    run(world, tmp_path / "out", swapped, tokenizer=make_tokenizer(), teacher=make_model("gpt2"))


def test_nothing_is_overwritten(world, tmp_path):
    shutil.copytree(world / "gpt2", tmp_path / "base")
    run(world, tmp_path / "rnn", tmp_path / "base", feature_size=4)
    for taken in ("rnn", "base"):
        with pytest.raises(T2RError, match="would replace the model"):
            run(world, tmp_path / taken, tmp_path / "rnn", overwrite=True)


def test_adapters_minutes_and_an_interruption(world, tmp_path, monkeypatch):
    """A LoRA stage, a time budget, and a run that is resumed."""
    overrides = (*SHORT, "distill.train=lora", "distill.lora_rank=2")
    asked = {"overrides": overrides, "minutes": 0.1, "valid": str(world / "valid.txt")}

    def stop(*args, real=sessions.run_stage, **options):
        real(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "run_stage", stop)
        with pytest.raises(KeyboardInterrupt):
            run(world, tmp_path / "more", "rnn", **asked)
    facts = json.loads((tmp_path / "more.run" / "run.json").read_text())
    assert facts["plan"]["teacher"] == of_weights(make_model("gpt2"))
    results = run(world, tmp_path / "more", "rnn", **asked)
    assert results["steps"]["distill"] == facts["distill.done"]
    before, after = weights(world / "rnn"), weights(tmp_path / "more")
    assert before.keys() == after.keys()
    assert any(not torch.equal(x, after[name]) for name, x in before.items())


def test_a_translation_model_is_continued(tmp_path):
    make_translator().save_pretrained(tmp_path / "marian")
    make_words().save_pretrained(tmp_path / "marian")
    pairs = dict(zip(("source", "target"), write_pairs(tmp_path, "train", 60), strict=True))
    valid = dict(zip(("valid_source", "valid_target"), write_pairs(tmp_path, "valid", 6, seed=1), strict=True))
    short = ["block_size=64", "batch_tokens=128", "steps=4", "warmup_steps=0"]
    given = {"overrides": short, "device": "cpu", "progress": False} | valid
    first = convert(str(tmp_path / "marian"), str(tmp_path / "rnn"), **given, **pairs, recurrent="both")
    given |= {"source": pairs["source"], "target": "teacher", "teacher_beams": 1}
    results = convert(str(tmp_path / "rnn"), str(tmp_path / "more"), **given)
    assert list(results["stages"]) == ["distill"]
    assert results["teacher"]["bleu"] == first["teacher"]["bleu"]
    assert results["before"]["loss"] == pytest.approx(first["stages"]["distill"]["loss"])
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "more").t2r_config.cross_feature_size == 32
    with pytest.raises(T2RError, match=r"recurrent is both in .*, not causal"):
        convert(str(tmp_path / "rnn"), str(tmp_path / "again"), **given, recurrent="causal")
