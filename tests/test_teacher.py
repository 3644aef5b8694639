"""Tests of the demo's teacher: it is small, can be merged, generates English, and uses its context."""

from __future__ import annotations

import json
import lzma
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from repository import example
from t2r.surgery.adapters import family_of
from t2r.training.recipes.preset import load_preset

EXAMPLES = Path(__file__).parent.parent / "examples"
FOLDER = EXAMPLES / "teacher"


@pytest.fixture(scope="module")
def teacher():
    example("teacher/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def text():
    with lzma.open(EXAMPLES / "novels" / "valid.txt.xz", "rt", encoding="utf-8") as file:
        return file.read()


def test_it_is_small_and_says_how_it_was_made():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12_000_000
    assert json.loads((FOLDER / "config.json").read_text())["dtype"] == "float16"
    assert {"preset.yaml", "recipe.yaml", "results.json", "README.md"} <= {file.name for file in FOLDER.iterdir()}
    made, shipped = yaml.safe_load((FOLDER / "preset.yaml").read_text()), load_preset("gpt2-novels")
    assert (made["model"], made["tokenizer"]) == (shipped.model, shipped.tokenizer)
    losses = [entry["loss"] for entry in json.loads((FOLDER / "results.json").read_text())["log"]["pretrain"]]
    assert len(losses) > 100
    assert losses[-1] < losses[0] / 2


def test_it_merges(teacher):
    assert family_of(teacher[0]).merges


@torch.no_grad()
def test_it_uses_its_context(teacher, text):
    """At positions 256 to 511, the perplexity is at least 8 % lower than with a context of only 16 tokens."""
    model, tokenizer = teacher
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    blocks = ids[: 4 * 512].view(4, 512)
    targets = blocks[:, 256:]
    all_of_it = cross_entropy(model(input_ids=blocks).logits[:, 255:-1].flatten(0, 1), targets.flatten())
    windows = blocks[:, 240:511].unfold(1, 16, 1)  # the windows that end just before each target
    assert windows.shape[1] == targets.shape[1]
    near = [
        cross_entropy(model(input_ids=rows, logits_to_keep=1).logits[:, -1], wanted)
        for rows, wanted in zip(windows, targets, strict=True)
    ]
    assert math.exp(all_of_it) < 0.92 * math.exp(torch.stack(near).mean())


@torch.no_grad()
def test_it_writes_english(teacher, text):
    """Nearly all generated words occur in novels, and they form sentences."""
    model, tokenizer = teacher
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 150}
    prompts = [tokenizer(start, return_tensors="pt") for start in ("She opened the letter, and", "The old man looked")]
    written = " ".join(tokenizer.decode(model.generate(**prompt, **options)[0]) for prompt in prompts)
    with lzma.open(example("novels/train.txt.xz"), "rt", encoding="utf-8") as file:
        known = set(re.findall(r"[a-z]+", (file.read() + text).lower()))
    words = re.findall(r"[a-z]+", written.lower())
    assert len(words) > 120
    assert sum(word in known for word in words) > 0.9 * len(words)
    sentences = re.findall(r"[^.!?]+[.!?]", written)
    assert len(sentences) > 5
    assert 3 < len(words) / len(sentences) < 60
