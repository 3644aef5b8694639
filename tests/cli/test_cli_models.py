"""The commands swap, inspect and generate on folders with a tiny model and a tokenizer."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, TokenizersBackend

import t2r
from families import is_seq2seq, tiny
from t2r import cli
from t2r.attention.cache import cache_bytes
from t2r.cli.common import parse_layers
from t2r.options import GenerationOptions, SwapOptions, options_of
from t2r.training.recipes.recipe import load_recipe

TEXT = ["the cat sat on the mat", "a dog ran", "the dog and the cat"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TYPES = ("gpt2", "llama", "marian")
both = pytest.mark.parametrize("model_type", TYPES)


def tokenizer(seq2seq: bool) -> TokenizersBackend:
    """Train a tokenizer whose vocabulary fits the tiny models."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    backend.train_from_iterator([*TEXT, "user: assistant:"], trainers.BpeTrainer(vocab_size=97, special_tokens=special))
    if seq2seq:  # a source ends with the end token
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    made = TokenizersBackend(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=64
    )
    made.chat_template = None if seq2seq else TEMPLATE
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A base model of each type and its swapped model: gpt2, gpt2-t2r, ..."""
    root = tmp_path_factory.mktemp("models")
    for model_type in TYPES:
        model, words = tiny(model_type, torch.float32), tokenizer(is_seq2seq(model_type))
        model.generation_config.repetition_penalty = 1.1  # must survive the swap
        model.save_pretrained(root / model_type)
        words.save_pretrained(root / model_type)
        t2r.swap(model, feature_size=8, recurrent="both", init="identity").save_pretrained(root / f"{model_type}-t2r")
        words.save_pretrained(root / f"{model_type}-t2r")
    return root


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command in this process, with this text on standard input."""

    def run(*arguments: object, stdin: str | io.StringIO = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["t2r", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", stdin if isinstance(stdin, io.StringIO) else io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return Outcome(exit.value.code or 0, *capsys.readouterr())

    return run


def load(folder: Path):
    seq2seq = AutoConfig.from_pretrained(folder).is_encoder_decoder
    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- swap ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["swap", "convert", "pretrain", "inspect"])
def test_commands_have_every_option_of_a_swap(run, command):
    told = run(command, "-h").stdout
    assert all(f"--{name.replace('_', '-')}" in told for name in options_of(SwapOptions))


def test_generate_has_every_option_of_generation(run):
    told = run("generate", "--help").stdout
    assert all(f"--{name.replace('_', '-')}" in told for name in options_of(GenerationOptions))


def test_layers_are_numbers_and_ranges(run, folders):
    found = json.loads(run("inspect", folders / "llama", "--softmax-layers", "0-1", "--json").stdout)
    assert found["options"]["softmax_layers"] == [0, 1]
    assert parse_layers("0-3, 7") == [0, 1, 2, 3, 7]


def test_swap_with_a_recipe(run, folders, tmp_path):
    """The same model as that of `convert` before its training."""
    code, stdout, _ = run("swap", folders / "llama", tmp_path / "out", "--recipe", "distill-lm", "--feature-size", 8)
    assert code == 0
    assert "defaults of t2r.swap" not in stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config | load_recipe("distill-lm").swap | {"feature_size": 8} == config
    assert "these are the defaults of t2r.swap" in run("swap", folders / "llama", tmp_path / "plain").stdout


@both
def test_swap_saves_a_complete_folder(run, folders, tmp_path, model_type):
    out = tmp_path / "new" / "model"
    code, stdout, stderr = run("swap", folders / model_type, out, "--feature-size", 8, "--init", "identity")
    assert (code, stderr) == (0, "")
    assert "3 of 3 decoder layers recurrent, 0 softmax" in stdout
    assert "parameters added:" in stdout
    assert "at 4K tokens" in stdout
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} < set(files(out))
    assert os.listdir(out.parent) == ["model"]
    assert f"base_model: {model_type}" in (out / "README.md").read_text()

    model, words = load(out)
    base, base_words = load(folders / model_type)
    assert isinstance(model, type(base))
    assert model.generation_config.repetition_penalty == 1.1
    assert words.chat_template == base_words.chat_template
    assert words(TEXT).input_ids == base_words(TEXT).input_ids
    expected = t2r.swap(base, feature_size=8, init="identity").state_dict()
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_swap_passes_every_option_on(run, folders, tmp_path):
    given = {
        "feature_map": "hedgehog",
        "feature_size": 6,
        "cross_feature_size": 4,
        "recurrent": "both",
        "softmax_layers": [0, 2],
        "shared": False,
        "grouped": False,
        "init": "paper",
        "freeze_feature_map": True,
        "seed": 5,
    }
    words = []
    for name, value in given.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", ",".join(map(str, value)) if isinstance(value, list) else value]
    out = tmp_path / "out"
    code, stdout, _ = run("swap", folders / "marian", out, *words, "--dtype", "bfloat16", "--json")
    assert code == 0
    found = json.loads(stdout)
    model, _ = load(out)
    assert model.dtype == torch.bfloat16
    for name, value in given.items():
        assert getattr(model.t2r_config, name) == value == found["options"][name]
    assert [site["recurrent"] for site in found["sites"]] == [False, False, True, True, False, False]
    activation = tmp_path / "activation"
    assert run("swap", folders / "gpt2", activation, "--activation", "gelu", "--softmax-every", 2, "-q")[0] == 0
    config = load(activation)[0].t2r_config
    assert (config.activation, config.softmax_every) == ("gelu", 2)


