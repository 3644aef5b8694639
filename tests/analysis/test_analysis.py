"""Attention weights are compared with transformers' own; measurements are tested on models with known results."""

import json
import math
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import t2r
from families import POSITIONS, VOCABULARY, batch, tiny
from t2r import T2RError
from t2r.analysis import analyze, tables
from t2r.analysis.findings import figures
from t2r.analysis.measures import ByDistance, distance_buckets, effective_rank, jensen_shannon
from t2r.analysis.subject import Place, Subject
from t2r.cli import app
from t2r.feature_maps.base import DECAY_PACE
from t2r.reporting.page import COLORS
from translating import write_pairs

WORDS = {f"w{i}": i for i in range(VOCABULARY)}


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w1", pad_token="w0", eos_token="w2")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (400,), generator=generator).tolist()
    path.write_text(" ".join(f"w{i}" for i in ids))
    return path


# --- Weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2", "gptj", "marian", "t5"])
def test_the_weights_of_a_transformer_are_its_own(model_type):
    model = tiny(model_type, torch.float32)
    inputs = batch(model_type, padding=None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, use_cache=False)
    causal = out.decoder_attentions if "encoder_attentions" in out else out.attentions
    expected = {("causal", i): weights for i, weights in enumerate(causal)}
    expected |= {("cross", i): weights for i, weights in enumerate(getattr(out, "cross_attentions", None) or ())}
    seen = Subject(model, "float32", "cpu").observe(inputs).attention
    assert {(place.kind, place.layer) for place in seen} == set(expected)
    for place, attention in seen.items():
        found = attention.weights().weights
        torch.testing.assert_close(found, expected[place.kind, place.layer], atol=1e-5, rtol=1e-4)
        for first in (2, found.shape[2] - 1):
            torch.testing.assert_close(attention.weights(first).weights, found[:, :, first:], atol=1e-6, rtol=1e-5)
    assert not isinstance(model, t2r.T2RForCausalLM), "a model that is given as an object is not modified"


@pytest.mark.parametrize("merged", [False, True])
def test_the_weights_of_a_recurrent_layer_average_its_values(merged):
    model = t2r.swap(tiny("gpt2"), feature_size=8, softmax_layers=[1])
    model = t2r.merge(model) if merged else model
    seen = Subject(model, "float32", "cpu").observe(batch("gpt2", padding=None)).attention
    assert [place for place in seen] == [Place(i, "causal") for i in range(3)]
    site = model.t2r_family.decoder_layers(model)[0].attn
    found = []
    site.c_proj.register_forward_hook(lambda module, inputs, out: found.append(inputs[0]))
    with torch.no_grad():
        model(**batch("gpt2", padding=None), use_cache=False)
    out = seen[Place(0, "causal")].weights().weights @ seen[Place(0, "causal")].v
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), found[0])


# --- The analysis -------------------------------------------------------------------------------------------


def test_a_model_is_at_no_distance_from_itself(tokenizer, text):
    model = tiny("llama", torch.float32)
    found = analyze(model, text, teacher=model, tokenizer=tokenizer, window=32, limit=3, measure_recall=False)
    assert found["mean"]["euclidean"] == 0
    assert found["mean"]["jensen_shannon"] < 1e-6
    assert found["mean"]["entropy"] == pytest.approx(found["mean"]["teacher_entropy"])
    assert found["features"] is None
    assert found["samples"] == 3
    assert [layer["recurrent"] for layer in found["layers"]] == [False] * 3
    rows = found["by_distance"]
    assert sum(row["model"] for row in rows if row["last"] < 16) <= 1
    assert [row["teacher"] for row in rows] == [row["model"] for row in rows]


