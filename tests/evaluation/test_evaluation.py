"""Measurements are compared with slow references, or tested on models with known results."""

import io
import json
import math
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

import t2r
from t2r import T2RError
from t2r.data import wikitext
from t2r.evaluation import compare, encode, evaluate, harness, perplexity, recall, repetition, sizes, tables
from t2r.evaluation.generation import repeated, repeated_sentences
from t2r.evaluation.inputs import read_text
from t2r.evaluation.logits import logits_by_slice
from t2r.evaluation.perplexity import fitting_batch
from t2r.model.logits import AT_ONCE

VOCABULARY = 300
SENTENCES = (
    "The old baker walked along the river before the sun was up.",
    "Nobody knew what the small wooden box in the attic contained – not even Zoë.",
    "In winter the roads were closed, and letters came once in a week.",
    "She counted the coins twice, and then she counted them again.",
    "A long time ago three ships left the harbor and were never seen again.",
)
TEXT = "\n".join(" ".join(SENTENCES[(i * k) % 5] for k in (1, 2, 4)) for i in range(1, 30))


@pytest.fixture(scope="module")
def tokenizer():
    """Return a byte-level BPE tokenizer with few merges, so that most words have many tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512}


def gpt2(seed: int = 0, **options) -> GPT2LMHeadModel:
    config = GPT2Config(**TOKENS | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512} | options)
    return lively(GPT2LMHeadModel, config, seed)


def llama(seed: int = 0, **options) -> LlamaForCausalLM:
    return lively(LlamaForCausalLM, LlamaConfig(**TOKENS | SHAPE | {"intermediate_size": 32} | options), seed)


def lively(model_class, config, seed: int):
    """Return a model with large weights, so that predictions depend clearly on the context."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
    return model


def blind(logits: torch.Tensor, **options) -> GPT2LMHeadModel:
    """Return a model whose predictions do not depend on the context."""
    model = gpt2(vocab_size=len(logits), **options)
    model.lm_head = nn.Linear(16, len(logits))
    nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias = nn.Parameter(logits)
    return model


class Copier(GPT2LMHeadModel):
    """Predicts the token that followed the last occurrence of the current context, if it is within reach."""

    reach = 10_000

    def forward(self, input_ids, **_):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids):
            # The length of the common suffix of the text up to j and up to t.
            match = torch.zeros(len(ids) + 1, dtype=torch.long)
            for t, token in enumerate(ids):
                match[1:] = torch.where(ids == token, match[:-1] + 1, 0)
                earlier = match[1 : t + 1].clone()
                earlier[: max(0, t - self.reach)] = 0
                if t and earlier.max() > 0:
                    logits[row, t, ids[earlier.argmax() + 1]] = 9.0
        return CausalLMOutput(logits=logits)


def copier(reach: int = 10_000) -> Copier:
    model = Copier(gpt2().config)
    model.reach = reach
    return model


def forgetful() -> GPT2LMHeadModel:
    """Predicts uniformly from the 12th position."""

    def forget(body, args, output):
        output.last_hidden_state[:, 11:] = 0

    model = gpt2()
    model.transformer.register_forward_hook(forget)
    return model