def test_a_source_without_a_tokenizer_gets_a_note(run, tmp_path):
    tiny("gpt2", torch.float32).save_pretrained(tmp_path / "base")
    code, _, stderr = run("swap", tmp_path / "base", tmp_path / "out")
    assert code == 0
    assert "has no tokenizer" in stderr
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()
    assert run("swap", tmp_path / "base", tmp_path / "again", "--quiet") == (0, "", "")
    code, _, stderr = run("generate", tmp_path / "out", "hello")
    assert code == 2
    assert "has no tokenizer" in stderr


def test_an_existing_folder_is_replaced_only_when_asked(run, folders, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert run("swap", folders / "gpt2", out)[0] == 0  # an empty folder may be replaced
    before = files(out)
    code, _, stderr = run("swap", folders / "gpt2", out, "--seed", 7)
    assert code == 2
    assert "--overwrite" in stderr
    assert files(out) == before
    (out / "old").write_text("gone afterwards")
    assert run("swap", folders / "gpt2", out, "--seed", 7, "--overwrite")[0] == 0
    after = files(out)
    assert after.keys() == before.keys()
    assert after["model.safetensors"] != before["model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def test_overwriting_replaces_models_only_and_never_the_base(run, folders, tmp_path):
    (tmp_path / "precious").write_text("")
    code, _, stderr = run("swap", folders / "gpt2", tmp_path, "--overwrite")
    assert code == 2
    assert "is not a saved model" in stderr
    shutil.copytree(folders / "gpt2", tmp_path / "base")
    for out in (tmp_path / "base", tmp_path):
        code, _, stderr = run("swap", tmp_path / "base", out, "--overwrite")
        assert code == 2
        assert "would replace the model" in stderr
    assert (tmp_path / "precious").exists()
    assert files(tmp_path / "base") == files(folders / "gpt2")


@pytest.mark.parametrize(("error", "code"), [(OSError("No space left on device"), 2), (KeyboardInterrupt(), 130)])
def test_a_save_that_fails_leaves_everything_as_it_was(run, folders, tmp_path, monkeypatch, error, code):
    shutil.copytree(folders / "gpt2-t2r", tmp_path / "there")
    before = files(tmp_path)

    def fail(self, folder, **kwargs):
        assert list(Path(folder).iterdir())  # the model is written, the tokenizer is not
        raise error

    monkeypatch.setattr(TokenizersBackend, "save_pretrained", fail)
    for words in ([tmp_path / "there", "--overwrite"], [tmp_path / "new"]):
        outcome = run("swap", folders / "gpt2", *words)
        assert outcome.code == code
        assert outcome.stderr.count("t2r: ") == (1 if code == 2 else 0)
        assert files(tmp_path) == before
        assert os.listdir(tmp_path) == ["there"]


def test_a_rename_that_fails_puts_the_old_folder_back(run, folders, tmp_path, monkeypatch):
    shutil.copytree(folders / "gpt2-t2r", tmp_path / "there")
    before, rename = files(tmp_path), Path.rename

    def fail(self, target):
        if self.name.endswith(".partial"):
            raise OSError("cannot")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert run("swap", folders / "gpt2", tmp_path / "there", "--overwrite").code == 2
    assert files(tmp_path) == before


# --- inspect ------------------------------------------------------------------------------------------------


@both
def test_inspect_shows_what_convert_makes(run, folders, model_type):
    """The defaults are those of the recipe that `convert` uses for the model, not those of `swap`."""
    recipe = load_recipe("distill-mt" if is_seq2seq(model_type) else "distill-lm")
    found = json.loads(run("inspect", folders / model_type, "--json").stdout)
    swap = {name: value for name, value in recipe.swap.items() if name != "cross_feature_size"}  # that stays exact
    assert found["options"] | swap == found["options"]
    assert [stage["name"] for stage in found["recipe"]["stages"]] == ["transfer", "distill"]
    plain = json.loads(run("inspect", folders / model_type, "--recipe", "none", "--json").stdout)
    assert plain["options"] == {name: option.default for name, option in options_of(SwapOptions).items()}
    assert "recipe" not in plain


def test_inspect_with_a_recipe(run, folders):
    found = json.loads(run("inspect", folders / "llama", "--recipe", "paper-lm", "--json").stdout)
    assert found["options"] | load_recipe("paper-lm").swap == found["options"]
    code, stdout, _ = run("inspect", folders / "llama", "--recipe", "distill-lm", "--feature-size", 8)
    assert code == 0
    assert "distill: distill, trains all, 40,000,000 tokens in batches of 16,384 tokens" in stdout
    code, _, stderr = run("inspect", folders / "llama", "--recipe", "nothing")
    assert (code, "no recipe 'nothing'" in stderr) == (2, True)
    code, _, stderr = run("inspect", folders / "gpt2-t2r", "--recipe", "distill-lm")
    assert (code, "already swapped: do not give recipe" in stderr) == (2, True)


@both
def test_inspect_with_layers_that_a_conversion_chooses(run, folders, model_type):
    def inspected(layers):
        return json.loads(run("inspect", folders / model_type, "--softmax-layers", layers, "--json").stdout)

    auto, first, last = inspected("auto:2"), inspected("0-1"), inspected("1-2")
    assert auto["options"]["softmax_layers"] == "auto:2"
    assert auto["undecided"] == 2
    totals = ("state_bytes", "kv_bytes", "cache_bytes", "parameters_added", "share", "cross_saves_from")
    for name in totals:  # all layers are alike, so that any two have the same bytes
        assert auto[name] == first[name] == last[name]
    code, stdout, stderr = run("inspect", folders / model_type, "--softmax-layers", "auto:2")
    assert (code, stderr) == (0, "")
    assert stdout.count("undecided") == sum(not site["cross"] for site in auto["sites"])
    assert "self attention: 1 of 3 decoder layers recurrent, 2 softmax" in stdout
    assert "measures the sensitivity of all layers after the first stage, and keeps softmax attention in 2" in stdout


@both
def test_inspect(run, folders, model_type):
    how = ["--feature-size", 8, "--recurrent", "both"]
    base = json.loads(run("inspect", folders / model_type, "--recipe", "none", *how, "--json").stdout)
    swapped = json.loads(run("inspect", folders / f"{model_type}-t2r", "--json").stdout)
    assert swapped["swapped"]
    assert not base["swapped"]
    assert base["parameters_added"] == swapped["parameters_added"]
    assert base["cache_bytes"] == swapped["cache_bytes"] == dict.fromkeys(["512", "4096", "32768"], base["state_bytes"])
    for site in base["sites"]:
        assert site["parameters_added"] == 8 * (site["head_dim"] + 1) * site["num_key_value_heads"]
    code, stdout, stderr = run("inspect", folders / model_type, "--softmax-layers", "1", "--recurrent", "both")
    assert (code, stderr) == (0, "")
    rows = [line.split() for line in stdout.splitlines() if line[:5].strip().isdigit()]
    kinds = ["recurrent", "softmax", "recurrent"]
    assert [row[1] for row in rows if row[1] != "cross"][:3] == kinds
    assert [row[2] for row in rows if row[1] == "cross"] == (kinds if is_seq2seq(model_type) else [])


# --- generate -----------------------------------------------------------------------------------------------

GREEDY = ["--max-new-tokens", "6"]


def expected(folder: Path, prompts: list[str], **options) -> list[list[str]]:
    """Generate for each prompt alone with model.generate."""
    model, words = load(folder)
    texts = []
    for prompt in prompts:
        ids = words(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **{"max_new_tokens": 6} | options)
        new = out if model.config.is_encoder_decoder else out[:, ids.shape[1] :]
        texts.append(words.batch_decode(new, skip_special_tokens=True))
    return texts


@both
@pytest.mark.parametrize("kind", ["", "-t2r"], ids=["base", "swapped"])
def test_generate_in_all_its_forms(run, folders, tmp_path, model_type, kind):
    folder = folders / (model_type + kind)
    texts = [text for (text,) in expected(folder, TEXT)]
    lines = "".join(" ".join(text.splitlines()) + "\n" for text in texts)
    (tmp_path / "prompts").write_text("\n".join(TEXT) + "\n")
    assert run("generate", folder, TEXT[0], *GREEDY) == (0, texts[0] + "\n", "")  # streamed
    assert run("generate", folder, *TEXT, *GREEDY) == (0, lines, "")
    assert run("generate", folder, "--file", tmp_path / "prompts", *GREEDY) == (0, lines, "")
    assert run("generate", folder, *GREEDY, "--batch-size", 2, stdin="\n".join(TEXT)) == (0, lines, "")


@pytest.mark.parametrize("from_file", [False, True], ids=["stdin", "file"])
def test_lines_end_with_a_newline_only(run, folders, tmp_path, from_file):
    given = "\ufeffthe cat\u2028sat\r\na\x85dog\fran\x1d\n\nthe\rdog\n"
    prompts = ["the cat\u2028sat", "a\x85dog\fran\x1d", "", "the\rdog"]
    (tmp_path / "prompts").write_bytes(given.encode())
    source = ["--file", tmp_path / "prompts"] if from_file else []
    done = run("generate", folders / "llama-t2r", *GREEDY, "--json", *source, stdin="" if from_file else given)
    assert [json.loads(line)["prompt"] for line in done.stdout.removesuffix("\n").split("\n")] == prompts


def test_a_state_is_of_the_unchanged_document(run, folders, tmp_path, monkeypatch):
    from t2r.generation import state

    read = []

    def read_document(model, words, text, *rest, real=state.read_document, **how):
        read.append(text)
        return real(model, words, text, *rest)

    monkeypatch.setattr(state, "read_document", read_document)
    (tmp_path / "document").write_bytes("\ufeffthe cat\r\nsat\f\n\n".encode())
    words = ["--file", tmp_path / "document", "--save-state", tmp_path / "state"]
    assert run("generate", folders / "llama-t2r", *words).code == 0
    assert read == ["the cat\r\nsat\f\n\n"]


@both
def test_beams_and_several_sequences(run, folders, model_type):
    folder = folders / f"{model_type}-t2r"
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "min_new_tokens": 2}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    texts = expected(folder, TEXT[:2], **options)
    lines = "".join(" ".join(text.splitlines()) + "\n" for pair in texts for text in pair)
    assert run("generate", folder, *TEXT[:2], *GREEDY, *words).stdout == lines
    objects = [json.loads(x) for x in run("generate", folder, *TEXT[:2], *GREEDY, *words, "--json").stdout.splitlines()]
    assert [[x["text"], *x["alternatives"]] for x in objects] == texts


@pytest.fixture(scope="module")
def beams(folders) -> Path:
    """Models whose own default is a beam search."""
    for name in ("llama", "llama-t2r"):
        shutil.copytree(folders / name, folders / "beams" / name)
        path = folders / "beams" / name / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 3, "early_stopping": True}))
    return folders / "beams"