def test_perplexity_is_of_the_samples_which_are_spread_over_the_text(tokenizer, text):
    """Not of the beginning of the text, whose attention is not measured."""
    model = tiny("llama", torch.float32)
    found = analyze(model, text, tokenizer=tokenizer, window=32, limit=2, measure_recall=False)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])
    windows = ids[: len(ids) // 32 * 32].view(-1, 32)
    samples = windows[[0, len(windows) // 2]]
    with torch.no_grad():
        scores = model(samples).logits[:, :-1].log_softmax(-1).gather(-1, samples[:, 1:, None])
    assert found["perplexity"]["model"] == pytest.approx((-scores.mean()).exp().item(), rel=1e-5)
    assert sum(row["tokens"] for row in found["by_position"]) == 2 * 31


def test_each_model_reads_each_sample_once(tokenizer, text):
    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=8)
    rows = []
    model.register_forward_pre_hook(lambda _, inputs, given: rows.append(len(given["input_ids"])), with_kwargs=True)
    teacher = tiny("gpt2", torch.float32)
    analyze(model, text, teacher=teacher, tokenizer=tokenizer, window=32, limit=6, measure_recall=False)
    assert rows == [4, 2]


def test_measurements_of_a_swapped_model(tokenizer, text):
    teacher = tiny("gpt2", torch.float32)
    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=8, decay=True, softmax_layers=[1])
    site = model.t2r_family.decoder_layers(model)[0].attn.feature_map
    with torch.no_grad():
        site.key_map.weight[0, :4] = 0  # head 0: half of its features are never active
        site.key_map.bias[0, :4] = -1
        for part in t2r.attention.recurrence.recurrent_sites(model):  # a half-life of 10 tokens
            part.feature_map.decay_logits.fill_(torch.logit(torch.tensor(math.log(2) / 10)).item() / DECAY_PACE)
    found = analyze(
        model, text, teacher=teacher, tokenizer=tokenizer, window=32, limit=2, measure_recall=False, sensitivity=True
    )
    first, kept, _ = found["layers"]
    assert (first["recurrent"], kept["recurrent"]) == (True, False)
    assert first["heads"][0]["dead"] >= 0.5
    assert first["dead"] == pytest.approx(sum(head["dead"] for head in first["heads"]) / 4)
    assert found["features"]["half_life"]["median"] == pytest.approx(10, rel=1e-3)
    assert found["features"]["half_life"]["above_window"] == 0
    assert [row["tokens"] for row in found["state"]] == [8, 16, 32]
    assert all(1 <= row["effective_rank"] <= 8 for row in found["state"])
    # The first softmax layer after a recurrent one reads other hidden states, so its weights differ too.
    assert found["mean"]["euclidean"] > 0 < kept["euclidean"]
    heads = [head["entropy"] for layer in found["layers"] for head in layer["heads"]]
    assert found["mean"]["entropy"] == pytest.approx(sum(heads) / len(heads))
    assert {row["layer"] for row in found["sensitivity"]} == {0, 2}
    assert not found["notes"]
    assert found["by_position"][0].keys() == {"first", "last", "tokens", "perplexity", "teacher"}


def test_signed_weights_have_no_entropy(tokenizer, text):
    model = t2r.swap(tiny("gpt2", torch.float32), feature_map="rfa", feature_size=8)
    teacher = tiny("gpt2", torch.float32)
    found = analyze(model, text, teacher=teacher, tokenizer=tokenizer, window=32, limit=1, measure_recall=False)
    assert found["mean"]["entropy"] is None is found["mean"]["jensen_shannon"]
    assert found["mean"]["euclidean"] > 0
    assert found["mean"]["teacher_entropy"] > 0
    assert "negative" in found["notes"][0]
    tables(found)
    entropy = figures(found)["Entropy by layer"]  # the only line is the teacher's: in its color, and named
    assert COLORS[1] in entropy
    assert COLORS[0] not in entropy
    assert ">teacher<" in entropy


def test_a_signed_teacher_has_no_entropy(tokenizer, text):
    model, teacher = tiny("gpt2", torch.float32), tiny("gpt2", torch.float32)
    teacher = t2r.swap(teacher, feature_map="rfa", feature_size=8)
    found = analyze(model, text, teacher=teacher, tokenizer=tokenizer, window=32, limit=1, measure_recall=False)
    assert found["mean"]["teacher_entropy"] is None is found["mean"]["jensen_shannon"]
    assert found["mean"]["entropy"] > 0 < found["mean"]["euclidean"]
    assert "teacher" in found["notes"][0]


def test_a_head_without_weights_does_not_hide_the_entropy_of_others(tokenizer, text):
    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=8)
    site = model.t2r_family.decoder_layers(model)[0].attn.feature_map
    with torch.no_grad():
        site.key_map.weight[1] = 0
        site.key_map.bias[1] = -1
    found = analyze(model, text, tokenizer=tokenizer, window=32, limit=2, measure_recall=False)
    heads = [head for layer in found["layers"] for head in layer["heads"]]
    assert [head["bounded"] == 1 for head in heads] == [i == 1 for i in range(len(heads))]
    assert heads[1]["entropy"] is None
    known = [head["entropy"] for head in heads if head is not heads[1]]
    assert found["mean"]["entropy"] == pytest.approx(sum(known) / len(known))
    assert f"1 of {len(heads)} heads" in found["notes"][0]
    assert "layer 0 head 1" in found["notes"][0]