def slow_log_probs(model, ids: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """Compute float32 log-probabilities token by token, with a separate forward pass for each context."""
    rows = []
    for t in range(window - stride, len(ids)):
        start = (t - (window - stride)) // stride * stride
        with torch.no_grad():
            rows.append(model(ids[None, start:t]).logits[0, -1].float().log_softmax(-1))
    return torch.stack(rows)


# --- Perplexity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(("window", "stride"), [(16, 8), (12, 5), (10, 9)])
def test_perplexity_is_what_a_token_by_token_evaluation_gives(make, window, stride):
    model, ids = make(), torch.randint(VOCABULARY, (window - stride + 6 * stride,))
    result = perplexity(model, ids, window=window, stride=stride, batch_size=4)
    log_probs = slow_log_probs(model, ids, window, stride)
    nll = -log_probs.gather(1, ids[window - stride :, None])[:, 0]
    torch.testing.assert_close(result.nll, nll, rtol=1e-4, atol=1e-4)
    assert result.tokens == 6 * stride
    assert result.mean_nll == pytest.approx(nll.mean().item(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "options", "last"),
    [
        (90, {}, 88),  # 10 full windows, and 2 remaining tokens
        (88, {}, 88),
        (90, {"tail": True}, 90),
        (88, {"tail": True}, 88),
        (90, {"limit": 3}, 32),
        (90, {"limit": 3, "tail": True}, 32),
        (90, {"limit": 11, "tail": True}, 90),
        (15, {"tail": True}, 15),
        (90, {"window": 9, "stride": 8}, 89),
        (90, {"window": 64, "stride": 1}, 90),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_token_is_scored_exactly_once(tokens, options, last, batch_size):
    # All tokens of the text are different and have different probabilities, so the scores identify the tokens.
    model = blind(torch.linspace(0, 5, tokens))
    options = {"window": 16, "stride": 8} | options
    result = perplexity(model, range(tokens), batch_size=batch_size, **options)
    known = -torch.linspace(0, 5, tokens).log_softmax(-1)
    scored = (result.nll[:, None] - known).abs().argmin(1)
    assert scored.tolist() == list(range(options["window"] - options["stride"], last))


def test_positions_average_to_the_whole():
    ids = torch.randint(VOCABULARY, (100,))
    result = perplexity(llama(), ids, window=16, stride=12, tail=True)
    buckets = result.by_position(5)
    assert (buckets[0].first, buckets[-1].last) == (4, 15)
    assert all(one.last + 1 == other.first for one, other in pairwise(buckets))
    total = sum(b.tokens * math.log(b.perplexity) for b in buckets)
    assert sum(b.tokens for b in buckets) == result.tokens == 96
    assert total / result.tokens == pytest.approx(result.mean_nll)


def test_a_model_that_forgets_has_a_higher_perplexity_by_position():
    result = perplexity(forgetful(), torch.randint(VOCABULARY, (200,)), window=16, stride=8)
    known, unknown = result.by_position(2)
    assert (unknown.first, unknown.last) == (12, 15)
    assert unknown.perplexity == pytest.approx(VOCABULARY)
    assert known.perplexity != pytest.approx(VOCABULARY, rel=1e-3)


def test_words_and_bytes_are_those_of_the_scored_text(tokenizer):
    text = encode(tokenizer, TEXT)
    nats = math.log(VOCABULARY)
    result = perplexity(blind(torch.zeros(VOCABULARY)), text, window=64, stride=16, limit=20)
    scored = tokenizer.decode(text.token_ids[48 : 48 + 320])
    assert result.text == scored
    assert result.bits_per_byte == pytest.approx(320 * nats / math.log(2) / len(scored.encode()))
    assert result.word_perplexity == pytest.approx(math.exp(320 * nats / len(scored.split())), rel=1e-5)


def test_without_a_text_there_are_no_words():
    result = perplexity(gpt2(), range(64), window=16, stride=8)
    assert (result.word_perplexity, result.bits_per_byte, result.mean_kl) == (None, None, None)


def test_the_interval_is_the_normal_one_over_windows():
    ids = torch.randint(VOCABULARY, (8 + 30 * 8,))
    result = perplexity(gpt2(), ids, window=16, stride=8)
    means = result.nll.view(30, 8).mean(1)
    error = 1.96 * means.std().item() / math.sqrt(30)
    low, high = result.interval
    assert low < result.perplexity < high
    assert math.log(low) == pytest.approx(result.mean_nll - error, rel=1e-5)
    assert math.log(high) == pytest.approx(result.mean_nll + error, rel=1e-5)
    assert perplexity(gpt2(), ids[:16], window=16, stride=8).interval is None


def test_the_interval_of_a_ratio_is_narrower():
    ids = torch.randint(VOCABULARY, (8 + 30 * 8,))
    model, near = gpt2(), gpt2()
    with torch.no_grad():
        near.transformer.h[1].mlp.c_fc.weight *= 1.02
    one, other = (perplexity(m, ids, window=16, stride=8) for m in (near, model))
    ratio, (low, high) = one.ratio(other)
    assert low < ratio < high
    assert ratio == pytest.approx(one.perplexity / other.perplexity)
    assert (high - low) / ratio < 0.2 * (one.interval[1] - one.interval[0]) / one.perplexity
    assert other.ratio(other) == (1, (1, 1))
    with pytest.raises(T2RError, match="same tokens"):
        one.ratio(perplexity(model, ids, window=16, stride=8, limit=2))


def test_kl_is_what_a_token_by_token_evaluation_gives(monkeypatch):
    model, teacher, ids = gpt2(1), llama(2), torch.randint(VOCABULARY, (56,))
    own, theirs = (slow_log_probs(m, ids, 16, 8) for m in (model, teacher))
    expected = (theirs.exp() * (theirs - own)).sum(-1)
    for at_once in (1 << 25, 3 * 2 * VOCABULARY):  # all positions in one slice, or 2 positions per slice
        monkeypatch.setitem(AT_ONCE, "cpu", at_once)
        result = perplexity(model, ids, window=16, stride=8, batch_size=3, teacher=teacher)
        torch.testing.assert_close(result.kl, expected, rtol=1e-3, atol=1e-4)
        assert result.mean_kl == pytest.approx(expected.mean().item(), rel=1e-4)
        assert result.agreement == (own.argmax(-1) == theirs.argmax(-1)).double().mean().item()


def test_a_model_agrees_with_itself(monkeypatch):
    monkeypatch.setitem(AT_ONCE, "cpu", 3 * 8 * VOCABULARY)
    model = llama()
    result = perplexity(model, torch.randint(VOCABULARY, (100,)), window=16, stride=8, teacher=model)
    assert result.kl.abs().max() < 1e-5
    assert result.agreement == 1


def test_a_bfloat16_model_is_scored_in_float32():
    model, ids = llama().to(torch.bfloat16), torch.randint(VOCABULARY, (40,))
    result = perplexity(model, ids, window=40, stride=39, teacher=model)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    assert logits.dtype == torch.bfloat16
    expected = -logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    assert result.nll.dtype == result.kl.dtype == torch.float32
    torch.testing.assert_close(result.nll, expected, rtol=1e-5, atol=1e-5)


def test_a_model_in_training_is_left_as_it_was():
    model = gpt2(resid_pdrop=0.5).train()
    ids = torch.randint(VOCABULARY, (40,))
    one, other = (perplexity(model, ids, window=16, stride=8) for _ in range(2))
    assert torch.equal(one.nll, other.nll)
    assert model.training
    model(ids[None], labels=ids[None]).loss.backward()


def test_progress_counts_windows():
    calls = []
    perplexity(gpt2(), range(90), window=16, stride=8, batch_size=4, tail=True, progress=lambda *x: calls.append(x))
    assert calls == [(4, 11), (8, 11), (10, 11), (11, 11)]


GEMMA = Gemma2Config(
    **TOKENS | SHAPE, head_dim=8, num_key_value_heads=1, intermediate_size=32, final_logit_softcapping=2.0
)
GRANITE = GraniteConfig(**TOKENS | SHAPE, intermediate_size=32, logits_scaling=3.0)
OPT = OPTConfig(**TOKENS | SHAPE, ffn_dim=32, word_embed_proj_dim=16)


@pytest.mark.parametrize(
    "make",
    [
        gpt2,
        llama,
        lambda: lively(Gemma2ForCausalLM, GEMMA, 0),  # caps its logits after the head
        lambda: lively(GraniteForCausalLM, GRANITE, 0),  # scales them
        lambda: lively(OPTForCausalLM, OPT, 0),
        copier,  # has a head but does not use it
        lambda: t2r.swap(llama()),
    ],
)
def test_logits_by_slice_are_the_logits(make, monkeypatch):
    monkeypatch.setitem(AT_ONCE, "cpu", 2 * 4 * VOCABULARY)
    model, ids = make().eval(), torch.randint(VOCABULARY, (2, 20))
    with torch.no_grad():
        pieces = list(logits_by_slice(model, ids, 5, 19))
        expected = model(ids, use_cache=False).logits[:, 5:19]
    assert [piece.shape[1] for piece in pieces] == [4, 4, 4, 2]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_the_head_never_sees_more_than_a_slice(monkeypatch):
    monkeypatch.setitem(AT_ONCE, "cpu", 2 * 4 * VOCABULARY)
    model, sizes = llama(), []
    model.lm_head.register_forward_hook(lambda head, args, out: sizes.append(out.numel()))
    perplexity(model, range(64), window=32, stride=16, batch_size=2, teacher=model)
    assert max(sizes) <= 2 * 4 * VOCABULARY


# --- Generation ---------------------------------------------------------------------------------------------


def test_repeated():
    assert repeated([7] * 13, 4) == 0.9
    assert repeated(list(range(13)), 4) == 0
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4], 4) == pytest.approx(1 / 5)


def test_repetition_of_rigged_models(tokenizer):
    constant = torch.zeros(VOCABULARY)
    constant[5] = 50
    prompts = ["The baker", "The old baker walked", [1, 2, 3]]  # of different lengths, strings and ids
    stuck = repetition(blind(constant), tokenizer, prompts, new_tokens=64)
    assert stuck.greedy == stuck.sampled == pytest.approx(1 - 1 / 61)
    random = repetition(blind(torch.zeros(VOCABULARY)), tokenizer, prompts, new_tokens=64)
    assert random.greedy > 0.9  # argmax of equal logits is always the same token
    assert random.sampled < 0.01
    assert repetition(blind(torch.zeros(VOCABULARY)), tokenizer, new_tokens=16) == pytest.approx((1 - 1 / 13, 0))


def test_repetition_ignores_the_settings_of_the_model(tokenizer):
    model = blind(torch.zeros(VOCABULARY))
    expected = repetition(model, tokenizer, ["The"], new_tokens=32)
    own = model.generation_config
    own.min_p, own.no_repeat_ngram_size, own.top_k = 0.999, 2, 3
    assert repetition(model, tokenizer, ["The"], new_tokens=32) == expected
    assert model.generation_config is own


def test_sentences_are_repeated_at_all_distances(tokenizer):
    text = tokenizer(TEXT * 40).input_ids
    ids, asked = repeated_sentences(tokenizer, text, 1500, 3, seed=1)
    distances = []
    for row, at in asked.nonzero().tolist():
        words = ids[row].tolist()
        question = tokenizer(tokenizer.decode(words[: at + 1]).rpartition("\n")[2]).input_ids
        assert tokenizer.decode(question).startswith("The password of the")
        before = [i for i in range(at) if words[i + 1 - len(question) : i + 1] == question]
        assert len(before) == 1  # said once
        assert words[before[0] + 1] == words[at + 1]  # the answer
        distances.append(at - before[0])
    assert min(distances) < 200 < 700 < max(distances)
    assert len(set(distances)) > len(distances) / 2
    with pytest.raises(T2RError, match="too short"):
        repeated_sentences(tokenizer, text, 20, 1)


def test_files_of_a_glob_are_separate_lines(tokenizer, tmp_path):
    for name, text in (("1", "one two"), ("2", "three\n"), ("3", "four")):
        (tmp_path / f"{name}.txt").write_text(text)
    assert read_text(str(tmp_path / "*.txt"), tokenizer) == "one two\nthree\nfour"


def test_repetition_has_its_own_random_state_and_no_early_end(tokenizer):
    ends = torch.zeros(VOCABULARY)
    ends[tokenizer.eos_token_id] = 50
    model = blind(ends)
    one, other = (repetition(model, tokenizer, ["The"], new_tokens=64, seed=3) for _ in range(2))
    assert one == other
    assert one.sampled < 0.05
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    repetition(model, tokenizer, ["The"], new_tokens=8)
    assert torch.equal(torch.rand(1), expected)


def test_a_model_that_copies_recalls_everything(tokenizer):
    results = recall(copier(), tokenizer, TEXT, distances=[0, 30], trials=12, batch_size=5)
    assert [r.distance for r in results] == [0, 30]
    for r in results:
        assert (r.accuracy, r.greedy, r.trials, r.chance) == (1, 1, 12, 1 / 8)


def test_a_model_that_forgets_recalls_by_distance(tokenizer):
    near, far = recall(copier(reach=90), tokenizer, TEXT, distances=[20, 120], trials=12)
    assert (near.accuracy, near.greedy) == (1, 1)
    assert far.accuracy <= 0.25
    assert far.greedy == 0


def test_a_random_model_recalls_by_chance(tokenizer):
    for choices in (2, 8):
        (result,) = recall(llama(), tokenizer, TEXT, distances=[16], trials=100, choices=choices)
        assert result.chance == 1 / choices
        assert abs(result.accuracy - result.chance) < 4 * math.sqrt(result.chance * (1 - result.chance) / 100)
        assert result.greedy < 0.05


def test_a_model_without_preference_is_never_right(tokenizer):
    (result,) = recall(blind(torch.zeros(VOCABULARY)), tokenizer, TEXT, distances=[16], trials=4)
    assert result.accuracy == 0  # a tie does not count as correct


def test_recall_is_the_same_in_any_batch_and_for_a_recurrent_model(tokenizer):
    model = t2r.swap(llama())
    one, other = (recall(model, tokenizer, TEXT, distances=[8, 20], trials=9, batch_size=size) for size in (1, 9))
    assert one == other


# --- Several models -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, tokenizer):
    """Return a folder with two models with a tokenizer, a swapped model without one, and a text."""
    for name, model in (("one", llama(0)), ("two", llama(1))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    t2r.swap(llama(0), feature_size=4).save_pretrained(tmp_path / "swapped")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_several_models_against_the_first(folder, tokenizer):
    names = [str(folder / name) for name in ("one", "two", "swapped")]
    results = evaluate(names, folder / "text.txt", window=64, stride=32, limit=6, trials=4, device="cpu")
    json.dumps(results, allow_nan=False)
    assert [r["model"] for r in results] == names
    first, second, third = results
    assert first["kl"] is None
    assert "ratio" not in first
    assert second["kl"] > 0
    assert third["kl"] > 0
    assert second["ratio"] == pytest.approx(second["perplexity"] / first["perplexity"])
    assert second["ratio_interval"][0] < second["ratio"] < second["ratio_interval"][1]
    assert all(r["tokens"] == 6 * 32 for r in results)
    expected = perplexity(llama(1), encode(tokenizer, TEXT), window=64, stride=32, limit=6, teacher=llama(0))
    assert second["perplexity"] == pytest.approx(expected.perplexity)
    assert second["kl"] == pytest.approx(expected.mean_kl, rel=1e-4)
    assert [row["distance"] for row in third["recall"]] == [16]
    assert set(third["repetition"]) == {"greedy", "sampled", "text"}

    console = Console(width=200, record=True, file=io.StringIO())
    for part in tables(results):
        console.print(part)
    printed = console.export_text()
    for r in results:
        assert f"{r['perplexity']:.2f}" in printed
        low, high = (round(100 * end) for end in r["recall"][0]["interval"])
        assert f"{100 * r['recall'][0]['accuracy']:.1f} % ({low}-{high})" in printed
    assert f"{second['kl']:.4f}" in printed


def test_several_texts_windows_and_variants(folder, tokenizer):
    (folder / "more.txt").write_text(TEXT[::-1])
    model = t2r.swap(llama(0), feature_size=4, softmax_layers=[1])
    model.save_pretrained(folder / "kept")
    texts = [folder / "text.txt", folder / "more.txt"]
    given = {"stride": 8, "limit": 3, "trials": 6, "distances": [20, 60], "device": "cpu"}
    variants = ["one:window=12,sinks=2", f"{folder / 'kept'}:window=12", "kept:state=bfloat16,every=4"]
    names = [str(folder / name) for name in ("one", "kept")]
    results = evaluate(names, texts, variants=variants, window=[16, 32], **given)
    json.dumps(results, allow_nan=False)
    rows = [(r["model"], r.get("variant")) for r in results]
    expected = [
        (0, None),
        (0, "window 12 + 2 sinks"),
        (1, None),
        (1, "window 12"),
        (1, "state in bfloat16 every 4 tokens"),
    ]
    assert rows == [(names[i], variant) for i, variant in expected]
    for result in results:
        assert [(m["text"], m["window"]) for m in result["measured"]] == [
            (str(text), window) for text in texts for window in (16, 32)
        ]
        assert result["perplexity"] == result["measured"][0]["perplexity"]
        assert ("repetition" in result) == ("variant" not in result)
        assert [r["distance"] for r in result["recall"]] == [20, 60]
        assert all(r["interval"][0] <= r["accuracy"] <= r["interval"][1] for r in result["recall"])
    teacher, limited, student, *_ = results
    last = perplexity(model, encode(tokenizer, TEXT[::-1]), window=32, stride=8, limit=3, teacher=llama(0))
    assert student["measured"][3]["perplexity"] == pytest.approx(last.perplexity)
    assert student["measured"][3]["kl"] == pytest.approx(last.mean_kl, rel=1e-4)
    reference = teacher["measured"][3]["perplexity"]
    assert student["measured"][3]["ratio"] == pytest.approx(last.perplexity / reference)
    assert limited["measured"][3]["ratio"] == pytest.approx(limited["measured"][3]["perplexity"] / reference)
    assert limited["measured"][0]["kept_bytes"] == limited["measured"][1]["kept_bytes"]  # 14 tokens for both windows
    assert 2 * teacher["measured"][0]["kept_bytes"] == teacher["measured"][1]["kept_bytes"]

    console = Console(width=250, record=True, file=io.StringIO())
    for part in tables(results):
        console.print(part)
    printed = console.export_text()
    for r in results:
        assert all(f"{m['perplexity']:.2f}" in printed for m in r["measured"])
    assert "6 trials" in printed


@pytest.mark.parametrize("variant", ["two:window=4", "window=4", "one:", "one:window=x"])
def test_a_variant_of_no_model_is_refused(folder, variant):
    with pytest.raises(T2RError, match="variant"):
        evaluate([str(folder / "one")], folder / "text.txt", variants=[variant], window=16, device="cpu")


def test_models_as_objects_and_a_teacher(folder, tokenizer):
    result, other = evaluate(
        [llama(1), llama(0)],
        folder / "text.txt",
        tokenizer=tokenizer,
        teacher=folder / "one",
        window=64,
        stride=32,
        limit=2,
        generation=False,
    )
    assert result["model"] == "LlamaForCausalLM"
    assert result["kl"] > 0.1
    assert other["kl"] == pytest.approx(0, abs=1e-5)
    assert "recall" not in result
    assert len(tables([result, other])) == 2


def test_each_model_is_loaded_once(folder, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        compare, "load_model", lambda name, real=compare.load_model, **kw: loaded.append(name) or real(name, **kw)
    )
    names = [str(folder / name) for name in ("one", "two", "swapped")]
    evaluate(
        names, folder / "text.txt", teacher=folder / "two", device="cpu", window=16, stride=8, limit=2, generation=False
    )
    assert sorted(loaded) == sorted(names)


def test_the_batch_grows_with_the_device():
    assert fitting_batch(torch.device("cpu"), 512) == 8
    assert fitting_batch(torch.device("mps"), 512) == 32
    assert fitting_batch(torch.device("mps"), 1 << 20) == 1


def test_user_errors(folder, tokenizer, tmp_path):
    text, one = folder / "text.txt", str(folder / "one")
    small = {"window": 64, "stride": 32, "generation": False}

    def refused(match, models=(one,), file=text, **options):
        with pytest.raises(T2RError, match=match) as caught:
            evaluate(models, file, **small | options)
        assert "\n" not in str(caught.value)

    refused("no file", file=tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    refused("empty", file=tmp_path / "empty.txt")
    (tmp_path / "short.txt").write_text("Too short.")
    refused(
        r"\d+ tokens, less than one window of 64: give a longer text or a smaller window", file=tmp_path / "short.txt"
    )
    refused("at least one model", models=())
    refused("there is no folder", models=(one, str(tmp_path / "none")))
    (tmp_path / "bare").mkdir()
    refused("no config.json", models=(one, str(tmp_path / "bare")))
    refused("tokenizer", models=(llama(),))
    refused("dtype must be one of auto, float32, bfloat16, float16; got 'float3'", dtype="float3")
    refused("stride", stride=64)
    refused("limit", limit=0)

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))
    llama().save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    refused("tokenizes this text differently", models=(one, str(tmp_path / "other")))
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))
    same = [encode(words, "?"), encode(words, "? ?")]
    compare._check([str(tmp_path / "other")], same)
    with pytest.raises(T2RError, match="differently"):  # only the second text is
        compare._check([str(tmp_path / "other")], [same[0], replace(same[1], token_ids=same[1].token_ids + 1)])

    weights = folder / "two" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("cannot be loaded", models=(str(folder / "two"),))
    refused("has no tokenizer", models=(str(folder / "swapped"), one))


