"""Real teachers pass the equivalence check, and generate after they are swapped, saved and loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import t2r
from t2r.budgets import descent
from t2r.generation.text import complete
from t2r.hub import load_model, load_tokenizer
from t2r.pipelines import budget
from t2r.pipelines.convert import convert
from t2r.pipelines.swap import swap_folder

pytestmark = pytest.mark.teachers

PROMPTS = {
    "smollm2": ["The capital of France is", "Water boils at"],
    "opus-mt-zh-en": ["你好，世界。", "今天天气很好，我们去公园散步吧。", "这本书是我父亲二十年前送给我的生日礼物。"],
    "stories15m": ["Once upon a time, there was a little", "The dog", "Lily and her mom went to the park to"],
}
# Logits of real teachers are of order ten. After thirty layers in float32, only their last digits differ.
LOGITS = 1e-3
NEW_TOKENS = 4

teacher = pytest.mark.parametrize("name", PROMPTS)
feature_map = pytest.mark.parametrize("feature_map", ["t2r", "hedgehog"])


def padded_batch(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return prompts of different lengths, padded for generation."""
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer is not None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    side = "right" if name == "opus-mt-zh-en" else "left"
    inputs = tokenizer(PROMPTS[name], return_tensors="pt", padding=True, padding_side=side)
    assert not inputs["attention_mask"].all()
    return {key: inputs[key] for key in ("input_ids", "attention_mask")}


@torch.no_grad()
def logits(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the meaningful logits: those of real tokens, or after a few tokens of translation."""
    if not model.config.is_encoder_decoder:
        return model(**inputs).logits[inputs["attention_mask"].bool()]
    start = model.generation_config.decoder_start_token_id
    targets = torch.tensor([[start, 5, 77, 1234]]).expand(len(inputs["input_ids"]), -1)
    return model(**inputs, decoder_input_ids=targets).logits


@teacher
@feature_map
def test_swapped_checked_saved_loaded_and_generated_from(teachers, tmp_path, name, feature_map):
    source, out = teachers / name, tmp_path / "swapped"
    inputs = padded_batch(source, name)
    expected = logits(load_model(str(source), dtype="float32"), inputs)
    done = swap_folder(str(source), str(out), feature_map=feature_map)
    assert all(site.recurrent != site.cross for site in done.sites)  # cross attention stays exact
    assert torch.equal(padded_batch(out, name)["input_ids"], inputs["input_ids"])  # the tokenizer is saved too

    model = load_model(str(out), dtype="float32")
    shutil.rmtree(out)  # pytest would keep hundreds of megabytes
    recurrent = logits(model, inputs)
    assert recurrent.isfinite().all()
    assert (recurrent - expected).abs().max() > 0.1  # the model is not trained yet
    with t2r.exact_attention(model):
        assert (logits(model, inputs) - expected).abs().max() < LOGITS

    for beams in (1, 5):
        options = {"num_beams": beams, "do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        with_state = model.generate(**inputs, **options)
        assert torch.equal(with_state, model.generate(**inputs, **options, use_cache=False))


def test_the_swapped_translator_in_exact_mode_translates_as_its_teacher(teachers):
    """Translate sentences with five beams and a cache of keys and values filled by the swapped modules."""
    source = str(teachers / "opus-mt-zh-en")
    model, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    prompts, options = PROMPTS["opus-mt-zh-en"], {"num_beams": 5, "max_new_tokens": 24}
    expected = [done.text for done in complete(model, tokenizer, prompts, **options)]
    assert expected[0] == "Hello, world."
    with t2r.exact_attention(t2r.swap(model)):
        assert [done.text for done in complete(model, tokenizer, prompts, **options)] == expected


ENGLISH = [
    "Hello, world.",
    "The weather is nice today, let's go for a walk in the park.",
    "This book is a birthday present that my father gave me twenty years ago.",
]


@pytest.mark.parametrize(
    ("recurrent", "memory"), [("causal", "0.8MiB"), pytest.param("both", "0.6MiB", marks=pytest.mark.slow)]
)
def test_a_translator_within_a_memory_budget(teachers, tmp_path, monkeypatch, recurrent, memory):
    """Planned, trained for a step, saved and loaded. It translates a batch in the engine as in `generate`."""
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(descent.STEPS, "cpu", 3)
    monkeypatch.setattr(budget, "PAIRS", 64)
    files = {}
    for side, lines in (("source", PROMPTS["opus-mt-zh-en"]), ("target", ENGLISH)):
        files[side] = str(tmp_path / side)
        (tmp_path / side).write_text("\n".join(lines) + "\n", encoding="utf-8")
    results = convert(
        str(teachers / "opus-mt-zh-en"),
        str(tmp_path / "rnn"),
        **files,
        memory=memory,
        context=48,
        source_tokens=48,
        recurrent=recurrent,
        overrides=("block_size=64", "batch_tokens=64", "transfer.steps=1", "distill.steps=1"),
        device="cpu",
        progress=False,
    )
    planned = results["planned"]
    assert planned["used"] <= planned["memory"]
    # 8 heads of 64 in 6 layers: keys and values of the source in bfloat16, or float32 states with 32 features.
    assert planned["cross"] == 6 * 8 * (2 * 2 * 64 * 48 if recurrent == "causal" else 4 * 32 * 65)
    rnn = load_model(str(tmp_path / "rnn"), dtype="float32")
    inputs = padded_batch(tmp_path / "rnn", "opus-mt-zh-en")
    shutil.rmtree(tmp_path / "rnn")
    for beams in (1, 3):
        options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 20}
        assert torch.equal(t2r.Engine(rnn).generate(**inputs, **options), rnn.generate(**inputs, **options))
