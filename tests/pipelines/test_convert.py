"""The convert pipeline: results, saved folders, budgets, errors, resuming, and several processes."""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

import t2r
from converting import BLOCK, SHORT, assert_same, make_model, make_tokenizer, make_world, run, weights, words
from families import tiny
from processes import kill_after_checkpoint, same_threads
from t2r.data import TokenCorpus, tokenize_corpus
from t2r.errors import T2RError
from t2r.evaluation import encode, perplexity, read_text
from t2r.generation.teacher import WritingSpeed
from t2r.pipelines import convert as module
from t2r.pipelines.common import advice
from t2r.pipelines.convert import convert, summary
from t2r.reporting.inspection import inspect_model
from t2r.storage import finite
from t2r.tasks import LanguageModeling, language_modeling
from t2r.training.planning.plan import within
from t2r.training.planning.timing import Cost, Speeds
from t2r.training.recipes.recipe import load_recipe
from t2r.training.sessions import session as sessions
from t2r.training.sessions.run import Run
from t2r.training.sessions.session import table_of
from t2r.training.steps.arithmetic import halve, without_denormals


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- Conversions ----------------------------------------------------------------------------------------------


def test_the_teacher_is_evaluated_in_float32(world, tmp_path):
    """The teacher is evaluated in float32, like its students, also with a teacher in bf16 for training."""
    results = run(world, tmp_path / "out", valid=str(world / "valid.txt"), bf16=True)
    text = encode(make_tokenizer(), read_text(str(world / "valid.txt"), make_tokenizer()))
    came = make_model("gpt2").eval()
    wanted = perplexity(came, text, window=64, stride=32).perplexity
    assert results["teacher"]["perplexity"] == pytest.approx(wanted, rel=1e-6)
    halve(came)
    assert perplexity(came, text, window=64, stride=32).perplexity != pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_whole_way(world, tmp_path, model_type):
    results = run(world, tmp_path / "out", model_type, valid=str(world / "valid.txt"), feature_size=8)
    out = tmp_path / "out"
    for measured in (results["teacher"], results["swapped"], *results["stages"].values()):
        assert measured["perplexity"] > 1
        assert measured["tokens"] > 100
    assert list(results["stages"]) == ["transfer", "distill"]
    assert results["stages"]["distill"]["kl"] > 0
    assert results["teacher"]["kl"] is None
    assert [len(log) for log in results["log"].values()] == [4, 4]
    assert results["merged"] is False

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads((out / "results.json").read_text(), parse_constant=refuse) == results
    assert load_recipe(out / "recipe.yaml") == load_recipe("distill-lm", SHORT)
    card = (out / "README.md").read_text()
    assert f"| after distill | {results['stages']['distill']['perplexity']:.2f} |" in card
    assert f"| teacher | {results['teacher']['perplexity']:.2f} |" in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "t2r"
    assert not Path(f"{out}.run").exists()

    loaded = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer("the cat", return_tensors="pt")
    written = loaded.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False)
    assert written.shape[1] == inputs["input_ids"].shape[1] + 5
    assert loaded.t2r_config.merged is results["merged"]
    again = perplexity(loaded, encode(tokenizer, (world / "valid.txt").read_text() + "\n"), window=64, stride=32)
    assert again.perplexity == pytest.approx(results["stages"]["distill"]["perplexity"], rel=1e-4)
    assert len(summary(results).rows) == 4


def test_merging_is_asked_for(world, tmp_path, caplog):
    """A result can be trained, unless it was merged."""
    plain, merged = tmp_path / "plain", tmp_path / "merged"
    run(world, plain, feature_size=8)
    assert run(world, merged, feature_size=8, merged=True)["merged"]
    inputs = torch.randint(97, (2, 16))
    trained = AutoModelForCausalLM.from_pretrained(plain).train()
    trained(inputs, labels=inputs).loss.backward()
    model = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(model(inputs).logits, trained.eval()(inputs).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(T2RError, match=r"cannot be trained: .*convert saves one unless --merge"):
        model.train()


def test_a_bad_result_is_said_last(world, tmp_path, monkeypatch, caplog):
    """Also in results.json and on the model card. A teacher that does not know the text is told before training."""
    monkeypatch.setattr(language_modeling, "FAR", 1.0)
    monkeypatch.setattr(language_modeling, "DOUBTFUL", 2.0)
    valid = str(world / "valid.txt")
    results = run(
        world, tmp_path / "out", valid=valid, overrides=(*SHORT, "distill.steps=2", "distill.learning_rate=0.1")
    )
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said[-1] == results["advice"] == json.loads((tmp_path / "out" / "results.json").read_text())["advice"]
    assert re.match(
        r"far from the teacher: its perplexity is [\d.]+ instead of [\d.]+ \(\+\d+%\), after 4 and 2 steps; give",
        said[-1],
    )
    assert "train this result further" in said[-1]
    assert f"F{said[-1][1:]}." in (tmp_path / "out" / "README.md").read_text()
    assert "the teacher does not know the text that is measured: its perplexity is 94 per token" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))
    caplog.clear()
    assert "advice" not in run(world, tmp_path / "good", valid=valid)
    assert "teacher" not in caplog.text