@pytest.mark.parametrize(
    ("variant", "words"),
    [("rnn:window=3", "no softmax attention to limit"), ("one:state=bfloat16", "this model has no recurrent state")],
)
def test_a_variant_that_does_not_apply_is_refused_before_anything_is_read(folder, monkeypatch, variant, words):
    t2r.swap(llama(0), feature_size=4).save_pretrained(folder / "rnn")
    for name in ("load_tokenizer", "read_text", "encode", "load_model"):
        monkeypatch.setattr(compare, name, lambda *args, name=name, **given: pytest.fail(f"{name} is called"))
    with pytest.raises(T2RError, match=words):
        evaluate([folder / "one", folder / "rnn"], folder / "text.txt", variants=[variant])


def test_the_default_window_fits_every_model(folder, tokenizer, caplog):
    """With rotary positions, as in llama(), longer windows do not fail, but the results are meaningless."""
    long, short = llama(0), llama(0)
    long.config.max_position_embeddings, short.config.max_position_embeddings = 64, 48
    given = {"tokenizer": tokenizer, "limit": 2, "trials": 2, "device": "cpu"}
    results = evaluate([long, short], folder / "text.txt", **given)
    assert [(r["window"], r["stride"]) for r in results] == [(48, 24)] * 2
    assert "windows of 48 tokens instead of 512" in caplog.text
    assert results[0]["recall"] == []  # no distance fits
    caplog.clear()
    evaluate([long, short], folder / "text.txt", window=64, generation=False, **given)
    (warning,) = caplog.messages
    assert "a window of 64 tokens is longer than the 48 positions of LlamaForCausalLM" in warning


