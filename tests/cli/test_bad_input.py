"""User errors print one line on stderr, exit with code 2, and leave no partial output."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2ForSequenceClassification

import t2r
from commands import TEXT, is_one_line, runner, words
from families import tiny
from t2r.storage import json_text

LONG = "x" * 5000


def edit(folder: Path, **fields: object) -> None:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def shard(folder: Path, index: object) -> None:
    """A checkpoint of one shard, with this index."""
    shutil.move(folder / "model.safetensors", folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Valid models, and one model for each kind of damage."""
    root = tmp_path_factory.mktemp("made")
    for name in ("gpt2", "llama", "marian"):
        tiny(name, torch.float32).save_pretrained(root / name)
        words().save_pretrained(root / name)
    t2r.swap(tiny("gpt2", torch.float32), feature_size=6).save_pretrained(root / "rnn")
    words().save_pretrained(root / "rnn")

    def copy(name: str, source: str = "gpt2") -> Path:
        shutil.copytree(root / source, root / name)
        return root / name

    for name, source in (("nan", "gpt2"), ("nan-rnn", "rnn"), ("loud", "llama")):
        path = copy(name, source) / "model.safetensors"
        weights = load_file(path)
        key = next(key for key in weights if key.endswith(("mlp.c_proj.weight", "norm.weight")))
        weights[key] = weights[key] * 1e30 if name == "loud" else weights[key].fill_(float("nan"))
        save_file(weights, path, metadata={"format": "pt"})

    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0)
    GPT2ForSequenceClassification(config).save_pretrained(root / "classifier")
    bert = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(bert).save_pretrained(root / "bert")
    GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2).save_pretrained(root / "other")
    for name, fields in {
        "eos-text": {"eos_token_id": "end"},
        "eos-texts": {"eos_token_id": ["end", 3]},
        "eos-float": {"eos_token_id": 2.5},
        "cold": {"temperature": 1e-40, "do_sample": True},
        "hot": {"temperature": "hot", "do_sample": True},
        "beams": {"num_beams": 10**10},
        "beams-text": {"num_beams": "many"},
        "returned": {"num_return_sequences": 10**10, "do_sample": True},
    }.items():
        (copy(f"config-{name}", "rnn") / "generation_config.json").write_text(json.dumps(fields))
    t2r_config = json.loads((root / "rnn" / "config.json").read_text())
    for name, fields in {
        "no-heads": {"n_head": 0},
        "text-heads": {"n_head": "many"},
        "odd-type": {"model_type": ["gpt2"]},
    }.items():
        edit(copy(name), **fields)
    for name, base in {
        "base-list": ["gpt2"],
        "base-untyped": {},
        "base-odd": t2r_config["base_config"] | {"n_layer": "x"},
        "base-unknown": {"model_type": "gpt99"},
    }.items():
        edit(copy(name, "rnn"), base_config=base)
    edit(copy("bad-option", "rnn"), feature_size=-3)
    for name, source, fields in (
        ("many-layers", "gpt2", {"n_layer": 10**9}),
        ("many-layers-llama", "llama", {"num_hidden_layers": 10**9}),
        ("many-layers-marian", "marian", {"encoder_layers": 1e300}),
        ("many-experts", "llama", {"num_local_experts": 10**9, "model_type": "mixtral"}),
        ("many-heads", "llama", {"num_key_value_heads": 10**9}),
        ("huge-dropout", "gpt2", {"attn_pdrop": 10**9}),
        ("unknown", "gpt2", {"model_type": "gpt99" * 100, "architectures": None}),
    ):
        edit(copy(name, source), **fields)
    edit(copy("base-layers", "rnn"), base_config=t2r_config["base_config"] | {"n_layer": 10**9})
    for name, text in {"list": "[]", "number": "3", "deep": "[" * 100_000, "cut": '{"model_type": "gp'}.items():
        (copy(f"config-{name}") / "config.json").write_text(text)
    (copy("config-bytes") / "config.json").write_bytes(b"\xff\xfe\x00")
    keys = list(load_file(root / "gpt2" / "model.safetensors"))
    shard(copy("index-outside"), {"weight_map": dict.fromkeys(keys, "../gpt2/model.safetensors")})
    shard(copy("index-absolute"), {"weight_map": dict.fromkeys(keys, str(root / "gpt2" / "model.safetensors"))})
    shard(copy("index-pickle"), {"weight_map": dict.fromkeys(keys, "part.bin")})
    shard(copy("index-list"), {"weight_map": keys})
    shard(copy("index-cut"), '{"weight_map": {')
    shard(copy("index-missing"), {"weight_map": dict.fromkeys(keys, "gone.safetensors")})
    words(200).save_pretrained(copy("many-words"))
    begins = words(200)  # and it begins every text with a token beyond the vocabulary
    begins.add_special_tokens({"bos_token": "<s>"})
    marks = [("<s>", begins.convert_tokens_to_ids("<s>"))]
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=marks)
    begins.save_pretrained(copy("begins", "llama"))
    for name, template in {"syntax": "{% if", "call": "{{ messages.nothing() }}", "type": "{{ 1 + 'a' }}"}.items():
        broken = words()
        broken.chat_template = template
        broken.save_pretrained(copy(f"template-{name}"))

    reader = t2r.load(root / "rnn")
    t2r.read_document(reader, words(), "the sea").save(root / "state")
    for name, text in {
        "cut": '{"plans": [',
        "list": '{"plans": [3]}',
        "zero": '{"plans": [{"plan": {"windows": []}}]}',
        "words": '{"plans": [{"plan": {"windows": [["many"]]}, "context": 3}]}',
    }.items():
        (root / f"plan-{name}.json").write_text(text)
    (root / "plan.json").write_text('{"plans": []}')
    (root / "text.txt").write_text(TEXT)
    (root / "words.txt").write_text(" ".join(f"w{i}" for i in range(150)))
    (root / "empty.txt").write_text("\n")
    (root / "surrogate.jsonl").write_text('{"text": "fine"}\n{"text": "half \\ud83d"}\n')
    (root / "deep.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
    (root / "digits.jsonl").write_text('{"text": ' + "9" * 5000 + "}\n")
    (root / "recipe-keys.yaml").write_text("stages: [{name: a, objective: task, steps: 3}]\n3: 4\n")
    (root / "recipe-date.yaml").write_text("stages: [{name: a, objective: task, steps: 2024-01-01}]\n")
    (root / "preset-size.yaml").write_text("model: {model_type: gpt2, vocab_size: abc}\n")
    (root / "recipe-deep.yaml").write_text("[" * 10_000)
    os.symlink(root / "loop", root / "loop")
    os.symlink(root / "loop", root / "loop.yaml")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        before = os.getcwd()
        os.chdir(root)  # a socket's path must be short
        bound.bind("socket")
        os.chdir(before)
    return root


@pytest.fixture
def run(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


CONVERT = "convert {m}/gpt2 {o} --train {m}/text.txt"
PRETRAIN = "pretrain gpt2-tiny {o} --train {m}/text.txt"
PLAN = "plan {m}/llama --train {m}/text.txt"
EVALUATE = "evaluate {m}/llama --text {m}/text.txt --no-generation"

CASES = [
    # Options, refused before anything is loaded.
    (f"{CONVERT} --set distill.betas=[2,2]", "betas must be a list of 2 numbers, at least 0 and below 1"),
    (f"{CONVERT} --set epsilon=0", "epsilon must be a number, above 0"),
    (f"{CONVERT} --set weight_decay=-1", "weight_decay must be a number, at least 0"),
    (f"{CONVERT} --set device_tokens=-4", "device_tokens must be a whole number, at least 1"),
    (f"{CONVERT} --set warmup_steps=-5", "warmup_steps must be a whole number, at least 0"),
    (f"{CONVERT} --set momentum=5", "momentum must be a number, at least 0 and below 1"),
    (f"{CONVERT} --set period=0", "period must be a whole number, at least 1"),
    (f"{CONVERT} --set kl_weight=-1", "kl_weight must be a number, at least 0"),
    (f"{CONVERT} --set steps=1e30", "steps must be a whole number, at least 1 and at most 1,000,000,000"),
    (f"{CONVERT} --set shrink=.nan", "shrink must be a number, above 0 and at most 1; got nan"),
    (f"{CONVERT} --minutes inf", "minutes must be a number, above 0 and at most 525,600; got inf"),
    (f"{CONVERT} --minutes nan", "got nan"),
    (f"{CONVERT} --steps 0", "steps must be a whole number, at least 1"),
    (f"{CONVERT} --learning-rate -1", "learning_rate must be a number, above 0"),
    (f"{CONVERT} --seed {2**70}", "seed must be a whole number, at least 0 and at most 4,294,967,295"),
    (f"{CONVERT} --seed -1", "seed must be a whole number, at least 0"),
    (f"{CONVERT} --limit 0", "limit must be a whole number, at least 1"),
    (f"{CONVERT} --teacher-tokens 0", "teacher_tokens must be a whole number, at least 1"),
    (f"{CONVERT} --save-steps 0", "save_steps must be a whole number, at least 1"),
    (f"{CONVERT} --device meta", "device 'meta' is not available"),
    (f"{CONVERT} --softmax-layers 3-1", "such as 1,5,9 or 0-3,7"),
    (f"{CONVERT} --softmax-layers -1", "such as 1,5,9 or 0-3,7"),
    ("swap {m}/gpt2 {o} --cross-feature-size -1", "cross_feature_size must be a whole number, at least 1; got -1"),
    ("swap {m}/gpt2 {o} --softmax-every 0", "softmax_every must be a whole number, at least 1"),
    ("generate {m}/gpt2 the --do-sample --top-p 2", "top_p must be a number, above 0 and at most 1; got 2.0"),
    ("generate {m}/gpt2 the --do-sample --temperature nan", "temperature must be a number, at least 1e-06 and"),
    ("generate {m}/gpt2 the --top-k -1", "top_k must be a whole number, at least 0"),
    ("generate {m}/gpt2 the --repetition-penalty 0", "repetition_penalty must be a number, above 0"),
    (f"generate {{m}}/gpt2 the --seed {2**70}", "seed must be a whole number"),
    ("generate {m}/gpt2 the --device meta", "device 'meta' is not available"),
    ("bench ops --device meta --length 8", "device 'meta' is not available"),
    ("bench ops --length 8 --backend fla", "the backend fla needs a CUDA device, got cpu"),
    (f"bench ops --length {10**9}", "1,000,000,000 tokens need at least"),
    (f"bench ops --length {10**30}", "of memory, and"),
    (f"bench ops --length 8 --head-dim {10**14}", "8 tokens need at least"),
    ("generate {m}/config-eos-text the", "eos_token_id"),
    ("generate {m}/config-eos-texts the", "eos_token_id"),
    ("generate {m}/config-eos-float the", "eos_token_id"),
    ("generate {m}/config-cold the", "temperature must be at least"),
    ("generate {m}/config-hot the", "temperature"),
    ("generate {m}/config-beams the", "num_beams must be a whole number, at least 1 and at most 2,147,483,647"),
    ("generate {m}/config-beams-text the", "num_beams"),
    ("generate {m}/config-returned the", "num_return_sequences must be a whole number, at least 1 and at most"),
    (f"generate {{m}}/llama the --num-beams {2 * 10**9}", "sequences (num_beams=2,000,000,000) need at least"),
    ("generate {m}/rnn the --do-sample --temperature 1e-40", "temperature must be a number, at least 1e-06"),
    (f"{EVALUATE} --window 1", "window must be a whole number, at least 2"),
    (f"{EVALUATE} --stride 0", "stride must be a whole number, at least 1"),
    (f"{EVALUATE} --stride 600", "stride 600 must be less than the window"),
    (f"{PRETRAIN} --model-set n_head=0", "configuration is not valid"),
    (f"{PRETRAIN} --model-set n_embd=-8", "configuration is not valid"),
    (f"{PRETRAIN} --model-set vocab_size=abc", "vocab_size must be a whole number, at least 1, or left out"),
    (f"{PRETRAIN} --model-set vocab_size=null", "vocab_size must be a whole number, at least 1, or left out"),
    ("pretrain {m}/preset-size.yaml {o} --train {m}/text.txt", "vocab_size must be a whole number"),
    (f"{CONVERT}:99% --train {{m}}/words.txt:0.0000001%", "words.txt: share must be a number, at least 1e-06"),
    # Recipes.
    (f"{CONVERT} --recipe {{m}}/recipe-keys.yaml", "no field 3"),
    (f"{CONVERT} --recipe {{m}}/recipe-date.yaml", "steps must be a whole number"),
    (f"{CONVERT} --recipe {{m}}/recipe-deep.yaml", "more than 50 levels"),
    # Texts.
    ("evaluate {m}/llama --text {m}/surrogate.jsonl", "surrogate.jsonl:2: the text is not valid Unicode (U+D83D"),
    ("evaluate {m}/llama --text {m}/deep.jsonl", "deep.jsonl:1: the JSON cannot be read"),
    ("evaluate {m}/llama --text {m}/digits.jsonl", "digits.jsonl:1: the JSON cannot be read"),
    ("evaluate {m}/llama --text {m}/pipe", "is a device or a pipe"),
    ("convert {m}/marian {o} --src {m}/empty.txt --tgt teacher", "empty.txt has no text for the teacher to translate"),
    ("evaluate {m}/llama --text ~nobody-here/x", "there is no file ~nobody-here/x"),
    # Models.
    *((f"{command}", "NaN or infinite weights") for command in (
        "swap {m}/nan {o}", "generate {m}/nan the", "generate {m}/nan-rnn the", "merge {m}/nan-rnn {o} --force",
        "evaluate {m}/nan --text {m}/text.txt", "convert {m}/nan {o} --train {m}/text.txt",
    )),
    *((f"{command}", "GPT2ForSequenceClassification, which does not generate text") for command in (
        "swap {m}/classifier {o}", "inspect {m}/classifier", "convert {m}/classifier {o} --train {m}/text.txt",
    )),
    (f"{EVALUATE} --teacher {{m}}/marian", "is an encoder-decoder"),
    (f"{EVALUATE} --teacher {{m}}/bert", "BertForMaskedLM, which does not generate text"),
    (f"{EVALUATE} --teacher {{m}}/other", "must have the same vocabulary size"),
    ("generate {m}/many-words --file {m}/words.txt", "the model's vocabulary ends at 96"),
    ("evaluate {m}/many-words --text {m}/words.txt --window 8", "vocabulary ends at 96"),
    *((f"{command}", "vocabulary ends at 96") for command in (
        "evaluate {m}/begins --text {m}/text.txt --window 8", "analyze {m}/begins --text {m}/text.txt --window 8",
        "convert {m}/begins {o} --train {m}/text.txt", "teach {m}/begins {o} --train {m}/text.txt --block-size 16",
        "plan {m}/begins --train {m}/text.txt --memory 6KiB --nbits 16 --context 32", "generate {m}/begins the",
    )),
    ("generate {m}/template-syntax --chat the", "the chat template rejects"),
    ("generate {m}/template-call --chat the", "the chat template rejects"),
    ("generate {m}/template-type --chat the", "the chat template rejects"),
    ("generate {m}/no-heads the", "cannot be loaded"),
    ("generate {m}/text-heads the", "cannot be loaded"),
    ("inspect {m}/no-heads", "is not valid (ZeroDivisionError"),
    ("inspect {m}/odd-type", "config.json of"),
    *((f"inspect {{m}}/config-{name}", "") for name in ("list", "number", "deep", "cut", "bytes")),
    ("inspect {m}/base-list", "base_config has no model_type"),
    ("inspect {m}/base-untyped", "base_config has no model_type"),
    ("inspect {m}/base-odd", "base_config is damaged"),
    ("inspect {m}/base-unknown", "has no model type 'gpt99'"),
    *(
        (f"{command}", "1,000,000,000, but its weights have 4")
        for name in ("many-layers", "base-layers")
        for command in (f"inspect {{m}}/{name}", f"generate {{m}}/{name} the", f"swap {{m}}/{name} {{o}}")
    ),
    ("inspect {m}/many-layers-llama", "num_hidden_layers is 1,000,000,000, but its weights have 30 tensors"),
    ("generate {m}/many-layers-marian the", "encoder_layers is 9,223,372,036,854,775,808, but its weights have"),
    ("generate {m}/many-experts the", "num_local_experts is 1,000,000,000, but its weights have 30 tensors"),
    ("inspect {m}/many-heads", "is not valid (ZeroDivisionError"),
    ("inspect {m}/huge-dropout", "is not valid (ValueError: dropout probability"),
    ("generate {m}/unknown the", "which this version of transformers does not support"),
    ("inspect {m}/bad-option", "feature_size must be a whole number, at least 1; got -3"),
    ("swap {m}/index-outside {o}", "refers to '../gpt2/model.safetensors', which is not a safetensors file in that"),
    ("swap {m}/index-absolute {o}", "which is not a safetensors file in that folder"),
    ("swap {m}/index-pickle {o}", "which is not a safetensors file in that folder"),
    ("swap {m}/index-list {o}", "has no valid weight_map"),
    ("swap {m}/index-cut {o}", "has no valid weight_map"),
    ("swap {m}/index-missing {o}", "cannot be loaded"),
    # Memory budgets, plans and their pages.
    *(
        (f"{command} {memory}", "memory must be a number of bytes above 0, for example 8MiB")
        for command in (f"{PLAN} --memory", f"{CONVERT} --memory")
        for memory in (
            "0", "-1", "nan", "1e400MiB", "4parsecs", "MiB", "1_000", "4MiB,8MiB", "9" * 40 + "TiB", "9" * 400
        )
    ),
    (f"{PLAN} --memory 1B", "a memory of 1 B is not possible: the smallest plan of this model needs"),
    (f"{PLAN} --memory 1GiB", "a memory of 1.0 GiB is not possible: the smallest plan of this model needs"),
    (f"{PLAN} --memory 6KiB --context 31", "context must be a whole number of tokens, at least 32; got 31"),
    (f"{PLAN} --memory 6KiB --context {10**30}", "is longer than the model's 64 positions"),
    (f"{PLAN} --memory 6KiB --nbits 12", "nbits must be 8 or 16; got 12"),
    (f"{PLAN} --memory 6KiB --nbits 7", "nbits must be a whole number, at least 8"),
    (f"{CONVERT} --nbits 8", "nbits belongs to a memory budget"),
    (f"{PLAN} --memory 6KiB --device meta", "device 'meta' is not available"),
    (f"{PLAN}", "Missing option '--memory'"),
    *(
        (f"{PLAN} --memory 6KiB {option}", "are for parallel text: give --src and --tgt, or leave them out")
        for option in ("--recurrent both", "--join 3", "--source-language zh", "--target-language en")
    ),
    (f"{PLAN} --memory 6KiB --recurrent nonsense", "recurrent must be one of"),
    ("plan {m}/llama --memory 6KiB", "memory is planned on a text: give one"),
    ("plan {m}/llama --memory 6KiB --train {m}/nowhere", "there is no file"),
    ("plan {m}/llama --memory 6KiB --train=", "a text has no name"),
    ("plan {m}/llama --memory 6KiB --train datasets:", "datasets: has no name of a dataset"),
    ("plan {m}/llama --memory 6KiB --train teacher", "memory is planned on a text"),
    ("plan {m}/llama --memory 6KiB --train {m}/pipe", "is a device or a pipe"),
    ("plan {m}/llama --memory 6KiB --train {m}/empty.txt", "there is no text in"),
    ("plan {m}/marian --memory 6KiB --train {m}/text.txt", "is an encoder-decoder: give it parallel text"),
    ("plan {m}/rnn --memory 6KiB --train {m}/text.txt", "a conversion that is continued keeps its memory"),
    (f"{CONVERT} --memory 6KiB --softmax-layers auto:1", "do not give softmax_layers too"),
    (f"{CONVERT} --memory 6KiB --recipe none --feature-map nosuch", "windows only, without feature maps: do not give"),
    (f"{CONVERT} --memory 6KiB --recipe none --feature-size 8 --decay", "do not give decay, feature_size"),
    (f"{CONVERT} --memory 6KiB --recipe none --set steps=3", "override 'steps=3': the recipe has no stages"),
    (f"{CONVERT} --context 64", "context belongs to a memory budget"),
    ("convert {m}/rnn {o} --train {m}/text.txt --memory 6KiB", ""),
    ("convert {m}/marian {o} --train {m}/text.txt --memory 6KiB", "is an encoder-decoder: give it parallel text"),
    ("inspect {m}/state --feature-size 8", "is a file of a state: options of a swap are for models"),
    ("inspect {m}/state --recipe none", "is a file of a state"),
    ("inspect {m}/text.txt", "is not a saved state"),
    ("inspect {m}/gpt2/model.safetensors", "is a safetensors file, but not a saved state"),
    ("inspect {m}/pipe", "is a file: give the folder of a saved model"),
    ("inspect {m}/llama --softmax-layers 99", "there is no layer 99"),
    ("inspect {m}/llama --softmax-layers auto:99", "would keep all 3 layers"),
    ("inspect {m}/llama --softmax-layers auto:x", "auto:N"),
    ("inspect {m}/llama --recipe nosuch", "no recipe 'nosuch'"),
    ("inspect {m}/llama --recipe=", "no recipe ''"),
    ("inspect {m}/llama --recipe {m}/text.txt", "has no list of stages"),
    (f"inspect {{m}}/llama --feature-size {10**30}", ""),
    ("report {m}/plan.json --out {m}/text.txt", "is not a page of t2r"),
    ("report {m}/plan.json --out /dev/null", "is a device, a pipe or a socket"),
    ("report {m}/plan-cut.json", "cannot be read as JSON"),
    ("report {m}/plan-list.json", "is not a complete result of this version of t2r"),
    ("report {m}/plan-zero.json", "is not a complete result of this version of t2r"),
    ("report {m}/plan-words.json", "is not a complete result of this version of t2r"),
    ("report {m}/pipe", "is not a file"),
    ("report {m}/text.txt", "cannot be read as JSON"),
    ("report {m}/rnn --prompt the", "contains neither results.json"),
    # Serving.
    ("serve {m}/rnn --port 0 --states {m}/text.txt", "states cannot be kept in"),
    ("serve {m}/rnn --port 0 --states {m}/text.txt/inside", "states cannot be kept in"),
    ("serve {m}/rnn --port 0 --states=", "the folder of states has no name"),
    ("serve {m}/rnn --port 0 --api-key=", "the key (--api-key) must be printable ASCII"),
    ("serve {m}/rnn --port 0 --api-key=é", "the key (--api-key) must be printable ASCII"),
    ("serve {m}/rnn --port 0 --teacher=", "there is no folder ''"),
    # Paths.
    ("swap {m}/gpt2 {m}/pipe", "is a device, a pipe or a socket"),
    ("swap {m}/gpt2 {m}/socket", "is a device, a pipe or a socket"),
    ("swap {m}/gpt2 /dev/null", "is a device, a pipe or a socket"),
    ("swap {m}/gpt2 /dev/null --overwrite", "is a device, a pipe or a socket"),
    ("convert {m}/gpt2 /dev/null --train {m}/text.txt", "is a device, a pipe or a socket"),
    ("pretrain gpt2-tiny {m}/pipe --train {m}/text.txt", "is a device, a pipe or a socket"),
    ("swap {m}/gpt2 {m}/loop", "symbolic links"),
    ("swap {m}/loop {o}", "symbolic links"),
    ("inspect {m}/loop", "symbolic links"),
    ("evaluate {m}/llama --text {m}/loop", "symbolic links"),
    (f"{CONVERT} --recipe {{m}}/loop.yaml", "symbolic links"),
    ("pretrain {m}/loop {o} --train {m}/text.txt", "symbolic links"),
    ("generate {m}/gpt2 --file {m}/loop", "cannot be read"),
    ("generate {m}/rnn the --save-state {m}/loop", "symbolic links"),
    (f"swap {LONG} {{o}}", "too long"),
    (f"swap {{m}}/gpt2 {{o}}/{LONG}", "too long"),
    (f"evaluate {{m}}/llama --text {LONG}", "too long"),
    (f"merge {LONG} {{o}}", "too long"),
    ("merge {m}/loop {o}", "symbolic links"),
    (f"{CONVERT} --recipe {LONG}.yaml", "too long"),
    (f"pretrain {LONG} {{o}} --train {{m}}/text.txt", "too long"),
    ("generate {m}/rnn the --save-state {m}/nowhere/state", "nowhere does not exist"),
    ("generate {m}/rnn --file {m}/text.txt --save-state {o}", "beyond the 64 positions"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "says"), CASES, ids=[command[:80] for command, _ in CASES])
def test_a_mistake_is_one_line(run, made, tmp_path, command, says):
    before = sorted(os.listdir(made))
    code, stdout, stderr = run(*(word.format(m=made, o=tmp_path / "out") for word in command.split()))
    assert code == 2, stderr
    assert says in stderr
    assert is_one_line(stderr), stderr
    assert len(stderr) < 1000, stderr
    assert stdout == ""
    assert os.listdir(tmp_path) == []
    assert sorted(os.listdir(made)) == before


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "many"}, "the environment has WORLD_SIZE=many, which is not a whole number from 1"),
        ({"WORLD_SIZE": "0"}, "the environment has WORLD_SIZE=0, which is not"),
        ({"WORLD_SIZE": ""}, "the environment has WORLD_SIZE=, which is not"),
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE=2 and no RANK: start several processes with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost"}, "the environment has WORLD_SIZE=2 and RANK=2"),
        ({"WORLD_SIZE": "2", "RANK": "-1", "MASTER_ADDR": "localhost"}, "the environment has RANK=-1, which is not"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "the environment has WORLD_SIZE=2 and no MASTER_ADDR"),
    ],
)
def test_processes_that_nobody_started(run, made, tmp_path, monkeypatch, environment, says):
    """One line, where torch would wait for the other processes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for command in (CONVERT, "teach {m}/gpt2 {o} --train {m}/text.txt"):
        code, stdout, stderr = run(*(word.format(m=made, o=tmp_path / "out") for word in command.split()))
        assert (code, stdout) == (2, "")
        assert says in stderr
        assert is_one_line(stderr), stderr
    assert os.listdir(tmp_path) == []


def test_devices_are_left_alone(made):
    assert Path("/dev/null").is_char_device()
    assert (made / "pipe").is_fifo()
    assert (made / "socket").is_socket()


def test_standard_input_that_is_not_utf8(run, made):
    code, _, stderr = run("generate", made / "gpt2", stdin=b"the old \xff man")
    assert code == 2
    assert stderr == "t2r: standard input is not UTF-8: 0xff at byte 8\n"


def test_arguments_that_are_not_utf8():
    command = [sys.executable.encode(), b"-m", b"t2r", b"generate", b"gpt2", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == b"t2r: argument 3 is not UTF-8: 'caf\\udce9'\n"


@pytest.mark.parametrize("slash", ["", "/"])
def test_an_empty_folder_can_become_a_model(run, made, tmp_path, slash):
    (tmp_path / "out").mkdir()
    assert run("swap", made / "gpt2", f"{tmp_path}/out{slash}", "-q") == (0, "", "")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert os.listdir(tmp_path) == ["out"]


def test_json_has_no_nan(run, made):
    assert json_text({"a": [float("nan"), (1.0, float("-inf"))]}) == '{"a": [null, [1.0, null]]}'

    def refuse(word: str) -> None:
        raise AssertionError(word)

    arguments = ("--text", made / "text.txt", "--no-generation", "--limit", 2, "--json")
    code, stdout, _ = run("evaluate", made / "loud", *arguments)
    assert code == 0
    (result,) = json.loads(stdout, parse_constant=refuse)
    assert result["perplexity"] is None


def test_a_word_of_three_megabytes(run, made, tmp_path):
    (tmp_path / "word.txt").write_text("a" * 3_000_000 + " " + TEXT)
    arguments = ("--text", tmp_path / "word.txt", "--no-generation", "--limit", 1, "--json")
    assert run("evaluate", made / "llama", *arguments)[0] == 0