def test_few_steps_are_said_where_nothing_is_measured():
    """If the time allowed no more. A user who asks for few steps knows it."""
    unmeasured = {"teacher": None, "stages": {"distill": None}, "steps": {"transfer": 60, "distill": 6}}
    assert advice(LanguageModeling, unmeasured) is None
    assert advice(LanguageModeling, unmeasured, limited=True).startswith(
        "probably far from the teacher, and not measured: it had 60 and 6 steps; give more time"
    )
    assert advice(LanguageModeling, unmeasured | {"steps": {"distill": 50}}, limited=True) is None
    assert advice(LanguageModeling, unmeasured | {"steps": {}}, limited=True) is None


def test_without_valid_text_perplexity_is_not_measured(world, tmp_path):
    results = run(world, tmp_path / "out", recipe="paper-lm", overrides=(*SHORT[:2], "steps=2"))
    assert results["teacher"] is None
    assert not summary(results).rows
    assert "## Results" in (tmp_path / "out" / "README.md").read_text()


def test_tensorboard_logs_are_kept(world, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results = run(world, tmp_path / "out", report_to="tensorboard")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("out")) == ["out", "out.logs"]
    for stage, log in results["log"].items():
        events = EventAccumulator(str(tmp_path / "out.logs" / stage)).Reload()
        written = [(e.step, e.value) for e in events.Scalars("train/loss")]
        assert written == [(e["step"], pytest.approx(e["loss"])) for e in log]


def test_an_unknown_tracker_is_refused(world, tmp_path):
    with pytest.raises(T2RError, match="report_to='trackers' is not installed: choose one of none"):
        run(world, tmp_path / "out", report_to="trackers")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


def test_numbers_that_are_not_finite_become_null():
    results = {
        "teacher": {"perplexity": 3.0, "kl": None},
        "stages": {"a": {"perplexity": float("inf"), "kl": float("nan")}},
    }
    results = finite(results | {"swapped": None})
    assert json.loads(json.dumps(results, allow_nan=False))["stages"]["a"] == {"perplexity": None, "kl": None}
    assert table_of(results, compared=True)[1][1] == ("after a", "not finite", "", "")


def test_auto_keeps_the_most_sensitive_layer(world, tmp_path):
    results = run(world, tmp_path / "out", softmax_layers="auto:1")
    (first, cost), (_, less) = results["sensitivity"]
    assert cost >= less
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.t2r_config.softmax_layers == [first]
    assert [site.layer_idx for site in t2r.attention.recurrence.recurrent_sites(loaded)] == [1 - first]


def test_auto_starts_from_the_teacher_and_the_trained_maps(world, tmp_path, monkeypatch):
    seen = {}

    def keep(student, teacher, *args, real=module.with_softmax):
        before = {name: x.clone() for name, x in student.state_dict().items()}
        again = real(student, teacher, *args)
        seen["equal"] = all(torch.equal(x, before[name]) for name, x in again.state_dict().items())
        seen["teacher"] = all(torch.equal(p, again.state_dict()[name]) for name, p in teacher.named_parameters())
        return again

    monkeypatch.setattr(module, "with_softmax", keep)
    base = AutoModelForCausalLM.from_pretrained(world / "llama", use_cache=False)
    tokenizer = AutoTokenizer.from_pretrained(world / "llama")
    run(world, tmp_path / "out", base, tokenizer=tokenizer, softmax_layers="auto:1")
    assert seen == {"equal": True, "teacher": True}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache  # as without auto


def test_a_model_that_is_refused_is_as_it_was(world, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(world / "llama")
    tokenizer = AutoTokenizer.from_pretrained(world / "llama")
    stock, names = type(model), set(model.state_dict())
    with pytest.raises(T2RError, match="cannot be merged"):
        run(world, tmp_path / "out", model, tokenizer=tokenizer, merged=True, rotary=True)
    assert type(model) is stock
    assert set(model.state_dict()) == names
    with pytest.raises(T2RError, match="cannot be merged"):  # not "is already a t2r model"
        run(world, tmp_path / "out", model, tokenizer=tokenizer, merged=True, rotary=True)


@pytest.mark.parametrize("wrong", [{"train": "empty.txt"}, {"feature_map": "hedgehog", "feature_size": 7}])
def test_refused_input_leaves_no_files(world, tmp_path, wrong):
    (tmp_path / "empty.txt").touch()
    wrong = {name: str(tmp_path / x) if name == "train" else x for name, x in wrong.items()}
    with pytest.raises(T2RError):
        run(world, tmp_path / "out", **wrong)
    assert list(tmp_path.glob("out*")) == []


class Dataset:
    """What `datasets` has, for text in memory."""

    column_names = ("text",)

    def __iter__(self):
        return iter([{"text": "a"}])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"limit": 0}, "limit must be a whole number, at least 1"),
        ({"teacher_tokens": 0, "train": "teacher"}, "teacher_tokens must be a whole number, at least 1"),
        ({"minutes": "1"}, "minutes must be a number"),
        ({"save_steps": 0}, "save_steps must be a whole number, at least 1"),
        ({"train": Dataset()}, "train must be text, a list, .* got a Dataset, a dataset in memory: give a name"),
        ({"valid": Dataset()}, "valid must be text or None; got a Dataset, a dataset in memory: give a name"),
    ],
)
def test_options_are_checked_before_anything_is_written(world, tmp_path, wrong, words):
    with pytest.raises(T2RError, match=words):
        run(world, tmp_path / "out", **wrong)
    assert list(tmp_path.glob("out*")) == []