@pytest.mark.parametrize("kind", ["gpt2", "swapped", "without an adapter"])
def test_a_window_beyond_learned_positions_is_refused_without_a_warning(folder, tokenizer, caplog, kind):
    short, rotary = gpt2(n_positions=48), llama(0)
    rotary.config.max_position_embeddings = 48  # would be warned of
    if kind == "swapped":
        short = t2r.swap(short, feature_size=4)
    elif kind == "without an adapter":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer)}
        short = OpenAIGPTLMHeadModel(OpenAIGPTConfig(n_positions=48, **sizes))
    caplog.clear()
    with pytest.raises(T2RError, match="has 48 positions, less than a window of 64 tokens: give a smaller one"):
        evaluate([rotary, short], folder / "text.txt", tokenizer=tokenizer, window=64, device="cpu")
    assert not caplog.messages


def test_models_of_one_class_have_their_own_limits(folder, tokenizer):
    given = {"tokenizer": tokenizer, "generation": False, "limit": 2, "device": "cpu"}
    results = evaluate([gpt2(n_positions=48), gpt2()], folder / "text.txt", **given)
    assert [r["window"] for r in results] == [48, 48]
    with pytest.raises(T2RError, match="must have the same vocabulary size"):
        evaluate([gpt2(vocab_size=20), gpt2(), gpt2(1)], folder / "text.txt", **given)