@pytest.mark.parametrize("name", ["llama", "llama-t2r"])
def test_a_model_with_beams_by_default(run, folders, beams, name):
    (text,) = expected(beams / name, TEXT[:1])[0]
    assert run("generate", beams / name, TEXT[0], *GREEDY) == (0, " ".join(text.splitlines()) + "\n", "")
    greedy = run("generate", folders / name, *GREEDY, stdin=Terminal(TEXT[0]))
    assert greedy.code == 0
    assert run("generate", beams / name, *GREEDY, stdin=Terminal(TEXT[0])).stdout == greedy.stdout
    code, _, stderr = run("generate", beams / name, "--num-beams", 2, stdin=Terminal(TEXT[0]))
    assert code == 2
    assert "one answer at a time" in stderr


def test_a_blank_prompt_has_as_many_lines_as_the_others(run, folders):
    words = ["--num-beams", 2, "--num-return-sequences", 2]
    lines = run("generate", folders / "llama-t2r", TEXT[0], " ", TEXT[1], *GREEDY, *words).stdout.split("\n")
    assert [i for i, line in enumerate(lines) if not line] == [2, 3, 6]


def test_sampling_follows_its_seed(run, folders):
    words = [*GREEDY, "--do-sample", "--temperature", 1.5, "--top-k", 20, "--top-p", 0.9, "--repetition-penalty", 1.2]
    outputs = [run("generate", folders / "llama-t2r", TEXT[0], *words, "--seed", s).stdout for s in (1, 1, 2, 3)]
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) > 1


