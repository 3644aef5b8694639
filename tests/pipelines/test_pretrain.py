"""The pretrain pipeline: any attention, saved folders, reproducibility, resuming, and errors."""

import json
import logging
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig

import t2r
from processes import kill_after_checkpoint, same_threads
from t2r import cli
from t2r.architectures.adaptive_lm.configuration import AdaptiveLMConfig
from t2r.architectures.adaptive_lm.modeling import AdaptiveLMForCausalLM
from t2r.attention.recurrence import recurrent_sites
from t2r.data.vocabulary import train_tokenizer
from t2r.errors import T2RError
from t2r.evaluation import encode, perplexity
from t2r.feature_maps import FEATURE_MAPS
from t2r.model.modeling import T2RModel
from t2r.pipelines.pretrain import make_model, pretrain, summary
from t2r.tasks import LanguageModeling
from t2r.training.loop.trainer import StageTrainer
from t2r.training.planning.timing import Cost, Speeds
from t2r.training.recipes.preset import load_preset
from t2r.training.recipes.recipe import Stage, load_recipe
from t2r.training.sessions import session as sessions
from t2r.training.sessions.run import Run
from t2r.training.sessions.run_stage import run_stage
from t2r.training.steps import objectives
from t2r.training.steps.job import Job, Settings
from t2r.training.steps.learner import Learner

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ran", "to", "it", "in", "rain", "or", "sun"]
BLOCK = 16
SHORT = (f"block_size={BLOCK}", f"batch_tokens={8 * BLOCK}", "steps=4", "warmup_steps=0")
SMALL = ("n_embd=16", "n_positions=32")
ADAPTIVE = (
    *("num_hidden_layers=2", "hidden_size=32", "num_attention_heads=4", "intermediate_size=32"),
    *("cutoffs=[6, 12]", "adaptive_factor=2"),
)