def test_states_of_a_smaller_last_batch_count_as_samples(tokenizer, text):
    """Five samples are read as batches of four and one."""
    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=8)
    found = analyze(model, text, tokenizer=tokenizer, window=32, limit=5, measure_recall=False)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])
    windows = ids[: len(ids) // 32 * 32].view(-1, 32)
    samples = windows[[i * len(windows) // 5 for i in range(5)]]
    norms = []
    for seen in Subject(model, "float32", "cpu").observe({"input_ids": samples}).attention.values():
        norms.append(torch.linalg.matrix_norm(seen.k.mT @ seen.v).mean().item())
    assert found["state"][-1]["norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-4)


def test_encoder_decoders(tmp_path, tokenizer):
    source, target = write_pairs(tmp_path, "test", 4, shortest=3)
    teacher = tiny("marian", torch.float32)
    model = t2r.swap(tiny("marian", torch.float32), feature_size=8, recurrent="cross")
    found = analyze(model, teacher=teacher, source=source, target=target, tokenizer=tokenizer)
    assert [(layer["layer"], layer["kind"]) for layer in found["layers"]] == [
        (i, kind) for i in range(3) for kind in ("causal", "cross")
    ]
    assert [layer["recurrent"] for layer in found["layers"]] == [False, True] * 3
    assert found["kinds"].keys() == {"causal", "cross"}
    assert found["kinds"]["cross"]["euclidean"] > 0
    assert "by_position" not in found
    assert "are of language models" in found["notes"][-1]
    assert len(tables(found)) > 2
    with pytest.raises(T2RError, match="--src and --tgt"):
        analyze(model, source, tokenizer=tokenizer)


@pytest.mark.parametrize("model_type", ["fsmt", "marian"])
def test_the_decoder_reads_the_targets(model_type, tmp_path, tokenizer):
    """FSMT does not make its decoder inputs from the labels."""
    model = t2r.swap(tiny(model_type, torch.float32), feature_size=8, recurrent="both")
    source, *targets = (tmp_path / f"{i}.txt" for i in range(3))
    for path, line in zip((source, *targets), ("w3 w4 w5 w6", "w7 w8 w9 w10", "w11 w12 w13 w14"), strict=True):
        path.write_text(line + "\n")
    found = [analyze(model, source=source, target=each, tokenizer=tokenizer)["mean"]["entropy"] for each in targets]
    assert found[0] != found[1]
    longer = tmp_path / "longer.txt"
    longer.write_text("w3 w4 w5 w6 w7 w8\n")
    assert analyze(model, source=source, target=longer, tokenizer=tokenizer)["tokens"] == 6
    with pytest.raises(T2RError, match="--window and --words are for --text"):
        analyze(model, source=source, target=source, tokenizer=tokenizer, words=1)
    with pytest.raises(T2RError, match="no languages to choose from"):
        analyze(model, source=source, target=source, tokenizer=tokenizer, target_language="de")


@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5", "marian"])
def test_a_single_recurrent_layer_is_that_of_a_model_with_the_others_kept(model_type):
    """The first layer of a T5 computes the bias of all exact layers above, also if it is recurrent itself."""
    model = t2r.swap(tiny(model_type), feature_size=8, recurrent="both", init="identity")
    inputs = batch(model_type)
    for layer in range(3):
        kept = t2r.swap(
            tiny(model_type),
            feature_size=8,
            recurrent="both",
            init="identity",
            softmax_layers=[i for i in range(3) if i != layer],
        )
        kept.load_state_dict(model.state_dict(), strict=False)
        with torch.no_grad(), t2r.exact_attention(model, recurrent_layers=[layer]):
            one = model(**inputs).logits
        with torch.no_grad():
            torch.testing.assert_close(one, kept(**inputs).logits)


def test_a_transformer_is_analyzed_without_notices_of_a_swap(tokenizer, text, caplog):
    analyze(tiny("mistral", torch.float32), text, tokenizer=tokenizer, window=16, measure_recall=False)
    assert "recurrent" not in caplog.text


def test_pairs_are_cut_at_the_positions_and_unknown_tokens_are_refused(tmp_path, tokenizer):
    path = tmp_path / "long.txt"
    path.write_text("w3 w4 " * POSITIONS + "\n")
    model = t2r.swap(tiny("marian", torch.float32), feature_size=8, recurrent="both")
    found = analyze(model, source=path, target=path, tokenizer=tokenizer)
    assert found["tokens"] == POSITIONS
    larger = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": VOCABULARY}, unk_token="a")))
    path.write_text("a\n" * 40)
    with pytest.raises(T2RError, match=f"vocabulary ends at {VOCABULARY - 1}"):
        analyze(model, source=path, target=path, tokenizer=larger)


def test_sentences_that_are_shorter_than_the_first_measured_state(tmp_path, tokenizer):
    path = tmp_path / "short.txt"
    path.write_text("w3 w4 w5\n" + "w6 " * 12 + "\n")
    model = t2r.swap(tiny("marian", torch.float32), feature_size=8, recurrent="both")
    found = analyze(model, source=path, target=path, tokenizer=tokenizer)
    assert [row["tokens"] for row in found["state"]] == [8, 12]


def test_command_line(tmp_path, tokenizer, text):
    t2r.swap(tiny("llama", torch.float32), feature_size=8).save_pretrained(tmp_path / "rnn")
    tiny("llama", torch.float32).save_pretrained(tmp_path / "teacher")
    for name in ("rnn", "teacher"):
        tokenizer.save_pretrained(tmp_path / name)
    words = ["analyze", str(tmp_path / "rnn"), "--text", str(text), "--window", "32", "--limit", "2"]
    words += ["--teacher", str(tmp_path / "teacher"), "--plots", str(tmp_path / "plots")]
    run = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    found = json.loads(run.stdout)
    assert found.keys() >= {"mean", "layers", "by_distance", "by_position", "recall", "features"}
    assert found["mean"].keys() == {"euclidean", "jensen_shannon", "entropy", "teacher_entropy"}
    assert found["layers"][0]["heads"][0].keys() >= found["mean"].keys()
    assert "recall is not measured" in found["notes"][0]  # one token per word, so that no word is known
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"attention-by-distance.svg", "euclidean-distance-by-layer-and-head.svg"} <= names
    run = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "Jensen-Shannon" in run.stdout


def test_the_help_states_the_default_dtype():
    shown = " ".join(CliRunner().invoke(app, ["analyze", "--help"]).stdout.split())
    assert "bfloat16 or float16. [default: float32]" in shown


def test_models_that_cannot_be_compared(tokenizer, text):
    other = tiny("gpt2", torch.float32)
    other.transformer.h = other.transformer.h[:2]
    with pytest.raises(T2RError, match="different layers"):
        analyze(tiny("gpt2", torch.float32), text, teacher=other, tokenizer=tokenizer)
    with pytest.raises(T2RError, match="less than one window"):
        analyze(tiny("gpt2", torch.float32), text, tokenizer=tokenizer, window=500)
    with pytest.raises(T2RError, match="positions, but 300"):
        analyze(tiny("gpt2", torch.float32), text, tokenizer=tokenizer, window=300)
    smaller = tiny("gpt2", torch.float32)
    smaller.resize_token_embeddings(50)
    with pytest.raises(T2RError, match="different vocabularies"):
        analyze(tiny("gpt2", torch.float32), text, teacher=smaller, tokenizer=tokenizer, window=16)


# --- Measurements -------------------------------------------------------------------------------------------


def test_divergence_and_rank():
    one, two = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    assert jensen_shannon(one, two).item() == pytest.approx(math.log(2))
    assert jensen_shannon(two, two).item() == 0
    assert effective_rank(torch.eye(6)).item() == pytest.approx(6)
    assert effective_rank(torch.ones(4, 6)).item() == pytest.approx(1, abs=1e-3)
    with pytest.raises(T2RError, match="activations overflow"):
        effective_rank(torch.full((2, 2), torch.inf))


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (40, 48)])
@pytest.mark.parametrize("tokens", [4, 64])
def test_the_effective_rank_is_that_of_singular_values(shape, tokens):
    """Also of states of fewer tokens than features, most of whose singular values are 0."""
    k, v = (torch.rand(2, 3, tokens, size, generator=torch.Generator().manual_seed(size)) for size in shape)
    s = k.mT @ v
    values = torch.linalg.svdvals(k.double().mT @ v.double())
    shares = values / values.sum(-1, keepdim=True)
    expected = (-torch.special.xlogy(shares, shares).sum(-1)).exp()
    torch.testing.assert_close(effective_rank(s), expected, atol=0, rtol=1e-5)


def test_attention_by_distance():
    weights = torch.rand(2, 3, 5, 9).double()
    weights = weights * (torch.arange(4, 9)[:, None] >= torch.arange(9))
    measured = ByDistance(9)
    measured.add(weights, first=4)
    for distance in range(9):
        pairs = [(i, i + 4 - distance) for i in range(5) if i + 4 - distance >= 0]
        expected = sum(weights[:, :, i, j].sum() for i, j in pairs) / (6 * len(pairs))
        assert measured.between(distance, distance) == pytest.approx(expected.item())
    edges = distance_buckets(512)
    assert edges[0] == (0, 0)
    assert edges[-1][1] == 511
    assert all(after[0] == before[1] + 1 for before, after in pairwise(edges))