def test_chat(run, folders):
    folder = folders / "llama-t2r"
    (text,) = expected(folder, [f"user: {TEXT[0]}</s>assistant:"])
    assert run("generate", folder, "--chat", TEXT[0], *GREEDY).stdout == text[0] + "\n"
    code, _, stderr = run("generate", folders / "marian-t2r", "--chat", TEXT[0])
    assert code == 2
    assert "no chat template" in stderr


@both
def test_json(run, folders, model_type):
    for kind in ("", "-t2r"):
        folder = folders / (model_type + kind)
        code, stdout, stderr = run("generate", folder, TEXT[0], "", TEXT[1], *GREEDY, "--json")
        assert (code, stderr) == (0, "")
        first, blank, last = map(json.loads, stdout.splitlines())
        model, words = load(folder)
        assert [first["text"], last["text"]] == [text for (text,) in expected(folder, TEXT[:2])]
        assert [x["prompt"] for x in (first, blank, last)] == [TEXT[0], "", TEXT[1]]
        assert first["prompt_tokens"] == len(words(TEXT[0]).input_ids)
        assert 1 <= first["new_tokens"] <= 6
        assert first["tokens_per_second"] > 0
        assert (first["dtype"], first["device"]) == ("float32", "cpu")
        assert first["backend"] == (None if kind == "" else "chunked")
        assert (blank["text"], blank["new_tokens"], blank["state_bytes"]) == ("", 0, 0)
        ids = words(TEXT[0], return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, return_dict_in_generate=True)
        if kind:  # of fixed size; keys and values also hold the padding of a batch
            assert first["state_bytes"] == last["state_bytes"] == cache_bytes(out.past_key_values)
        else:
            alone = json.loads(run("generate", folder, TEXT[0], *GREEDY, "--json").stdout)
            assert alone["state_bytes"] == cache_bytes(out.past_key_values)