def sentences(count, seed=0):
    """Each word determines the next one, so that there is something to learn."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        start = rng.randrange(len(WORDS))
        lines.append(" ".join(WORDS[(start + i) % len(WORDS)] for i in range(rng.randrange(4, 12))))
    return "".join(f"{line} .\n" for line in lines)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    (folder / "train.txt").write_text(sentences(400))
    (folder / "valid.txt").write_text(sentences(60, seed=1))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def run(world, out, config="gpt2-tiny", **options):
    defaults = {
        "train": str(world / "train.txt"),
        "overrides": SHORT,
        "model_overrides": SMALL if config == "gpt2-tiny" else ADAPTIVE if "adaptive" in str(config) else (),
        "device": "cpu",
        "progress": False,
    }
    return pretrain(str(config), str(out), **(defaults | options))


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def assert_same(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), (name, (x - theirs[name]).abs().max())


# --- Pretraining ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["gpt2-tiny", "adaptive-lm-small"])
def test_the_whole_way(world, tmp_path, config):
    out = tmp_path / "out"
    overrides = (*SHORT[:2], "steps=60", "learning_rate=1e-2")
    results = run(world, out, config, valid=str(world / "valid.txt"), overrides=overrides)
    assert results["stages"]["pretrain"]["perplexity"] < 0.5 * results["untrained"]["perplexity"]
    assert results["log"]["pretrain"][-1]["loss"] < results["log"]["pretrain"][0]["loss"]
    assert json.loads((out / "results.json").read_text()) == results
    assert len(summary(results).rows) == 2
    assert not Path(f"{out}.run").exists()

    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert type(loaded) is (GPT2LMHeadModel if config == "gpt2-tiny" else AdaptiveLMForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert sum(p.numel() for p in loaded.parameters()) == results["parameters"]
    assert loaded.config.use_cache  # Trainer disables it
    assert loaded.config.vocab_size % 8 == 0
    assert 0 <= loaded.config.vocab_size - len(tokenizer) < 8
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    text = encode(tokenizer, (world / "valid.txt").read_text())
    again = perplexity(loaded, text, window=BLOCK, stride=BLOCK // 2)
    assert again.perplexity == pytest.approx(results["stages"]["pretrain"]["perplexity"], rel=1e-4)
    prompt = tokenizer("the cat", return_tensors="pt").input_ids
    assert loaded.generate(prompt, max_new_tokens=5, min_new_tokens=5).shape[1] == prompt.shape[1] + 5

    assert load_recipe(out / "recipe.yaml") == load_preset(config).plan(overrides)
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    assert f"| after pretrain | {results['stages']['pretrain']['perplexity']:.2f} |" in card
    assert ("import t2r" in card) is (config != "gpt2-tiny")


def test_a_saved_preset_gives_the_same_model(world, tmp_path):
    options = {"feature_map": "elu", "softmax_every": 2, "seed": 3}
    run(world, tmp_path / "one", **options)
    other = run(world, tmp_path / "two", tmp_path / "one" / "preset.yaml", overrides=(), seed=3)
    assert_same(tmp_path / "one", tmp_path / "two")
    assert len(other["log"]["pretrain"]) == 4
    run(world, tmp_path / "three", tmp_path / "one" / "preset.yaml", overrides=(), feature_map="softmax")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "three")) is GPT2LMHeadModel


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_any_attention(world, tmp_path, feature_map):
    run(world, tmp_path / "out", feature_map=feature_map, model_overrides=(*SMALL, "n_head=2"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(loaded, T2RModel)
    assert isinstance(loaded, GPT2LMHeadModel)
    assert loaded.t2r_config.feature_map == feature_map
    assert len(recurrent_sites(loaded)) == 2
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{feature_map} attention" in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "t2r"


def test_some_layers_and_the_papers_initialization(world, tmp_path):
    run(world, tmp_path / "out", softmax_every=2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert [site.layer_idx for site in recurrent_sites(loaded)] == [0]  # the top layer keeps softmax attention
    (site,) = recurrent_sites(loaded)
    assert (site.feature_map.name, site.feature_map.init) == ("t2r", "paper")


def test_feature_map_softmax_is_no_swap(world, tmp_path):
    run(world, tmp_path / "plain")
    run(world, tmp_path / "named", feature_map="softmax")
    assert_same(tmp_path / "plain", tmp_path / "named")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "named")) is GPT2LMHeadModel
    with pytest.raises(T2RError, match="softmax does not use feature_size"):
        run(world, tmp_path / "out", feature_map="softmax", feature_size=4)


def test_the_configuration_of_a_model_folder(world, tmp_path):
    """With its tokenizer or, without one, with a new one of its vocabulary size. Its weights are not used."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
    )
    config.save_pretrained(tmp_path / "shape")
    run(world, tmp_path / "one", tmp_path / "shape", overrides=SHORT)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    for name in ("model_type", "vocab_size", "hidden_size", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(loaded.config, name) == getattr(config, name)
    assert loaded.config.eos_token_id == 0
    assert load_recipe(tmp_path / "one" / "recipe.yaml").name == "scratch-lm"

    tokenizer = train_tokenizer(str(world / "train.txt"), "word", progress=False)
    tokenizer.save_pretrained(tmp_path / "shape")
    run(world, tmp_path / "two", tmp_path / "shape", overrides=SHORT, feature_map="elu")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "two")) == len(tokenizer)

    # A swapped model is swapped again.
    run(world, tmp_path / "three", tmp_path / "two", overrides=SHORT)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "three").t2r_config.feature_map == "elu"
    run(world, tmp_path / "four", tokenizer=str(tmp_path / "two"))
    assert_same(tmp_path / "two", tmp_path / "three")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "four")) == len(tokenizer)


def test_continued_training_starts_from_the_weights(world, tmp_path):
    first, more = str(tmp_path / "first"), str(tmp_path / "more")
    given = {"train": str(world / "train.txt"), "valid": str(world / "valid.txt"), "device": "cpu", "progress": False}
    before = pretrain("gpt2-tiny", first, model_overrides=SMALL, overrides=SHORT, **given)
    after = pretrain(first, more, continued=True, overrides=[*SHORT, "steps=20", "learning_rate=3e-3"], **given)
    last = before["stages"]["pretrain"]["perplexity"]
    assert after["untrained"]["perplexity"] == pytest.approx(last, rel=1e-5)
    assert after["stages"]["pretrain"]["perplexity"] < last
    assert "the weights of first" in Path(more, "README.md").read_text()
    with pytest.raises(T2RError, match="does not change the model"):
        pretrain(first, str(tmp_path / "other"), continued=True, feature_map="elu", **given)