def test_paths_may_be_objects(world, tmp_path):
    results = run(
        world, tmp_path / "out", world / "gpt2", train=world / "train.txt", valid=world / "valid.txt", limit=2
    )
    assert results["teacher"]["perplexity"] > 0


def test_a_model_is_not_replaced_by_its_conversion(world, tmp_path):
    shutil.copytree(world / "gpt2", tmp_path / "both")
    before = weights(tmp_path / "both")
    with pytest.raises(T2RError, match="would replace the model"):
        run(world, tmp_path / "both", tmp_path / "both", overwrite=True)
    assert all(torch.equal(x, before[name]) for name, x in weights(tmp_path / "both").items())


@pytest.mark.parametrize("named", ["hedgehog", "t2r", "elu", "performer", "rfa"])
def test_a_given_feature_map_uses_its_own_defaults(world, tmp_path, named):
    """The options that the recipe sets for its own map do not apply to another map."""
    run(world, tmp_path / "out", feature_map=named)
    config = t2r.T2RForCausalLM.from_pretrained(tmp_path / "out").t2r_config
    assert (config.feature_map, config.activation, config.init, config.shared) == (named, "relu", None, True)
    assert config.decay  # of the recipe: an option of the attention, not of the map


def test_the_recipes_own_map(world, tmp_path):
    run(world, tmp_path / "out")
    config = t2r.T2RForCausalLM.from_pretrained(tmp_path / "out").t2r_config
    assert (config.feature_map, config.activation, config.init, config.shared) == ("t2r", "softmax", "identity", False)


def test_a_stage_with_nothing_to_train_is_skipped(world, tmp_path, caplog):
    results = run(world, tmp_path / "out", feature_map="performer", decay=False)
    assert list(results["log"]) == ["distill"]
    assert "stage transfer is skipped: the feature map has nothing to train" in caplog.text
    assert [stage.name for stage in load_recipe(tmp_path / "out" / "recipe.yaml").stages] == ["distill"]


def test_maps_are_drawn_with_the_seed(world, tmp_path):
    frozen = {"freeze_feature_map": True, "recipe": "paper-lm", "overrides": (*SHORT[:2], "steps=1")}
    drawn = []
    for seed in (0, 1):
        run(world, tmp_path / str(seed), seed=seed, **frozen)
        fresh = t2r.swap(make_model("gpt2"), **load_recipe("paper-lm").swap, seed=seed)
        drawn.append({name: x for name, x in weights(tmp_path / str(seed)).items() if ".feature_map." in name})
        expected = fresh.state_dict()
        assert drawn[-1]
        assert all(torch.equal(x, expected[name]) for name, x in drawn[-1].items())
    assert any(not torch.equal(x, drawn[1][name]) for name, x in drawn[0].items())


@pytest.mark.parametrize("exists", [False, True])
def test_a_slash_after_the_destination(world, tmp_path, exists):
    if exists:
        (tmp_path / "out").mkdir()
    run(world, f"{tmp_path / 'out'}/")
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out.run").exists()


def test_denormals_are_flushed_during_a_conversion():
    tiny_number = torch.tensor(1e-39)

    def flushed():
        return (tiny_number * 1.0).item() == 0.0

    assert not flushed()
    with without_denormals():
        assert flushed()
        with without_denormals():
            assert flushed()
        assert flushed()
    assert not flushed()


def test_the_teacher_generates_text(world, tmp_path, monkeypatch):
    asked = {}

    def tokenize(sources, tokenizer, **options):
        asked.update(options, sources=sources)
        corpus = tokenize_corpus(sources, tokenizer, **options)
        asked["corpus"] = TokenCorpus(corpus.folder)
        return corpus

    monkeypatch.setattr(language_modeling, "tokenize_corpus", tokenize)
    run(world, tmp_path / "out", train="teacher", teacher_tokens=400)
    written = list((tmp_path / "cache" / "teacher").glob("*.jsonl"))
    assert len(written) == 1  # kept when the run folder is removed
    assert asked["add_eos"] is False
    assert len(asked["corpus"]) >= 100
    asked.clear()
    run(world, tmp_path / "list", train=["teacher"], teacher_tokens=400)
    assert asked["add_eos"] is False
    asked.clear()
    run(world, tmp_path / "text")
    assert asked.get("add_eos", True) is True  # the default


def test_swap_errors_are_raised_before_the_teacher_generates(world, tmp_path, monkeypatch):
    monkeypatch.setattr(language_modeling, "write_corpus", lambda *args, **options: pytest.fail("it wrote for nothing"))
    with pytest.raises(T2RError, match="must be even"):
        run(world, tmp_path / "out", train="teacher", feature_map="hedgehog", feature_size=7)