def test_a_real_pipe(folders):
    command = [sys.executable, "-m", "t2r", "generate", str(folders / "marian-t2r"), *GREEDY]
    done = subprocess.run(command, input="\n".join(TEXT), capture_output=True, text=True, check=True)
    texts = [text for (text,) in expected(folders / "marian-t2r", TEXT)]
    assert done.stdout.splitlines() == [" ".join(text.splitlines()) for text in texts]
    assert done.stderr == ""


def test_interrupting_is_clean(folders):
    command = [sys.executable, "-m", "t2r", "generate", str(folders / "llama-t2r"), TEXT[0]]
    command += ["--max-new-tokens", "1000000", "--min-new-tokens", "999999"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)  # generation has started
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert b"Traceback" not in process.stderr.read()


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(folders, tmp_path) -> Path:
    """Folders and files that are not a valid model, of every kind."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "one").write_text(TEXT[0])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    configs = {"bert": '{"model_type": "bert"}', "vit": '{"model_type": "vit"}', "new": '{"model_type": "new"}'}
    configs |= {"json": '{"model_type": ', "code": '{"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}'}
    configs["wrong"] = '{"model_type": "llama", "num_hidden_layers": "many"}'
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    for kind in ("", "-t2r"):
        shutil.copytree(folders / f"gpt2{kind}", tmp_path / f"cut{kind}")
        weights = tmp_path / f"cut{kind}" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        shutil.copytree(folders / f"gpt2{kind}", tmp_path / f"none{kind}")
        (tmp_path / f"none{kind}" / "model.safetensors").unlink()
    shutil.copytree(folders / "gpt2", tmp_path / "deeper")
    config = tmp_path / "deeper" / "config.json"
    config.write_text(config.read_text().replace('"n_layer": 3', '"n_layer": 4'))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("inspect {b}/nowhere", "there is no folder"),
        ("inspect {b}/empty", "has no config.json"),
        ("inspect {b}/file", "is not a saved state, or is truncated"),
        ("swap {f}/llama {b}/out --softmax-layers auto:2", "only convert and inspect accept auto:N"),
        ("inspect {f}/llama --softmax-layers auto:3", "auto:3 would keep all 3 layers: nothing would be swapped"),
        ("inspect {f}/llama --softmax-layers auto:x", "give layers, or auto:N"),
        ("inspect {f}/llama --softmax-layers auto:1 --softmax-every 2", "cannot be combined with softmax_every"),
        ("inspect {b}/json", "not a valid JSON"),
        ("inspect {b}/wrong", "cannot be loaded"),
        ("inspect {b}/code", "--trust-remote-code"),
        ("inspect {b}/bert", "models of type 'bert' cannot be swapped"),
        ("inspect {b}/vit", "models of type 'vit' cannot be swapped"),
        ("inspect {b}/new", "type 'new', which this version of transformers does not support: upgrade"),
        ("inspect some/name", "some/name is not a local folder, and from the Hub it cannot be loaded"),
        ("inspect {f}/gpt2-t2r --seed 1", "already swapped"),
        ("inspect {f}/gpt2 --dtype int3", "dtype must be one of auto, float32, bfloat16, float16; got 'int3'"),
        ("swap {b}/empty {b}/out", "has no config.json"),
        ("swap {b}/bert {b}/out", "models of type 'bert' cannot be swapped"),
        ("swap {f}/gpt2-t2r {b}/out", "is already a t2r model"),
        ("swap {f}/gpt2 {b}/file", "is a file: give the path of a folder"),
        ("swap {f}/gpt2 {b}/file/out", "cannot be written"),
        ("swap {b}/cut {b}/out", "damaged or truncated"),
        ("swap {b}/none {b}/out", "no file named model.safetensors"),
        ("swap {b}/deeper {b}/out", "missing: "),
        ("swap {f}/gpt2 {b}/out --feature-map magic", "unknown feature map 'magic': choose one of t2r"),
        ("swap {f}/gpt2 {b}/out --feature-size 999", "999 is more than 16 times the head size 8"),
        ("swap {f}/gpt2 {b}/out --feature-map rfa --feature-size 7", "must be even; got 7, try 8"),
        ("swap {f}/gpt2 {b}/out --feature-map elu --feature-size 7", "feature_size must be 8 (or left out)"),
        ("swap {f}/gpt2 {b}/out --softmax-layers 1,7", "there is no layer 7; the model has layers 0 to 2"),
        ("swap {f}/gpt2 {b}/out --softmax-layers one", "such as 1,5,9 or 0-3,7; got 'one'"),
        ("swap {f}/gpt2 {b}/out --softmax-layers 1 --softmax-every 2", "not both"),
        ("swap {f}/gpt2 {b}/out --softmax-every 1", "nothing would be swapped"),
        ("swap {f}/gpt2 {b}/out --activation magic", "unknown activation 'magic'"),
        ("swap {f}/gpt2 {b}/out --init magic", "unknown initialization 'magic'"),
        ("generate {b}/empty hello", "has no config.json"),
        ("generate {b}/cut hello", "damaged"),
        ("generate {b}/cut-t2r hello", "damaged"),
        ("generate {b}/none-t2r hello", "no file named model.safetensors"),
        ("generate {f}/gpt2", "no prompt in standard input"),
        ("generate {f}/gpt2 --file {b}/blank", "no prompt in"),
        ("generate {f}/gpt2 --file {b}/nowhere", "/nowhere cannot be read: No such file or directory\n"),
        ("generate {f}/gpt2 --file {b}/bytes", "cannot be read"),
        ("generate {f}/gpt2 --file {b}/one hello", "not both"),
        ("generate {f}/gpt2 hello --device abacus", "device 'abacus' is not available"),
        ("generate {f}/gpt2 hello --batch-size 0", "batch_size must be a whole number, at least 1; got 0"),
        ("generate {f}/gpt2 hello --max-new-tokens 0", "max_new_tokens must be a whole number, at least 1"),
        ("generate {f}/gpt2 hello --temperature 2", "temperature is for sampling"),
        ("generate {f}/gpt2 hello --length-penalty 2", "length_penalty is for beam search"),
        ("generate {f}/gpt2 hello --num-return-sequences 2 --max-new-tokens 3", "cannot generate"),
        ("generate {f}/gpt2 hello --do-sample --temperature -1", "temperature must be a number, above 0; got -1.0"),
        ("generate {f}/gpt2 hello --max-new-tokens 100", "beyond the 64 positions"),
        ("generate {f}/gpt2-t2r hello --max-new-tokens 100", "beyond the 64 positions"),
        ("generate {f}/marian-t2r " + 80 * "a", "beyond the 64 positions of the encoder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, folders, broken, monkeypatch, command, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = sorted(os.listdir(broken))
    code, _, stderr = run(*(word.format(b=broken, f=folders) for word in command.split()))
    assert code == 2
    assert says in stderr
    assert stderr.startswith("t2r: ")
    assert stderr.count("\n") == 1
    assert sorted(os.listdir(broken)) == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["", "-t2r"], ids=["base", "swapped"])
def test_a_terminal_without_a_prompt_is_a_chat(run, folders, kind):
    folder = folders / f"llama{kind}"
    code, stdout, _ = run("generate", folder, *GREEDY, stdin=Terminal(f"{TEXT[0]}\n\n{TEXT[1]}\n"))
    assert code == 0
    first = run("generate", folder, "--chat", TEXT[0], *GREEDY).stdout
    assert stdout.startswith(f"> {first}> > ")
    assert stdout.endswith("\n> \n")
    code, _, stderr = run("generate", folders / f"marian{kind}", stdin=Terminal())
    assert code == 2
    assert "requires a language model" in stderr


def test_saving_a_state_requires_a_document(run, folders, tmp_path):
    code, _, stderr = run("generate", folders / "llama-t2r", "--save-state", tmp_path / "state", stdin=Terminal())
    assert code == 2
    assert "no document" in stderr


@pytest.mark.parametrize("kind", ["", "-t2r"], ids=["base", "swapped"])
def test_computed_positions_do_not_end(run, folders, kind):
    words = ["--min-new-tokens", 66, "--max-new-tokens", 66]
    assert run("generate", folders / f"marian{kind}", TEXT[0], *words).code == 0