def test_documents(world, tmp_path):
    lines = [json.dumps({"text": sentences(2, seed)}) for seed in range(60)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    options = {"train": [str(tmp_path / "documents.jsonl")], "documents": True}
    for name, more in (("softmax", {}), ("elu", {"feature_map": "elu"})):
        assert run(world, tmp_path / name, **options, **more)["log"]["pretrain"][-1]["loss"] > 0


# --- Reproducibility ------------------------------------------------------------------------------------------


def test_weights_depend_on_the_seed_alone():
    config = load_preset("gpt2-tiny", SMALL).model
    shape = GPT2Config(**{k: v for k, v in config.items() if k != "model_type"}, vocab_size=64)
    first = make_model(shape, {}, 5)
    state = torch.random.get_rng_state()
    torch.manual_seed(77)
    again, other = make_model(shape, {}, 5), make_model(shape, {}, 6)
    assert torch.equal(torch.rand(3), torch.manual_seed(77) and torch.rand(3))  # the global random state is not used
    torch.random.set_rng_state(state)
    for x, y, z in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y)
        assert x.dim() < 2 or not torch.equal(x, z)
    # Recurrent and softmax models start from the same weights, so that they can be compared.
    swapped = dict(make_model(shape, {"feature_map": "t2r"}, 5).named_parameters())
    assert all(torch.equal(x, swapped[name]) for name, x in first.named_parameters())


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_result(world, tmp_path):
    """Bitwise equal, with dropout, layer dropout, and a loss computed by the model."""
    overrides = (*SHORT[:2], "steps=20", "warmup_steps=100")
    call = {"train": str(world / "train.txt"), "overrides": overrides, "model_overrides": ADAPTIVE, "save_steps": 6}
    kill_after_checkpoint(
        *("pretrain", "adaptive-lm-small", str(tmp_path / "cut")),
        checkpoints=tmp_path / "cut.run" / "pretrain.checkpoints",
        environment=same_threads(T2R_CACHE=str(tmp_path / "cache")),
        **call,
        device="cpu",
    )
    assert not (tmp_path / "cut").exists()

    options = {"config": "adaptive-lm-small", "overrides": overrides}
    for change, words in (
        ({"seed": 1}, "plan.seed: was 0, now 1"),
        ({"model_overrides": (*ADAPTIVE, "dropout=0")}, "plan.config.dropout"),
        ({"feature_map": "elu"}, "elu"),
        ({"train": str(world / "valid.txt")}, "plan."),
    ):
        with pytest.raises(T2RError, match="unfinished run with other options") as error:
            run(world, tmp_path / "cut", **(options | change))
        assert words in str(error.value)
    resumed = run(world, tmp_path / "cut", **options)
    straight = run(world, tmp_path / "straight", **options)
    assert_same(tmp_path / "cut", tmp_path / "straight")
    assert [x["loss"] for x in resumed["log"]["pretrain"]] == [x["loss"] for x in straight["log"]["pretrain"]]


# --- The trainer ----------------------------------------------------------------------------------------------


class OfRows(LanguageModeling):
    """Language modeling on given rows."""

    def __init__(self, rows):
        super().__init__(None, [])
        self.rows = rows

    def dataset(self, block_size):
        return self.rows


class Rows(torch.utils.data.Dataset):
    def __init__(self, prompts=lambda index: 0):
        self.ids = torch.randint(3, 40, (8, BLOCK), generator=torch.Generator().manual_seed(1))
        self.prompts = prompts

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: self.prompts(index)] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def adaptive():
    torch.manual_seed(1)
    names = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "softmax_dropout")
    return AdaptiveLMForCausalLM(
        AdaptiveLMConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            cutoffs=[10, 20],
            adaptive_factor=2,
            **dict.fromkeys(names, 0.0),
        )
    ).double()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("device_tokens", [None, 2 * BLOCK])
def test_a_loss_without_logits_is_the_cross_entropy(tmp_path, monkeypatch, swapped, device_tokens):
    """Also with accumulation, over blocks with different numbers of scored tokens, one of them with none."""
    dataset = Rows(prompts=lambda index: BLOCK if index == 2 else 3 * index % BLOCK)
    model = adaptive()
    if swapped:
        model = t2r.swap(model, feature_map="elu")
    assert model.loss_without_logits
    batch = {name: torch.stack([dataset[i][name] for i in range(8)]) for name in ("input_ids", "labels")}
    logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)

    seen = []
    real = StageTrainer.compute_loss
    monkeypatch.setattr(Learner, "against", None)  # the path that computes logits is not used
    monkeypatch.setattr(StageTrainer, "compute_loss", lambda *args, **kw: seen.append(1) or real(*args, **kw))
    stage = Stage(
        "only",
        "task",
        steps=1,
        block_size=BLOCK,
        batch_tokens=8 * BLOCK,
        device_tokens=device_tokens,
        optimizer="nag",
        momentum=1e-9,
        learning_rate=1.0,
        schedule="constant",
        clip_norm=None,
    )
    before = [p.detach().clone() for p in model.parameters()]
    run = Run(tmp_path / "run", {})
    run_stage(run, Job(OfRows(dataset), settings=Settings(progress=False)), model, stage)
    assert len(seen) == (1 if device_tokens is None else 4)
    assert run.facts["only.log"][0]["loss"] == pytest.approx(expected.item(), abs=1e-4)
    for old, new, grad in zip(before, model.parameters(), wanted, strict=True):
        torch.testing.assert_close(old - new, torch.zeros_like(old) if grad is None else grad, rtol=1e-6, atol=1e-9)