def test_a_teacher_with_another_vocabulary(folder, tokenizer):
    with pytest.raises(T2RError, match="must have the same vocabulary size"):
        evaluate([llama()], folder / "text.txt", tokenizer=tokenizer, teacher=gpt2(vocab_size=20), window=8)


def test_a_model_with_weights_missing_is_refused(folder):
    path = folder / "one" / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(T2RError, match=r"missing: model\.layers\.1\.mlp\.up_proj"):
        evaluate([folder / "one"], folder / "text.txt", window=64, stride=32)


def test_user_errors_of_single_measurements(tokenizer, tmp_path):
    with pytest.raises(T2RError, match="has 16 positions, but 32"):
        perplexity(gpt2(n_positions=16), range(64), window=32, stride=16)
    with pytest.raises(T2RError, match="vocabulary ends at 299"):
        perplexity(gpt2(), range(VOCABULARY + 1), window=32, stride=16)
    with pytest.raises(T2RError, match="vocabulary of 20"):
        perplexity(gpt2(), range(20), window=8, stride=4, teacher=gpt2(vocab_size=20))
    with pytest.raises(T2RError, match="too short for a distance of 64"):
        recall(gpt2(), tokenizer, "A short one.", distances=[64])
    with pytest.raises(T2RError, match="different first tokens"):
        recall(gpt2(), tokenizer, TEXT, choices=30)
    with pytest.raises(T2RError, match="4-grams"):
        repetition(gpt2(), tokenizer, new_tokens=3)

    marian = MarianMTModel(
        MarianConfig(
            vocab_size=30,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=1,
            decoder_attention_heads=1,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
    )
    with pytest.raises(T2RError, match="encoder-decoder"):
        perplexity(marian, range(20), window=8, stride=4)
    marian.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(T2RError, match="encoder-decoder"):
        evaluate([gpt2(), str(tmp_path)], tmp_path / "text.txt", tokenizer=tokenizer)


# --- lm-eval ------------------------------------------------------------------------------------------------

TASK = """
task: cloze
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_runs_a_local_task_on_a_recurrent_model(tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs the lm-eval extra")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = t2r.swap(llama(), feature_size=4)
    rows, right = [], 0
    for i, sentence in enumerate(SENTENCES):
        question, choices = sentence[:20], [sentence[20:24], sentence[21:25]]
        rows.append({"question": question, "choices": choices, "answer": i % 2})
        scores = []
        for choice in choices:
            ids, start = tokenizer(question + choice)["input_ids"], len(tokenizer(question)["input_ids"])
            with torch.no_grad():
                log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(log_probs[t - 1, ids[t]].item() for t in range(start, len(ids))))
        right += scores[i % 2] > scores[1 - i % 2]
    data = tmp_path / "cloze.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "cloze.yaml").write_text(TASK.format(file=data))
    results = harness(model, ["cloze"], tokenizer=tokenizer, task_folder=tmp_path / "tasks")
    assert results["cloze"]["acc,none"] == pytest.approx(right / len(SENTENCES))


def test_missing_lm_eval_is_an_error(monkeypatch):
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(T2RError, match="lm-eval is not installed"):
        harness("any", ["task"])


# --- A real teacher -----------------------------------------------------------------------------------------


@pytest.mark.teachers
def test_smollm2_on_wikitext(teachers, tmp_path):
    folder = os.environ.get("T2R_DATA")
    if not folder:
        pytest.skip("T2R_DATA does not name a folder with wikitext/valid.raw.txt.xz")
    text = tmp_path / "valid.txt"
    wikitext.prepare(str(Path(folder, "wikitext", "valid.raw.txt.xz")), text)
    (result,) = evaluate([str(teachers / "smollm2")], text, limit=8, batch_size=4, generation=False, device="cpu")
    # The first 8 of the 200 windows for which the float32 perplexity is 19.04.
    assert result["tokens"] == 8 * 256
    assert result["perplexity"] == pytest.approx(13.717, abs=0.01)


def test_the_memory_of_an_unknown_kind_of_layer_is_not_known():
    """Hybrid models have them."""
    assert sizes._of_layers([object()]) is None