def test_a_small_text_is_refused_before_the_teacher_generates(world, tmp_path, monkeypatch):
    monkeypatch.setattr(language_modeling, "write_corpus", lambda *args, **options: pytest.fail("it wrote for nothing"))
    (small := tmp_path / "small.txt").write_text(words(3))
    with pytest.raises(T2RError, match=rf"{small} has \d+ tokens, .*: give more text or use a smaller block_size$"):
        run(world, tmp_path / "out", train=[str(small), "teacher"])
    assert not (tmp_path / "out.run").exists()


def test_the_teacher_continues_excerpts(world, tmp_path, monkeypatch):
    seen = {}

    def write(*args, real=language_modeling.write_corpus, **options):
        seen["continues"] = options["continues"]
        seen["written"] = real(*args, **options)
        return seen["written"]

    def stage(run, job, model, stage, *args, real=sessions.run_stage):
        seen["parts"] = [len(part) for part in job.task.dataset(stage.block_size).parts]
        return real(run, job, model, stage, *args)

    monkeypatch.setattr(language_modeling, "write_corpus", write)
    monkeypatch.setattr(sessions, "run_stage", stage)
    text = str(world / "train.txt")
    run(world, tmp_path / "out", train=[text, "teacher"], teacher_tokens=1000)
    assert seen["parts"][0] == len(seen["continues"]) // BLOCK
    assert seen["parts"][1] > 0.5 * 1000 / BLOCK  # text of a random model has fewer tokens when it is tokenized again
    assert json.loads((tmp_path / "out" / "results.json").read_text())["stages"]["distill"] is None  # no valid text


def test_conversations_and_documents(world, tmp_path):
    lines = [
        {
            "messages": [
                {"role": "user", "content": words(40 if i == 3 else 4, i)},
                {"role": "assistant", "content": words(5, i)},
            ]
        }
        for i in range(60)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    results = run(world, tmp_path / "out", train=str(tmp_path / "chat.jsonl"), documents=True)
    assert all(entry["loss"] > 0 for log in results["log"].values() for entry in log)


def test_minutes(world, tmp_path):
    plan = within(load_recipe("distill-lm", ["transfer.steps=10", "distill.tokens=491520"]), 8)
    assert [stage.minutes for stage in plan.stages] == [2, 6]
    assert all(stage.steps is None and stage.tokens is None for stage in plan.stages)
    plan = within(load_recipe("distill-lm", ["transfer.minutes=0.3", "distill.minutes=0.1"]), 8)
    assert [stage.minutes for stage in plan.stages] == pytest.approx([6, 2])
    for other in ("transfer.epochs=1", "transfer.minutes=1"):
        with pytest.raises(T2RError, match="minutes requires a recipe whose budgets"):
            within(load_recipe("distill-lm", [other]), 8)


SPEEDS = Speeds({"transfer": Cost(1e-4, 1e-3), "distill": Cost(2e-4, 2e-3)}, 1e-6, WritingSpeed(1e-3, 1e-4, 64))
"""Speeds for which a minute is long and a conversion of tiny models short."""


def slow(factor):
    stages = {name: Cost(cost.token * factor, cost.step * factor) for name, cost in SPEEDS.stages.items()}
    return Speeds(stages, SPEEDS.reading * factor, WritingSpeed(1e-3 * factor, 1e-4 * factor, 64))


def test_minutes_cover_everything(world, tmp_path):
    """With real timing, a conversion takes about the given time. On a busy machine, the shortest may be refused."""
    for minutes in (0.1, 0.4, 1.6):
        started = time.monotonic()
        with threads(2), suppress(T2RError):
            results = run(
                world, tmp_path / "out", minutes=minutes, valid=str(world / "valid.txt"), softmax_layers="auto:1"
            )
            assert torch.get_num_threads() == 2  # as before
            break
    assert 30 * minutes < time.monotonic() - started < 180 * minutes + 24
    assert results["threads"] in (1, 2)
    for stage, log in results["log"].items():
        assert results["steps"][stage] >= log[-1]["step"] > 0
        assert results["mixture"][0]["read"][stage] in [results["steps"][stage] * n * BLOCK for n in (1, 2, 4)]


def test_too_few_minutes_are_refused_before_they_are_spent(world, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "time_all", lambda *args: slow(1e3))
    monkeypatch.setattr(language_modeling, "write_corpus", lambda *args, **options: pytest.fail("it wrote for nothing"))
    with pytest.raises(T2RError, match=r"0.5 minutes is not enough on this machine.*give about [\d.]+ minutes"):
        run(world, tmp_path / "out", minutes=0.5, train="teacher")
    assert list(tmp_path.glob("out*")) == []


def test_a_resumed_run_keeps_its_schedule(world, tmp_path, monkeypatch, caplog):
    """Also if interrupted while the teacher generates: a resumed run requests the same text, and times nothing."""
    monkeypatch.setattr(sessions, "time_all", lambda *args: slow(20))
    asked = []

    def write(*args, real=language_modeling.write_corpus, **options):
        asked.append(options["tokens"])
        if len(asked) == 1:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(language_modeling, "write_corpus", write)
    options = {"minutes": 1.0, "train": "teacher", "teacher_tokens": 10**6, "valid": str(world / "valid.txt")}
    with caplog.at_level("INFO", "t2r"), pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "out", **options)
    assert f"the teacher generates {asked[0]:,} tokens instead of 1,000,000, to fit into 1 minute" in caplog.text
    assert "plan: transfer (transfer, trains maps): " in caplog.text
    assert "plan: 4 evaluations on" in caplog.text
    assert "of 1 minute;" in caplog.text
    assert "interrupted: the same command resumes this run" in caplog.text
    monkeypatch.setattr(sessions, "time_all", None)
    # The time is nearly over: the stages share the rest.
    monkeypatch.setattr(Run, "seconds", property(lambda self: 55.0))
    caplog.clear()
    with caplog.at_level("INFO", "t2r"):
        results = run(world, tmp_path / "out", **options)
    assert asked[0] == asked[1] < 10**6
    assert "resuming the unfinished run in" in caplog.text
    # How many steps fit into the five seconds that are left depends on the machine; that they end in time does not.
    spent = [int(seconds) for seconds in re.findall(r"stage \w+: [\d,]+ steps in (\d+) seconds?", caplog.text)]
    assert len(spent) == len(results["log"]) == 2
    assert max(spent) <= 12  # each may end with one step more; of the whole minute it would be 20 and more