def test_an_adaptive_model_can_be_a_teacher(tmp_path):
    """With a teacher, both models compute full log-probabilities."""
    teacher = adaptive().requires_grad_(False)
    student = t2r.swap(adaptive(), feature_map="hedgehog")
    stage = Stage("only", "distill", steps=3, block_size=BLOCK, batch_tokens=8 * BLOCK, learning_rate=1e-3)
    run = Run(tmp_path / "run", {})
    run_stage(run, Job(OfRows(Rows()), teacher, Settings(progress=False)), student, stage)
    assert run.facts["only.log"][-1]["loss"] < run.facts["only.log"][0]["loss"]


def test_a_short_budget_shortens_the_warm_up(world, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "t2r"):
        results = run(world, tmp_path / "out", overrides=(*SHORT[:3], "warmup_steps=30", "learning_rate=1e-3"))
    assert "has 4 steps, no more than its 30 warm-up steps, which are reduced to 0" in caplog.text
    assert max(entry["learning_rate"] for entry in results["log"]["pretrain"]) > 5e-4


@pytest.mark.parametrize("budget", ["steps=60", f"tokens={60 * 8 * BLOCK}", "epochs=2.07", "minutes"])
def test_the_plan_reports_the_time(world, tmp_path, caplog, monkeypatch, budget):
    def stop(*args, **options):
        raise KeyboardInterrupt

    speeds = Speeds({"pretrain": Cost(0.0, 2.0)}, 0.0)
    monkeypatch.setattr(sessions, "time_all", lambda *args: speeds)
    monkeypatch.setattr(StageTrainer, "train", stop)
    options = {"minutes": 2.3} if budget == "minutes" else {"overrides": (*SHORT[:2], budget)}
    with caplog.at_level(logging.INFO, "t2r"), pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "out", **options)
    if budget == "minutes":  # the time of loading is subtracted, and varies
        told = re.search(r"steps.* in about (\d+ seconds|2\.\d minutes)", caplog.text)
        assert told is not None, caplog.text
        assert told[1].endswith("minutes") or int(told[1].split()[0]) > 60
    else:
        assert "in about 2.0 minutes" in caplog.text