def test_restart_starts_again(world, tmp_path, monkeypatch):
    run_until(monkeypatch, "transfer", world, tmp_path / "out")
    other = (*SHORT, "transfer.steps=3")
    with pytest.raises(T2RError, match="use --restart to start again"):
        run(world, tmp_path / "out", overrides=other)
    results = run(world, tmp_path / "out", overrides=other, restart=True)
    assert results["log"]["transfer"][-1]["step"] == 3
    assert not (tmp_path / "out.run").exists()


def test_restart_keeps_the_old_run_until_the_input_was_checked(world, tmp_path, monkeypatch):
    run_until(monkeypatch, "transfer", world, tmp_path / "out")
    with pytest.raises(T2RError, match="there is no file"):
        run(world, tmp_path / "out", train=str(world / "trian.txt"), restart=True)
    assert (tmp_path / "out.run" / "transfer.safetensors").exists()
    assert list(run(world, tmp_path / "out")["log"]) == ["transfer", "distill"]


def test_a_folder_of_the_user_in_the_place_of_a_run_is_kept(world, tmp_path):
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "notes.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(T2RError, match=r"out.run is not a run of t2r, which keeps unfinished work there"):
            run(world, tmp_path / "out", restart=restart)
    assert (tmp_path / "out.run" / "notes.txt").read_text() == "mine"


def test_a_changed_validation_text_is_noticed(world, tmp_path, monkeypatch):
    valid = tmp_path / "valid.txt"
    valid.write_text(words(300, seed=1))
    run_until(monkeypatch, "transfer", world, tmp_path / "out", valid=str(valid))
    valid.write_text(words(300, seed=2))
    with pytest.raises(T2RError, match=r"an unfinished run with other options .*valid_text"):
        run(world, tmp_path / "out", valid=str(valid))
    valid.write_text(words(300, seed=1))
    facts = json.loads((tmp_path / "out.run" / "run.json").read_text())
    del facts["plan"]["valid_text"], facts["checksum"]  # a run of an older version
    for name in ("run.json", "run.json.old"):
        (tmp_path / "out.run" / name).write_text(json.dumps(facts))
    run(world, tmp_path / "out", valid=str(valid))


@pytest.mark.parametrize("steps", [4, 60])
def test_a_tokenizer_of_another_model_leaves_nothing_behind(world, tmp_path, steps):
    given = {"tokenizer": make_tokenizer(), "overrides": (*SHORT, f"transfer.steps={steps}")}
    for valid in (None, str(world / "valid.txt")):
        small = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_embd=16, n_layer=1, n_head=2, n_positions=64))
        with pytest.raises(T2RError, match="vocabulary"):
            run(world, tmp_path / "out", small, valid=valid, **given)
        assert not list(tmp_path.glob("out*"))


def test_overwriting_does_not_delete_the_texts(world, tmp_path):
    run(world, tmp_path / "out")
    shutil.copy(world / "train.txt", tmp_path / "out" / "train.txt")
    text = str(tmp_path / "out" / "train.txt")
    for given in ({"train": text}, {"train": f"{text}:2"}, {"train": str(tmp_path / "out" / "*.txt")}, {"valid": text}):
        with pytest.raises(T2RError, match=r"saving to .*out would delete .*train.txt"):
            run(world, tmp_path / "out", overwrite=True, **given)
    with pytest.raises(T2RError, match=r"would delete .*recipe.yaml"):
        run(world, tmp_path / "out", overwrite=True, recipe=str(tmp_path / "out" / "recipe.yaml"))
    assert Path(text).exists()


def test_restart_does_not_clear_a_locked_run(world, tmp_path, monkeypatch):
    """The folder of a run that another process uses is not cleared."""
    run_until(monkeypatch, "transfer", world, tmp_path / "out")
    facts = json.loads((tmp_path / "out.run" / "run.json").read_text())
    with Run(tmp_path / "out.run", facts["plan"]):
        with pytest.raises(T2RError, match="another process is working in"):
            run(world, tmp_path / "out", restart=True)
        assert (tmp_path / "out.run" / "transfer.safetensors").exists()