def test_a_model_of_an_unknown_family_trains(world, tmp_path, monkeypatch):
    """A model without a known family or attention: there is nothing to compile or swap.

    Its loss is that of any model, and is not compiled here, which takes ten seconds."""
    monkeypatch.setattr(objectives, "fused", lambda function: function)
    file = tmp_path / "mamba.yaml"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    text = {"model": {"model_type": "mamba", **sizes}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    file.write_text(yaml.safe_dump(text))
    results = run(world, tmp_path / "out", file, compiled=True, valid=str(world / "valid.txt"))
    assert results["stages"]["pretrain"]["perplexity"] > 1
    with pytest.raises(T2RError, match="mamba"):
        run(world, tmp_path / "rnn", file, feature_map="elu")
    assert not list(tmp_path.glob("rnn*"))


# --- Errors ---------------------------------------------------------------------------------------------------


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("model_type", ["bert", "electra"])
def test_models_that_read_later_tokens_are_refused(world, tmp_path, model_type):
    file = tmp_path / "bert.yaml"
    fields = {"model_type": model_type, **BERT}
    file.write_text(yaml.safe_dump({"model": fields, "tokenizer": {"kind": "bpe", "vocab_size": 300}}))
    with pytest.raises(T2RError, match=f"{model_type} reads the tokens after each position: only causal"):
        run(world, tmp_path / "out", file)
    assert not list(tmp_path.glob("out*"))
    results = run(world, tmp_path / "out", file, model_overrides=("is_decoder=true",))
    assert results["stages"]


def test_an_empty_name_of_the_output_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("", " "):
        with pytest.raises(T2RError, match="has no name: give its path"):
            run(world, out)
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": "gpt2"}, "no preset 'gpt2': choose one of adaptive-lm-medium"),
        ({"recipe": "best"}, "no recipe 'best'"),
        ({"recipe": ""}, "no recipe ''"),
        ({"model_overrides": ("n_layer=0",)}, "num_hidden_layers must be at least 1; got 0"),
        ({"recipe": "none", "overrides": ()}, "recipe none trains nothing"),
        ({"recipe": "distill-lm", "overrides": ()}, "objective transfer, which requires a teacher"),
        ({"overrides": ("pretrain.stepz=1",)}, "unknown option stepz"),
        ({"model_overrides": ("n_layers=3",)}, "gpt2 has no field n_layers"),
        ({"model_overrides": ("n_embd=15", "n_head=4")}, "configuration is not valid"),
        ({"feature_sise": 3}, "unknown option feature_sise"),
        ({"feature_map": "magic"}, "magic"),
        ({"feature_map": "rfa", "feature_size": 3}, "3"),
        ({"softmax_layers": [0, 1]}, "nothing would be swapped"),
        ({"softmax_layers": "auto:1"}, "only convert and inspect accept auto:N"),
        ({"train": "/none/of.txt"}, "of.txt"),
        ({"train": "empty.txt"}, "no text"),
        ({"train": "teacher:2"}, "pretraining has no teacher that generates text: name files"),
        (
            {"continued": True, "model_overrides": ()},
            "--continued requires a model folder or a hub name; gpt2-tiny is a preset",
        ),
        ({"valid": "/none/of.txt"}, "of.txt"),
        ({"target_language": "de"}, "languages are for translation"),
        ({"tokenizer": "/none"}, "/none"),
        ({"device": "abacus"}, "device 'abacus' is not available"),
        ({"config": "adaptive-lm-small", "model_overrides": ()}, "cutoffs"),
    ],
)
def test_errors_leave_no_files(world, tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(sessions, "run_stage", None)
    (tmp_path / "empty.txt").touch()
    if options.get("train") == "empty.txt":
        options = {"train": str(tmp_path / "empty.txt")}
    with pytest.raises(T2RError) as error:
        run(world, tmp_path / "out", **options)
    assert words in str(error.value)
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_at_the_end(world, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(GPT2LMHeadModel, "save_pretrained", full)
        with pytest.raises(T2RError, match="cannot be written"):
            run(world, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(world, tmp_path / "out")
    run(world, tmp_path / "straight")
    assert_same(tmp_path / "out", tmp_path / "straight")
    with pytest.raises(T2RError, match="already exists"):
        run(world, tmp_path / "out")
    run(world, tmp_path / "out", overwrite=True)


# --- The command ----------------------------------------------------------------------------------------------


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["t2r", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    return exit.value.code or 0, *capsys.readouterr()


def test_the_command(world, tmp_path, monkeypatch, capsys):
    sets = [part for value in SHORT for part in ("--set", value)]
    sets += [part for value in SMALL for part in ("--model-set", value)]
    common = ("--train", world / "train.txt", "--device", "cpu", *sets)
    code, stdout, stderr = call(
        monkeypatch, capsys, "pretrain", "gpt2-tiny", tmp_path / "a", *common, "--feature-map", "elu", "--json"
    )
    assert code == 0, stderr
    assert json.loads(stdout) == json.loads((tmp_path / "a" / "results.json").read_text())
    valid = ("--valid", world / "valid.txt", "--softmax-every", "4", "--seed", "2")
    code, stdout, stderr = call(monkeypatch, capsys, "pretrain", "gpt2-tiny", tmp_path / "b", *common, *valid)
    assert code == 0, stderr
    assert "after pretrain" in stdout
    assert f"saved in {tmp_path / 'b'}" in " ".join(stdout.split())
    code, stdout, stderr = call(monkeypatch, capsys, "pretrain", "gpt7", tmp_path / "c", "--train", "x.txt")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("t2r: no preset 'gpt7': choose one of ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "cache"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b").t2r_config.softmax_every == 4


def test_help_names_every_preset(monkeypatch, capsys):
    from t2r.training.recipes.preset import shipped_presets

    code, stdout, _ = call(monkeypatch, capsys, "pretrain", "--help")
    assert code == 0
    told = stdout.replace("-\n", "-").replace(" ", "")
    assert all(name in told for name in shipped_presets())


# --- The demo's teacher ---------------------------------------------------------------------------------------


def test_gpt2_novels_is_small():
    preset = load_preset("gpt2-novels")
    fields = {name: value for name, value in preset.model.items() if name != "model_type"}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**fields, vocab_size=preset.tokenizer["vocab_size"]))
    count = sum(p.numel() for p in model.parameters())
    assert 4_000_000 < count <= 5_900_000  # 12 MB in half precision, with its tokenizer
    assert model.config.n_embd // model.config.n_head == 8  # small heads are approximated well by 32 features
    assert not any(isinstance(part, nn.Embedding) and part.num_embeddings > 4096 for part in model.modules())