def test_the_card_names_the_training_text(world, tmp_path):
    run(world, tmp_path / "out", valid=str(world / "valid.txt"))
    card = (tmp_path / "out" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["library_name"] == "t2r"
    assert re.search(r"- text: `train.txt`: [\d,]+ tokens", body)
    assert f"- distill: {4 * 4 * BLOCK} tokens read" in body
    found = inspect_model(str(tmp_path / "out"))
    assert f"- state of a sequence: {found.state_bytes:,} bytes" in body
    assert f"- feature size: {found.sites[0].feature_size} (2 of 2" in body
    assert "| after distill |" in body


def test_a_mixture_is_read_and_saved(world, tmp_path, monkeypatch):
    (tmp_path / "other.txt").write_text(words(900, seed=5))
    text, other = str(world / "train.txt"), str(tmp_path / "other.txt")
    results = run(world, tmp_path / "out", train=[f"{text}:75%", f"{other}:25%"])
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert saved["mixture"] == results["mixture"]
    first, second = results["mixture"]
    assert (first["source"], first["readings"], first["share"]) == (text, None, 75.0)
    assert first["tokens"] == len(tokenize_corpus(text, AutoTokenizer.from_pretrained(world / "gpt2"), progress=False))
    assert first["read"].keys() == {"transfer", "distill"}
    assert first["read"]["distill"] + second["read"]["distill"] == 4 * 4 * BLOCK
    assert first["share_read"] + second["share_read"] == pytest.approx(100, abs=0.01)
    assert 50 < first["share_read"] < 95  # 8 steps in random order
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`train.txt` (75 % of what is read), `other.txt` (25 % of what is read)" in card
    assert re.search(r"\| other.txt \| [\d,]+ \| [\d,]+ \| [\d.]+ % \|", card)
    # The same with a recipe.
    plan = load_recipe("distill-lm", SHORT).to_dict()
    plan["train"] = [{"source": text, "share": 75}, {"source": other, "share": "25%"}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(plan))
    again = run(world, tmp_path / "again", train=None, recipe=str(tmp_path / "mine.yaml"), overrides=())
    assert again["mixture"] == results["mixture"]
    assert_same(tmp_path / "out", tmp_path / "again")
    kept = yaml.safe_load((tmp_path / "again" / "recipe.yaml").read_text())
    assert kept["train"] == [{"source": text, "share": 75.0}, {"source": other, "share": 25.0}]


def test_missing_text_is_one_error(world, tmp_path):
    for nothing in (None, []):
        with pytest.raises(T2RError, match=r"^no text was given"):
            run(world, tmp_path / "out", train=nothing)
    (tmp_path / "mine.yaml").write_text("train: 3\nstages: [{name: a, objective: task, steps: 1}]")
    with pytest.raises(T2RError, match=r"mine.yaml: train must be a list of sources; got 3"):
        run(world, tmp_path / "out", train=None, recipe=str(tmp_path / "mine.yaml"), overrides=())
    assert not (tmp_path / "out.run").exists()


def test_halving_leaves_rotary_frequencies_alone():
    model = tiny("llama", torch.float32)
    before = model.model.rotary_emb.inv_freq.clone()
    halve(model)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


# --- Errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overrides": ("distill.stepz=1",)}, "unknown option stepz"),
        ({"recipe": "best"}, "no recipe 'best'"),
        ({"feature_sise": 3}, "unknown option feature_sise"),
        ({"softmax_layers": "auto"}, "give layers, or auto:N"),
        ({"softmax_layers": "auto:2"}, "would keep all 2 layers"),
        ({"softmax_layers": "auto:1", "softmax_every": 2}, "or softmax_every"),
        (
            {"softmax_layers": "auto:1", "recipe": "paper-lm", "overrides": (*SHORT[:2], "steps=2")},
            "first stage is a transfer",
        ),
        ({"model": "llama", "merged": True, "rotary": True}, "llama cannot be merged"),
        ({"train": "/none/of.txt"}, "of.txt"),
        ({"device": "abacus"}, "device 'abacus' is not available"),
    ],
)
def test_errors_are_raised_before_training(world, tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(sessions, "run_stage", None)
    with pytest.raises(T2RError) as error:
        run(world, tmp_path / "out", **options)
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_valid_text_that_is_too_short_leaves_no_run(world, tmp_path):
    """Otherwise the command with a longer text would be refused, because its options are not those of the run."""
    (short := tmp_path / "short.txt").write_text(words(3))
    with pytest.raises(T2RError, match=r"short\.txt has \d+ tokens, less than one window of \d+: give a longer text"):
        run(world, tmp_path / "out", valid=str(short))
    assert not (tmp_path / "out.run").exists()


def test_models_that_are_refused(world, tmp_path):
    with pytest.raises(T2RError, match=r"bart is an encoder-decoder: give it parallel text"):
        run(world, tmp_path / "out", tiny("bart", torch.float32), tokenizer=make_tokenizer())
    with pytest.raises(T2RError, match="the model has no tokenizer"):
        run(world, tmp_path / "out", make_model("gpt2"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(T2RError, match="already exists"):
        run(world, tmp_path / "out")
    assert not (tmp_path / "out.run").exists()


# --- Resuming -------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


def run_until(monkeypatch, stage, *args, **options):
    """Interrupt the run when a stage is done."""

    def run_stage(run, job, model, what, *args, real=sessions.run_stage, **options):
        trained = real(run, job, model, what, *args, **options)
        if what.name == stage:
            raise Stopped
        return trained

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "run_stage", run_stage)
        with pytest.raises(Stopped):
            run(*args, **options)


def test_an_unfinished_run_with_other_options(world, tmp_path, monkeypatch):
    run_until(monkeypatch, "transfer", world, tmp_path / "out", valid=str(world / "valid.txt"), softmax_layers="auto:1")
    same = {"valid": str(world / "valid.txt"), "softmax_layers": "auto:1"}
    for options, says in (
        ({"seed": 1}, "plan.seed: was 0, now 1"),
        ({"overrides": (*SHORT, "distill.steps=9")}, "plan.recipe.stages.1.steps: was 4, now 9"),
        ({"feature_size": 4}, "plan.swap.feature_size: was None, now 4"),
        ({"valid": None}, "plan.valid"),
        ({"documents": True}, "plan.documents: was False, now True"),
        ({"model": "llama"}, "plan.model"),
    ):
        with pytest.raises(T2RError, match="unfinished run with other options") as error:
            run(world, tmp_path / "out", **(same | options))
        assert says in str(error.value)
    (text := tmp_path / "copy.txt").write_text((world / "train.txt").read_text())
    resumed = run(world, tmp_path / "out", **same)
    straight = run(world, tmp_path / "straight", **same)
    assert_same(tmp_path / "out", tmp_path / "straight")
    assert resumed["sensitivity"] == straight["sensitivity"]
    assert resumed["stages"] == straight["stages"]

    run_until(monkeypatch, "transfer", world, tmp_path / "changing", train=str(text))
    text.write_text(text.read_text() + " more")
    with pytest.raises(T2RError, match="corpus"):
        run(world, tmp_path / "changing", train=str(text))


def test_a_run_that_began_before_an_option_existed(world, tmp_path, monkeypatch, caplog):
    """It resumes with the option's default, which is what was done before it existed, as often as it is stopped."""
    stages = []

    def stop(self, model, stage):
        stages.extend(self.plan.stages)
        raise Stopped

    monkeypatch.setattr(sessions.Session, "train", stop)
    with pytest.raises(Stopped):
        run(world, tmp_path / "out")
    for name in ("run.json", "run.json.old"):
        facts = json.loads((path := tmp_path / "out.run" / name).read_text())
        for stage in facts["plan"]["recipe"]["stages"]:
            del stage["dropout"]
        del facts["checksum"]
        path.write_text(json.dumps(facts))
    for _ in range(2):
        with pytest.raises(Stopped):
            run(world, tmp_path / "out")
    assert [stage.dropout for stage in stages] == [True, False, True, True, True, True]
    assert "stage distill keeps dropout: true, as when this run began" in caplog.text
    with pytest.raises(T2RError, match="unfinished run with other options"):
        run(world, tmp_path / "out", overrides=(*SHORT, "distill.noise=0.5"))


@pytest.mark.parametrize("what", ["transfer.safetensors", "run.json", "checkpoint"])
def test_damaged_files_are_detected_and_replaced(world, tmp_path, monkeypatch, caplog, what):
    """The run resumes from undamaged files, and gets the same result."""
    options = {"save_steps": 1, "valid": str(world / "valid.txt")}
    if what == "checkpoint":
        with monkeypatch.context() as patch:
            patch.setattr(Run, "finish", stop_at("distill"))
            with pytest.raises(Stopped):
                run(world, tmp_path / "out", **options)
        checkpoints = tmp_path / "out.run" / "distill.checkpoints"
        assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-3", "checkpoint-4"]
        damaged = checkpoints / "checkpoint-4" / "optimizer.pt"
    else:
        run_until(monkeypatch, "transfer", world, tmp_path / "out", **options)
        damaged = tmp_path / "out.run" / what
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    resumed = run(world, tmp_path / "out", **options)
    assert "damaged" in caplog.text
    straight = run(world, tmp_path / "straight", **options)
    assert_same(tmp_path / "out", tmp_path / "straight")
    assert resumed["stages"] == straight["stages"]
    if what == "checkpoint":
        assert "resuming from step 3 of distill" in caplog.text or "checkpoint-4 is damaged" in caplog.text


def stop_at(stage):
    def finish(self, name, model, real=Run.finish):
        if name == stage:
            raise Stopped
        real(self, name, model)

    return finish


def test_two_conversions_to_one_folder(world, tmp_path, monkeypatch):
    """The second is refused before it trains, and does not affect the first."""
    refused = []

    def stage(*args, real=sessions.run_stage):
        if not refused:
            with pytest.raises(T2RError, match="another process is working in") as error:
                run(world, tmp_path / "out")
            refused.append(str(error.value))
        return real(*args)

    monkeypatch.setattr(sessions, "run_stage", stage)
    run(world, tmp_path / "out")
    assert len(refused) == 1
    assert (tmp_path / "out" / "config.json").exists()


def test_an_interrupted_scan_is_resumed(world, tmp_path, monkeypatch):
    from t2r.training.sessions import sensitivity

    measured = []

    def loss(*args, real=sensitivity.loss_of):
        if len(measured) == 2:
            raise Stopped
        measured.append(real(*args))
        return measured[-1]

    with monkeypatch.context() as patch:
        patch.setattr(sensitivity, "loss_of", loss)
        with pytest.raises(Stopped):
            run(world, tmp_path / "out", softmax_layers="auto:1")
    asked = []
    monkeypatch.setattr(sensitivity, "loss_of", lambda *a, real=sensitivity.loss_of: asked.append(1) or real(*a))
    results = run(world, tmp_path / "out", softmax_layers="auto:1")
    assert len(asked) == 1  # of three losses (exact and two layers), two were saved
    assert len(results["sensitivity"]) == 2


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_gradient_checkpointing_changes_only_memory(world, tmp_path, model_type):
    """Including dropout: recomputation draws the same random numbers."""
    for checkpointing in (False, True):
        run(world, tmp_path / str(checkpointing), model_type, gradient_checkpointing=checkpointing)
    ours, theirs = weights(tmp_path / "True"), weights(tmp_path / "False")
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_full_disk_at_the_end(world, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(t2r.model.modeling.T2RModel, "save_pretrained", full)
        with pytest.raises(T2RError, match="cannot be written"):
            run(world, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(world, tmp_path / "out")
    run(world, tmp_path / "straight")
    assert_same(tmp_path / "out", tmp_path / "straight")


def command(world, out, *more):
    """Return the arguments of `t2r` for a short conversion."""
    sets = [part for override in SHORT for part in ("--set", override)]
    return ["convert", str(world / "gpt2"), str(out), "--train", str(world / "train.txt"), *sets, *more]


def environment(tmp_path):
    return same_threads(T2R_CACHE=str(tmp_path / "cache"), T2R_DEBUG="1")


def test_a_killed_run_is_resumed_to_the_same_result(world, tmp_path):
    """Bitwise equal on one machine with the same number of threads."""
    overrides = (*SHORT, "distill.steps=20")
    kill_after_checkpoint(
        *("convert", str(world / "gpt2"), str(tmp_path / "cut")),
        checkpoints=tmp_path / "cut.run" / "distill.checkpoints",
        environment=environment(tmp_path),
        **{"train": str(world / "train.txt"), "overrides": overrides, "device": "cpu", "save_steps": 6},
    )
    assert not (tmp_path / "cut").exists()
    resumed = run(world, tmp_path / "cut", overrides=overrides)
    straight = run(world, tmp_path / "straight", overrides=overrides)
    assert_same(tmp_path / "cut", tmp_path / "straight")
    assert [x["loss"] for x in resumed["log"]["distill"]] == [x["loss"] for x in straight["log"]["distill"]]


def test_another_number_of_threads_gives_nearly_the_same_result(world, tmp_path, monkeypatch):
    """Sums are computed in another order: the run resumes, and its result is equal up to float32 rounding."""
    with threads(1):
        straight = run(world, tmp_path / "straight")
        run_until(monkeypatch, "transfer", world, tmp_path / "cut")
    with threads(3):
        resumed = run(world, tmp_path / "cut")
    for ours, theirs in zip(resumed["log"]["distill"], straight["log"]["distill"], strict=True):
        # A KL of 1e-3 between log-probabilities of about 5, each rounded to 5e-7.
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    other = weights(tmp_path / "straight")
    for name, x in weights(tmp_path / "cut").items():
        # Adam divides by the size of the gradient, so rounding errors are largest where the gradient is near zero.
        torch.testing.assert_close(x, other[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_two_processes_get_the_losses_of_one(world, tmp_path):
    arguments = command(world, tmp_path / "two", "--valid", str(world / "valid.txt"), "--device", "cpu", "--json")
    # Not `accelerate launch --cpu`, which always starts one process.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    # No dropout: each process would draw different numbers.
    model = make_model("gpt2")
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(model.config, name, 0.0)
    shutil.copytree(world / "gpt2", tmp_path / "gpt2")
    model.save_pretrained(tmp_path / "gpt2")
    arguments[1] = str(tmp_path / "gpt2")
    done = subprocess.run(
        [*launcher, "-m", "t2r", *arguments], env=environment(tmp_path), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)
    assert two == json.loads((tmp_path / "two" / "results.json").read_text())
    one = convert(
        str(tmp_path / "gpt2"),
        str(tmp_path / "one"),
        train=str(world / "train.txt"),
        valid=str(world / "valid.txt"),
        overrides=SHORT,
        device="cpu",
        progress=False,
    )
    for stage, log in one["log"].items():
        for ours, theirs in zip(log, two["log"][stage], strict=True):
            assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-4)
    assert two["stages"]["distill"]["perplexity"] == pytest.approx(one["stages"]["distill"]["perplexity"], rel=1e-3)
    assert not Path(f"{tmp_path / 'two'}.run").exists()


@pytest.mark.slow
def test_two_processes_share_a_time_budget(world, tmp_path):
    arguments = command(world, tmp_path / "two", "--device", "cpu", "--json", "--minutes", "0.3")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "t2r", *arguments], env=environment(tmp_path), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert all(steps >= 1 for steps in results["steps"].values())
    assert "threads" not in results  # not tuned with several processes
